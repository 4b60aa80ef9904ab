"""The decode calls in plain PyTorch: the truth, and the CPU path.

What a step does to its slots is here; the mathematics is `cula.common.reference`.
"""

from collections.abc import Callable

import torch

from cula.common.layouts import to_k_first, to_v_first
from cula.common.pool import load_states, store_states, valid_slots
from cula.common.ragged import Mark, sequences_of
from cula.common.reference import (
    KdaForm,
    KdaInputs,
    LightningForm,
    LightningInputs,
    kda_forward,
    lightning_forward,
)
from cula.decode.call import Plan, States


def run(
    plan: Plan,
    inputs: KdaInputs | LightningInputs,
    states: States,
    out: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Do what `plan` says, into `out` and the states."""
    with torch.no_grad():
        first = first_slots(states)
        initial = None
        if states.state is not None:
            initial = to_k_first(load_states(states.state, first, None, sequences=plan.sequences))
        per_token = states.per_token or states.tokens is not None
        result = forward(
            plan.form,
            inputs,
            initial,
            cu_seqlens=states.cu_seqlens,
            every=1 if per_token else None,
            dtype=dtype,
        )
        o = result.o.view(out.shape)
        if first is not None:
            o = torch.where(
                _tokens_with_slots(plan, states, first).view(*out.shape[:2], 1, 1), o, 0.0
            )
        out.copy_(o)
        store(plan, states, first, to_v_first(result.final), result.marks)


def forward(
    form: KdaForm | LightningForm,
    inputs: KdaInputs | LightningInputs,
    initial: torch.Tensor | None,
    **options,
):
    """`kda_forward` or `lightning_forward`, as the form says."""
    step: Callable = kda_forward if isinstance(form, KdaForm) else lightning_forward
    return step(form, inputs, initial, **options)


def first_slots(states: States) -> torch.Tensor | None:
    """The slot index that each sequence starts from, [N]; -1 where it names none."""
    if not states.per_token:
        return states.indices
    indices = states.indices
    if states.accepted is None:
        return indices[:, 0]
    column = states.accepted.long() - 1
    inside = (column >= 0) & (column < indices.shape[1])
    found = indices.gather(1, torch.where(inside, column, 0)[:, None])[:, 0]
    return torch.where(inside, found, -1)


def store(
    plan: Plan,
    states: States,
    first: torch.Tensor | None,
    final: torch.Tensor,
    marks: tuple[Mark, ...] = (),
) -> None:
    """Put V-first final states, and the states after every token, where the call wants them."""
    named = None if first is None else valid_slots(first, states.state.shape[0])
    for mark in marks:
        _store_token(plan, states, mark, named)
    if states.final is not None:
        states.final.copy_(final)
    elif states.state is not None and states.update and not states.per_token:
        store_states(states.state, states.indices, final)


def _store_token(plan: Plan, states: States, mark: Mark, named: torch.Tensor | None) -> None:
    """The states of the sequences that have a token `mark.count - 1`."""
    values, token = to_v_first(mark.states), mark.count - 1
    numbers = torch.tensor(mark.numbers, device=values.device)
    if states.tokens is not None:
        rows = torch.tensor(mark.starts, device=values.device) + token
        kept = states.tokens.flatten(0, 1)
        new = values.to(kept.dtype)
        if named is not None:
            new = torch.where(named[numbers].view(-1, 1, 1, 1), new, kept[rows])
        if kept.data_ptr() == states.tokens.data_ptr():
            kept.index_copy_(0, rows, new)
        else:  # the buffer's batch and token strides cannot be merged into one
            states.tokens[rows // plan.dims.T, rows % plan.dims.T] = new
    if not (states.per_token and states.update) or states.state is None:
        return
    if token < states.indices.shape[1]:
        slots = torch.where(named[numbers], states.indices[numbers, token], -1)
        store_states(states.state, slots, values)


def _tokens_with_slots(plan: Plan, states: States, first: torch.Tensor) -> torch.Tensor:
    """[B * T]: whether the token's sequence starts from a slot."""
    named = valid_slots(first, states.state.shape[0])
    sequences = sequences_of(plan.dims.B, plan.dims.T, states.cu_seqlens)
    owner = torch.full((plan.dims.B * plan.dims.T,), -1, device=first.device)
    for n, (start, length) in enumerate(zip(sequences.starts, sequences.lengths, strict=True)):
        owner[start : start + length] = n
    if named.numel() == 0:
        return owner >= 0
    return (owner >= 0) & named[owner.clamp(min=0)]
