"""The public calls of Kimi Delta Attention over whole sequences.

The recurrence is that of Kimi Team, "Kimi Linear" (2025).
"""

import warnings
from typing import Any

import torch

from cula.common.checks import needs_grad, require, require_flags, require_tensor
from cula.common.layouts import new_output, new_states, state_shape
from cula.common.ragged import sequences_of
from cula.kda.reference import KdaInputs
from cula.kda.run import chunk_by_fallback, chunk_op, prefill_op


def kda_prefill(
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
) -> torch.Tensor:
    """Run prompts through KDA, straight from and into a serving engine's state pool.

    Per token and value head, with the state S (K x V): ``S <- diag(e^g) S``, then
    ``S <- S + beta k (v - S^T k)^T`` and ``o = scale * S^T q``. No gradients are recorded.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype; value head i reads key head ``i // (HV / H)``.
        g: ``[B, T, HV, K]``, any of these dtypes: raw gates, or with ``use_gate_in_kernel=False``
            the log decay itself (natural logarithm, at most 0).
        beta: ``[B, T, HV]``, any of these dtypes: step sizes, or their logits.
        state: the pool ``[slots, HV, V, K]`` (V-first), float32 or bfloat16, updated in place;
            slots may lie apart. A K-first pool is passed as its transposed view. None: start from
            zero and keep no state.
        state_indices: ``[N]``, int32 or int64: the slot of each sequence. An index that is negative
            or not below ``slots`` names no slot: that sequence starts from zero and its final state
            is not stored. Sequences that name one slot race for it. None: sequence n has slot n.
        has_initial_state: ``[N]``, bool: false starts from zero, whatever the slot holds.
        cu_seqlens: ``[N + 1]``, int32 or int64, on the device: sequences packed into B = 1. One
            without tokens keeps its initial state (or zero). Values on a GPU are not looked at:
            where they are out of range or decrease they are clamped.
        A_log, dt_bias: ``[HV]``, and ``[HV * K]`` or ``[HV, K]``. With x = g + dt_bias the log
            decay is ``-e^A_log softplus(x)``; with lower_bound
            ``lower_bound * sigmoid(e^A_log x)``, or without A_log ``lower_bound * sigmoid(x)``.
        lower_bound: the smallest log decay a token, in [-5, 0).
        scale: the factor on the output, ``K ** -0.5`` by default.
        use_qk_l2norm_in_kernel: divide q and k by their norms, ``sqrt(sum of squares + 1e-6)``.
        use_beta_sigmoid_in_kernel: beta holds logits. ``allow_neg_eigval`` doubles the sigmoid.
        checkpoints: ``[rows, HV, V, K]``, float32 or bfloat16, at least
            ``B * T // checkpoint_interval`` rows: gets the state after every
            ``checkpoint_interval`` tokens of each sequence. Those of the sequence that starts at
            token s of the flattened batch (``cu_seqlens[n]``, or ``n * T``) lie in order from row
            ``s // checkpoint_interval`` on; other rows are left alone.
        checkpoint_interval: a multiple of 64 tokens.
        segment_tokens: our kernels cut longer sequences into segments of so many tokens, a multiple
            of 64, which run side by side: for few heads and long sequences. Exact, but rounded in
            another order. 0: sequences stay whole. None: decided by the shapes of the call. For one
            value that is not None a sequence's bits depend on nothing else in the batch.
        out: ``[B, T, HV, V]`` of q's dtype, to write into.
        backend: "auto", or "cute", "fla", "reference" to insist.
        validate: copy cu_seqlens' values back from the GPU and check them.

    Returns:
        o, ``[B, T, HV, V]`` in q's dtype: ``out`` if given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: the backend insisted on cannot run this.
    """
    if out is None:
        require_tensor("q", q)
        require_tensor("v", v)
        out = new_output(v, q.dtype)
    prefill_op(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        has_initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        lower_bound,
        scale,
        use_gate_in_kernel,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        checkpoints,
        checkpoint_interval,
        segment_tokens,
        out,
        backend,
        validate,
    )
    return out


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Kimi Delta Attention with the signature and meaning of FLA 0.6's ``fla.ops.kda.chunk_kda``.

    Every keyword of FLA 0.4.2 to 0.6 is accepted, in 0.6's order; others raise TypeError (FLA drops
    them silently). Gradients, ``cp_context`` and ``use_graph`` are served by FLA where it is
    installed; gradients otherwise by the reference. What fails in FLA by assertion fails here with
    ValueError, and so do q, k, v of different dtypes and a ``lower_bound`` outside [-5, 0).

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype; value head i reads key head ``i // (HV / H)``.
        g: ``[B, T, HV, K]``: the log decay (natural logarithm, at most 0), or with
            ``use_gate_in_kernel=True`` raw gates, as in `kda_prefill`.
        beta: ``[B, T, HV]``: step sizes, or logits with ``use_beta_sigmoid_in_kernel=True``.
        scale: the factor on the output, ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, float32 (or bfloat16, which FLA refuses). Not written to.
        output_final_state: whether to return the final state rather than None.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            lower_bound, A_log, dt_bias: as in `kda_prefill`, but off by default.
        safe_gate: the caller's word that no log decay is below -5. Passed on to FLA; nothing else
            here needs the promise.
        disable_recompute: keep FLA's intermediates for the backward pass.
        return_intermediate_states: also return the state at the start of every chunk. Only in
            inference mode. With ``cu_seqlens`` on a GPU and without ``cu_seqlens_cpu`` the number
            of chunks has to be read back, which waits for the GPU and breaks a compiled graph.
        state_v_first: states are ``[.., V, K]``. ``transpose_state_layout`` is its deprecated name.
        cu_seqlens: ``[N + 1]``, int32 or int64: sequences packed into B = 1; may be empty ones.
        cu_seqlens_cpu: the same numbers on the CPU; saves FLA a wait. Our kernels do not need it;
            where they run, its values are looked at when a kind of call is first seen. It says how
            many rows of intermediate states there are: states of more chunks are not kept.
        cp_context: FLA's context-parallel context; without initial and final state.
        use_graph, max_num_seqs: FLA's capture mode: ``cu_seqlens`` is padded by empty sequences to
            ``max_num_seqs + 1`` entries.
        chunk_size: 32 or 64: FLA's tile, and the spacing of the intermediate states.
        backend: "auto", or "cute", "fla", "reference" to insist.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype; the float32 final state ``[N, HV, K, V]`` or None; with
        ``return_intermediate_states`` also h ``[B, chunks, HV, K, V]`` in k's dtype (packed: B = 1
        and the chunks of all sequences in order).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: only FLA could run this, and it is missing; or the backend insisted on
            cannot.
    """
    require_tensor("q", q, shape=[None] * 4, dims="[B, T, H, K]")
    require_tensor("v", v, shape=[None] * 4, dims="[B, T, HV, V]")
    for arg, x in (
        ("k", k),
        ("g", g),
        ("beta", beta),
        ("A_log", A_log),
        ("dt_bias", dt_bias),
        ("initial_state", initial_state),
        ("cu_seqlens", cu_seqlens),
    ):
        if x is not None:
            require_tensor(arg, x)
    if transpose_state_layout is not None:
        require(
            not state_v_first,
            "transpose_state_layout",
            transpose_state_layout,
            "is the deprecated name of state_v_first; give one of them",
        )
        if not torch.compiler.is_compiling():
            warnings.warn(
                "chunk_kda: transpose_state_layout is now named state_v_first",
                DeprecationWarning,
                stacklevel=2,
            )
        state_v_first = transpose_state_layout
    if output_final_state and output_final_state is not True:
        require_flags(output_final_state=output_final_state)
    if return_intermediate_states:
        require_flags(return_intermediate_states=return_intermediate_states)
        # torch.compile cannot trace the question whether this is inference mode.
        inference = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        require(
            inference and not disable_recompute,
            "return_intermediate_states",
            True,
            "needs torch.inference_mode() and disable_recompute=False",
        )
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    # In the order of the operator's arguments.
    form = {
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "lower_bound": lower_bound,
    }
    differentiable = needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias)
    if differentiable or use_graph or cp_context is not None:
        results = chunk_by_fallback(
            KdaInputs(q, k, v, g, beta, A_log, dt_bias),
            initial_state,
            form,
            differentiable=differentiable,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=chunk_size,
            safe_gate=safe_gate,
            intermediate_states=return_intermediate_states,
            disable_recompute=disable_recompute,
            cp_context=cp_context,
            use_graph=use_graph,
            max_num_seqs=max_num_seqs,
            backend=backend,
        )
        return results if return_intermediate_states else results[:2]

    out = new_output(v, q.dtype)
    final_state = h = None
    if output_final_state:
        final_state = new_states(q, v, initial_state, cu_seqlens, state_v_first)
    if return_intermediate_states:
        B, T, HV, K, V = *q.shape[:2], v.shape[2], q.shape[3], v.shape[3]
        lengths = sequences_of(B, T, cu_seqlens, cu_seqlens_cpu).lengths
        chunks = sum(-(-length // chunk_size) for length in lengths) // max(B, 1)
        shape = (B, *state_shape(chunks, HV, K, V, state_v_first))
        h = torch.empty(shape, dtype=k.dtype, device=q.device)
    chunk_op(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        cu_seqlens_cpu,
        *form.values(),
        safe_gate,
        state_v_first,
        chunk_size,
        backend,
        out,
        final_state,
        h,
    )
    return (out, final_state, h) if return_intermediate_states else (out, final_state)
