"""From a call's arguments to its backend: what the operators of this package run.

A step of a small batch takes the GPU a few microseconds, so the host's share counts. A call whose
plan was our kernel leaves its launch function behind under a short key, and the next such call goes
straight to it (cula.common.launches; a call that the function refuses is planned anew, so V-first
and K-first pools of one shape may share a key).
"""

from collections.abc import Callable

import torch

from cula.common import jit
from cula.common.checks import require_tensor
from cula.common.launches import keep, on_device
from cula.common.reference import KdaForm, KdaInputs, LightningInputs
from cula.common.registry import register_op
from cula.decode import fla_fallback, reference
from cula.decode.call import Plan, States
from cula.decode.plan import plan_kda, plan_lightning

_launches: dict[tuple, tuple[Callable[..., None], float]] = {}  # and the default scale


def _kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    token_states: torch.Tensor | None,
    out: torch.Tensor,
    update_state: bool,
    lower_bound: float | None,
    scale: float | None,
    use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    backend: str,
) -> None:
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    try:
        key = (
            q.shape,
            state.shape,
            q.dtype,
            g.dtype,
            beta.dtype,
            state.dtype,
            q.get_device(),
            A_log if A_log is None else A_log.dtype,
            dt_bias if dt_bias is None else dt_bias.dtype,
            dt_bias if dt_bias is None else dt_bias.numel(),
            state_indices if state_indices is None else state_indices.dtype,
            state_indices if state_indices is None else state_indices.shape,
            cu_seqlens if cu_seqlens is None else cu_seqlens.dtype,
            cu_seqlens if cu_seqlens is None else cu_seqlens.shape,
            num_accepted_tokens if num_accepted_tokens is None else num_accepted_tokens.dtype,
            token_states is None,
            update_state,
            lower_bound,
            use_gate_in_kernel,
            use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            backend,
        )
        known = _launches.get(key)
    except (AttributeError, TypeError):  # no tensor, or a number that is a list: the plan says so
        key = known = None
    if known is not None:
        launch, default_scale = known
        try:
            launch(
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                state,
                None,
                state_indices,
                num_accepted_tokens,
                cu_seqlens,
                token_states,
                out,
                default_scale if scale is None else scale,
                0.0 if lower_bound is None else lower_bound,
            )
            return
        except (TypeError, ValueError):
            pass
    require_tensor("state", state)
    inputs = KdaInputs(q, k, v, g, beta, A_log, dt_bias)
    states = States(
        state, update_state, None, state_indices, num_accepted_tokens, cu_seqlens, token_states
    )
    plan = plan_kda(
        "kda_decode",
        inputs,
        states,
        out,
        lower_bound=lower_bound,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        backend=backend,
    )
    run(plan, key, inputs, states, out)


def _lightning_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    token_states: torch.Tensor | None,
    out: torch.Tensor,
    update_state: bool,
    scale: float | None,
    backend: str,
) -> None:
    try:
        key = (
            q.shape,
            state.shape,
            q.dtype,
            state.dtype,
            q.get_device(),
            state_indices if state_indices is None else state_indices.dtype,
            state_indices if state_indices is None else state_indices.shape,
            cu_seqlens if cu_seqlens is None else cu_seqlens.dtype,
            cu_seqlens if cu_seqlens is None else cu_seqlens.shape,
            num_accepted_tokens if num_accepted_tokens is None else num_accepted_tokens.dtype,
            token_states is None,
            update_state,
            backend,
        )
        known = _launches.get(key)
    except (AttributeError, TypeError):  # no tensor, or a number that is a list: the plan says so
        key = known = None
    if known is not None:
        launch, default_scale = known
        try:
            launch(
                q,
                k,
                v,
                g_gamma,
                None,
                None,
                None,
                state,
                None,
                state_indices,
                num_accepted_tokens,
                cu_seqlens,
                token_states,
                out,
                default_scale if scale is None else scale,
                0.0,
            )
            return
        except (TypeError, ValueError):
            pass
    require_tensor("state", state)
    inputs = LightningInputs(q, k, v, g_gamma)
    states = States(
        state, update_state, None, state_indices, num_accepted_tokens, cu_seqlens, token_states
    )
    plan = plan_lightning("lightning_decode", inputs, states, out, scale=scale, backend=backend)
    run(plan, key, inputs, states, out)


