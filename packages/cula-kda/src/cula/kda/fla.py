"""``import cula.kda.fla``: flash-linear-attention's models run `cula.kda`'s kernels, unmodified.

FLA's `chunk_kda` asks us call by call; what our plan has no kernel for stays FLA's, with the reason
logged (``logging.getLogger("cula")``, level INFO). FLA 0.5 and 0.6 have a hook for that. In 0.4.2
there is none, and only `patch_fla` takes the function over.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from cula.common.checks import needs_grad
from cula.common.fla_backend import Adapter, Patch, Takeover, device_kind, dtype_of
from cula.kda.op import chunk_kda
from cula.kda.plan import Plan, plan_chunk

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


def _key(call: Mapping[str, Any]) -> Hashable:
    get = call.get
    q, v, g, beta = call["q"], call["v"], call["g"], call["beta"]
    return (
        q.shape[2:],
        v.shape[2:],
        q.dtype,
        v.dtype,
        g.dtype,
        beta.dtype,
        device_kind(call, TENSORS),
        dtype_of(get("initial_state")),
        dtype_of(get("A_log")),
        dtype_of(get("dt_bias")),
        dtype_of(get("cu_seqlens")),
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


_takeover = Takeover("cula.kda", [Adapter("fla.ops.kda.chunk_kda", "kda", _key, _plan, _run)])
_takeover.register()
_takeover.warn()


def patch_fla() -> Patch:
    """Replace FLA's function where the installed version has no hook for it (0.4.2).

    Modules outside of FLA that have imported it by name already keep FLA's. Does nothing where
    there is a hook.

    Returns:
        The patch, in place already: ``with patch_fla(): ...`` takes it back at the end.
    """
    return Patch(_takeover)


def unpatch_fla() -> None:
    """Put FLA's function back where `patch_fla` replaced it."""
    _takeover.undo()


def report() -> dict[str, str]:
    """Say for each of FLA's functions how it is taken over: "hook", "patch" or "no"."""
    return _takeover.report()
