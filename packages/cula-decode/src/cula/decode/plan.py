"""What a decode call will do, decided on the host from shapes, dtypes and keywords alone."""

from collections.abc import Sequence

import torch

from cula.common.arch import KERNEL_ARCHS, arch_of, missing_compiler
from cula.common.backends import choose_backend
from cula.common.checks import (
    INDEX_DTYPES,
    require,
    require_cu_seqlens,
    require_flags,
    require_number,
    require_own_elements,
    require_tensor,
)
from cula.common.dims import QKV_DTYPES, Dims, dims_of
from cula.common.gates import beta_form, kda_gate
from cula.common.layouts import STATE_DTYPES, to_k_first
from cula.common.reference import KdaForm, KdaInputs, LightningForm, LightningInputs
from cula.decode import fla_fallback
from cula.decode.call import Plan, States
from cula.decode.kernels.config import DecodeConfig, KdaDecodeConfig, LightningDecodeConfig

KERNEL_DIMS = (64, 128)
FEW_UNITS, MANY_UNITS = 128, 512  # (sequence, head) pairs: up to where a tile is the fastest
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}


def plan_kda(
    call: str,
    inputs: KdaInputs,
    states: States,
    out: torch.Tensor,
    *,
    lower_bound: float | None,
    scale: float | None,
    use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    backend: str,
) -> Plan:
    """The plan of a KDA call; raises what the call raises."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    dims = dims_of(q, k, v)
    rows = (dims.B, dims.T, dims.HV)
    _require_input("g", g, (*rows, dims.K), "[B, T, HV, K]", q.device)
    per_channel = isinstance(beta, torch.Tensor) and beta.dim() == 4
    _require_input(
        "beta",
        beta,
        (*rows, dims.V) if per_channel else rows,
        "[B, T, HV] or [B, T, HV, V]",
        q.device,
    )
    gate = kda_gate(
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        HV=dims.HV,
        K=dims.K,
        device=q.device,
    )
    beta_of = beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    require_flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    form = KdaForm(gate, beta_of, use_qk_l2norm_in_kernel, _scale(scale, dims))
    own = "beta with a value per channel" if per_channel else None
    return _plan(call, dims, form, inputs, states, out, backend, own)


def plan_lightning(
    call: str,
    inputs: LightningInputs,
    states: States,
    out: torch.Tensor,
    *,
    scale: float | None,
    backend: str,
) -> Plan:
    """The plan of a Lightning call; raises what the call raises."""
    q, k, v, g_gamma = inputs
    dims = dims_of(q, k, v)
    require_tensor(
        "g_gamma",
        g_gamma,
        shape=(dims.HV,),
        dims="[HV]",
        dtypes=(torch.float32,),
        device=q.device,
    )
    if q.device.type == "cpu":  # a GPU's values are not looked at: that would wait for the GPU
        largest = g_gamma.max().item()
        require(largest <= 0, "g_gamma", f"largest value {largest:g}", "must be at most 0")
    form = LightningForm(_scale(scale, dims))
    return _plan(call, dims, form, inputs, states, out, backend, None)


def _scale(scale: float | None, dims: Dims) -> float:
    if scale is None:
        return dims.K**-0.5
    require_number("scale", scale)
    return float(scale)


def _plan(
    call: str,
    dims: Dims,
    form: KdaForm | LightningForm,
    inputs: KdaInputs | LightningInputs,
    states: States,
    out: torch.Tensor,
    backend: str,
    own: str | None,
) -> Plan:
    device = inputs.q.device
    sequences = dims.B
    if states.cu_seqlens is not None:
        sequences = require_cu_seqlens(
            states.cu_seqlens, batch=dims.B, tokens=dims.T, device=device
        )
    require_flags(update_state=states.update)
    _require_states(states, dims, sequences, device)
    require_tensor(
        "out",
        out,
        shape=inputs.v.shape,
        dims="[B, T, HV, V]",
        dtypes=(inputs.v.dtype,),
        device=device,
    )
    state = states.state if states.update else None
    for arg, x in (("state", state), ("token_states", states.tokens), ("out", out)):
        if x is not None:
            require_own_elements(arg, x)
    missing = own or _no_kernel(dims, states, device)
    fla_missing = fla_fallback.missing(dims, sequences, states)
    chosen = choose_backend(call, backend, device, cute_missing=missing, fla_missing=fla_missing)
    if chosen == "cute":
        arch = arch_of(device)
        config = kernel_config(dims, sequences, form, inputs, states, arch)
        return Plan(call, dims, sequences, form, chosen, "", arch, config)
    if device.type != "cuda":
        reason = f"the tensors are on {device}"
    else:
        reason = missing or f"backend {chosen!r} was asked for"
    return Plan(call, dims, sequences, form, chosen, reason)


def _require_input(
    arg: str, x: torch.Tensor, shape: Sequence[int], names: str, device: torch.device
) -> None:
    require_tensor(arg, x, shape=shape, dims=names, dtypes=QKV_DTYPES, device=device)


def _require_states(states: States, dims: Dims, sequences: int, device: torch.device) -> None:
    matrix = (dims.V, dims.K)
    if states.state is not None:
        require_tensor(
            "state",
            states.state,
            shape=(None, dims.HV, *matrix),
            dims="[slots, HV, V, K]",
            dtypes=STATE_DTYPES,
            device=device,
        )
    if states.indices is None:
        require(
            states.state is None or states.state.shape[0] >= sequences,
            "state",
            f"shape {list(states.state.shape) if states.state is not None else None}",
            f"must have a slot for each of the {sequences} sequences when state_indices is None",
        )
    else:
        _require_indices(states, sequences, device)
    require(
        states.accepted is None or states.per_token,
        "num_accepted_tokens",
        "given",
        "needs state_indices of shape [N, tokens], which name the slot of every token",
    )
    if states.accepted is not None:
        require_tensor(
            "num_accepted_tokens",
            states.accepted,
            shape=(sequences,),
            dims="[N]",
            dtypes=INDEX_DTYPES,
            device=device,
        )
    if states.tokens is not None:
        require(
            states.state is not None,
            "token_states",
            "given",
            "needs a state, whose layout it shares",
        )
        require_tensor(
            "token_states",
            states.tokens,
            shape=(dims.B, dims.T, dims.HV, *matrix),
            dims="[B, T, HV, V, K]",
            dtypes=(states.state.dtype,),
            device=device,
        )


def _require_indices(states: States, sequences: int, device: torch.device) -> None:
    require_tensor("state_indices", states.indices)  # before anything asks for its rank
    rank = 2 if states.per_token else 1
    require_tensor(
        "state_indices",
        states.indices,
        shape=(sequences, None)[:rank],
        dims="[N] or [N, tokens]",
        dtypes=INDEX_DTYPES,
        device=device,
    )
    require(
        rank == 1 or states.indices.shape[1] > 0,
        "state_indices",
        f"shape {list(states.indices.shape)}",
        "must name at least one slot per sequence",
    )


def _no_kernel(dims: Dims, states: States, device: torch.device) -> str | None:
    """Why our kernels cannot run this, or None."""
    if device.type != "cuda":
        return None
    arch = arch_of(device)
    if arch not in KERNEL_ARCHS:
        return f"no kernel for the architecture {arch}; there are {', '.join(KERNEL_ARCHS)}"
    if dims.K not in KERNEL_DIMS or dims.V not in KERNEL_DIMS:
        return f"no kernel for K = {dims.K}, V = {dims.V}; each must be 64 or 128"
    for arg, x in (
        ("state", states.state),
        ("token_states", states.tokens),
        ("final", states.final),
    ):
        if x is None:
            continue
        if not (_v_first(x) or _v_first(to_k_first(x))):
            return f"{arg}: strides {list(x.stride())}; each head's matrix must be contiguous"
        if x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in x.stride()[:-2]):
            return f"{arg}: its matrices must start at multiples of 16 bytes"
    tokens, state = states.tokens, states.state
    if tokens is not None and state is not None and _v_first(tokens) != _v_first(state):
        return "token_states: V-first and K-first mixed with state"
    return missing_compiler()


def _v_first(x: torch.Tensor) -> bool:
    """Whether each head's matrix [V, K] lies densely in memory, row by row."""
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]


