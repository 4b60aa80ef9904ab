"""Sequences of different lengths, taken through one recurrence together.

`scan` walks all sequences at once and cuts where one of them ends or a state has to be kept, so
a step function only ever sees sequences of equal length. The references use it, and so does any
backend that cannot keep states along the way by itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# (inputs [n, L, ...], state [n, ...]) -> (o [n, L, ...], state [n, ...])
Step = Callable[[list[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sequences:
    """Where each sequence lies in the flattened batch: first token and number of tokens."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Mark:
    """States that `scan` kept: `states[i]` is that of the sequence whose first token is
    `starts[i]` (number `numbers[i]`) after `count` intervals of its tokens."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    count: int
    states: torch.Tensor


@dataclass(frozen=True)
class Scan:
    """Outputs [tokens, ...], final states [N, ...] and the states kept along the way."""

    o: torch.Tensor
    final: torch.Tensor
    marks: tuple[Mark, ...] = ()


def sequences_of(
    batch: int,
    tokens: int,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> Sequences:
    """The sequences of a call with `batch` rows of `tokens` tokens, or packed by `cu_seqlens`.

    Reads `cu_seqlens` on the host unless `cu_seqlens_cpu` is given, so on a GPU it synchronises.
    Values are clamped: a sequence never starts before the one before it ended, nor ends after the
    last token.
    """
    if cu_seqlens is None:
        return Sequences(tuple(n * tokens for n in range(batch)), (tokens,) * batch)
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    for i, bound in enumerate(bounds):
        bounds[i] = min(max(bound, bounds[i - 1] if i else 0), tokens)
    lengths = tuple(end - start for start, end in pairwise(bounds))
    return Sequences(tuple(bounds[:-1]), lengths)


def scan(
    sequences: Sequences,
    step: Step,
    inputs: Sequence[torch.Tensor],
    state: torch.Tensor,
    *,
    o_shape: tuple[int, ...],
    every: int | None = None,
) -> Scan:
    """Take all sequences through `step`, differentiably.

    Args:
        step: advances n sequences by L tokens each.
        inputs: tensors `[tokens, ...]`, tokens of the flattened batch.
        state: initial states `[N, ...]`.
        o_shape: the shape of `o` without its first dimension; tokens of no sequence get zeros.
        every: keep the states after each `every` tokens of each sequence.
    """
    order = sorted(range(len(sequences)), key=lambda n: -sequences.lengths[n])
    longest_first = [-sequences.lengths[n] for n in order]
    device = state.device
    index = torch.tensor(order, dtype=torch.int64, device=device)
    starts = torch.tensor(sequences.starts, dtype=torch.int64, device=device)[index]
    # Contiguous, so that a step's bits do not depend on the strides of the caller's states.
    current, finished, marks = state.contiguous()[index], [], []
    ids, pieces = [], []
    position = 0
    for cut in _cuts(sequences.lengths, every):
        active = bisect_left(longest_first, -cut + 1)
        finished.append(current[active:])
        tokens = starts[:active, None] + torch.arange(position, cut, device=device)  # [n, L]
        o, current = step([x[tokens] for x in inputs], current[:active])
        ids.append(tokens.flatten())
        pieces.append(o.flatten(0, 1))
        if every and cut % every == 0:
            numbers = tuple(order[:active])
            first = tuple(sequences.starts[n] for n in numbers)
            marks.append(Mark(numbers, first, cut // every, current))
        position = cut
    finished.append(current)
    # The longest finished last: in reverse, `finished` is in `order` again.
    final = torch.cat(finished[::-1])[torch.argsort(index)]
    o = state.new_zeros((inputs[0].shape[0], *o_shape))
    if pieces:
        o = o.index_copy(0, torch.cat(ids), torch.cat(pieces).to(o.dtype))
    return Scan(o, final, tuple(marks))


def _cuts(lengths: Sequence[int], every: int | None) -> list[int]:
    """Token counts at which some sequence ends or states are kept, ascending, without 0."""
    cuts = {length for length in lengths if length}
    if every and cuts:
        cuts.update(range(every, max(cuts) + 1, every))
    return sorted(cuts)
