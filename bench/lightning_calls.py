"""Inputs, the call under test, the baseline and the float64 oracle of the Lightning cases."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench import accuracy
from bench.baselines import FAST_OPS
from bench.lightning_cases import LightningCase
from bench.prefill import Result

TOLERANCE = 0.005
SCALE = 1.0  # the published benchmark's


@dataclass
class LightningInputs:
    """One set of buffers of a case.

    Attributes:
        case: the case.
        q, k: [B, T, H, D] bf16; packed: B = 1.
        v: [B, T, HV, D] bf16.
        g_gamma: [HV] fp32, the log decay.
        cu_seqlens: int32 [N + 1], or None.
        initial: V-first [N, HV, D, D] fp32, or None.
    """

    case: LightningCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g_gamma: torch.Tensor
    cu_seqlens: torch.Tensor | None
    initial: torch.Tensor | None


def make_inputs(case: LightningCase, device: torch.device | str, seed: int = 42) -> LightningInputs:
    """Draw one set of inputs: randn, and the decay of the middle layer of 24.

    Args:
        case: shapes.
        device: where.
        seed: of the generator.

    Returns:
        The inputs.
    """
    from cula.common.recurrence import lightning_log_decay

    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    B, T = (1, case.tokens) if case.packed else (case.B, case.T)
    bounds = torch.tensor([0, *case.lengths], dtype=torch.int32, device=device).cumsum(0)
    return LightningInputs(
        case=case,
        q=randn(B, T, case.H, case.D),
        k=randn(B, T, case.H, case.D),
        v=randn(B, T, case.HV, case.D),
        g_gamma=lightning_log_decay(case.HV, 12, 24, device),
        cu_seqlens=bounds.to(torch.int32) if case.packed else None,
        initial=randn(case.B, case.HV, case.D, case.D, dtype=torch.float32)
        if case.states
        else None,
    )


def our_call(
    inputs: LightningInputs, out: torch.Tensor, state: torch.Tensor | None
) -> Callable[[], torch.Tensor]:
    """The call under test, bound to its buffers. A fallback would be timed as if it were ours, so
    our kernel is insisted on.

    Args:
        inputs: everything that is only read.
        out: [B, T, HV, D], written.
        state: gets the final states; holds the initial ones if the case has them. None: no states.

    Returns:
        A call without arguments.
    """
    from cula.lightning import lightning_prefill

    options: dict[str, object] = {"out": out, "scale": SCALE, "backend": "cute"}
    if inputs.cu_seqlens is not None:
        options["cu_seqlens"] = inputs.cu_seqlens
    if inputs.case.segment is not None:
        options["segment_tokens"] = inputs.case.segment
    if state is not None:
        options["state"] = state
        if inputs.initial is None:
            begins = torch.zeros(inputs.case.B, dtype=torch.bool, device=state.device)
            options["has_initial_state"] = begins
    return functools.partial(
        lightning_prefill, inputs.q, inputs.k, inputs.v, inputs.g_gamma, **options
    )


def final_states(inputs: LightningInputs) -> torch.Tensor | None:
    """A pool for ``our_call``: the initial states where there are some; None: no states."""
    case = inputs.case
    if inputs.initial is not None:
        return inputs.initial.clone()
    if not case.packed:
        return None
    shape = (case.B, case.HV, case.D, case.D)
    return torch.full(shape, float("nan"), device=inputs.q.device)


def fla_call(inputs: LightningInputs) -> Callable[[], Result]:
    """FLA's function below its autograd wrapper, as the published benchmark calls it.

    FLA has no grouped value heads here: q and k are repeated before the clock starts.

    Returns:
        A call without arguments that returns o and the final states, V-first.
    """
    os.environ.setdefault(FAST_OPS, "1")
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

    case = inputs.case
    q, k = inputs.q, inputs.k
    if case.HV != case.H:
        q, k = (x.repeat_interleave(case.HV // case.H, dim=2) for x in (q, k))
    options = {
        "g": None,
        "g_gamma": inputs.g_gamma,
        "scale": SCALE,
        "initial_state": None if inputs.initial is None else inputs.initial.mT.contiguous(),
        "output_final_state": case.states or case.packed,
        "cu_seqlens": None if inputs.cu_seqlens is None else inputs.cu_seqlens.long(),
        "chunk_size": 64,
    }

    def call() -> Result:
        o, after, *_ = chunk_simple_gla_fwd(q, k, inputs.v, **options)
        return o, None if after is None else after.mT

    return call


def oracle(inputs: LightningInputs, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result of one sequence, in float64 from the rounded inputs, chunk by chunk.

    Args:
        inputs: the inputs.
        sequence: which.

    Returns:
        o [tokens, HV, D] and the final state V-first [HV, D, D].
    """
    case, chunk = inputs.case, 128
    lengths = case.lengths
    row, start = (0, sum(lengths[:sequence])) if case.packed else (sequence, 0)
    tokens = slice(start, start + lengths[sequence])
    q, k, v = (x[row, tokens].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    group = case.HV // case.H
    g = inputs.g_gamma.double()[:, None]
    S = q.new_zeros(case.HV, case.D, case.D, dtype=torch.float64)
    if inputs.initial is not None:
        S = inputs.initial[sequence].mT.double()
    i = torch.arange(chunk, device=q.device)
    decay = (g[..., None] * (i[:, None] - i).clamp(min=0)).exp().tril()
    parts = []
    for t in range(0, q.shape[1], chunk):
        qt, kt = (x[:, t : t + chunk].double().repeat_interleave(group, dim=0) for x in (q, k))
        vt = v[:, t : t + chunk].double()
        L = vt.shape[1]
        scores = (qt @ kt.mT) * decay[:, :L, :L]
        parts.append(scores @ vt + (g * (i[:L] + 1)).exp()[..., None] * (qt @ S))
        weights = (g * (L - 1 - i[:L])).exp()[..., None]
        S = (g * L).exp()[..., None] * S + (kt * weights).mT @ vt
    o = torch.cat(parts, dim=1) if parts else v.double()
    return SCALE * o.transpose(0, 1), S.mT


def check_ours(found: dict[str, tuple[float, float]]) -> None:
    """Hold our errors to the tolerance.

    Args:
        found: what ``prefill.errors`` returned, ours under "ours".

    Raises:
        AccuracyError: o or a final state is further off than allowed.
    """
    for name, error in zip(("o", "state"), found["ours"], strict=True):
        accuracy.check(name, error, TOLERANCE)
