"""Which kernel runs a decode call, if any: from shapes, strides and dtypes alone."""

import torch

from cula.common.arch import KERNEL_ARCHS, arch_of, missing_compiler
from cula.common.dims import Dims
from cula.common.kernel_args import DTYPE_NAMES, dtype_name
from cula.common.layouts import to_k_first
from cula.common.reference import KdaForm, KdaInputs, LightningForm, LightningInputs
from cula.decode.call import States
from cula.decode.kernels.config import DecodeConfig, KdaDecodeConfig, LightningDecodeConfig

KERNEL_DIMS = (64, 128)
FEW_UNITS, MANY_UNITS = 128, 512  # (sequence, head) pairs: up to where a tile is the fastest


def no_kernel(dims: Dims, states: States, device: torch.device) -> str | None:
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
        "io": DTYPE_NAMES[inputs.q.dtype],
        "state": "fp32" if like is None else DTYPE_NAMES[like.dtype],
        "v_first": v_first,
        "single": single,
        "reads": states.state is not None,
        "writes": states.writes,
        "state_indices": dtype_name(states.indices),
        "slot_per_token": states.per_token,
        "num_accepted_tokens": dtype_name(states.accepted),
        "cu_seqlens": dtype_name(states.cu_seqlens),
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
        g=DTYPE_NAMES[inputs.g.dtype],
        A_log=dtype_name(inputs.A_log if uses_a else None),
        dt_bias=dtype_name(bias),
        flat_bias=bias is not None and bias.dim() == 1,
        beta=form.beta,
        beta_dtype=DTYPE_NAMES[inputs.beta.dtype],
        l2norm=form.l2norm,
    )


def _tile(
    dims: Dims, lightning: bool, v_first: bool, fp32: bool, single: bool, units: int
) -> tuple[int, int, int]:
    """(warps, value channels a thread, lanes a row) of a block; DESIGN.md, Tiles, has figures."""
    if not v_first:
        return 4, 4, 8 if dims.K == 128 else 16
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
