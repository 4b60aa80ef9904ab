"""The baselines: what others offer for the same work, given the same inputs.

FLA (flash-linear-attention, ``pip install fla-core``) is called as its users call it. It is never
required: where it is not installed its columns are absent, and ``missing`` says why.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable

import torch

from bench.decode_calls import LOWER_BOUND, DecodeInputs, make_inputs
from bench.decode_cases import DecodeCase, Op
from bench.environment import version

Result = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], Result]
Builder = Callable[[DecodeInputs], Call]

# FLA's own faster, less exact exp and log, as in the published benchmarks: the baseline at its
# best. FLA reads it when it is imported.
FAST_OPS = "FLA_USE_FAST_OPS"


def missing() -> str | None:
    """Why there is no FLA here.

    Returns:
        A sentence, or None where FLA can be used.
    """
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install fla-core)"
    if importlib.util.find_spec("triton") is None:
        return "flash-linear-attention needs triton, which is not installed"
    if not torch.cuda.is_available():
        return "flash-linear-attention needs a GPU"
    return None


def versions() -> dict[str, str]:
    """The versions of the baselines and of the compiler they run on, for ``env``."""
    found = {"fla": version("fla-core") or version("flash-linear-attention")}
    if missing() is None:
        found["triton"] = version("triton")
    return {name: known for name, known in found.items() if known is not None}


def decode_baselines(case: DecodeCase) -> dict[str, Builder]:
    """FLA's calls for one decode case.

    "fla" is the public call: it returns the new state beside the old one. "fla-published" is what
    the published Lightning benchmark timed: FLA's kernel with preallocated outputs ("kernel
    only"), or the function under FLA's autograd wrapper ("wrapper"), each with the sum over FLA's
    two halves of K.

    Args:
        case: the case.

    Returns:
        Per baseline, a function that takes the inputs and returns a call without arguments; that
        call returns o and the final state, V-first. FLA gets the states K-first, its own layout.
        Empty for a bf16 state: FLA would return an fp32 one, so it is not the same work.
    """
    os.environ.setdefault(FAST_OPS, "1")
    if case.state != "fp32":
        return {}
    if case.op == "kda_decode":
        return {"fla": _kda_decode}
    builders: dict[str, Builder] = {"fla": _lightning_decode}
    if case.group in ("kernel", "wrapper"):
        published = _published_kernel if case.mode == "kernel" else _published_wrapper
        builders["fla-published"] = published
    return builders


@functools.cache
def let_fla_tune(op: Op, D: int) -> None:
    """Have FLA choose its configurations at a batch of 64.

    It chooses at its first call and keeps the choice for every batch. At a batch of one its
    candidates differ by noise alone, and the one it then keeps may be a third slower at 64.

    Args:
        op: whose baselines.
        D: the head dimension, for each of which FLA chooses anew.
    """
    inputs = make_inputs(DecodeCase(op, "kernel", "kernel", 64, H=64, HV=64, D=D), "cuda")
    for build in decode_baselines(inputs.case).values():
        build(inputs)()
    torch.cuda.synchronize()


def _k_first_state(inputs: DecodeInputs) -> torch.Tensor:
    return inputs.sequence_states(inputs.state).mT.contiguous()


def _kda_decode(inputs: DecodeInputs) -> Call:
    from fla.ops.kda import fused_recurrent_kda

    state = _k_first_state(inputs)

    def call() -> Result:
        o, after = fused_recurrent_kda(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            lower_bound=LOWER_BOUND,
        )
        return o, after.mT

    return call


def prefill(call: str, inputs: tuple[torch.Tensor, ...], **options) -> Call:
    """FLA's chunked call for a prefill, from a zero state, keeping the final one.

    Args:
        call: "kda_prefill" or "lightning_prefill".
        inputs: q, k, v and for KDA the raw gates and beta.
        options: for KDA A_log, dt_bias and lower_bound, for Lightning g_gamma.

    Returns:
        A call without arguments that returns o and the final state, V-first.
    """
    os.environ.setdefault(FAST_OPS, "1")
    if call == "kda_prefill":
        from fla.ops.kda import chunk_kda as chunked

        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "safe_gate")
        options = {**options, **dict.fromkeys(flags, True)}
    else:
        from fla.ops.simple_gla import chunk_simple_gla as chunked

    def run() -> Result:
        o, after = chunked(*inputs, **options, output_final_state=True)
        return o, after.mT

    return run


def _repeated_heads(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k per value head: FLA's simple_gla has no GVA. Done before the clock starts."""
    case = inputs.case
    if case.H == case.HV:
        return inputs.q, inputs.k
    times = case.HV // case.H
    return inputs.q.repeat_interleave(times, dim=2), inputs.k.repeat_interleave(times, dim=2)


def _lightning_decode(inputs: DecodeInputs) -> Call:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    state = _k_first_state(inputs)
    q, k = _repeated_heads(inputs)

    def call() -> Result:
        o, after = fused_recurrent_simple_gla(
            q=q,
            k=k,
            v=inputs.v,
            g_gamma=inputs.g,
            initial_state=state,
            output_final_state=True,
        )
        return o, after.mT

    return call


def _published_wrapper(inputs: DecodeInputs) -> Call:
    fla = importlib.import_module("fla.ops.common.fused_recurrent")
    state = _k_first_state(inputs)
    q, k = _repeated_heads(inputs)
    scale = inputs.case.D**-0.5

    def call() -> Result:
        o, after = fla.fused_recurrent_fwd(
            q=q,
            k=k,
            v=inputs.v,
            g_gamma=inputs.g,
            scale=scale,
            initial_state=state,
            output_final_state=True,
        )
        return o, after.mT

    return call


def _published_kernel(inputs: DecodeInputs) -> Call:
    fla = importlib.import_module("fla.ops.common.fused_recurrent")
    state = _k_first_state(inputs)
    q, k = _repeated_heads(inputs)
    case = inputs.case
    tile = min(case.D, 64)
    halves = case.D // tile
    partial_o = torch.empty(halves, *inputs.v.shape, dtype=torch.float32, device=q.device)
    after = torch.empty_like(state)
    launch = fla.fused_recurrent_fwd_kernel[(halves * halves * case.B * case.HV,)]
    nothing = dict.fromkeys(("g", "gk", "gv", "cu_seqlens"))
    flags = {"USE_G": False, "USE_G_GAMMA": True, "USE_GK": False, "USE_GV": False}
    sizes = {"B": case.B, "T": case.T, "H": case.HV, "K": case.D, "V": case.D}

    def call() -> Result:
        launch(
            q=q,
            k=k,
            v=inputs.v,
            g_gamma=inputs.g,
            o=partial_o,
            h0=state,
            ht=after,
            scale=case.D**-0.5,
            BK=tile,
            BV=tile,
            REVERSE=False,
            **nothing,
            **sizes,
            **flags,
        )
        return torch.sum(partial_o, 0), after.mT

    return call
