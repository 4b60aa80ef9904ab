"""``cula.lightning.fla.patch_fla()``: flash-linear-attention's chunked Lightning Attention by us.

FLA's `chunk_lightning_attn` is its `chunk_simple_gla` with a decay per head (``g_gamma``), and
no version of FLA has a hook for either. So importing this module changes nothing; `patch_fla`
replaces `chunk_simple_gla` in FLA's modules, and `unpatch_fla` puts it back. While it is in place,
every call with ``g_gamma`` that our plan has a kernel for is ours (retention layers have such a
decay too); the others stay FLA's, with the reason logged (``logging.getLogger("cula")``, INFO).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cula.common.checks import needs_grad, require, require_tensor
from cula.common.fla_adapter import Adapter, device_kind, kind_of
from cula.common.fla_backend import Patch, Takeover
from cula.common.layouts import new_output, new_states
from cula.lightning import launch
from cula.lightning.call import Plan
from cula.lightning.plan import plan_chunk
from cula.lightning.reference import LightningInputs
from cula.lightning.run import chunk_by_fallback, chunk_key, chunk_op

__all__ = ["patch_fla", "report", "unpatch_fla"]

TENSORS = ("q", "k", "v", "g_gamma", "initial_state")


def _key(call: Mapping[str, Any]) -> tuple:
    get = call.get
    q = call["q"]
    return (
        q.shape,
        call["v"].shape,
        q.dtype,
        device_kind(call, TENSORS),
        kind_of(get("initial_state")),
        kind_of(get("g_gamma")),
        kind_of(get("cu_seqlens")),
        kind_of(get("cu_seqlens_cpu")),
        get("g") is None,
        get("output_final_state"),
        get("state_v_first"),
        get("transpose_state_layout"),
        get("chunk_size"),
        get("head_first"),
    )


def _plan(call: Mapping[str, Any], backend: str) -> Plan:
    require(call.get("g") is None, "g", "given", "cuLA has a fixed decay per head only")
    require(call.get("g_gamma") is not None, "g_gamma", None, "cuLA needs a decay per head")
    require(not call.get("head_first"), "head_first", True, "must be False")
    v = call["v"]
    require_tensor(
        "g_gamma",
        call["g_gamma"],
        shape=(v.shape[2],),
        dims="[H]",
        dtypes=(torch.float32,),
        device=v.device,
    )
    require(
        not call["g_gamma"].requires_grad or not torch.is_grad_enabled(),
        "g_gamma",
        "requires a gradient",
        "cuLA has none for it",
    )
    return plan_chunk(
        call["q"],
        call["k"],
        v,
        scale=call.get("scale"),
        initial_state=call.get("initial_state"),
        state_v_first=_v_first(call),
        cu_seqlens=call.get("cu_seqlens"),
        cu_seqlens_cpu=call.get("cu_seqlens_cpu"),
        chunk_size=call.get("chunk_size") or 64,
        differentiable=needs_grad(*(call.get(name) for name in TENSORS)),
        backend=backend,
    )


def _v_first(call: Mapping[str, Any]) -> bool:
    return bool(call.get("state_v_first") or call.get("transpose_state_layout"))


def _run(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    q, k, v, g_gamma = (call[name] for name in ("q", "k", "v", "g_gamma"))
    initial_state, cu_seqlens = get("initial_state"), get("cu_seqlens")
    if needs_grad(q, k, v, initial_state):
        return chunk_by_fallback(
            LightningInputs(q, k, v, g_gamma),
            initial_state,
            scale=get("scale"),
            output_final_state=bool(get("output_final_state")),
            state_v_first=_v_first(call),
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=get("cu_seqlens_cpu"),
            chunk_size=get("chunk_size") or 64,
            backend="auto",
        )
    out, final_state = _new_results(call)
    chunk_op(
        q,
        k,
        v,
        g_gamma,
        initial_state,
        cu_seqlens,
        get("cu_seqlens_cpu"),
        get("scale"),
        _v_first(call),
        get("chunk_size") or 64,
        "auto",
        out,
        final_state,
    )
    return out, final_state


def _new_results(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, v, get = call["q"], call["v"], call.get
    out = new_output(v, q.dtype)
    if not get("output_final_state"):
        return out, None
    return out, new_states(q, v, get("initial_state"), get("cu_seqlens"), _v_first(call))


def _kept(call: Mapping[str, Any], result: tuple) -> Callable[..., None] | None:
    return launch.kept(
        chunk_key(
            call["q"],
            call["v"],
            call.get("initial_state"),
            result[1],
            call.get("cu_seqlens"),
            call.get("cu_seqlens_cpu"),
            _v_first(call),
            call.get("chunk_size") or 64,
            "auto",
        )
    )


def _again(
    call: Mapping[str, Any], known: Callable[..., None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    q, scale, initial = call["q"], get("scale"), get("initial_state")
    out, final_state = _new_results(call)
    states = (initial, final_state)
    if not _v_first(call):
        states = tuple(x if x is None else x.mT for x in states)
    known(
        q,
        call["k"],
        call["v"],
        call["g_gamma"],
        *states,
        None,
        None,
        None,
        get("cu_seqlens"),
        out,
        q.shape[3] ** -0.5 if scale is None else scale,
    )
    return out, final_state


_takeover = Takeover(
    "cula.lightning",
    [
        Adapter(
            "fla.ops.simple_gla.chunk_simple_gla", "simple_gla", _key, _plan, _run, _kept, _again
        )
    ],
)
_takeover.register()


def patch_fla() -> Patch:
    """Replace FLA's `chunk_simple_gla`, and with it the function under `chunk_lightning_attn`.

    Modules outside of FLA that have imported it by name already keep FLA's.

    Returns:
        The patch, in place already: ``with patch_fla(): ...`` takes it back at the end.
    """
    return Patch(_takeover)


def unpatch_fla() -> None:
    """Put FLA's function back where `patch_fla` replaced it."""
    _takeover.undo()


def report() -> dict[str, str]:
    """Say for FLA's function whether it is taken over: "patch" or "no"."""
    return _takeover.report()