def kernel_config(
    dims: Dims,
    sequences: int,
    form: KdaForm | LightningForm,
    inputs: KdaInputs | LightningInputs,
    states: States,
    arch: str,
) -> DecodeConfig:
    """What the kernel of such a call is compiled for; looks at shapes, strides and dtypes alone."""
    like = states.final if states.final is not None else states.state
    v_first = like is None or _v_first(like)
    single = dims.T == 1 and states.cu_seqlens is None and not states.per_token
    warps, v_per_thread, lanes = _tile(
        dims,
        isinstance(form, LightningForm),
        v_first,
        like is None or like.dtype == torch.float32,
        single,
        sequences * dims.HV,
    )
    common = {
        "K": dims.K,
        "V": dims.V,
        "warps": warps,
        "v_per_thread": v_per_thread,
        "lanes": lanes,
        "io": _NAMES[inputs.q.dtype],
        "state": "fp32" if like is None else _NAMES[like.dtype],
        "v_first": v_first,
        "single": single,
        "reads": states.state is not None,
        "writes": states.writes,
        "state_indices": _name(states.indices),
        "slot_per_token": states.per_token,
        "num_accepted_tokens": _name(states.accepted),
        "cu_seqlens": _name(states.cu_seqlens),
        "token_states": states.tokens is not None,
        "pdl": arch != "sm_80",
    }
    if isinstance(form, LightningForm):
        return LightningDecodeConfig(**common)
    assert isinstance(inputs, KdaInputs)  # as the form says
    uses_a = form.gate.form in ("softplus", "bounded")
    bias = inputs.dt_bias if form.gate.has_bias else None
    return KdaDecodeConfig(
        **common,
        gate=form.gate.form,
        g=_NAMES[inputs.g.dtype],
        A_log=_name(inputs.A_log if uses_a else None),
        dt_bias=_name(bias),
        flat_bias=bias is not None and bias.dim() == 1,
        beta=form.beta,
        beta_dtype=_NAMES[inputs.beta.dtype],
        l2norm=form.l2norm,
    )


def _tile(
    dims: Dims, lightning: bool, v_first: bool, fp32: bool, single: bool, units: int
) -> tuple[int, int, int]:
    """(warps, value channels a thread, lanes a row) of a block; DESIGN.md, Tiles, has figures."""
    if not v_first:
        return 4, 4, 8
    if not single:
        if lightning:
            return 4, 4, 8
        return (8 if dims.K == dims.V == 128 else 4), 4, 16
    if not fp32:
        return 4, 4, 16
    if units <= FEW_UNITS:
        return 4, 1, 8
    if units <= MANY_UNITS:
        return 4, 4, 8
    return (4, 1, 16) if lightning else (2, 2, 16)


def _name(x: torch.Tensor | None) -> str | None:
    return None if x is None else _NAMES[x.dtype]
