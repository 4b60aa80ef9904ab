"""The two layouts of a recurrent state, and slot pools.

A state is the matrix S of one value head: K-first [..., K, V] is FLA's default, V-first
[..., V, K] is what serving engines keep. A pool holds one state per slot,
``[slots, HV, V, K]`` or ``[slots, HV, K, V]``. Between two slots there may be padding; the heads
of one slot lie densely, because a kernel reads a slot in one sweep.
"""

from collections.abc import Collection

import torch

from cula.common.checks import require, require_tensor

STATE_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that a state pool may have."""


def to_v_first(state: torch.Tensor) -> torch.Tensor:
    """View a K-first state [..., K, V] as V-first [..., V, K]; no copy."""
    return state.mT


def to_k_first(state: torch.Tensor) -> torch.Tensor:
    """View a V-first state [..., V, K] as K-first [..., K, V]; no copy."""
    return state.mT


def state_shape(
    slots: int, heads: int, K: int, V: int, v_first: bool = True
) -> tuple[int, int, int, int]:
    """Return the shape of a state pool in the given layout."""
    return (slots, heads, V, K) if v_first else (slots, heads, K, V)


def new_output(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for an output of v's shape, dense whatever v's strides are."""
    if v.dtype != dtype:
        return v.new_empty(v.shape, dtype=dtype)
    # On the host a third of torch.empty with a shape, a dtype and a device. Without the format it
    # would take v's strides, which may be those of a view into a packed projection.
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def new_states(
    q: torch.Tensor,
    v: torch.Tensor,
    initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    v_first: bool,
) -> torch.Tensor:
    """Room for the final states of a call, float32, in its layout.

    Args:
        q, v: ``[B, T, H, K]``, ``[B, T, HV, V]``.
        initial: its initial states in that layout, if any; of the right shape, or the call is
            refused elsewhere.
        cu_seqlens: ``[N + 1]``, or None for N = B.
        v_first: the layout.
    """
    if initial is not None and initial.dtype == torch.float32:
        return torch.empty_like(initial, memory_format=torch.contiguous_format)
    N = q.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    shape = state_shape(N, v.shape[2], q.shape[3], v.shape[3], v_first)
    return q.new_empty(shape, dtype=torch.float32)


def has_dense_slots(state: torch.Tensor) -> bool:
    """Tell whether each slot of a pool [slots, heads, rows, columns] is contiguous.

    Padding between slots is allowed, also a stride of 0 or an overlap when there is one slot.
    """
    expected = 1
    for size, stride in zip(state.shape[:0:-1], state.stride()[:0:-1], strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return state.shape[0] <= 1 or state.stride(0) >= expected


def require_state(
    arg: str,
    state: torch.Tensor,
    *,
    slots: int | None,
    heads: int,
    K: int,
    V: int,
    v_first: bool = True,
    dtypes: Collection[torch.dtype] = STATE_DTYPES,
    device: torch.device | None = None,
    dense: bool = True,
) -> None:
    """Check a state pool: shape in its layout, dtype, device, density of its slots.

    Args:
        arg: the argument's name.
        state: what the user gave.
        slots: the number of slots, or None for any.
        heads: the number of value heads HV.
        K: key dimension.
        V: value dimension.
        v_first: the layout that the call reads.
        dtypes: the allowed dtypes.
        device: the device that the state must be on.
        dense: require each slot to be contiguous.

    Raises:
        TypeError: not a tensor.
        ValueError: the wrong shape (also one with as many elements), dtype, device or strides.
    """
    dims = "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]"
    shape = (slots, heads, V, K) if v_first else (slots, heads, K, V)
    require_tensor(arg, state, shape=shape, dims=dims, dtypes=dtypes, device=device)
    if dense:
        require(
            has_dense_slots(state),
            arg,
            f"strides {list(state.stride())}",
            "each slot must be contiguous (padding between slots is allowed)",
        )
