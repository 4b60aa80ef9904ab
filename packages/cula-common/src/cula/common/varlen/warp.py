"""The schedule of at most 32 sequences in one warp's registers.

No launch before the consumer and no workspace: this costs a warp less than a launch does. Every
warp that needs rows makes its own; they are those of the tables, bit for bit.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cula.common.varlen.device import where
from cula.common.varlen.steps import (
    boundary,
    count,
    larger,
    plus,
    segment_row,
    smaller,
    warp_scan,
)
from cula.common.varlen.twin import ChunkRow, SegmentRow


# Frozen: CuTe DSL lets dynamic loops read a frozen dataclass from outside.
@dataclass(frozen=True)
class WarpSchedule:
    """Lane i holds sequence i; lanes from N on hold empty ones that add nothing.

    Made by `warp_schedule`. All 32 lanes ask together, with the same index.

    chunk_sum, segment_sum  chunks and segments of the batch, the same in every lane
    the other Int32         of the lane's own sequence: its tokens, how many segments it has and
                            how many are full, what lies before it, its short segment's row
    """

    chunk: int
    segment_chunks: Int32
    start: Int32
    stop: Int32
    full: Int32
    segments: Int32
    chunk_start: Int32
    full_start: Int32
    first: Int32
    chunk_sum: Int32
    full_sum: Int32
    segment_sum: Int32
    place: Int32

    def segment(self, index) -> SegmentRow:
        """Row `index` >= 0 of the table of segments; sequence -1 beyond the last one."""
        in_full = index < self.full_sum
        holder = Int32(cute.arch.vote_ballot_sync(self.place == index))
        short = Int32(31) - Int32(cute.arch.clz(holder))
        sequence = where(in_full, self._last_with(self.full_start, index), short)
        lane = larger(sequence, 0)
        number = where(in_full, index - self._of(self.full_start, lane), self._of(self.full, lane))
        row = segment_row(
            sequence,
            number,
            *(
                self._of(x, lane)
                for x in (self.start, self.stop, self.chunk_start, self.segments, self.first)
            ),
            self.chunk,
            self.segment_chunks,
        )
        return SegmentRow(sequence, *(where(sequence >= 0, x, 0) for x in row[1:]))

    def chunk_row(self, index) -> ChunkRow:
        """Row `index` >= 0 of the table of chunks; sequence -1 beyond the last one."""
        there = index < self.chunk_sum
        lane = self._last_with(self.chunk_start, index)
        number = index - self._of(self.chunk_start, lane)
        begin = self._of(self.start, lane) + number * self.chunk
        tokens = smaller(self._of(self.stop, lane) - begin, self.chunk)
        return ChunkRow(
            where(there, lane, -1), *(where(there, x, 0) for x in (number, begin, tokens))
        )

    def _of(self, x, lane) -> Int32:
        return cute.arch.shuffle_sync(x, lane)

    def _last_with(self, before, index) -> Int32:
        """The last lane whose `before` is at most index; `before` starts at 0 and never
        decreases.
        """
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(before <= index))) - 1


def warp_schedule(mCu, n, tokens, chunk: int, segment_chunks) -> WarpSchedule:
    """The schedule of cu_seqlens [n + 1] with n <= 32 (VarlenPlan.fits_warp), by all 32 lanes.

    tokens and chunk are the plan's; segment_chunks is its `device_segment_chunks`.
    """
    lane = Int32(cute.arch.lane_idx())
    start = warp_scan(larger, boundary(mCu, lane, n, tokens), lane, 32)
    last = larger(cute.arch.shuffle_sync(start, 31), boundary(mCu, n, n, tokens))
    stop = where(lane < 31, cute.arch.shuffle_sync(start, smaller(lane + 1, 31)), last)
    chunks, full, short, key = count(stop - start, chunk, segment_chunks, lane < n)
    segments = full + short
    ends = [warp_scan(plus, x, lane, 32) for x in (chunks, full, segments)]
    sums = [Int32(cute.arch.shuffle_sync(x, 31)) for x in ends]

    ahead = Int32(0)
    for i in range(32):
        ahead += where(cute.arch.shuffle_sync(key, i) > key, 1, 0)
    same = cute.arch.match_sync(cute.arch.FULL_MASK, key, kind="any")
    ahead += Int32(cute.arch.popc(same & cute.arch.lanemask_lt()))
    return WarpSchedule(
        chunk=chunk,
        segment_chunks=segment_chunks,
        start=start,
        stop=stop,
        full=full,
        segments=segments,
        chunk_start=ends[0] - chunks,
        full_start=ends[1] - full,
        first=ends[2] - segments,
        chunk_sum=sums[0],
        full_sum=sums[1],
        segment_sum=sums[2],
        place=where(key >= 0, sums[1] + ahead, -1),
    )
