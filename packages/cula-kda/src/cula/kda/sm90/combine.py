"""States between segments: the second of three passes over sequences that are cut along time.

The first pass (segments.py) leaves M and b of every segment but a sequence's last, and for its
first b is the state after it. Here S <- M S + b from segment to segment, and the state after each
takes b's place. Everything is float32.

Tile:     a block takes eight value channels of a (sequence, head), at K = 64 sixteen: S^T's rows,
          which are independent. A lane has eight rows of four columns.
Roles:    warps 0-3 share out the sum over K, a quarter each; warp 4 loads M.
M:        comes in pieces of eight of M^T's rows for each warp, into a ring that runs ahead of the
          steps. The blocks of a cluster, which are of one head, each load a part of every piece and
          multicast it, so that L2 is not what bounds: 128 blocks by themselves ask for 8 MB a step.
Step:     S^T and M^T -> partial sums -> shared memory, the block meets -> S^T, stored. A warp adds
          up the very columns that it multiplies next, so it need not meet the others again.
Shared:   a ring of M (80 KB), and partial sums twice (32 KB), in turn. S^T lies where the first of
          its partial sums did. Two blocks an SM.
Registers: sums 32; four rows of M 16, twice; four columns of S^T 32, each row's next ones loaded
          when it was used.
Bytes:    a segment's M for each cluster, from L2; b in and out.
Floor:    8 K^2 multiplications a step: 1024 cycles at K = 128; M at 64 bytes a cycle takes as long.
Predicted: 1,750 cycles a step: 1,346 instructions a warp, one warp a scheduler; sums out and in,
          256 wavefronts that nothing hides; latencies.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute import vector
from cula.common.cute.smem import SmemAllocator
from cula.common.varlen.device import read_segment, unit_coords, where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import SLICE
from cula.kda.sm90.scan_block import segment_states

CLUSTER = 4  # blocks that load M together
WARPS = 4  # that compute
ROWS = 8  # of M^T a warp and piece; of S^T a lane
STAGES = 5  # pieces of M
SUMS = 4 * SLICE  # bytes of a warp's partial sums


class KdaCombine:
    """Host launch and device code; `config`: config.CombineConfig."""

    def __init__(self, config):
        if WARPS % CLUSTER or config.slices % CLUSTER:
            raise ValueError(
                f"CLUSTER: {CLUSTER}; must divide {WARPS} warps, {config.slices} slices"
            )
        self.config = config
        self.row = 4 * config.K  # bytes
        self.pieces = config.K // (WARPS * ROWS)  # of M
        self.part = ROWS * self.row  # bytes a warp and piece

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
        stage = WARPS * self.part // 4

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            read: cute.struct.MemRange[Int64, STAGES]
            free: cute.struct.MemRange[Int64, STAGES]
            matrix: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * stage], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARPS * SLICE], 128]

        self.Shared = Shared
        self.kernel(mSegments, mWork, segments).launch(
            grid=[walks * mSegments.shape[1] * self.config.slices, 1, 1],
            block=[32 * WARPS + 32, 1, 1],
            cluster=[CLUSTER, 1, 1],
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
        full, read, free = (x.data_ptr() for x in (storage.full, storage.read, storage.free))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(read + s, 32 * WARPS)
                    cute.arch.mbarrier_init(free + s, CLUSTER)
        cute.arch.mbarrier_init_fence()
        self.meet()
        walk, head, part = unit_coords(
            Int32(cute.arch.block_idx()[0]), mSegments.shape[1], self.config.slices
        )
        cute.arch.griddepcontrol_wait()
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
            matrix = Int32(storage.matrix.data_ptr().toint())
            sums = Int32(storage.sums.data_ptr().toint())
            if warp == WARPS:
                self.load(full, read, free, matrix, place, step, segments)
            else:
                self.walk(full, read, matrix, sums, place, step, part, segments)
            self.meet()  # no block leaves before the others have heard its last word

    def meet(self):
        """All threads of the cluster."""
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

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
    def load(
        self,
        full: cute.Pointer,
        read: cute.Pointer,
        free: cute.Pointer,
        matrix: Int32,
        place: cute.Pointer,
        step: Int64,
        segments: Int32,
    ):
        """The load warp: this block's share of every piece, to all blocks of the cluster.

        When a stage has been read here, it tells all that copy to it that it is free.
        """
        share = WARPS // CLUSTER  # of the warps that compute
        first = cute.arch.block_idx_in_cluster() * share
        source = Int64(place.toint()) + Int64(self.config.V * self.row)
        for n in cutlass.range((segments - 2) * self.pieces, unroll=1):
            s, segment, piece = n % STAGES, n // self.pieces + 1, n % self.pieces
            cute.arch.mbarrier_wait(read + s, n // STAGES % 2 ^ 1)
            with cute.arch.elect_one():
                for block in cutlass.range_constexpr(CLUSTER):
                    cute.arch.mbarrier_arrive(free + s, block)
            cute.arch.mbarrier_wait(free + s, n // STAGES % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + s, WARPS * self.part)
                for warp in [first + i for i in range(share)]:
                    ptx.copy_to_shared(
                        matrix + (s * WARPS + warp) * self.part,
                        source + Int64(segment) * step * 4
                        + Int64((warp * self.pieces + piece) * self.part),
                        self.part,
                        Int32((full + s).toint()),
                        blocks=CLUSTER,
                    )  # fmt: skip

    @cute.jit
    def walk(
        self,
        full: cute.Pointer,
        read: cute.Pointer,
        matrix: Int32,
        sums: Int32,
        place: cute.Pointer,  # of the sequence's first segment
        step: Int64,  # elements to the next
        part: Int32,
        segments: Int32,
    ):
        K, row = self.config.K, self.row
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        # where in S^T: the lane's sums (bytes); the first of the two quads that it adds up, the
        # other half the rows further (elements); its rows, in the columns that its warp multiplies
        tile = lane // (K // 4) * (ROWS * row) + lane % (K // 4) * 16
        mine = lane // (K // 16) * K + warp * (K // WARPS) + lane % (K // 16) * 4
        columns = lane // (K // 4) * (ROWS * row) + warp * (row // WARPS)
        source = place + Int64(part * SLICE + mine)  # of b and S
        matrix += warp * self.part + lane % (K // 4) * 16
        M = cute.make_rmem_tensor((4, 4, 2), Float32)
        S = cute.make_rmem_tensor((4, ROWS), Float32)
        b = cute.make_rmem_tensor((4, 2), Float32)
        total = cute.make_rmem_tensor((4, ROWS), Float32)

        self.load_quads(b, source)
        self.keep_quads(sums + 4 * mine, b)
        self.load_quads(b, source + step)
        cute.arch.sync_warp()
        stage, phase, left = Int32(0), Int32(0), (segments - 2) * self.pieces
        cute.arch.mbarrier_wait(full, 0)
        self.load_matrix(M, 0, matrix)
        for s in cutlass.range(1, segments - 1, unroll=1):
            state = sums + (s + 1) % 2 * (WARPS * SUMS) + columns
            after = sums + s % 2 * (WARPS * SUMS)
            total.fill(0.0)
            self.load_state(S, state)
            for i in cutlass.range(self.pieces, unroll=1):
                here = stage
                self.load_matrix(M, 1, matrix + here * (WARPS * self.part) + 4 * self.row)
                stage = where(here + 1 < STAGES, here + 1, 0)
                phase = where(stage == 0, phase ^ 1, phase)
                left -= 1
                ready = cute.arch.mbarrier_test_wait(full + stage, phase) | (left == 0)
                self.add(total, S, M, 0, state + 16)
                cute.arch.mbarrier_arrive(read + here)  # every thread for itself
                if not ready:
                    cute.arch.mbarrier_wait(full + stage, phase)
                # past the last piece what comes is not used
                self.load_matrix(M, 0, matrix + stage * (WARPS * self.part))
                state = where(i + 1 < self.pieces, state + 32, state)
                self.add(total, S, M, 1, state)
            self.store_rows(after + warp * SUMS + tile, total)
            cute.arch.barrier(barrier_id=1, number_of_threads=32 * WARPS)
            self.add_up(b, after + 4 * mine)
            self.keep_quads(after + 4 * mine, b)
            cute.arch.sync_warp()
            self.store_quads(source + Int64(s) * step, b)
            self.load_quads(b, source + Int64(where(s + 2 < segments, s + 1, s)) * step)

    def load_matrix(self, M, half, address) -> None:
        """Four rows of M^T, of which a lane has four columns."""
        for i in range(4):
            for c, x in enumerate(ptx.load_shared(address, i * self.row, 4, "f")):
                M[c, i, half] = x

    def load_state(self, S, address) -> None:
        for r in range(ROWS):
            self.load_columns(S, r, address)

    def load_columns(self, S, r, address) -> None:
        """Four columns of a row of S^T."""
        for c, x in enumerate(ptx.load_shared(address, r * self.row, 4, "f")):
            S[c, r] = x

    def store_rows(self, address, X) -> None:
        for r in range(ROWS):
            ptx.store_shared(address, r * self.row, [X[c, r] for c in range(4)], "f")

    def add(self, total, S, M, half, following) -> None:
        """Four columns of S^T times four rows of M^T; each row's next columns come meanwhile."""
        for r in range(ROWS):
            for i in range(4):
                for c in range(4):
                    total[c, r] = total[c, r] + S[i, r] * M[c, i, half]
            self.load_columns(S, r, following)

    def add_up(self, b, address) -> None:
        """The lane's two quads of S^T: b and the partial sums of all warps."""
        for warp in range(WARPS):
            for j in range(2):
                piece = ptx.load_shared(address, warp * SUMS + j * (SUMS // 2), 4, "f")
                for c, x in enumerate(piece):
                    b[c, j] = b[c, j] + x

    def load_quads(self, b, source) -> None:
        for j in range(2):
            piece = vector.load_floats((source + j * (SLICE // 2)).align(16), Float32, 4)
            for c, x in enumerate(piece):
                b[c, j] = x

    def keep_quads(self, address, S) -> None:
        for j in range(2):
            piece = [S[c, j] for c in range(4)]
            ptx.store_shared(address, j * (SUMS // 2), piece, "f")

    def store_quads(self, target, S) -> None:
        for j in range(2):
            piece = [S[c, j] for c in range(4)]
            vector.store_floats((target + j * (SLICE // 2)).align(16), Float32, piece)
