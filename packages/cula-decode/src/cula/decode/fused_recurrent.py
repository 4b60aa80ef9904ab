"""FLA's recurrent call of Kimi Delta Attention: any number of tokens, states in and out."""

import torch

from cula.common.checks import (
    needs_grad,
    require,
    require_cu_seqlens,
    require_flags,
    require_known_keywords,
    require_tensor,
)
from cula.common.layouts import new_output, state_shape, to_k_first, to_v_first
from cula.common.reference import KdaForm, KdaInputs, kda_forward
from cula.decode.call import States
from cula.decode.plan import plan_kda
from cula.decode.run import fused_recurrent_kda_op

# keywords of FLA 0.4.2 to 0.6 that do not apply here
IGNORED = {
    "safe_gate": "chooses between FLA's chunked kernels",
    "chunk_size": "there are no chunks here",
    "chunk_indices": "there are no chunks here",
    "disable_recompute": "nothing is recorded",
    "cu_seqlens_cpu": "the lengths are not read on the host",
}


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
    **ignored: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention token by token, with FLA 0.6's signature, meaning and defaults.

    For whole prompts `cula.kda.chunk_kda` is much faster. Where gradients are needed, the
    reference runs, which records them; FLA's own function has none.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype.
        g: ``[B, T, HV, K]``: log decay (natural logarithm), or raw with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``, or ``[B, T, HV, V]``: a step size for every value channel.
        A_log, dt_bias, lower_bound, scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, cu_seqlens, backend: as for `kda_decode`.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``; float32,
            bfloat16 or float16. Not written.
        output_final_state: return the final states too.
        transpose_state_layout: FLA's older name of ``state_v_first``.
        ignored: what other versions of FLA take and what has no meaning here (`IGNORED`).

    Returns:
        o, ``[B, T, HV, V]`` in v's dtype, and the final states, new, float32, in the layout of
        ``initial_state``, or None.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: the backend insisted on cannot run this.
    """
    if ignored:
        require_known_keywords("fused_recurrent_kda", ignored, IGNORED)
    if transpose_state_layout is not None:
        require(
            not state_v_first,
            "transpose_state_layout",
            transpose_state_layout,
            "is the older name of state_v_first; give one of them",
        )
        state_v_first = transpose_state_layout
    if output_final_state and output_final_state is not True:
        require_flags(output_final_state=output_final_state)
    if state_v_first and state_v_first is not True:
        require_flags(state_v_first=state_v_first)
    for arg, x in (("q", q), ("v", v)):
        require_tensor(arg, x, shape=[None] * 4, dims="[B, T, heads, channels]")
    N, T, _, K = q.shape
    _, _, HV, V = v.shape
    if cu_seqlens is not None:
        N = require_cu_seqlens(cu_seqlens, batch=N, tokens=T, device=q.device)
    shape = state_shape(N, HV, K, V, state_v_first)
    if initial_state is not None:
        require_tensor(
            "initial_state",
            initial_state,
            shape=shape,
            dims="[N, HV, V, K]" if state_v_first else "[N, HV, K, V]",
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            device=q.device,
        )
        if initial_state.dtype != torch.float32:
            initial_state = initial_state.float()
        if not state_v_first:
            initial_state = to_v_first(initial_state)
    out = new_output(v, v.dtype)
    if needs_grad(q, k, v, g, beta, A_log, dt_bias, initial_state):
        inputs = KdaInputs(q, k, v, g, beta, A_log, dt_bias)
        states = States(initial_state, False, cu_seqlens=cu_seqlens)
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
            backend="reference",
        )
        assert isinstance(plan.form, KdaForm)
        initial = None if initial_state is None else to_k_first(initial_state)
        result = kda_forward(plan.form, inputs, initial, cu_seqlens=cu_seqlens)
        final = to_v_first(result.final) if state_v_first else result.final
        return result.o.view(v.shape).to(v.dtype), final if output_final_state else None
    final = None
    if output_final_state:
        final = q.new_empty(shape, dtype=torch.float32)
    fused_recurrent_kda_op(
        q,
        k,
        v,
        g,
        beta,
        A_log if use_gate_in_kernel else None,
        dt_bias if use_gate_in_kernel else None,
        initial_state,
        cu_seqlens,
        out,
        final if final is None or state_v_first else to_v_first(final),
        lower_bound,
        scale,
        use_gate_in_kernel,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        backend,
    )
    return out, final
