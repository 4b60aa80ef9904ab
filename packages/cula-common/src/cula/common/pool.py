"""Recurrent-state pools: which slot a sequence starts from, and where its states go.

A serving engine keeps one pool `[slots, HV, V, K]` per layer and names the slot of each sequence by
`state_indices`. The rules, the same for every family:

- An index that is negative, or not below the number of slots, names no slot: the sequence starts
  from zero and its final state is not stored.
- Without `state_indices`, sequence n uses slot n.
- `has_initial_state[n]` false: the sequence starts from zero, whatever its slot holds. Its final
  state is stored all the same.
- Two sequences that name the same slot race for it: which of their final states it holds afterwards
  is not defined, nor whether the later one starts from what it held before the call.

Nothing here reads a device value on the host.
"""

from collections.abc import Callable, Iterable

import torch

from cula.common.checks import INDEX_DTYPES, require, require_tensor
from cula.common.layouts import has_dense_slots, require_state, to_k_first, to_v_first
from cula.common.ragged import Mark, Scan

CHECKPOINT_UNIT = 64
"""Tokens that a checkpoint interval is a multiple of: every kernel's chunk divides it."""


def require_pool(
    state: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    *,
    sequences: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
) -> None:
    """Check a call's state pool.

    Args:
        state: `[slots, heads, value_dim, key_dim]`, float32 or bfloat16, written in place.
            Slots may lie apart; a K-first pool is passed as its transposed view
            (`layouts.to_v_first`).
        state_indices: `[sequences]`, int32 or int64.
        has_initial_state: `[sequences]`, bool.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
    """
    if state is None:
        for arg, given in (
            ("state_indices", state_indices),
            ("has_initial_state", has_initial_state),
        ):
            require(given is None, arg, "given", "needs a state pool, but state is None")
        return
    _require_states("state", state, heads, key_dim, value_dim, device)
    if state_indices is None:
        require(
            state.shape[0] >= sequences,
            "state",
            tuple(state.shape),
            f"must have a slot for each of the {sequences} sequences when state_indices is None",
        )
    else:
        require_tensor(
            "state_indices",
            state_indices,
            shape=(sequences,),
            dims="[N]",
            dtypes=INDEX_DTYPES,
            device=device,
        )
    if has_initial_state is not None:
        require_tensor(
            "has_initial_state",
            has_initial_state,
            shape=(sequences,),
            dims="[N]",
            dtypes=(torch.bool,),
            device=device,
        )


def _require_states(
    arg: str,
    states: torch.Tensor,
    heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
) -> None:
    """Check states written in place: V-first by shape, in memory V-first or K-first."""
    require_state(
        arg, states, slots=None, heads=heads, K=key_dim, V=value_dim, device=device, dense=False
    )
    require(
        has_dense_slots(states) or has_dense_slots(to_k_first(states)),
        arg,
        f"strides {list(states.stride())}",
        "each slot must be contiguous, or the transposed view of a contiguous K-first slot "
        "(padding between slots is allowed)",
    )


def valid_slots(state_indices: torch.Tensor, slots: int) -> torch.Tensor:
    """Bool tensor of state_indices' shape: does the index name one of `slots` slots?"""
    return (state_indices >= 0) & (state_indices < slots)


def load_states(
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    *,
    sequences: int,
) -> torch.Tensor:
    """The states that the sequences start from, a new float32 tensor `[sequences, HV, V, K]`."""
    starts = torch.ones(sequences, dtype=torch.bool, device=state.device)
    if state_indices is None:
        rows = state[:sequences].float()
    elif state.shape[0] == 0:
        return state.new_zeros((sequences, *state.shape[1:]), dtype=torch.float32)
    else:
        starts = valid_slots(state_indices, state.shape[0])
        rows = state.index_select(0, torch.where(starts, state_indices, 0).long()).float()
    if has_initial_state is not None:
        starts = starts & has_initial_state
    # where, not a product: an unused slot may hold NaN.
    return torch.where(starts.view(-1, 1, 1, 1), rows, 0.0)


