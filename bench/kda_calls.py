"""Inputs, the call under test, the baseline and the float64 oracle of the KDA prefill cases."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench import accuracy
from bench.baselines import FAST_OPS
from bench.kda_cases import KdaCase
from bench.prefill import Result

TOLERANCE = 0.005
OF_BASELINE = 1.25  # our error is never above so many times the baseline's
LOWER_BOUND = -5.0


@dataclass
class KdaInputs:
    """One set of buffers of a case.

    Attributes:
        case: the case.
        q, k: [B, T, H, D] bf16; packed: B = 1.
        v: [B, T, HV, D] bf16.
        g: raw gates [B, T, HV, D] bf16.
        beta: step sizes [B, T, HV] fp32.
        A_log: [HV] fp32.
        dt_bias: [HV * D] fp32.
        cu_seqlens: int32 [N + 1], or None.
        initial: V-first [N, HV, D, D] fp32, or None.
    """

    case: KdaCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    cu_seqlens: torch.Tensor | None
    initial: torch.Tensor | None

    @property
    def lower_bound(self) -> float | None:
        """The gate's bound; None for softplus."""
        return LOWER_BOUND if self.case.gate == "bounded" else None


def make_inputs(case: KdaCase, device: torch.device | str, seed: int = 42) -> KdaInputs:
    """Draw one set of inputs, as the published benchmark does.

    Args:
        case: shapes.
        device: where.
        seed: of the generator.

    Returns:
        The inputs: randn, beta its sigmoid.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    exact = torch.float32
    B, T = (1, case.tokens) if case.packed else (case.B, case.T)
    bounds = torch.tensor([0, *case.lengths], device=device).cumsum(0).to(torch.int32)
    return KdaInputs(
        case=case,
        q=randn(B, T, case.H, case.D),
        k=randn(B, T, case.H, case.D),
        v=randn(B, T, case.HV, case.D),
        g=randn(B, T, case.HV, case.D),
        beta=randn(B, T, case.HV, dtype=exact).sigmoid(),
        A_log=randn(case.HV, dtype=exact),
        dt_bias=randn(case.HV * case.D, dtype=exact),
        cu_seqlens=bounds if case.packed else None,
        initial=randn(case.B, case.HV, case.D, case.D, dtype=exact) if case.initial else None,
    )


def final_states(inputs: KdaInputs) -> torch.Tensor:
    """A pool for ``our_call``: the initial states, or room for the final ones."""
    if inputs.initial is not None:
        return inputs.initial.clone()
    case = inputs.case
    shape = (case.B, case.HV, case.D, case.D)
    return torch.full(shape, float("nan"), device=inputs.q.device)


def our_call(
    inputs: KdaInputs, out: torch.Tensor, state: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The call under test, bound to its buffers. A fallback would be timed as if it were ours, so
    our kernels are insisted on.

    Args:
        inputs: everything that is only read.
        out: [B, T, HV, D], written.
        state: gets the final states; holds the initial ones if the case has them.

    Returns:
        A call without arguments.
    """
    from cula.kda import kda_prefill

    case = inputs.case
    options = {
        "out": out,
        "state": state,
        "A_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
        "lower_bound": inputs.lower_bound,
        "backend": "cute",
    }
    if inputs.cu_seqlens is not None:
        options["cu_seqlens"] = inputs.cu_seqlens
    if inputs.initial is None:
        options["has_initial_state"] = torch.zeros(case.B, dtype=torch.bool, device=state.device)
    if case.checkpoints:
        shape = (case.tokens // 64, case.HV, case.D, case.D)
        options["checkpoints"] = torch.empty(shape, device=state.device)
        options["checkpoint_interval"] = 64
    read = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return functools.partial(kda_prefill, *read, **options)


def fla_call(inputs: KdaInputs) -> Callable[[], Result]:
    """FLA's public call with the arguments of the published benchmark.

    Returns:
        A call without arguments that returns o and the final states, V-first.
    """
    os.environ.setdefault(FAST_OPS, "1")
    from fla.ops.kda import chunk_kda

    bounded = inputs.lower_bound is not None
    options = {
        "A_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
        "initial_state": None if inputs.initial is None else inputs.initial.mT.contiguous(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "safe_gate": bounded,
        "lower_bound": inputs.lower_bound,
        "cu_seqlens": inputs.cu_seqlens,
    }

    def call() -> Result:
        with torch.no_grad():
            o, after = chunk_kda(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **options)
        return o, after.mT

    return call


def oracle(inputs: KdaInputs, sequence: int) -> Result:
    """The exact result of one sequence, in float64 from the rounded inputs, 16 tokens at a time.

    Args:
        inputs: the inputs.
        sequence: which.

    Returns:
        o [tokens, HV, D] and the final state V-first [HV, D, D].
    """
    from cula.common.recurrence import kda_log_decay, l2_normalise

    case, chunk, exact = inputs.case, 16, torch.float64
    row, start = (0, sum(case.lengths[:sequence])) if case.packed else (sequence, 0)
    tokens = slice(start, start + case.lengths[sequence])
    group = case.HV // case.H

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x[row, tokens].transpose(0, 1)

    q, k, v, raw, beta = (
        heads_first(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    S = q.new_zeros(case.HV, case.D, case.D, dtype=exact)
    if inputs.initial is not None:
        S = inputs.initial[sequence].mT.double()
    parts = [v[:, :0].double()]
    for t in range(0, v.shape[1], chunk):
        now = slice(t, t + chunk)
        qt, kt = (
            l2_normalise(x[:, now], dtype=exact).repeat_interleave(group, dim=0) for x in (q, k)
        )
        g = kda_log_decay(
            raw[:, now].transpose(0, 1),
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            lower_bound=inputs.lower_bound,
            dtype=exact,
        ).transpose(0, 1)
        bt, G = beta[:, now, None].double(), g.cumsum(1)
        C = G.shape[1]
        later = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()
        apart = (G[:, :, None] - G[:, None]).masked_fill(~later[..., None], -torch.inf).exp()
        scores = torch.einsum("hid,hjd,hijd->hij", qt, kt, apart)
        pairs = torch.einsum("hid,hjd,hijd->hij", kt, kt, apart)
        right = bt * (v[:, now].double() - (kt * G.exp()) @ S)
        eye = torch.eye(C, dtype=exact, device=G.device)
        new = torch.linalg.solve_triangular(
            eye + (bt * pairs).tril(-1), right, upper=False, unitriangular=True
        )
        parts.append(case.D**-0.5 * ((qt * G.exp()) @ S + scores @ new))
        S = G[:, -1:].exp().mT * S + (kt * (G[:, -1:] - G).exp()).mT @ new
    return torch.cat(parts, dim=1).transpose(0, 1), S.mT


def check_ours(found: dict[str, tuple[float, float]]) -> None:
    """Hold our errors to the tolerance, and to the baseline's where there is one.

    Args:
        found: what ``prefill.errors`` returned, ours under "ours".

    Raises:
        AccuracyError: o or a final state is further off than allowed.
    """
    for i, name in enumerate(("o", "state")):
        allowed = TOLERANCE
        if "fla" in found:
            allowed = min(allowed, OF_BASELINE * found["fla"][i])
        accuracy.check(name, found["ours"][i], allowed)
