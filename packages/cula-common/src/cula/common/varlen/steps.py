"""Device steps that the schedule's kernel and the schedule within a warp share. Plain functions
that CuTe DSL traces.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cula.common.varlen.device import ceil_div, where
from cula.common.varlen.twin import SegmentRow

# Sort keys of sequences without a short segment, and of places beyond the last sequence: behind
# all others.
NO_KEY = -1
BEYOND = -2


def larger(a, b) -> Int32:
    return where(a > b, a, b)


def smaller(a, b) -> Int32:
    return where(a < b, a, b)


def plus(a, b) -> Int32:
    return a + b


def running(combine, values: list) -> list:
    """Each value combined with all before it."""
    out = values[:1]
    for value in values[1:]:
        out.append(combine(out[-1], value))
    return out


def boundary(mCu, index, n, tokens) -> Int32:
    """cu_seqlens[min(index, n)] put into [0, tokens] in its own width, so that no int64 value
    is cut off first.
    """
    value = mCu[smaller(index, n)]
    kind = type(value)
    value = kind(select_(value > kind(tokens), kind(tokens), value))
    return Int32(select_(value < kind(0), kind(0), value))


def warp_scan(combine, x, lane, width: int) -> Int32:
    """Inclusive scan over a warp's first `width` lanes; 0 is the neutral element."""
    distance = 1
    while distance < width:
        x = combine(x, where(lane >= distance, cute.arch.shuffle_sync_up(x, distance), 0))
        distance *= 2
    return x


def count(length, chunk: int, segment_chunks, exists) -> tuple:
    """(chunks, full segments, short segments, sort key) of a sequence of `length` tokens.

    A short segment is what is left after the full ones; an empty sequence has one of no chunks.
    """
    chunks = ceil_div(length, chunk)
    full = chunks // segment_chunks
    left = chunks - full * segment_chunks
    short = exists & ((left > 0) | (chunks == 0))
    return chunks, full, where(short, 1, 0), where(exists, where(short, left, NO_KEY), BEYOND)


def segment_row(
    sequence, number, start, stop, chunk_start, segments, first, chunk: int, segment_chunks
) -> SegmentRow:
    """The row of the number-th segment of a sequence of tokens start .. stop.

    Nothing passes 2^31: the segments before it are full, and a sequence that is not cut has
    number 0 alone.
    """
    before = number * segment_chunks
    begin = start + before * chunk
    full = (stop - begin) // chunk >= segment_chunks
    end = where(full, begin + segment_chunks * chunk, stop)
    return SegmentRow(sequence, number, begin, end, chunk_start + before, segments, first, start)
