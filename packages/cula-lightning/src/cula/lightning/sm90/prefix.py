"""States that segments start from: between the two passes over sequences that are cut along time.

The first pass (segments.py) leaves A_s, what a segment s adds, in the row of the segment after it.
This turns a sequence's rows, in place, into the states that its segments start from:

    S_1 = A_0 (the initial state included),    S_(s + 1) = l^(tokens of a segment) S_s + A_s

in this order, in float32, whatever the batch. Row 0, the initial state, stays.

Tile:      a thread has four neighbouring elements of a (sequence, head) over all its segments.
Packed:    a block looks through ROWS rows of the schedule for sequences to do.
Loads:     16 bytes each, those of DEPTH segments in flight before the first sum.
Bytes:     8 an element and segment, in L2: the first pass has just written them.
Floor:     the launch, and the latency of one load for every DEPTH segments.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute import math, vector
from cula.common.varlen.device import ceil_div, read_segment, where
from cula.lightning.sm90.config import CHUNK

THREADS = 128
DEPTH = 16
ROWS = 8  # of the schedule, that a block looks through


class SegmentPrefix:
    """Compiled for a PrefixConfig."""

    def __init__(self, config):
        self.config = config
        self.matrix = config.K * config.V
        self.pieces = self.matrix // (4 * THREADS)  # blocks that share a (sequence, head)

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`."""
        HV = cute.sym_int()
        shape = (cute.sym_int(), HV, self.config.V, self.config.K)
        work = None
        if self.config.varlen:
            work = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
        strides = (cute.sym_int64(divisibility=8), self.matrix, self.config.K, 1)
        return (
            make_fake_tensor(Float32, shape, strides, assumed_align=16),
            make_fake_tensor(Float32, (HV,), (cute.sym_int64(),)),
            work,
            Int32(1),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mLocal: cute.Tensor,  # (segments, HV, V, K), states of segments
        mG: cute.Tensor,  # (HV), log decay
        mWork: cute.Tensor | None,  # the schedule's workspace
        rows: Int32,  # sequences; packed: first rows of the schedule, with all second segments
        segments: Int32,  # of each sequence; packed: not read
        segment_chunks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mLocal, mG, mWork, rows, segments, segment_chunks).launch(
            # in one dimension: the others end at 65,535, and sequences do not
            grid=[
                self.pieces
                * mLocal.shape[1]
                * (ceil_div(rows, ROWS) if mWork is not None else rows),
                1,
                1,
            ],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mLocal: cute.Tensor,
        mG: cute.Tensor,
        mWork: cute.Tensor | None,
        rows: Int32,
        segments: Int32,
        segment_chunks: Int32,
    ):
        # the second pass may take its place on the GPU; it, too, waits before it reads anything
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        block, heads = cute.arch.block_idx()[0], mLocal.shape[1]
        piece, head, z = (
            block % self.pieces,
            block // self.pieces % heads,
            block // self.pieces // heads,
        )
        decay = math.decay(Float32(mG[head]) * Float32(segment_chunks * CHUNK))
        element = (piece * THREADS + cute.arch.thread_idx()[0]) * 4
        if cutlass.const_expr(mWork is None):
            self.join(mLocal, head, z * segments, segments, decay, element)
        else:
            # A sequence's second row stands for it. Where there is a third, the second has all its
            # chunks, and such rows come first.
            lane, stands = cute.arch.lane_idx(), Int32(0)
            if (lane < ROWS) & (z * ROWS + lane < rows):
                row = read_segment(mWork.iterator, z * ROWS + lane)
                stands = where((row.segment == 1) & (row.segments > 2), 1, 0)
            standing = Int32(cute.arch.vote_ballot_sync(stands != 0))
            for i in cutlass.range(ROWS, unroll=1):
                if (standing >> i) & 1 != 0:
                    row = read_segment(mWork.iterator, z * ROWS + i)
                    self.join(mLocal, head, row.first, row.segments, decay, element)

    @cute.jit
    def join(
        self,
        mLocal: cute.Tensor,
        head: Int32,
        place: Int32,
        segments: Int32,
        decay: Float32,
        element: Int32,
    ):
        """Four elements of the states of a sequence of three segments or more."""

        step = Int64(mLocal.stride[0])
        start = mLocal.iterator + (Int64(place) * step + Int64(head * self.matrix + element))
        S = cute.make_rmem_tensor(4, Float32)
        for x, value in enumerate(vector.load_floats(start + step, Float32, 4)):
            S[x] = value
        for batch in cutlass.range(ceil_div(segments - 2, DEPTH), unroll=1):
            first = 2 + batch * DEPTH
            added = []
            for i in cutlass.range_constexpr(DEPTH):
                there = where(first + i < segments, first + i, segments - 1)
                added.append(vector.load_floats(start + Int64(there) * step, Float32, 4))
            for i in cutlass.range_constexpr(DEPTH):
                for x in cutlass.range_constexpr(4):
                    S[x] = S[x] * decay + added[i][x]
                if first + i < segments:
                    sums = [S[x] for x in range(4)]
                    vector.store_floats(start + Int64(first + i) * step, Float32, sums)
