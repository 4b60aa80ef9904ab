"""Units of work of a block that walks chunks: which there are, and how its warps hear of them.

The load warp decides what the block works on next, finds out where that lies, and tells the state
warps through a ring in shared memory, ahead of them: what it had to read from memory, a row of the
schedule or a slot, nobody waits for.
"""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cula.common.cute.states import slot_of
from cula.common.varlen.device import (
    fixed_segment,
    load4,
    read_segment,
    store4,
    take_ticket,
    unit_coords,
    where,
)

RING = 2  # units that the load warp may be ahead of the one being walked
WHOLE = 2**31 - 1  # chunks a segment: sequences are not cut


@dataclass(frozen=True)
class Unit:
    """What a block works on. n: the sequence; -1: nothing.

    b, first: where its tokens start: row of the batch, token. chunk: the number of its first chunk
    over the batch. start: its sequence's first token in the flattened batch. before: tokens of the
    sequence before the unit's. segment, segments: its place among the sequence's. place: of the
    sequence's segments in the workspace: the first. initial, final: slots of the sequence's states,
    -1 where there are none. more: a word of the kernel's own.
    """

    n: Int32
    head: Int32
    part: Int32
    b: Int32
    first: Int32
    tokens: Int32
    chunk: Int32
    start: Int32
    before: Int32 | int
    segment: Int32
    segments: Int32
    place: Int32
    initial: Int32 | int = -1
    final: Int32 | int = -1
    more: Int32 | int = 0


COUNT = len(fields(Unit))
WORDS = -(-COUNT // 4) * 4  # whole pieces of 16 bytes
END = Unit(-1, *[0] * (COUNT - 1))  # no unit follows


def unit_at(index, work, shape, parts: int, chunk: int, segment_chunks) -> Unit:
    """The index-th unit, without slots; n is -1 beyond the schedule's last row.

    work: the schedule's workspace, None for equal lengths. shape: of v. parts: units that share a
    head. chunk: tokens a chunk. segment_chunks: None where sequences are whole.
    """
    batch, length, heads = shape[0], shape[1], shape[2]
    place, head, part = unit_coords(index, heads, parts)
    if work is None:
        row = fixed_segment(
            place, batch, length, chunk, WHOLE if segment_chunks is None else segment_chunks
        )
        b = row.sequence
        first = row.begin - b * length
    else:
        row = read_segment(work.iterator, place)
        b = Int32(0)
        first = row.begin
    return Unit(
        row.sequence,
        head,
        part,
        b,
        first,
        row.end - row.begin,
        row.chunk,
        row.start,
        0 if segment_chunks is None else row.begin - row.start,
        row.segment,
        row.segments,
        row.first,
    )


def with_slots(unit: Unit, states) -> Unit:
    """The unit, of a sequence, with its slots.

    states: has `initial` and `final`, each [slots, ...] or None, `index`, which slot is a
    sequence's (None: its own number), and `mask`, which sequences have an initial state, or None.
    """
    initial = final = Int32(-1)
    if states.initial is not None:
        initial = Int32(slot_of(states.index, unit.n, states.initial.shape[0]))
        if states.mask is not None:
            initial = where(states.mask[unit.n] == 0, -1, initial)
    if states.final is not None:
        final = Int32(slot_of(states.index, unit.n, states.final.shape[0]))
    return replace(unit, initial=initial, final=final)


@cute.jit
def draw(tickets: cute.Tensor | None, counter: cutlass.Constexpr[int] = 0) -> Int32:
    """A ticket, in one lane. tickets: the schedule's workspace, or None where none are drawn."""
    ticket = Int32(0)
    if cutlass.const_expr(tickets is not None):
        if cute.arch.lane_idx() == 0:
            ticket = take_ticket(tickets.iterator, counter)
    return ticket


def next_index(index, ticket, tickets) -> Int32:
    """The unit after this one: tickets count from 0, when every block has taken its first."""
    past = index if tickets is None else cute.arch.shuffle_sync(ticket, 0)
    return Int32(cute.arch.grid_dim()[0]) + past


# shared: has `unit_full` and `unit_empty`, RING barriers each, for 1 arrival and for as many as
# there are threads that hear, and `units`, RING x WORDS words at a multiple of 16 bytes.
def tell(shared, told, unit: Unit) -> None:
    """The load warp's told-th message."""
    slot = told % RING
    cute.arch.mbarrier_wait(shared.unit_empty + slot, told // RING % 2 ^ 1)
    with cute.arch.elect_one():
        words = [getattr(unit, field.name) for field in fields(Unit)] + [0] * (WORDS - COUNT)
        for i in range(0, WORDS, 4):
            place = (shared.units + (slot * WORDS + i)).align(16)
            store4(place, words[i : i + 4], shared=True)
        cute.arch.mbarrier_arrive(shared.unit_full + slot)


def hear(shared, told) -> Unit:
    """The told-th message, by every thread of the state warpgroups."""
    slot = told % RING
    cute.arch.mbarrier_wait(shared.unit_full + slot, told // RING % 2)
    words = []
    for i in range(0, WORDS, 4):
        words += load4(shared.units + (slot * WORDS + i), shared=True)
    cute.arch.mbarrier_arrive(shared.unit_empty + slot)
    return Unit(*words[:COUNT])
