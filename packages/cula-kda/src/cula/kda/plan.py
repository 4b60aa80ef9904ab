"""What a call will do, decided on the host from shapes, dtypes and keywords alone."""

from dataclasses import dataclass

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
from cula.common.dims import QKV_DTYPES, Dims, dims_of
from cula.common.gates import beta_form, kda_gate
from cula.common.layouts import require_state
from cula.common.pool import require_checkpoints, require_pool
from cula.kda import fla_fallback
from cula.kda.kernel_plan import KernelPlan, kernel_plan, no_kernel
from cula.kda.reference import KdaForm
from cula.kda.sm90.config import CHUNK

CHUNK_SIZES = (32, 64)


@dataclass(frozen=True)
class Plan:
    """One call's sizes, form and backend. Equal arguments give equal plans."""

    call: str
    dims: Dims
    sequences: int
    dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    form: KdaForm
    varlen: bool
    state_dtype: torch.dtype | None
    checkpoint_interval: int | None
    backend: Backend
    reason: str
    """Why the backend is not our kernel; empty if it is."""
    kernels: KernelPlan | None = None

    @property
    def workspace_bytes(self) -> int:
        """Device memory that our kernels take for this call; about 1 KB a token and value head.

        At most twice as much where the plan cuts sequences along time.
        """
        return 0 if self.kernels is None else self.kernels.workspace_bytes

    @property
    def empty(self) -> bool:
        """No sequences or no tokens: nothing to launch, only states to pass on."""
        return self.dims.T == 0 or self.sequences == 0

    @property
    def compile_key(self) -> str:
        """What a kernel is compiled for. Batch, length, heads, scale and pool size are run-time."""
        gate = self.form.gate
        parts = [
            "kda",
            _short(self.dtype),
            f"k{self.dims.K}v{self.dims.V}",
            f"g.{_short(self.gate_dtype)}.{gate.form}" + (".bias" if gate.has_bias else ""),
            f"beta.{_short(self.beta_dtype)}.{self.form.beta}",
            "l2" if self.form.l2norm else "",
            f"state.{_short(self.state_dtype)}" if self.state_dtype else "",
            "varlen" if self.varlen else "",
            "checkpoints" if self.checkpoint_interval else "",
        ]
        return "-".join(part for part in parts if part)


def plan_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_gate_in_kernel: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    checkpoints: torch.Tensor | None = None,
    checkpoint_interval: int | None = None,
    segment_tokens: int | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    validate: bool = False,
) -> Plan:
    """The plan of `kda_prefill` with these arguments; raises what the call raises."""
    dims = _require_inputs(q, k, v, g, beta)
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
    form = KdaForm(
        kda_gate(
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            HV=dims.HV,
            K=dims.K,
            device=q.device,
        ),
        beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _flag(use_qk_l2norm_in_kernel),
        _scale(scale, dims),
    )
    missing = no_kernel(q, dims, {"state": state, "checkpoints": checkpoints})
    chosen, reason = _backend("kda_prefill", backend, q.device, dims, sequences, missing)
    kernels = None
    if chosen == "cute":
        kernels = kernel_plan(
            q,
            g,
            beta,
            form,
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
        "kda_prefill",
        dims,
        sequences,
        q.dtype,
        g.dtype,
        beta.dtype,
        form,
        cu_seqlens is not None,
        None if state is None else state.dtype,
        checkpoint_interval,
        chosen,
        reason,
        kernels,
    )


def plan_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    final_state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    only_fla: str | None = None,
    differentiable: bool = False,
    backend: str = "auto",
) -> Plan:
    """The plan of `chunk_kda` with these arguments; raises what the call raises.

    Args:
        final_state: where the kernel is to put the final state, of the call's own making.
        starts: where the states at the start of chunks are to go, of the call's own making.
        only_fla: the keyword, if any, that nothing but FLA can serve on a GPU.
        differentiable: whether gradients are needed.
    """
    dims = _require_inputs(q, k, v, g, beta)
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
    require_flags(state_v_first=state_v_first, safe_gate=safe_gate)
    require(chunk_size in CHUNK_SIZES, "chunk_size", chunk_size, f"must be one of {CHUNK_SIZES}")
    require(
        lower_bound is not None or not (safe_gate and use_gate_in_kernel),
        "lower_bound",
        None,
        "must be given with safe_gate=True and use_gate_in_kernel=True",
    )
    form = KdaForm(
        kda_gate(
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            HV=dims.HV,
            K=dims.K,
            device=q.device,
        ),
        beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _flag(use_qk_l2norm_in_kernel),
        _scale(scale, dims),
    )
    if only_fla:
        missing = f"{only_fla} is FLA's"
    elif differentiable:
        missing = "gradients are needed"
    elif starts is not None and (chunk_size != CHUNK or starts.dtype != torch.bfloat16):
        missing = (
            f"no kernel keeps intermediate states of {starts.dtype} every {chunk_size} tokens; "
            f"they must be bfloat16, every {CHUNK}"
        )
    else:
        missing = no_kernel(q, dims, {})
    chosen, reason = _backend("chunk_kda", backend, q.device, dims, sequences, missing)
    if only_fla and chosen != "fla":
        raise NotImplementedError(f"{only_fla}: given; needs FLA. {reason}")
    kernels = None
    if chosen == "cute":
        initial, final = (
            x if x is None or state_v_first else x.mT for x in (initial_state, final_state)
        )
        checkpoints = None if starts is None else starts_by_row(starts, state_v_first)
        kernels = kernel_plan(
            q,
            g,
            beta,
            form,
            dims,
            sequences,
            initial=initial,
            final=final,
            checkpoints=checkpoints,
            starts=starts is not None,
            varlen=cu_seqlens is not None,
            sms=sm_count(q.device),
        )
    return Plan(
        "chunk_kda",
        dims,
        sequences,
        q.dtype,
        g.dtype,
        beta.dtype,
        form,
        cu_seqlens is not None,
        None if initial_state is None else initial_state.dtype,
        None,
        chosen,
        reason,
        kernels,
    )


def starts_by_row(starts: torch.Tensor, v_first: bool) -> torch.Tensor:
    """`chunk_kda`'s [B, chunks, HV, ..] as the kernel's [rows, HV, V, K]."""
    rows = starts.flatten(0, 1)
    return rows if v_first else rows.mT


def _require_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> Dims:
    dims = dims_of(q, k, v)
    B, T, HV, K = dims.B, dims.T, dims.HV, dims.K
    for arg, x, shape, names in (
        ("g", g, (B, T, HV, K), "[B, T, HV, K]"),
        ("beta", beta, (B, T, HV), "[B, T, HV]"),
    ):
        require_tensor(arg, x, shape=shape, dims=names, dtypes=QKV_DTYPES, device=q.device)
    return dims


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


def _scale(scale: float | None, dims: Dims) -> float:
    if scale is None:
        return dims.K**-0.5
    require_number("scale", scale)
    return float(scale)


def _flag(use_qk_l2norm_in_kernel: bool) -> bool:
    require_flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return use_qk_l2norm_in_kernel


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
    if chosen == "reference" and fla_missing:
        return chosen, f"{cute_missing}; {fla_missing}"
    return chosen, cute_missing or f"backend={requested!r}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
