"""The calls of upstream cuLA's `cula.lightning` (inclusionAI/cuLA), as thin adapters.

For code written against that package: same arguments, same V-first float32 states, on
`cula.lightning.lightning_prefill`. What differs, and why:

- Any GPU or CPU, any head dimensions, grouped value heads, strided inputs, bfloat16 pools; upstream
  serves D = 128 on one architecture.
- The final state of a length that is no multiple of 64 has decayed by the tokens that exist;
  upstream decays it by a whole chunk.
- Sequences without tokens are right; upstream hangs.
- A slot index that is negative or out of range names no slot.
- `decay` must not be negative. `chunk_size` and `persistent` choose upstream's tiles; they are
  accepted and change nothing.
"""

import torch

from cula.common.checks import needs_grad, readable, require, require_flags, require_tensor
from cula.common.layouts import require_state, state_shape
from cula.lightning.op import lightning_prefill


def lightning_attn_fwd(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    decay: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Upstream's fixed-length forward.

    Args:
        Q, K, V: ``[B, S, H, D]``.
        decay: ``[HV]``, float32, at least 0: the state decays by ``exp(-decay)`` a token.
        scale: the factor on the output; 1 by default, not ``D ** -0.5``.
        initial_state: V-first ``[B, HV, V, K]``, float32. Not written to.
        output_final_state: whether to return the final state rather than None.
        chunk_size: has no effect.

    Returns:
        O ``[B, S, HV, V]`` and the V-first float32 final state or None.

    Raises:
        NotImplementedError: gradients are needed; this call has none, upstream's neither.
        TypeError, ValueError: as `lightning_prefill`.
    """
    _require_inference("lightning_attn_fwd", Q, K, V, initial_state)
    if output_final_state and output_final_state is not True:
        require_flags(output_final_state=output_final_state)
    state = begins = None
    if initial_state is not None:
        require_tensor("V", V, shape=[None] * 4, dims="[B, S, HV, V]")
        require_tensor("K", K, shape=[None] * 4, dims="[B, S, H, K]")
        require_state(
            "initial_state",
            initial_state,
            slots=V.shape[0],
            heads=V.shape[2],
            K=K.shape[3],
            V=V.shape[3],
            dtypes=(torch.float32,),
            device=V.device,
            dense=False,
        )
        state = initial_state.clone(memory_format=torch.contiguous_format)
    elif output_final_state:
        state, begins = _new_states(V.shape[0], K, V)
    O = lightning_prefill(
        Q, K, V, _log_decay(decay), state=state, has_initial_state=begins, scale=scale
    )
    return O, state if output_final_state else None


def lightning_attn_fwd_varlen(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    decay: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float = 1.0,
    state_pool: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    persistent: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's packed forward over a state pool.

    Args:
        Q, K, V: ``[1, T, H, D]``.
        decay: ``[HV]``, float32, at least 0: the state decays by ``exp(-decay)`` a token.
        cu_seqlens: ``[N + 1]``, int32 or int64.
        scale: the factor on the output; 1 by default, not ``D ** -0.5``.
        state_pool: ``[slots, HV, V, K]``, float32 or bfloat16, updated in place; without one, a new
            pool of zeros with a slot for each sequence.
        initial_state_indices: ``[N]``, int32 or int64; sequence n has slot n by default.
        chunk_size, persistent: have no effect.

    Returns:
        O ``[1, T, HV, V]`` and the pool.

    Raises:
        NotImplementedError: gradients are needed; this call has none, upstream's neither.
        TypeError, ValueError: as `lightning_prefill`.
    """
    _require_inference("lightning_attn_fwd_varlen", Q, K, V, state_pool)
    begins = None
    if state_pool is None:
        require_tensor("cu_seqlens", cu_seqlens)
        state_pool, begins = _new_states(max(cu_seqlens.numel() - 1, 0), K, V)
        if initial_state_indices is not None:  # a slot that none of them names stays as it is
            state_pool.zero_()
    O = lightning_prefill(
        Q,
        K,
        V,
        _log_decay(decay),
        state=state_pool,
        state_indices=initial_state_indices,
        has_initial_state=begins,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    return O, state_pool


def _new_states(count: int, K: torch.Tensor, V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool that holds nothing yet, and a mask that says so: no zeros to write and read."""
    require_tensor("K", K, shape=[None] * 4, dims="[B, S, H, K]")
    require_tensor("V", V, shape=[None] * 4, dims="[B, S, HV, V]")
    shape = state_shape(count, V.shape[2], K.shape[3], V.shape[3])
    states = torch.empty(shape, dtype=torch.float32, device=V.device)
    return states, torch.zeros(count, dtype=torch.bool, device=V.device)


def _log_decay(decay: torch.Tensor) -> torch.Tensor:
    require_tensor("decay", decay, shape=(None,), dims="[HV]", dtypes=(torch.float32,))
    if decay.device.type == "cpu" and decay.numel() and readable(decay):
        smallest = decay.min().item()
        require(smallest >= 0, "decay", f"smallest value {smallest}", "must be at least 0")
    return -decay


def _require_inference(call: str, *tensors: torch.Tensor | None) -> None:
    require(
        not needs_grad(*tensors),
        call,
        "an input requires a gradient",
        "has no backward pass; use chunk_lightning_attn, or torch.no_grad()",
        NotImplementedError,
    )
