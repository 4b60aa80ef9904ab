"""States between segments: the second of three passes over sequences that are cut along time.

The first pass (segments.py) leaves M and b of every segment but a sequence's last, and for its
first b is the state after it. Here S <- M S + b from segment to segment, and the state after each
takes b's place. Everything is float32.

Tile:     a block takes 8 value channels of a (sequence, head): S^T's rows, which are independent.
Roles:    eight warps share out the sum over K; a lane has K / 32 columns of all eight rows. Then a
          warp adds up one row of the eight partial sums.
Step:     S^T and M^T's sixteen rows -> partial sums -> shared memory -> S^T, stored.
Shared:   S^T (4 KB at K = 128), partial sums (32 KB).
Registers: M's rows 64, of which each is loaded for the next step once it was used; sums 32.
Bytes:    a segment's M for each of V / 8 blocks, from L2; b in and out.
Floor:    8 K^2 multiplications a step: 1024 cycles at K = 128; M from L2 takes as long.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute import vector
from cula.common.cute.smem import SmemAllocator
from cula.common.varlen.device import read_segment, unit_coords, where
from cula.kda.sm90.config import SLICE
from cula.kda.sm90.scan_block import segment_states

WARPS = 8


class KdaCombine:
    """Host launch and device code; `config`: config.CombineConfig."""

    def __init__(self, config):
        self.config = config
        self.rows = config.K // WARPS  # of M^T a warp
        self.width = config.K // 32  # columns a lane

    # ------------------------------------------------------------------ host
    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`."""
        work = None
        if self.config.varlen:
            work = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
        return (
            segment_states(self.config, cute.sym_int()),
            work,
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mSegments: cute.Tensor,  # (segments, HV, V + K, K)
        mWork: cute.Tensor | None,  # the schedule's workspace
        segments: Int32,  # of each sequence; packed: rows of the schedule to look at
        walks: Int32,  # sequences; packed: pairs of rows
        stream: cuda.CUstream,
    ):
        K = self.config.K

        @cute.struct
        class Shared:
            state: cute.struct.Align[cute.struct.MemRange[Float32, SLICE * K], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * SLICE * K], 16]

        self.Shared = Shared
        self.kernel(mSegments, mWork, segments).launch(
            grid=[walks * mSegments.shape[1] * self.config.slices, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    # ------------------------------------------------------------------ device
    @cute.kernel
    def kernel(self, mSegments: cute.Tensor, mWork: cute.Tensor | None, segments: Int32):
        storage = SmemAllocator().allocate(self.Shared)
        # launched before the first pass is complete, as the scan is before this
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        walk, head, part = unit_coords(
            Int32(cute.arch.block_idx()[0]), mSegments.shape[1], self.config.slices
        )
        if cutlass.const_expr(mWork is None):
            first = walk * segments
        else:
            first, segments = self.sequence(mWork, walk, segments)
        # the first segment's b is the state after it; nobody needs the state after the last here
        if segments > 2:
            step = Int64(mSegments.stride[0])
            place = mSegments.iterator + (
                Int64(first) * step + Int64(head) * Int64(mSegments.stride[1])
            )
            self.walk(
                storage.state.data_ptr(), storage.sums.data_ptr(), place, step, part, segments
            )

    def sequence(self, mWork, pair, rows):
        """(place of its first segment, segments) of the sequence of more than two segments whose
        second one is in this pair of rows.

        Segments that others follow have the most chunks: they lead the table, and a sequence's are
        neighbours in the order of time. So of two neighbours one at most is such a second one.
        """
        first, segments = Int32(0), Int32(0)
        for index in (2 * pair, where(2 * pair + 1 < rows, 2 * pair + 1, 2 * pair)):
            row = read_segment(mWork.iterator, index)
            found = (row.segment == 1) & (row.segments > 2)
            first, segments = where(found, row.first, first), where(found, row.segments, segments)
        return first, segments

    @cute.jit
    def walk(
        self,
        state: cute.Pointer,
        sums: cute.Pointer,
        place: cute.Pointer,  # of the sequence's first segment
        step: Int64,  # elements to the next
        part: Int32,
        segments: Int32,
    ):
        K, rows, width = self.config.K, self.rows, self.width
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        column = lane * width
        mine = place + Int64((part * SLICE + warp) * K + column)  # of b and S
        matrix = place + Int64((self.config.V + warp * rows) * K + column)
        M = cute.make_rmem_tensor((width, (4, rows // 4)), Float32)
        b = cute.make_rmem_tensor(width, Float32)
        total = cute.make_rmem_tensor((width, SLICE), Float32)

        self.store(state + (warp * K + column), self.load(mine))
        for j in range(rows):
            self.fill(M[None, (j % 4, j // 4)], self.load(matrix + step + j * K))
        self.fill(b, self.load(mine + step))
        cute.arch.sync_threads()
        for s in cutlass.range(1, segments - 1, unroll=1):
            following = Int64(where(s + 2 < segments, s + 1, s)) * step
            total.fill(0.0)
            for j in range(0, rows, 4):
                self.add(total, state + (warp * rows + j), M[None, (None, j // 4)])
                for i in range(4):
                    place_of = matrix + following + (j + i) * K
                    self.fill(M[None, (i, j // 4)], self.load(place_of))
            for r in range(SLICE):
                piece = [total[c, r] for c in range(width)]
                self.store(sums + ((warp * SLICE + r) * K + column), piece)
            cute.arch.sync_threads()
            S = self.summed(b, sums + (warp * K + column))
            self.store(state + (warp * K + column), S)
            self.store(mine + Int64(s) * step, S)
            self.fill(b, self.load(mine + following))
            cute.arch.sync_threads()

    def add(self, total, state, M) -> None:
        """Four rows of M^T times four columns of S^T."""
        for r in range(SLICE):
            S = vector.load_shared((state + r * self.config.K).align(16), 4)
            for i in range(4):
                for c in range(self.width):
                    total[c, r] = total[c, r] + S[i] * M[c, i]

    def summed(self, b, sums) -> list:
        S = [b[c] for c in range(self.width)]
        for w in range(WARPS):
            place = (sums + w * SLICE * self.config.K).align(4 * self.width)
            piece = vector.load_shared(place, self.width)
            S = [x + y for x, y in zip(S, piece, strict=True)]
        return S

    def load(self, place) -> list:
        return vector.load_floats(place.align(4 * self.width), Float32, self.width)

    def store(self, place, values) -> None:
        vector.store_floats(place.align(4 * self.width), Float32, values)

    def fill(self, tensor, values) -> None:
        for i, x in enumerate(values):
            tensor[i] = x
