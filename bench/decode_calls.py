"""Inputs, the call under test and the float64 oracle of the decode cases."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench import accuracy
from bench.decode_cases import DecodeCase

# Batch rows per oracle slice: its float64 temporaries stay within a few GB at any case's size.
_ORACLE_ELEMENTS = 1 << 25

O_TOLERANCE = 0.004
STATE_TOLERANCE_A_STEP = 1e-5
# A bf16 state may be this much worse than rounding the exact state to bf16 after each step.
BF16_STATE_FACTOR = 1.5

LOWER_BOUND = -5.0


@dataclass
class DecodeInputs:
    """One set of buffers of a case.

    Attributes:
        case: the case.
        q, k: [B, T, H, D] bf16.
        v: [B, T, HV, D] bf16.
        g: KDA's raw gates [B, T, HV, D] bf16, or Lightning's log decay [H] fp32.
        beta: KDA's step size, final, [B, T, HV] fp32; None for Lightning.
        A_log: [HV] fp32; None for Lightning.
        dt_bias: [HV * D] fp32; None for Lightning.
        state: the states before the step, V-first [slots, HV, D, D].
        slots: int32 [B], which slot is whose; None for slot b of sequence b.
    """

    case: DecodeCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    state: torch.Tensor
    slots: torch.Tensor | None

    def sequence_states(self, state: torch.Tensor) -> torch.Tensor:
        """The sequences' states [B, HV, V, K] in a pool shaped like ``state``."""
        return state if self.slots is None else state[self.slots.long()]


def make_inputs(case: DecodeCase, device: torch.device | str, seed: int = 42) -> DecodeInputs:
    """Draw one set of inputs: randn, A_log and dt_bias that differ by head and channel.

    Args:
        case: shapes and dtypes.
        device: where.
        seed: of the generator.

    Returns:
        The inputs.
    """
    from cula.common.recurrence import lightning_log_decay

    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    B, T, H, HV, D = case.B, case.T, case.H, case.HV, case.D
    kda = case.op == "kda_decode"
    number_of_slots = 2 * B if case.pool else B
    shuffled = torch.randperm(number_of_slots, generator=generator, device=device)
    return DecodeInputs(
        case=case,
        q=randn(B, T, H, D),
        k=randn(B, T, H, D),
        v=randn(B, T, HV, D),
        # the decay of the middle layer of 24, as in the published benchmark
        g=randn(B, T, HV, D) if kda else lightning_log_decay(HV, 12, 24, device),
        beta=randn(B, T, HV, dtype=torch.float32).sigmoid() if kda else None,
        A_log=randn(HV, dtype=torch.float32) if kda else None,
        dt_bias=randn(HV * D, dtype=torch.float32) if kda else None,
        state=randn(number_of_slots, HV, D, D, dtype=torch.float32).to(
            torch.float32 if case.state == "fp32" else torch.bfloat16
        ),
        slots=shuffled[:B].to(torch.int32) if case.pool else None,
    )


def our_call(
    inputs: DecodeInputs, state: torch.Tensor, out: torch.Tensor, **options
) -> Callable[[], torch.Tensor]:
    """The call under test, bound to its buffers.

    Args:
        inputs: everything that is only read.
        state: updated in place.
        out: [B, T, HV, D], written.
        options: further keywords, such as ``backend``.

    Returns:
        A call without arguments.
    """
    from cula.decode import kda_decode, lightning_decode

    options = {"state_indices": inputs.slots, "out": out, **options}
    if inputs.slots is None:
        del options["state_indices"]
    if inputs.case.op == "lightning_decode":
        read = (inputs.q, inputs.k, inputs.v, inputs.g, state)
        return functools.partial(lightning_decode, *read, **options)
    gate = {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias, "lower_bound": LOWER_BOUND}
    read = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, state)
    return functools.partial(kda_decode, *read, **gate, **options)


def oracle(inputs: DecodeInputs, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact step, in float64 from the rounded inputs.

    Args:
        inputs: the inputs.
        rows: which sequences.

    Returns:
        o [b, T, HV, V] and the final states V-first [b, HV, V, K].
    """
    from cula.common.recurrence import kda_log_decay, kda_steps, l2_normalise, lightning_steps

    exact = torch.float64
    scale = inputs.case.D**-0.5
    q, k, v = inputs.q[rows], inputs.k[rows], inputs.v[rows]
    slots = rows if inputs.slots is None else inputs.slots[rows].long()
    before = inputs.state[slots].mT
    if inputs.beta is None:  # Lightning
        o, after = lightning_steps(q, k, v, inputs.g, before, scale, dtype=exact)
        return o, after.mT
    g = kda_log_decay(
        inputs.g[rows],
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
        lower_bound=LOWER_BOUND,
        dtype=exact,
    )
    q, k = l2_normalise(q, dtype=exact), l2_normalise(k, dtype=exact)
    o, after = kda_steps(q, k, v, g, inputs.beta[rows], before, scale, dtype=exact)
    return o, after.mT


def errors(
    inputs: DecodeInputs, results: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, tuple[float, float]]:
    """Errors of output and state of several implementations, against one oracle.

    Args:
        inputs: what they all started from.
        results: per name, o [B, T, HV, V] and the states V-first [B, HV, V, K].

    Returns:
        Per name, the two errors, and under "rounded" those of the exact result in the dtypes
        of o and of the state.
    """
    case = inputs.case
    gathered = {name: (accuracy.RelativeError(), accuracy.RelativeError()) for name in results}
    rounded = (accuracy.RelativeError(), accuracy.RelativeError())
    step = max(1, _ORACLE_ELEMENTS // (case.HV * case.D * case.D))
    for first in range(0, case.B, step):
        rows = slice(first, min(first + step, case.B))
        o, state = oracle(inputs, rows)
        for name, (their_o, their_state) in results.items():
            gathered[name][0].add(their_o[rows], o)
            gathered[name][1].add(their_state[rows], state)
        rounded[0].add(o.to(inputs.q.dtype), o)
        rounded[1].add(state.to(inputs.state.dtype), state)
    return {
        name: (for_o.value(), for_state.value())
        for name, (for_o, for_state) in {**gathered, "rounded": rounded}.items()
    }


def check_ours(inputs: DecodeInputs, found: dict[str, tuple[float, float]]) -> None:
    """Hold our errors to the tolerances.

    Args:
        inputs: the inputs.
        found: what ``errors`` returned, ours under "ours".

    Raises:
        AccuracyError: o or the state is further off than allowed.
    """
    o_error, state_error = found["ours"]
    accuracy.check("o", o_error, O_TOLERANCE)
    allowed = STATE_TOLERANCE_A_STEP * inputs.case.T
    if inputs.case.state == "bf16":
        allowed = BF16_STATE_FACTOR * found["rounded"][1]
    accuracy.check("state", state_error, allowed)
