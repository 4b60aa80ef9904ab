"""``import cula.kda.fla``: flash-linear-attention's models run `cula.kda`'s kernels, unmodified.

FLA's `chunk_kda` asks us call by call; what our plan has no kernel for stays FLA's, with the reason
logged (``logging.getLogger("cula")``, level INFO). FLA 0.5 and 0.6 have a hook for that. In 0.4.2
there is none, and only `patch_fla` takes the function over.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cula.common.checks import needs_grad
from cula.common.fla_adapter import Adapter, device_kind, kind_of
from cula.common.fla_backend import Patch, Takeover
from cula.common.layouts import new_output, new_states
from cula.kda import launch
from cula.kda.op import chunk_kda
from cula.kda.plan import Plan, plan_chunk
from cula.kda.reference import KdaInputs
from cula.kda.run import chunk_key, chunk_pool, with_numbers

__all__ = ["patch_fla", "report", "unpatch_fla"]

TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
PLANNED = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "scale",
    "initial_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "state_v_first",
    "cu_seqlens",
    "cu_seqlens_cpu",
    "A_log",
    "dt_bias",
    "chunk_size",
)
# FLA drops the keywords that it does not know; so they do not reach our call, which would raise.
KNOWN = frozenset(PLANNED) | {
    "output_final_state",
    "disable_recompute",
    "return_intermediate_states",
    "cp_context",
    "use_graph",
    "max_num_seqs",
    "transpose_state_layout",
}


def _key(call: Mapping[str, Any]) -> tuple:
    get = call.get
    q, k, v, g, beta = call["q"], call["k"], call["v"], call["g"], call["beta"]
    return (
        q.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        g.dtype,
        beta.dtype,
        device_kind(call, TENSORS),
        kind_of(get("initial_state")),
        kind_of(get("A_log")),
        kind_of(get("dt_bias")),
        kind_of(get("cu_seqlens")),
        kind_of(get("cu_seqlens_cpu")),
        get("use_qk_l2norm_in_kernel"),
        get("use_gate_in_kernel"),
        get("use_beta_sigmoid_in_kernel"),
        get("allow_neg_eigval"),
        get("safe_gate"),
        get("lower_bound"),
        get("state_v_first"),
        get("transpose_state_layout"),
        get("return_intermediate_states"),
        get("output_final_state"),
        get("chunk_size"),
        get("use_graph"),
        get("cp_context") is None,
    )


def _plan(call: Mapping[str, Any], backend: str) -> Plan:
    given = {name: call[name] for name in PLANNED if name in call}
    if call.get("transpose_state_layout"):
        given["state_v_first"] = True
    if not call.get("use_gate_in_kernel"):
        given["A_log"] = given["dt_bias"] = None
    only_fla = None
    for name in ("cp_context", "use_graph"):
        if call.get(name):
            only_fla = name
    return plan_chunk(
        **given,
        only_fla=only_fla,
        differentiable=needs_grad(*(call.get(name) for name in TENSORS)),
        backend=backend,
    )


def _run(call: Mapping[str, Any]) -> tuple[Any, ...]:
    if not call.keys() <= KNOWN:
        call = {name: value for name, value in call.items() if name in KNOWN}
    return chunk_kda(**call)


def _v_first(call: Mapping[str, Any]) -> bool:
    return bool(call.get("state_v_first") or call.get("transpose_state_layout"))


def _inputs(call: Mapping[str, Any]) -> KdaInputs:
    gated = call.get("use_gate_in_kernel")
    return KdaInputs(
        call["q"],
        call["k"],
        call["v"],
        call["g"],
        call["beta"],
        call.get("A_log") if gated else None,
        call.get("dt_bias") if gated else None,
    )


def _kept(call: Mapping[str, Any], result: tuple) -> Callable[..., None] | None:
    get = call.get
    if len(result) != 2:
        return None
    form = (
        get("lower_bound"),
        get("use_gate_in_kernel", False),
        get("use_qk_l2norm_in_kernel", False),
        get("use_beta_sigmoid_in_kernel", False),
        get("allow_neg_eigval", False),
        get("safe_gate", False),
    )
    return launch.kept(
        chunk_key(
            _inputs(call),
            chunk_pool(get("initial_state"), result[1], _v_first(call)),
            get("cu_seqlens"),
            get("cu_seqlens_cpu"),
            form,
            _v_first(call),
            get("chunk_size", 64),
            "auto",
        )
    )


def _again(
    call: Mapping[str, Any], known: Callable[..., None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    q, v, initial, scale = call["q"], call["v"], get("initial_state"), get("scale")
    v_first, cu_seqlens, final = _v_first(call), get("cu_seqlens"), None
    out = new_output(v, q.dtype)
    if get("output_final_state"):
        final = new_states(q, v, initial, cu_seqlens, v_first)
    pool = chunk_pool(initial, final, v_first)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    known(with_numbers(_inputs(call)), pool, cu_seqlens, out, factor)
    return out, final


_takeover = Takeover(
    "cula.kda", [Adapter("fla.ops.kda.chunk_kda", "kda", _key, _plan, _run, _kept, _again)]
)
_takeover.register()
_takeover.warn()


def patch_fla(past_dispatch: bool = False) -> Patch:
    """Replace FLA's function where the installed version has no hook for it (0.4.2).

    Modules outside of FLA that have imported it by name already keep FLA's. Does nothing where
    there is a hook, unless asked to.

    Args:
        past_dispatch: replace the hooked function too.
            Calls that are ours then pay nothing for FLA's dispatch, several microseconds of the
            host's each; FLA's other backends are asked only about those that are not.

    Returns:
        The patch, in place already: ``with patch_fla(): ...`` takes it back at the end.
    """
    return Patch(_takeover, past_dispatch)


def unpatch_fla() -> None:
    """Put FLA's function back where `patch_fla` replaced it."""
    _takeover.undo()


def report() -> dict[str, str]:
    """Say for each of FLA's functions how it is taken over: "hook", "patch" or "no"."""
    return _takeover.report()
