"""What a consumer kernel needs of a schedule. Plain functions that CuTe DSL traces.

`workspace` is a pointer to the schedule's int32 workspace in global memory; the rows are those
of `twin.SegmentRow` and `twin.ChunkRow`. A persistent kernel reads

    unit = block_idx                        # or take_ticket by one thread, told to the block
    while unit < max_units:                 # of the plan
        index, head, part = unit_coords(unit, heads, parts)
        segment = read_segment(workspace, index)
        if segment.sequence >= 0:           # rows beyond the batch's last hold -1
            ...
        unit += blocks                      # or the next ticket

and takes the same steps for fixed lengths with `fixed_segment` in place of `read_segment`.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector
from cutlass.cutlass_dsl import select_

from cula.common.varlen.plan import (
    CHUNK_WORDS,
    CHUNKS_WORD,
    HEADER_WORDS,
    SEGMENT_WORDS,
    TICKETS,
    TICKETS_AT,
)
from cula.common.varlen.twin import ChunkRow, SegmentRow


def where(condition, a, b) -> Int32:
    """`a` where the condition holds, else `b`, without a branch."""
    return Int32(select_(condition, Int32(a), Int32(b)))


def ceil_div(a, b):
    """ceil(a / b) for a >= 0 without passing 2^31."""
    whole = a // b
    return where(whole * b < a, whole + 1, whole)


def load4(pointer, *, shared: bool = False) -> list:
    """Four int32 in one access; the pointer is a multiple of 16 bytes."""
    kind = ir.VectorType.get([4], Int32.mlir_type)
    packed = cute.arch.load(pointer, kind, ss="cta" if shared else None)
    return [Int32(vector.extract(packed, [], [i])) for i in range(4)]


def store4(pointer, words, *, shared: bool = False) -> None:
    """The reverse of `load4`."""
    kind = ir.VectorType.get([4], Int32.mlir_type)
    values = [Int32(word).ir_value() for word in words]
    cute.arch.store(pointer, vector.from_elements(kind, values), ss="cta" if shared else None)


def unit_coords(unit, heads, parts):
    """(segment's row, head, part) of a unit.

    The parts of a head are neighbours, so that they share its q and k in L2.
    """
    rest = unit // parts
    return rest // heads, rest % heads, unit % parts


def read_segment(workspace, index) -> SegmentRow:
    """Row `index` < plan.max_segments of the table of segments, as Int32; two 16-byte loads."""
    row = workspace + (HEADER_WORDS + index * SEGMENT_WORDS)
    return SegmentRow(*load4(row), *load4(row + 4))


def read_chunk(workspace, chunks_at, index) -> ChunkRow:
    """Row `index` < plan.max_chunks of the table at plan.chunks_at; one 16-byte load."""
    return ChunkRow(*load4(workspace + (chunks_at + index * CHUNK_WORDS)))


def chunk_count(workspace) -> Int32:
    """How many chunks there are, at most plan.max_chunks."""
    return Int32(cute.make_tensor(workspace + CHUNKS_WORD, cute.make_layout(1))[0])


def take_ticket(workspace, counter: int) -> Int32:
    """The next number of one of the workspace's counters (0 to 7), which the schedule starts at 0.

    For one thread of a block. Each kernel that draws from the same schedule takes a counter of
    its own.
    """
    if not 0 <= counter < TICKETS:
        raise ValueError(f"counter: {counter}; must be in [0, {TICKETS})")
    return Int32(cute.arch.atomic_add(workspace + (TICKETS_AT + counter), Int32(1)))


def fixed_segment(index, batch, length, chunk: int, segment_chunks) -> SegmentRow:
    """The row that `read_segment` would read for `batch` sequences of `length` tokens.

    Longest first, and within a sequence in the order of time, as in the table. segment_chunks is
    the plan's `device_segment_chunks`; index < FixedPlan.max_segments.
    """
    chunks = ceil_div(length, chunk)
    segments = ceil_div(chunks, segment_chunks)
    segments = where(segments < 1, 1, segments)
    sequence, segment = index % batch, index // batch
    before = segment * segment_chunks
    start = sequence * length
    begin = start + before * chunk
    stop = start + length
    end = where(segment == segments - 1, stop, begin + segment_chunks * chunk)
    return SegmentRow(
        sequence,
        segment,
        begin,
        end,
        sequence * chunks + before,
        segments,
        sequence * segments,
        start,
    )


def fixed_chunk(index, length, chunk: int) -> ChunkRow:
    """The row that `read_chunk` would read for sequences of `length` tokens each."""
    chunks = ceil_div(length, chunk)
    sequence = index // chunks
    number = index % chunks
    left = length - number * chunk
    return ChunkRow(
        sequence, number, sequence * length + number * chunk, where(left < chunk, left, chunk)
    )
