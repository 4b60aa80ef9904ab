"""Decode by flash-linear-attention, 0.4.2 to 0.6, where no kernel of ours applies.

FLA's recurrent kernels take states and return new ones; slots are gathered and scattered here.
"""

import inspect
from collections.abc import Callable

import torch

from cula.common.dims import Dims
from cula.common.fla import fla_function, fla_missing
from cula.common.gates import apply_beta
from cula.common.layouts import to_k_first, to_v_first
from cula.common.pool import load_states, valid_slots
from cula.common.recurrence import l2_normalise
from cula.common.reference import KdaForm, KdaInputs, LightningForm, LightningInputs
from cula.decode.call import Plan, States
from cula.decode.reference import store

FUSED_RECURRENT_KDA = "fla.ops.kda.fused_recurrent_kda"
FUSED_RECURRENT_LIGHTNING = "fla.ops.simple_gla.fused_recurrent_simple_gla"
MAX_KEY_DIM = 256
MAX_GRID = 65535  # FLA launches a grid row per (sequence, value head)


def missing(dims: Dims, sequences: int, states: States) -> str | None:
    """Why FLA cannot run such a call, or None."""
    if states.per_token or states.tokens is not None:
        return "FLA's recurrent kernels do not keep the state after every token this way"
    if states.indices is not None and states.cu_seqlens is not None:
        return "with cu_seqlens, the tokens of a sequence without a slot are not known on the host"
    if dims.K > MAX_KEY_DIM:
        return f"K = {dims.K}, and FLA's recurrent kernels take at most {MAX_KEY_DIM}"
    if sequences * dims.HV > MAX_GRID:
        return f"{sequences} sequences x {dims.HV} heads are more than FLA's {MAX_GRID} grid rows"
    return fla_missing()


def run(plan: Plan, inputs: KdaInputs | LightningInputs, states: States, out: torch.Tensor) -> None:
    """As `reference.run`, by FLA."""
    with torch.no_grad():
        initial = None
        if states.state is not None:
            rows = load_states(states.state, states.indices, None, sequences=plan.sequences)
            initial = to_k_first(rows).contiguous()
        step: Callable = _kda if isinstance(plan.form, KdaForm) else _lightning
        o, final = step(plan.form, inputs, initial, states.cu_seqlens)
        if states.indices is not None:
            named = valid_slots(states.indices, states.state.shape[0])
            o = torch.where(named.view(-1, 1, 1, 1), o, 0.0)
        out.copy_(o)
        store(plan, states, states.indices, to_v_first(final))


def _kda(form: KdaForm, inputs: KdaInputs, initial, cu_seqlens):
    """Gates, norms and beta are computed before: what FLA's versions fuse differs."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if form.l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    function = fla_function(FUSED_RECURRENT_KDA)
    if v.shape[2] != q.shape[2] and "state_v_first" not in inspect.signature(function).parameters:
        q, k = _per_value_head(q, v), _per_value_head(k, v)
    return function(
        q=q,
        k=k,
        v=v,
        g=form.gate.log_decay(inputs.g, inputs.A_log, inputs.dt_bias),
        beta=apply_beta(form.beta, inputs.beta),
        scale=form.scale,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )


def _lightning(form: LightningForm, inputs: LightningInputs, initial, cu_seqlens):
    q, k, v, g_gamma = inputs
    return fla_function(FUSED_RECURRENT_LIGHTNING)(
        q=_per_value_head(q, v),
        k=_per_value_head(k, v),
        v=v,
        g_gamma=g_gamma,
        scale=form.scale,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )


def _per_value_head(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x if x.shape[2] == v.shape[2] else x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)
