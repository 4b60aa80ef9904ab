"""The schedule in plain Python: what `ScheduleKernel` writes, word for word. The oracle of its
tests, and the CPU path.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from cula.common.varlen.plan import (
    CHUNKS_WORD,
    END_WORD,
    HEADER_WORDS,
    SEGMENTS_WORD,
    VarlenPlan,
    ceil_div,
)


class SegmentRow(NamedTuple):
    """A row of the table of segments. A row that is not used has sequence -1 and zeros.

    sequence, segment   the segment-th segment of that sequence
    begin, end          its tokens, as indices of the packed axis
    chunk               the number of its first chunk, counted over the batch
    segments            how many segments the sequence has: the last is segment == segments - 1
    first               the number, counted over the batch by sequence, of the sequence's first
                        segment: first + segment numbers a segment in the order of time (a place
                        for its state)
    start               the sequence's first token
    """

    sequence: int = -1
    segment: int = 0
    begin: int = 0
    end: int = 0
    chunk: int = 0
    segments: int = 0
    first: int = 0
    start: int = 0


class ChunkRow(NamedTuple):
    """A row of the table of chunks: `tokens` tokens from `begin`. Not used: sequence -1 and
    zeros.
    """

    sequence: int = -1
    chunk: int = 0
    begin: int = 0
    tokens: int = 0


def clamped_starts(cu_seqlens: Sequence[int], tokens: int) -> list[int]:
    """Boundaries that never decrease and stay within [0, tokens]: the running maximum of the
    values put into range.

    Right input is returned as it is. Sequences never overlap, so no two units write the same
    token, whatever is given.
    """
    starts, highest = [], 0
    for value in cu_seqlens:
        highest = max(highest, min(max(int(value), 0), tokens))
        starts.append(highest)
    return starts


def segment_rows(plan: VarlenPlan, cu_seqlens: Sequence[int]) -> list[SegmentRow]:
    """Every segment: longest first in chunks, equal ones by sequence and then by time.

    Within a sequence only the last segment may be short, so a segment always comes after its
    predecessors.
    """
    starts = clamped_starts(cu_seqlens, plan.tokens)
    step = plan.segment_chunks
    rows, chunk, first = [], 0, 0
    for n, (start, stop) in enumerate(itertools.pairwise(starts)):
        chunks = ceil_div(stop - start, plan.chunk)
        segments = max(1, ceil_div(chunks, step)) if step else 1
        for k in range(segments):
            begin = start + k * step * plan.chunk
            end = stop if k == segments - 1 else begin + step * plan.chunk
            rows.append(SegmentRow(n, k, begin, end, chunk + k * step, segments, first, start))
        chunk += chunks
        first += segments
    return sorted(rows, key=lambda row: -ceil_div(row.end - row.begin, plan.chunk))  # stable


def chunk_rows(plan: VarlenPlan, cu_seqlens: Sequence[int]) -> list[ChunkRow]:
    """Every chunk of every sequence, in order."""
    starts = clamped_starts(cu_seqlens, plan.tokens)
    return [
        ChunkRow(n, c, begin, min(plan.chunk, stop - begin))
        for n, (start, stop) in enumerate(itertools.pairwise(starts))
        for c, begin in enumerate(range(start, stop, plan.chunk))
    ]


def workspace_words(plan: VarlenPlan, cu_seqlens: Sequence[int]) -> list[int]:
    """The workspace up to `plan.scratch_at`, tickets at zero."""
    starts = clamped_starts(cu_seqlens, plan.tokens)
    segments = segment_rows(plan, cu_seqlens)
    chunks = chunk_rows(plan, cu_seqlens)
    chunk_starts, segment_starts = [0], [0]
    for start, stop in itertools.pairwise(starts):
        here = ceil_div(stop - start, plan.chunk)
        chunk_starts.append(chunk_starts[-1] + here)
        pieces = max(1, ceil_div(here, plan.segment_chunks)) if plan.segment_chunks else 1
        segment_starts.append(segment_starts[-1] + pieces)

    header = [0] * HEADER_WORDS
    header[CHUNKS_WORD] = len(chunks)
    header[SEGMENTS_WORD] = len(segments)
    header[END_WORD] = starts[-1]
    segments += [SegmentRow()] * (plan.max_segments - len(segments))
    chunks = (chunks + [ChunkRow()] * (plan.chunk_rows - len(chunks)))[: plan.chunk_rows]
    tables = [word for row in [*segments, *chunks] for word in row]
    return [*header, *tables, *starts, *chunk_starts, *segment_starts]
