"""What a call will do, decided on the host from shapes, dtypes and keywords alone."""

import torch

from cula.common.arch import sm_count
from cula.common.backends import Backend, choose_backend
from cula.common.checks import (
    require,
    require_cu_seqlens,
    require_flags,
    require_number,
    require_own_elements,
    require_tensor,
)
from cula.common.dims import Dims, dims_of
from cula.common.layouts import require_state
from cula.common.pool import require_checkpoints, require_pool
from cula.lightning import fla_fallback
from cula.lightning.call import Plan
from cula.lightning.kernel_plan import kernel_plan, no_kernel
from cula.lightning.reference import LightningForm
from cula.lightning.sm90.config import CHUNK


def plan_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    checkpoints: torch.Tensor | None = None,
    checkpoint_interval: int | None = None,
    segment_tokens: int | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    validate: bool = False,
) -> Plan:
    """The plan of `lightning_prefill` with these arguments; raises what the call raises."""
    dims = dims_of(q, k, v)
    _require_decay(g_gamma, dims, q.device, validate)
    sequences = _sequences(dims, q.device, cu_seqlens, validate=validate)
    sizes = {"heads": dims.HV, "key_dim": dims.K, "value_dim": dims.V, "device": q.device}
    require_pool(state, state_indices, has_initial_state, sequences=sequences, **sizes)
    require_checkpoints(checkpoints, checkpoint_interval, tokens=dims.B * dims.T, **sizes)
    require_flags(validate=validate)
    require(
        segment_tokens is None
        or (
            isinstance(segment_tokens, int) and segment_tokens >= 0 and segment_tokens % CHUNK == 0
        ),
        "segment_tokens",
        segment_tokens,
        f"must be None or an integer multiple of {CHUNK}, 0 included",
    )
    if out is not None:
        require_tensor(
            "out", out, shape=v.shape, dims="[B, T, HV, V]", dtypes=(q.dtype,), device=q.device
        )
        require_own_elements("out", out)
    missing = no_kernel(q, dims, {"state": state, "checkpoints": checkpoints})
    chosen, reason = _backend("lightning_prefill", backend, q.device, dims, sequences, missing)
    kernel = None
    if chosen == "cute":
        kernel = kernel_plan(
            q,
            dims,
            sequences,
            initial=state,
            final=state,
            state_indices=state_indices,
            mask=has_initial_state is not None,
            checkpoints=checkpoints,
            varlen=cu_seqlens is not None,
            segment_tokens=segment_tokens,
            sms=sm_count(q.device),
        )
    return Plan(
        "lightning_prefill",
        dims,
        sequences,
        q.dtype,
        _form(scale, dims),
        cu_seqlens is not None,
        None if state is None else state.dtype,
        checkpoint_interval,
        chosen,
        reason,
        kernel,
    )


def plan_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_size: int = 64,
    final_state: torch.Tensor | None = None,
    differentiable: bool = False,
    backend: str = "auto",
) -> Plan:
    """The plan of `chunk_lightning_attn` with these arguments; raises what the call raises.

    Args:
        final_state: where the kernel is to put the final state, of the call's own making.
        differentiable: whether gradients are needed.
    """
    dims = dims_of(q, k, v)
    sequences = _sequences(dims, q.device, cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None:
        require_state(
            "initial_state",
            initial_state,
            slots=sequences,
            heads=dims.HV,
            K=dims.K,
            V=dims.V,
            v_first=state_v_first,
            device=q.device,
            dense=False,
        )
    require_flags(state_v_first=state_v_first)
    require(
        isinstance(chunk_size, int) and chunk_size > 0 and chunk_size & (chunk_size - 1) == 0,
        "chunk_size",
        chunk_size,
        "must be an integer power of 2",
    )
    missing = "gradients are needed" if differentiable else no_kernel(q, dims, {})
    chosen, reason = _backend("chunk_lightning_attn", backend, q.device, dims, sequences, missing)
    kernel = None
    if chosen == "cute":

        def v_first(x: torch.Tensor | None) -> torch.Tensor | None:
            return x if x is None or state_v_first else x.mT

        kernel = kernel_plan(
            q,
            dims,
            sequences,
            initial=v_first(initial_state),
            final=v_first(final_state),
            varlen=cu_seqlens is not None,
            sms=sm_count(q.device),
        )
    return Plan(
        "chunk_lightning_attn",
        dims,
        sequences,
        q.dtype,
        _form(scale, dims),
        cu_seqlens is not None,
        None if initial_state is None else initial_state.dtype,
        None,
        chosen,
        reason,
        kernel,
    )


def _require_decay(g_gamma: torch.Tensor, dims: Dims, device: torch.device, validate: bool) -> None:
    require_tensor(
        "g_gamma", g_gamma, shape=(dims.HV,), dims="[HV]", dtypes=(torch.float32,), device=device
    )
    # A GPU's values are not looked at unless the caller asks for it: that would wait for the GPU.
    if validate or device.type == "cpu":
        largest = g_gamma.max().item()
        require(largest <= 0, "g_gamma", f"largest value {largest}", "must be at most 0 everywhere")


def _sequences(
    dims: Dims,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    validate: bool = False,
) -> int:
    if cu_seqlens is None:
        require(cu_seqlens_cpu is None, "cu_seqlens_cpu", "given", "needs cu_seqlens")
        return dims.B
    return require_cu_seqlens(
        cu_seqlens,
        batch=dims.B,
        tokens=dims.T,
        device=device,
        cu_seqlens_cpu=cu_seqlens_cpu,
        validate=validate,
    )


def _form(scale: float | None, dims: Dims) -> LightningForm:
    if scale is None:
        return LightningForm(dims.K**-0.5)
    require_number("scale", scale)
    return LightningForm(float(scale))


def _backend(
    call: str,
    requested: str,
    device: torch.device,
    dims: Dims,
    sequences: int,
    cute_missing: str | None,
) -> tuple[Backend, str]:
    """The backend, and why it is not our kernel."""
    fla_missing = fla_fallback.missing(dims, sequences)
    chosen = choose_backend(
        call, requested, device, cute_missing=cute_missing, fla_missing=fla_missing
    )
    if chosen == "cute":
        return chosen, ""
    if device.type != "cuda":
        return chosen, f"the tensors are on {device}"
    if cute_missing is None:
        return chosen, "asked for"
    if chosen == "reference" and fla_missing:
        return chosen, f"{cute_missing}; {fla_missing}"
    return chosen, cute_missing
