"""What a decode call will do, decided on the host from shapes, dtypes and keywords alone."""

from collections.abc import Sequence

import torch

from cula.common.arch import arch_of
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
from cula.common.layouts import STATE_DTYPES
from cula.common.reference import KdaForm, KdaInputs, LightningForm, LightningInputs
from cula.decode import fla_fallback
from cula.decode.call import Plan, States
from cula.decode.kernel_plan import kernel_config, no_kernel


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
    missing = own or no_kernel(dims, states, device)
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
