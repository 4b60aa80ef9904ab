"""The schedule of a batch of packed sequences, from cu_seqlens, in one launch.

Any number of blocks of `threads` threads. Every block scans all sequences by itself, so that
blocks never wait for each other; then each writes its share of the wide tables:

    scan     a thread takes `per_thread` neighbouring sequences: running maximum of the
             boundaries, then sums of chunks, full segments and short segments (warp shuffles,
             one barrier each)
    chunks   a thread a row, its sequence found by bisection
    full     a thread a row, the same
    short    a block 32 sequences a time, a lane each: its place is the number of sequences that
             come before it, counted by all warps
    block 0  header and per-sequence tables as well

Shared memory: 20 bytes a sequence (threads * per_thread of them) + 4 a thread, or 4 a thread
where the tables are too long and live in the workspace (every block writes the same words
there, and reads its own). Registers: see DESIGN.md. Bytes: 8 N in, 16 a chunk + 32 a segment +
12 N out; the floor is the launch. SIMT only, for every architecture.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute.smem import SmemAllocator
from cula.common.varlen import device
from cula.common.varlen.device import where
from cula.common.varlen.plan import (
    CHUNK_WORDS,
    CHUNKS_WORD,
    END_WORD,
    HEADER_WORDS,
    ROW,
    SEGMENT_WORDS,
    SEGMENTS_WORD,
    ScheduleConfig,
)
from cula.common.varlen.steps import (
    boundary,
    count,
    larger,
    plus,
    running,
    segment_row,
    smaller,
    warp_scan,
)


class ScheduleKernel:
    """Compiled for a ScheduleConfig; launched with VarlenPlan.launch_args."""

    def __init__(self, config: ScheduleConfig):
        self.index = Int32 if config.index_bits == 32 else Int64
        self.chunk = config.chunk
        self.threads = config.threads
        self.warps = config.threads // 32
        self.per_thread = config.per_thread
        self.tile = config.threads * config.per_thread
        self.in_shared = config.in_shared
        self.early_release = config.early_release

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`."""
        return (
            make_fake_tensor(self.index, (cute.sym_int(),), (1,)),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16),
            *[Int32(1)] * 5,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mCu: cute.Tensor,  # cu_seqlens [N + 1]
        mW: cute.Tensor,  # workspace [words], from a multiple of 16 bytes on
        tokens: Int32,
        segment_chunks: Int32,
        segment_rows: Int32,
        chunk_rows: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mCu, mW, tokens, segment_chunks, segment_rows, chunk_rows).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCu: cute.Tensor,
        mW: cute.Tensor,
        tokens: Int32,
        segment_chunks: Int32,
        segment_rows: Int32,
        chunk_rows: Int32,
    ):
        if cutlass.const_expr(self.early_release):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        n = mCu.shape[0] - 1
        rows = (n + ROW - 1) // ROW

        # The workspace's sections, as VarlenPlan lays them out.
        workspace = mW.iterator
        chunks_at = HEADER_WORDS + segment_rows * SEGMENT_WORDS
        starts_at = chunks_at + chunk_rows * CHUNK_WORDS
        gStarts = array(workspace + starts_at, n + 1)
        gChunks = array(workspace + (starts_at + n + 1), n + 1)
        gSegments = array(workspace + (starts_at + 2 * (n + 1)), n + 1)

        # Per sequence: its first token; the chunks, segments and full segments before it; its
        # short segment's sort key.
        smem = SmemAllocator()
        sTotals = smem.allocate_tensor(Int32, cute.make_layout((32, 4)), byte_alignment=16)
        sCounts = smem.allocate_tensor(Int32, cute.make_layout((32, self.warps)), byte_alignment=16)
        if cutlass.const_expr(self.in_shared):
            starts, chunks, segments, fulls, keys = [
                smem.allocate_tensor(Int32, cute.make_layout(self.tile + 4), byte_alignment=16)
                for _ in range(5)
            ]
        else:
            starts, chunks, segments = gStarts, gChunks, gSegments
            # Keys are read four at a time.
            keys_at = (starts_at + 3 * (n + 1) + 3) // 4 * 4
            keys = array(workspace + keys_at, rows * ROW)
            fulls = array(workspace + (keys_at + rows * ROW), n + 1)

        # ---------------------------------------------------------------- scan
        last = boundary(mCu, n, n, tokens)  # read first: nothing is to wait for memory twice
        tiles = Int32(1)
        if cutlass.const_expr(not self.in_shared):
            tiles = (n + self.tile - 1) // self.tile
        highest, chunk_sum, full_sum, short_sum = Int32(0), Int32(0), Int32(0), Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            base = tile * self.tile + thread * self.per_thread
            # Boundaries base .. base + per_thread: the last one, the next thread's first, ends
            # this thread's last.
            edges = running(
                larger, [boundary(mCu, base + i, n, tokens) for i in range(self.per_thread + 1)]
            )
            (before,), (top,) = self.block_scan(larger, [edges[-2]], sTotals, 0, lane, warp)
            before = larger(before, highest)
            edges = [larger(edge, before) for edge in edges]
            highest = larger(highest, top)

            counts = [
                count(edges[i + 1] - edges[i], self.chunk, segment_chunks, base + i < n)
                for i in range(self.per_thread)
            ]
            sums = [running(plus, [x[j] for x in counts]) for j in range(3)]
            befores, tops = self.block_scan(
                plus, [column[-1] for column in sums], sTotals, 1, lane, warp
            )
            befores = [befores[0] + chunk_sum, befores[1] + full_sum, befores[2] + short_sum]
            chunk_sum, full_sum, short_sum = (
                chunk_sum + tops[0],
                full_sum + tops[1],
                short_sum + tops[2],
            )
            for i in cutlass.range_constexpr(self.per_thread):
                sequence = base + i
                chunk, full, short = befores
                if cutlass.const_expr(i > 0):
                    chunk, full, short = [
                        b + column[i - 1] for b, column in zip(befores, sums, strict=True)
                    ]
                if sequence < rows * ROW:
                    keys[sequence] = counts[i][3]
                if sequence < n:
                    starts[sequence] = edges[i]
                    chunks[sequence] = chunk
                    segments[sequence] = full + short
                    fulls[sequence] = full
                    if cutlass.const_expr(self.in_shared) and block == 0:
                        gStarts[sequence] = edges[i]
                        gChunks[sequence] = chunk
                        gSegments[sequence] = full + short

        segment_sum = full_sum + short_sum
        if thread == 0:
            end = larger(highest, last)
            starts[n] = end
            chunks[n] = chunk_sum
            segments[n] = segment_sum
            fulls[n] = full_sum
            if block == 0:
                gStarts[n] = end
                gChunks[n] = chunk_sum
                gSegments[n] = segment_sum
                header = [Int32(0)] * HEADER_WORDS
                header[CHUNKS_WORD], header[SEGMENTS_WORD] = chunk_sum, segment_sum
                header[END_WORD] = end
                for i in cutlass.range_constexpr(0, HEADER_WORDS, 4):
                    device.store4(workspace + i, header[i : i + 4])
        cute.arch.sync_threads()

        # ---------------------------------------------------------------- a thread a row
        first = block * self.threads + thread
        step = blocks * self.threads
        for index in cutlass.range(first, chunk_rows, step, unroll=1):
            row = workspace + (chunks_at + index * CHUNK_WORDS)
            if index < chunk_sum:
                sequence = bisect(chunks, index, n)
                number = index - chunks[sequence]
                begin = starts[sequence] + number * self.chunk
                size = smaller(starts[sequence + 1] - begin, self.chunk)
                device.store4(row, [sequence, number, begin, size])
            else:
                device.store4(row, [-1, 0, 0, 0])

        for index in cutlass.range(first, segment_rows, step, unroll=1):
            if index < full_sum:
                sequence = bisect(fulls, index, n)
                number = index - fulls[sequence]
                self.write_segment(
                    workspace, index, sequence, number, segment_chunks, starts, chunks, segments
                )
            elif index >= segment_sum:
                row = workspace + (HEADER_WORDS + index * SEGMENT_WORDS)
                device.store4(row, [-1, 0, 0, 0])
                device.store4(row + 4, [0, 0, 0, 0])

        # ---------------------------------------------------------------- rank short segments
        for row in cutlass.range(block, rows, blocks, unroll=1):
            sequence = row * ROW + lane
            key = keys[sequence]
            ahead = Int32(0)
            for other in cutlass.range(warp, rows, self.warps, unroll=1):
                # Of equal keys the earlier sequence comes first; in its own row that is settled
                # below.
                least = where(other < row, key, key + 1)
                for i in cutlass.range_constexpr(0, ROW, 4):
                    for x in self.load_keys(keys, other * ROW + i):
                        ahead += where(x >= least, 1, 0)
            sCounts[lane, warp] = ahead
            cute.arch.sync_threads()
            if warp == 0:
                same = cute.arch.match_sync(cute.arch.FULL_MASK, key, kind="any")
                place = full_sum + Int32(cute.arch.popc(same & cute.arch.lanemask_lt()))
                for w in cutlass.range_constexpr(self.warps):
                    place += sCounts[lane, w]
                if key >= 0:
                    number = fulls[sequence + 1] - fulls[sequence]
                    self.write_segment(
                        workspace, place, sequence, number, segment_chunks, starts, chunks, segments
                    )
            cute.arch.sync_threads()

    def load_keys(self, keys, at) -> list:
        """Four neighbouring keys in one access."""
        return device.load4(keys.iterator + at, shared=self.in_shared)

    @cute.jit
    def block_scan(
        self,
        combine: cutlass.Constexpr,
        values: list,
        sTotals: cute.Tensor,
        at: cutlass.Constexpr[int],
        lane: Int32,
        warp: Int32,
    ):
        """(values of the threads before this one combined, values of all threads combined), for
        non-negative values.

        One barrier. The totals' columns at .. at + len(values) may be used again after another
        scan's barrier.
        """
        scanned = [warp_scan(combine, x, lane, 32) for x in values]
        if lane == 31:
            for i, x in enumerate(scanned):
                sTotals[warp, at + i] = x
        cute.arch.sync_threads()
        befores, tops = [], []
        for i in cutlass.range_constexpr(len(scanned)):
            total = where(lane < self.warps, sTotals[lane % self.warps, at + i], 0)
            total = warp_scan(combine, total, lane, self.warps)
            previous = cute.arch.shuffle_sync(total, where(warp > 0, warp - 1, 0))
            own = cute.arch.shuffle_sync_up(scanned[i], 1)
            own = where(lane > 0, own, 0)
            befores.append(combine(own, where(warp > 0, previous, 0)))
            tops.append(cute.arch.shuffle_sync(total, self.warps - 1))
        return befores, tops

    @cute.jit
    def write_segment(
        self,
        workspace: cute.Pointer,
        row: Int32,
        sequence: Int32,
        number: Int32,
        segment_chunks: Int32,
        starts: cute.Tensor,
        chunks: cute.Tensor,
        segments: cute.Tensor,
    ):
        """The row of a sequence's number-th segment."""
        first = segments[sequence]
        words = segment_row(
            sequence,
            number,
            starts[sequence],
            starts[sequence + 1],
            chunks[sequence],
            segments[sequence + 1] - first,
            first,
            self.chunk,
            segment_chunks,
        )
        place = workspace + (HEADER_WORDS + row * SEGMENT_WORDS)
        device.store4(place, words[:4])
        device.store4(place + 4, words[4:])


def array(pointer, length) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_layout(length))


@cute.jit
def bisect(before: cute.Tensor, index: Int32, n: Int32):
    """The last sequence with before[sequence] <= index: the one whose rows include `index` <
    before[n].
    """
    found = Int32(0)
    steps = Int32(32) - Int32(cute.arch.clz(n))
    for i in cutlass.range(steps, unroll=1):
        middle = found + (Int32(1) << (steps - 1 - i))
        if middle < n and before[middle] <= index:
            found = middle
    return found
