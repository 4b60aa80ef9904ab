"""The public calls of Lightning Attention over whole sequences.

The recurrence is that of Qin et al., "Lightning Attention-2" (2024).
"""

import torch
from torch.compiler import is_dynamo_compiling

from cula.common.checks import needs_grad, require, require_flags, require_tensor
from cula.common.layouts import new_output, new_states
from cula.common.recurrence import lightning_log_decay
from cula.lightning.reference import LightningInputs
from cula.lightning.run import chunk_by_fallback, chunk_op, prefill_op

MAX_LOG_DECAYS = 1024  # one for each layer and stream
_log_decays: dict[tuple, torch.Tensor] = {}


def lightning_prefill(
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
) -> torch.Tensor:
    """Run prompts through Lightning Attention, from and into a serving engine's state pool.

    Per token and value head, with the state S (K x V): ``S <- e^g S + k v^T`` and
    ``o = scale * S^T q``. No gradients are recorded.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype; value head i reads key head ``i // (HV / H)``.
        g_gamma: ``[HV]``, float32: the log decay a token of each value head (natural logarithm, at
            most 0), for instance `cula.common.recurrence.lightning_log_decay`'s. Values on a GPU
            are not looked at.
        state: the pool ``[slots, HV, V, K]`` (V-first), float32 or bfloat16, updated in place;
            slots may lie apart. A K-first pool is passed as its transposed view. None: start from
            zero and keep no state.
        state_indices: ``[N]``, int32 or int64: the slot of each sequence. An index that is negative
            or not below ``slots`` names no slot: that sequence starts from zero and its final state
            is not stored. Where two sequences name one slot, what the second starts from and which
            final state it keeps are not defined. None: sequence n has slot n.
        has_initial_state: ``[N]``, bool: false starts from zero, whatever the slot holds.
        cu_seqlens: ``[N + 1]``, int32 or int64, on the device: sequences packed into B = 1. One
            without tokens keeps its initial state (or zero). Values on a GPU are not looked at:
            where they are out of range or decrease they are clamped.
        scale: the factor on the output, ``K ** -0.5`` by default.
        checkpoints: ``[rows, HV, V, K]``, float32 or bfloat16, at least
            ``B * T // checkpoint_interval`` rows: gets the state after every
            ``checkpoint_interval`` tokens of each sequence. Those of the sequence that starts at
            token s of the flattened batch (``cu_seqlens[n]``, or ``n * T``) lie in order from row
            ``s // checkpoint_interval`` on; other rows are left alone.
        checkpoint_interval: a multiple of 64 tokens.
        segment_tokens: our kernel cuts longer sequences into segments of so many tokens, a multiple
            of 64, which run side by side: for few heads and long sequences. Exact, but rounded in
            another order. 0: sequences stay whole. None: the plan cuts where that is faster, which
            depends on how many sequences, heads and tokens there are; with any number, a
            sequence's bits depend on nothing else in the batch. Takes a float32 state of memory
            for each segment and head.
        out: ``[B, T, HV, V]`` of q's dtype, to write into.
        backend: "auto", or "cute", "fla", "reference" to insist.
        validate: copy the values of cu_seqlens and g_gamma back from the GPU and check them.

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
        g_gamma,
        state,
        state_indices,
        has_initial_state,
        cu_seqlens,
        scale,
        checkpoints,
        checkpoint_interval,
        segment_tokens,
        out,
        backend,
        validate,
    )
    return out


def chunk_lightning_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    *,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens_cpu: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lightning Attention with the signature and meaning of FLA's ``fla.ops.lightning_attn``.

    Every keyword of FLA 0.4.2 to 0.6 is accepted; others raise TypeError (FLA drops them silently).
    Gradients are served by FLA where it is installed, otherwise by the reference.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype. FLA has HV = H; here value head i reads key head
            ``i // (HV / H)``.
        layer_idx, num_layers: they set the log decay
            ``-(8 / HV) (1 - layer_idx / num_layers) h`` of value head h.
        scale: the factor on the output, ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, float32 or bfloat16. Not written to.
        output_final_state: whether to return the final state rather than None.
        cu_seqlens: ``[N + 1]``, int32 or int64: sequences packed into B = 1; may be empty ones.
        head_first: of FLA 0.4.2; must be False.
        chunk_size: FLA's tile, a power of 2.
        state_v_first: states are ``[N, HV, V, K]``. Not among FLA's keywords, like the next two.
        cu_seqlens_cpu: cu_seqlens on the CPU; saves FLA a wait.
        backend: "auto", or "cute", "fla", "reference" to insist.

    Returns:
        o ``[B, T, HV, V]`` in q's dtype, and the float32 final state or None.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: the backend insisted on cannot run this.
    """
    require_tensor("q", q, shape=[None] * 4, dims="[B, T, H, K]")
    require_tensor("v", v, shape=[None] * 4, dims="[B, T, HV, V]")
    for arg, x in (("k", k), ("initial_state", initial_state), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            require_tensor(arg, x)
    require(not head_first, "head_first", head_first, "must be False: inputs are [B, T, H, ...]")
    if output_final_state and output_final_state is not True:
        require_flags(output_final_state=output_final_state)
    HV = v.shape[2]
    if needs_grad(q, k, v, initial_state):
        return chunk_by_fallback(
            LightningInputs(q, k, v, lightning_log_decay(HV, layer_idx, num_layers, q.device)),
            initial_state,
            scale=scale,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=chunk_size,
            backend=backend,
        )

    g_gamma = _log_decay(HV, layer_idx, num_layers, q.device)
    out = new_output(v, q.dtype)
    final_state = None
    if output_final_state:
        final_state = new_states(q, v, initial_state, cu_seqlens, state_v_first)
    chunk_op(
        q,
        k,
        v,
        g_gamma,
        initial_state,
        cu_seqlens,
        cu_seqlens_cpu,
        scale,
        state_v_first,
        chunk_size,
        backend,
        out,
        final_state,
    )
    return out, final_state


def _log_decay(heads: int, layer_idx: int, num_layers: int, device: torch.device) -> torch.Tensor:
    """A layer's log decays, kept: they are the same for every call, and cost more launches than it.

    Kept for each stream, since another may get ahead of the launches that write them. Not kept
    while a graph is captured or traced, whose tensors hold nothing until it is replayed.
    """
    traced = is_dynamo_compiling() or torch._C._len_torch_dispatch_stack()
    if device.type != "cuda" or traced or torch.cuda.is_current_stream_capturing():
        return lightning_log_decay(heads, layer_idx, num_layers, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (heads, layer_idx, num_layers, device, stream)
    kept = _log_decays.get(key)
    if kept is None:
        if len(_log_decays) >= MAX_LOG_DECAYS:
            _log_decays.clear()
        with torch.inference_mode(False):
            kept = lightning_log_decay(heads, layer_idx, num_layers, device=device)
        _log_decays[key] = kept
    return kept
