"""Units of work: how the load warp names them, and how the state warps hear of them."""

from typing import NamedTuple

from cutlass import Int32

from cula.common.varlen.device import fixed_segment, load4, read_segment, store4, unit_coords, where

WORDS = 12
RING = 2  # units that the load warp may be ahead
END = -1  # sequence of the message that ends a block's work


class Unit(NamedTuple):
    """What one block works on: the tokens of a segment, for a head's part.

    b, first: where its tokens start: row of the batch, token. tokens: how many.
    start: the sequence's first token in the flattened batch.
    segment, segments: which of the sequence's segments, of how many; none: there is no such unit.
    place: where the states of the sequence's segments lie, in order.
    """

    n: Int32
    head: Int32 = 0
    part: Int32 = 0
    b: Int32 = 0
    first: Int32 = 0
    tokens: Int32 = 0
    start: Int32 = 0
    segment: Int32 = 0
    segments: Int32 = 0
    place: Int32 = 0


def unit_at(unit, work, heads, parts: int, batch, length, chunk: int, segment_chunks) -> Unit:
    """The unit-th unit; work: the schedule's workspace, or None for equal lengths.

    Beyond the schedule's last row: no tokens, and no segments, so that nothing is done.
    """
    index, head, part = unit_coords(unit, heads, parts)
    if work is None:
        row = fixed_segment(index, batch, length, chunk, segment_chunks)
        b = row.sequence
        first = row.begin - b * length
    else:
        row = read_segment(work.iterator, index)
        b = Int32(0)
        first = row.begin
    return Unit(
        where(row.sequence < 0, 0, row.sequence),
        head,
        part,
        b,
        first,
        row.end - row.begin,
        row.start,
        row.segment,
        row.segments,
        row.first,
    )


def publish(ring, slot, unit) -> None:
    """Writes a unit into a slot of the ring, by one thread."""
    words = [*unit, *[0] * (WORDS - len(unit))]
    for i in range(0, WORDS, 4):
        store4(ring + (slot * WORDS + i), words[i : i + 4], shared=True)


def receive(ring, slot) -> Unit:
    """Reads what `publish` wrote."""
    words = []
    for i in range(0, WORDS, 4):
        words += load4(ring + (slot * WORDS + i), shared=True)
    return Unit(*words[: len(Unit._fields)])