def _fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    backend: str,
) -> None:
    """States are V-first by shape; a K-first one is the transposed view."""
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    try:
        key = (
            q.shape,
            v.shape,
            beta.shape,
            q.dtype,
            g.dtype,
            beta.dtype,
            q.get_device(),
            A_log if A_log is None else A_log.dtype,
            dt_bias if dt_bias is None else dt_bias.dtype,
            dt_bias if dt_bias is None else dt_bias.shape,
            # A state's strides say which layout the kernel has for it, and whether it has one.
            initial_state if initial_state is None else initial_state.dtype,
            initial_state if initial_state is None else initial_state.shape,
            initial_state if initial_state is None else initial_state.stride(),
            final_state if final_state is None else final_state.shape,
            final_state if final_state is None else final_state.stride(),
            cu_seqlens if cu_seqlens is None else cu_seqlens.dtype,
            cu_seqlens if cu_seqlens is None else cu_seqlens.shape,
            lower_bound,
            use_gate_in_kernel,
            use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            backend,
        )
        known = _launches.get(key)
    except (AttributeError, TypeError):  # no tensor, or a number that is a list: the plan says so
        key = known = None
    if known is not None:
        launch, default_scale = known
        try:
            launch(
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                initial_state,
                final_state,
                None,
                None,
                cu_seqlens,
                None,
                out,
                default_scale if scale is None else scale,
                0.0 if lower_bound is None else lower_bound,
            )
            return
        except (TypeError, ValueError):
            pass
    inputs = KdaInputs(q, k, v, g, beta, A_log, dt_bias)
    states = States(initial_state, False, final_state, cu_seqlens=cu_seqlens)
    plan = plan_kda(
        "fused_recurrent_kda",
        inputs,
        states,
        out,
        lower_bound=lower_bound,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        backend=backend,
    )
    run(plan, key, inputs, states, out)


def kept(key: tuple | None) -> tuple[Callable[..., None], float] | None:
    """The launch function and the default scale of an earlier call that `run` got with this key."""
    return None if key is None else _launches.get(key)


def run(
    plan: Plan,
    key: tuple | None,
    inputs: KdaInputs | LightningInputs,
    states: States,
    out: torch.Tensor,
) -> None:
    """Runs a planned call. If it is our kernel's and nothing was copied, the launch is kept."""
    if inputs.q.device.type == "meta":  # shapes and dtypes alone: they have been checked
        return
    if plan.backend == "cute" and not plan.empty:
        _launch(plan, key, inputs, states, out)
    elif plan.backend == "fla" and not plan.empty:
        fla_fallback.run(plan, inputs, states, out)
    else:
        reference.run(plan, inputs, states, out)


def _launch(
    plan: Plan,
    key: tuple | None,
    inputs: KdaInputs | LightningInputs,
    states: States,
    out: torch.Tensor,
) -> None:
    function = on_device(jit.compiled(plan.config, plan.arch), inputs.q.device)
    q, k, v, g, *rest = inputs
    if isinstance(plan.form, KdaForm):
        lower_bound = plan.form.gate.lower_bound or 0.0
    else:
        rest, lower_bound = [None, None, None], 0.0
    given = (q, k, v, g, out)
    q, k, v, g, target = (_dense_channels(x) for x in given)
    function(
        q,
        k,
        v,
        g,
        *rest,
        states.state,
        states.final,
        states.indices,
        states.accepted,
        states.cu_seqlens,
        states.tokens,
        target,
        plan.form.scale,
        lower_bound,
    )
    if target is not out:
        out.copy_(target)
    keep(_launches, key, (function, plan.dims.K**-0.5), given, (q, k, v, g, target))


def _dense_channels(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if its last dimension is strided: kernels read neighbouring channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


kda_decode_op = register_op("kda_decode", _kda_decode, mutates=("state", "token_states", "out"))
lightning_decode_op = register_op(
    "lightning_decode", _lightning_decode, mutates=("state", "token_states", "out")
)
fused_recurrent_kda_op = register_op(
    "fused_recurrent_kda", _fused_recurrent_kda, mutates=("out", "final_state")
)
