"""KDA prefill on Hopper, first kernel: all that a chunk's tokens can say without the state.

Tile:     one block prepares one (chunk of 64 tokens, value head): its record (config.Record).
Roles:    four warps, 16 tokens each; warp 0 also starts the loads. A lane has two channels of all
          16 tokens at a time, so that products along time need no shuffles; channels come in
          pieces of 64.
Steps:    norms and the scores' diagonal; decays; scores within 16 tokens in four levels; | decayed
          keys and queries out; scores against earlier warps' tokens, out; | inverse, out.
          ( | : the block meets)
Shared:   k, q and k decayed to its block's end 16 KB each, all scratch lies over them as they are
          used up; 5 KB of tables: 53 KB, four blocks an SM.
Registers: 48 words of vectors, 30 of decays, 16 scores; 128 with four blocks an SM.
Bytes:    772 a token and head in (q, k, g in 16 bits, beta), 1,032 out at K = 128.
Floor:    those bytes at the memory's copy rate.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute import math
from cula.common.cute.smem import SmemAllocator
from cula.common.varlen.device import fixed_chunk, read_chunk
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import CHUNK, Record
from cula.kda.sm90.layouts import rows_layout
from cula.kda.sm90.prep_block import (
    LEVELS,
    NORMS,
    PIECE,
    ROWS,
    BlockWarp,
    decay_products,
    widen,
)
from cula.kda.sm90.prep_gates import DTYPES, GateReader, step_size
from cula.kda.sm90.prep_inverse import invert_diagonal, write_column

IO = {"bf16": BFloat16, "fp16": Float16}
BLOCKS_PER_SM = 3


class KdaPrep:
    """Host launch and device code; `config` (config.py) is everything known when compiling."""

    allowed_spill_bytes = 64  # gates of 32 bits or without a bias; see DESIGN.md, Budgets

    def __init__(self, config):
        self.config = config
        self.io = IO[config.io]
        self.pieces = config.K // 64
        self.record = Record(config.K)

    # ------------------------------------------------------------------ host
    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`.

        A size that two of them share is one symbol: the call checks it.
        """
        c = self.config
        B, T, H, HV = (cute.sym_int() for _ in range(4))

        def tokens(heads, dtype):
            strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
            return make_fake_tensor(dtype, (B, T, heads, c.K), (*strides, 1), assumed_align=16)

        strides = [cute.sym_int64() for _ in range(3)]
        beta = make_fake_tensor(DTYPES[c.beta_dtype], (B, T, HV), tuple(strides))

        def numbers(present, size):
            return make_fake_tensor(Float32, (size,), (1,)) if present else None

        return (
            tokens(H, self.io),
            tokens(H, self.io),
            tokens(HV, DTYPES[c.gate_dtype]),
            beta,
            numbers(c.gate in ("bounded", "softplus"), HV),
            numbers(c.bias, cute.sym_int()),
            make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
            if c.varlen
            else None,
            make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16),
            Float32(1.0),
            Float32(0.0),
            Int32(0),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, T, H, K)
        mK: cute.Tensor,  # (B, T, H, K)
        mG: cute.Tensor,  # (B, T, HV, K)
        mBeta: cute.Tensor,  # (B, T, HV)
        mA: cute.Tensor | None,  # (HV), A_log
        mBias: cute.Tensor | None,  # (HV * K)
        mWork: cute.Tensor | None,  # the schedule's workspace
        mRecords: cute.Tensor,  # records [chunk, head], in words
        scale: Float32,
        lower_bound: Float32,
        chunks_at: Int32,  # the schedule's table of chunks
        chunks: Int32,  # blocks a head
        stream: cuda.CUstream,
    ):
        c = self.config
        layout = rows_layout(CHUNK, c.K, 1, self.io)
        one = cute.slice_(layout, (None, None, 0))

        def rows(t):  # (token, channel, head, b)
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))

        load = cpasync.CopyBulkTensorTileG2SOp()
        aQ, tQ = cpasync.make_tiled_tma_atom(load, rows(mQ), one, (CHUNK, c.K))
        aK, tK = cpasync.make_tiled_tma_atom(load, rows(mK), one, (CHUNK, c.K))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, 1]
            norms: cute.struct.Align[cute.struct.MemRange[Int32, NORMS], 16]  # of four warps
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 4 * c.K], 16]
            between: cute.struct.Align[cute.struct.MemRange[Float16, 8 * c.K], 16]
            k: cute.struct.Align[cute.struct.MemRange[self.io, 2 * CHUNK * 64], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.io, 2 * CHUNK * 64], 1024]
            back: cute.struct.Align[cute.struct.MemRange[Float16, CHUNK * c.K], 1024]

        self.Shared = Shared
        self.kernel(
            aQ, tQ, aK, tK, layout, mG, mBeta, mA, mBias, mWork, mRecords, scale, lower_bound,
            chunks_at, mQ.shape[1], mQ.shape[2],
        ).launch(
            grid=[chunks * mG.shape[2], 1, 1],
            block=[128, 1, 1],
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=100,
        )  # fmt: skip

    # ------------------------------------------------------------------ device
    @cute.kernel
    def kernel(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        layout: cute.ComposedLayout,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mWork: cute.Tensor | None,
        mRecords: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
        chunks_at: Int32,
        length: Int32,
        key_heads: Int32,
    ):
        heads = mG.shape[2]
        block = Int32(cute.arch.block_idx()[0])
        head, index = block % heads, block // heads  # heads fastest: neighbours in memory
        if cutlass.const_expr(mWork is None):
            row = fixed_chunk(index, length, CHUNK)
            b = row.sequence
            first = row.begin - b * length
        else:
            row = read_chunk(mWork.iterator, chunks_at, index)
            b = Int32(0)
            first = row.begin
        record = Int64(mRecords.iterator.toint()) + Int64(block) * Int64(self.record.bytes)
        if row.sequence >= 0:  # the last chunks of the bound may not exist
            self.prepare(
                aQ, tQ, aK, tK, layout, mG, mBeta, mA, mBias, record, scale, lower_bound,
                b, first, row.tokens, head, head // (heads // key_heads),
            )  # fmt: skip

    @cute.jit
    def prepare(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        layout: cute.ComposedLayout,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        record: Int64,
        scale: Float32,
        lower_bound: Float32,
        b: Int32,
        first: Int32,
        tokens: Int32,
        head: Int32,
        key_head: Int32,
    ):
        c, pieces = self.config, self.pieces
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.Shared)
        full = storage.full.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            self.load(aQ, tQ, storage.q, layout, full, b, first, key_head, True)
            self.load(aK, tK, storage.k, layout, full, b, first, key_head, False)

        me = self.warp_of(storage, warp, lane)
        valid = tokens - 16 * warp
        gates = self.gates(mG, mA, lower_bound, b, first + 16 * warp, head, lane, valid)
        words = gates.load(0)
        token = lane & 15
        beta = Float32(0.0)
        if token < valid:
            at = (
                Int64(b) * Int64(mBeta.stride[0])
                + Int64(first + 16 * warp + token) * Int64(mBeta.stride[1])
                + Int64(head) * Int64(mBeta.stride[2])
            )
            given = Float32(cute.make_tensor(mBeta.iterator + at, cute.make_layout(1))[0])
            beta = step_size(c.beta, given)
        me.write_beta(beta)

        cute.arch.mbarrier_wait(full, 0)
        if valid < 16:
            me.clear_past_end(valid, pieces)
            cute.arch.sync_warp()
        me.write_norms(scale, pieces)
        cute.arch.sync_warp()

        scores = [[Float32(0.0)] * 4 for _ in LEVELS]
        # where the next piece's gates fit into the registers; 4: they come when they are needed
        fetch = 3 if c.gate_dtype == "fp32" else 1 if c.bias else len(LEVELS)
        for piece in cutlass.range_constexpr(pieces):
            if cutlass.const_expr(piece > 0 and fetch == len(LEVELS)):
                words = gates.load(piece)
            bias = [Float32(0.0)] * 2
            if cutlass.const_expr(c.bias):
                at = head * c.K + (64 * piece + 2 * lane)
                bias = [mBias[at], mBias[at + 1]]
            decays, total = decay_products(lambda r: gates.factors(r, words[r], bias))  # noqa: B023
            ptx.store_shared(me.totals + warp * (4 * c.K) + lane * 8, 256 * piece, total, "f")
            kb, q = me.normalised(piece)
            kf = [ptx.multiply_halves(x, d) for x, d in zip(kb, decays[1], strict=True)]
            qf = [ptx.multiply_halves(x, d) for x, d in zip(q, decays[1], strict=True)]
            cute.arch.sync_warp()  # the piece's k and q have been read
            for level in cutlass.range_constexpr(len(LEVELS)):
                me.write_level(level, piece, kf, qf, kb)
                cute.arch.sync_warp()
                scores[level] = me.multiply_level(level, piece, scores[level])
                widen(LEVELS[level], kf, qf, kb, decays[LEVELS[level]])
                if cutlass.const_expr(level == fetch and piece + 1 < pieces):
                    words = gates.load(piece + 1)
            cute.arch.sync_warp()
            me.write_operands(piece, kf, qf, kb)
        cute.arch.sync_threads()

        before, after, total = me.read_totals()
        rows = record + Int64(warp * ROWS)
        me.write_rows(me.k, rows + Int64(self.record.kg), before, ptx.pack_bfloat)
        me.write_rows(me.q, rows + Int64(self.record.qg), before, ptx.pack_bfloat)
        me.write_rows(me.back, rows + Int64(self.record.kr), after, ptx.pack_half)
        if warp == 0:
            target = record + Int64(self.record.decay) + Int64(lane % (c.K // 8) * 32)
            for half in cutlass.range_constexpr(2):
                sums = [x.bitcast(Int32) for x in total[4 * half : 4 * half + 4]]
                ptx.store_global(target, 16 * half, sums)

        kf, qf = me.fragments(me.k, pieces), me.fragments(me.q, pieces)
        cute.arch.sync_warp()
        # the warp's rows of k and q are free
        triangle, minus_a, aqk, column = me.k, me.k + PIECE, me.q, me.q + PIECE
        for i in cutlass.range_constexpr(4):
            ptx.store_shared(aqk + lane * 16, 512 * i, [0] * 4)
        cute.arch.sync_warp()
        me.write_diagonal(scores, triangle, aqk)
        if warp > 0:
            me.multiply_earlier(0, kf, qf, minus_a, aqk)
        if warp > 1:
            me.multiply_earlier(1, kf, qf, minus_a, aqk)
        if warp > 2:
            me.multiply_earlier(2, kf, qf, minus_a, aqk)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            piece = ptx.load_shared(aqk + lane * 16, 512 * i, 4)
            ptx.store_global(rows + Int64(self.record.aqk) + Int64(lane * 16), 512 * i, piece)
        invert_diagonal(me, triangle, column)
        cute.arch.sync_threads()
        of_warp_0 = warp * ROWS
        write_column(
            me,
            triangle - of_warp_0,
            minus_a - of_warp_0,
            column,
            record + Int64(self.record.t),
        )

    @cute.jit
    def load(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        tile,
        layout: cute.ComposedLayout,
        full: cute.Pointer,
        b: Int32,
        first: Int32,
        head: Int32,
        expect: cutlass.Constexpr,
    ):
        """Starts a tile's load; the first announces the bytes of both.

        Past the tensor's end TMA fills in zeros.
        """
        if cutlass.const_expr(expect):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.record.rows)
        rows = cute.domain_offset((first, 0), tensor[None, None, head, b])
        chunk = cute.local_tile(rows, (CHUNK, self.config.K), (0, 0))
        shared = cute.make_tensor(
            cute.recast_ptr(tile.data_ptr(), layout.inner, dtype=self.io), layout.outer
        )
        sX, gX = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(chunk, 0, 2),
        )
        cute.copy(atom, gX, sX[(None, 0)], tma_bar_ptr=full)

    # ------------------------------------------------------------------ pieces
    def warp_of(self, storage, warp: Int32, lane: Int32) -> BlockWarp:
        k, q, back, norms, totals, between = (
            Int32(x.data_ptr().toint())
            for x in (
                storage.k,
                storage.q,
                storage.back,
                storage.norms,
                storage.totals,
                storage.between,
            )
        )
        return BlockWarp(
            config=self.config,
            warp=warp,
            lane=lane,
            k=k + warp * ROWS,
            q=q + warp * ROWS,
            back=back + warp * ROWS,
            tile_back=back,
            norms=norms + warp * NORMS,
            totals=totals,
            between=between + warp * (4 * self.config.K),
        )

    def gates(self, mG, mA, lower_bound, b, first, head, lane, valid) -> GateReader:
        size = mG.element_type.width // 8
        at = (
            Int64(b) * Int64(mG.stride[0])
            + Int64(first) * Int64(mG.stride[1])
            + Int64(head) * Int64(mG.stride[2])
            + Int64(2 * lane)
        )
        return GateReader(
            config=self.config,
            address=Int64(mG.iterator.toint()) + at * Int64(size),
            stride=Int64(mG.stride[1]) * Int64(size),
            valid=valid,
            rate=Float32(1.0) if mA is None else math.exp(mA[head]),
            lower_bound=lower_bound,
        )