def store_states(
    state: torch.Tensor, state_indices: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Store `values` [sequences, HV, V, K] in the sequences' slots, rounded to the pool's dtype.

    A slot that no sequence names keeps its bits.
    """
    values = values.to(state.dtype)
    if state_indices is None:
        state[: values.shape[0]].copy_(values)
        return
    if state.shape[0] == 0 or values.shape[0] == 0:
        return
    # Selecting the valid rows by a mask would read the mask on the host. So a row without a slot
    # repeats the write of the first row with one; if no row has one, all rewrite slot 0 as it is.
    valid = valid_slots(state_indices, state.shape[0])
    first = valid.int().argmax().view(1)
    rows = torch.where(valid, torch.arange(len(valid), device=valid.device), first)
    slots = torch.where(valid, state_indices, 0).long()[rows]
    kept = torch.where(valid.any(), values[rows], state[:1])
    state.index_copy_(0, slots, kept)


def pass_states_on(
    out: torch.Tensor, final: torch.Tensor | None, initial: torch.Tensor | None
) -> None:
    """What a call without tokens does, by the device alone: it may be captured in a CUDA graph.

    Args:
        out: has no elements that a sequence owns.
        final: gets the initial states, or zeros.
        initial: of final's layout.
    """
    out.zero_()
    if final is not None and initial is not None:
        final.copy_(initial)
    elif final is not None:
        final.zero_()


def require_checkpoints(
    checkpoints: torch.Tensor | None,
    interval: int | None,
    *,
    tokens: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
) -> None:
    """Check a call's checkpoint buffer; `tokens` counts the tokens of the whole call (B x T).

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
    """
    if checkpoints is None and interval is None:
        return
    if checkpoints is None or interval is None:
        arg = "checkpoints" if checkpoints is None else "checkpoint_interval"
        rule = "checkpoints and checkpoint_interval are given together or not at all"
        raise ValueError(f"{arg}: None; {rule}")
    require(
        isinstance(interval, int) and interval > 0 and interval % CHECKPOINT_UNIT == 0,
        "checkpoint_interval",
        interval,
        f"must be a positive multiple of {CHECKPOINT_UNIT} tokens",
    )
    _require_states("checkpoints", checkpoints, heads, key_dim, value_dim, device)
    require(
        checkpoints.shape[0] >= tokens // interval,
        "checkpoints",
        tuple(checkpoints.shape),
        f"must have at least tokens // checkpoint_interval = {tokens // interval} rows",
    )


def checkpoint_row(start: int, count: int, interval: int) -> int:
    """The row of `checkpoints` for the state after `count * interval` tokens of a sequence.

    `start` is the sequence's first token in the flattened batch (`cu_seqlens[n]`, or `n * T`). The
    sequence's checkpoints are then the rows from `start // interval` on, one for each full
    `interval` of its length, in order. Since floor(a) + floor(b) <= floor(a + b), no two sequences
    share a row and `tokens // interval` rows are always enough: the bound needs no lengths, and a
    kernel finds its row without a prefix sum. Rows in between are left as they were.
    """
    return start // interval + count - 1


def store_checkpoints(checkpoints: torch.Tensor, interval: int, marks: Iterable[Mark]) -> None:
    """Store the K-first states that a scan kept every `interval` tokens; see `checkpoint_row`."""
    for mark in marks:
        rows = [checkpoint_row(start, mark.count, interval) for start in mark.starts]
        index = torch.tensor(rows, dtype=torch.int64, device=checkpoints.device)
        checkpoints.index_copy_(0, index, to_v_first(mark.states).to(checkpoints.dtype))


def scan_over_pool(
    scan: Callable[[torch.Tensor | None], Scan],
    out: torch.Tensor,
    state: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    interval: int | None,
    *,
    sequences: int,
    empty: bool,
) -> None:
    """A call that takes its states from a pool and leaves them there, by a scan that has none.

    Args:
        scan: from initial states [sequences, HV, K, V], K-first, or None, which is zero, to the
            results; not called if the call is empty.
        out: gets the outputs.
        state, state_indices, has_initial_state: the pool, as `require_pool` has it.
        checkpoints, interval: as `require_checkpoints` has them.
        sequences: how many.
        empty: no sequence has tokens; then all is done by the device alone, so that such a call,
            too, may be captured in a CUDA graph.
    """
    starts = None
    if state is not None:
        starts = load_states(state, state_indices, has_initial_state, sequences=sequences)
    if empty:
        out.zero_()
        if state is not None and starts is not None:
            store_states(state, state_indices, starts)
        return
    result = scan(None if starts is None else to_k_first(starts))
    out.copy_(result.o.view(out.shape))
    if state is not None:
        store_states(state, state_indices, to_v_first(result.final))
    if checkpoints is not None and interval is not None:
        store_checkpoints(checkpoints, interval, result.marks)
