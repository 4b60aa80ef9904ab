"""KDA prefill on Hopper, first kernel: all that a chunk's tokens can say without the state.

Tile:     a block prepares one (chunk of 64 tokens, value head) after the other: a record
          (config.Record) each.
Roles:    four warps, 16 tokens each, which load their own rows; the last one loads gates. A lane
          has two channels of all 16 tokens at a time, so that products along time need no shuffles;
          channels come in pieces of 64. A warp past its sequence's end only leaves zeros.
Steps:    norms and the scores' diagonal; decays; scores within 16 tokens in four levels; | decayed
          keys and queries out; the next chunk's k and q begin to load; scores against earlier
          warps' tokens, out; its gates begin to load; inverse | out. ( | : the block meets)
Shared:   k, q and k decayed to its block's end 16 KB each, most scratch lies over them as they are
          used up, and gates of 16 bits come where the decayed k will be; 16 KB for the inverse,
          which runs while the next chunk's inputs arrive; 5 KB of tables. Three blocks an SM.
Registers: 48 words of vectors, 30 of decays, 16 scores: 168, three blocks an SM.
Bytes:    772 a token and head in (q, k, g in 16 bits, beta), 936 out at K = 128.
Floor:    those bytes at the memory's copy rate.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute import math
from cula.common.cute.dtypes import DTYPES
from cula.common.cute.smem import SmemAllocator
from cula.common.cute.wgmma import rows_layout
from cula.common.varlen.device import ceil_div, chunk_count, read_chunk, where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import (
    BLOCK,
    CHUNK,
    PANEL_BLOCK,
    PANELS,
    PREP_BLOCKS_PER_SM,
    Record,
    panel_origin,
)
from cula.kda.sm90.prep_block import (
    BETWEEN,
    LEVELS,
    NORMS,
    PIECE,
    ROWS,
    TRIANGLE,
    BlockWarp,
    decay_products,
    widen,
)
from cula.kda.sm90.prep_gates import LEAST_RATE, MOST_RATE, GateReader, step_size
from cula.kda.sm90.prep_inverse import COLUMN, invert_diagonal, write_column

LAST = 3  # the warp that is the last to read the others' kb, and then loads gates there


# Frozen: CuTe DSL lets dynamic loops read a frozen dataclass from outside.
@dataclass(frozen=True)
class Inputs:
    """What a block reads, and how its chunks are found."""

    q: tuple  # TMA atom and tensor, shared-memory layout, dtype
    k: tuple
    g: tuple | None  # gates of 16 bits
    mG: cute.Tensor
    mBeta: cute.Tensor
    mA: cute.Tensor | None
    mBias: cute.Tensor | None
    mWork: cute.Tensor | None
    chunks_at: Int32
    length: Int32
    heads: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2  # value heads a key head
    chunks: cute.FastDivmodDivisorV2  # of one of equal lengths


@dataclass(frozen=True)
class Place:
    """Where a (chunk, head) lies."""

    b: Int32
    first: Int32
    tokens: Int32
    head: Int32


class KdaPrep:
    """Host launch and device code; `config` (config.py) is everything known when compiling."""

    allowed_spill_bytes = 64  # softplus gates; see DESIGN.md, Budgets

    def __init__(self, config):
        self.config = config
        self.io = DTYPES[config.io]
        self.pieces = config.K // 64
        self.record = Record(config.K)
        self.gates_by_tma = config.gate_dtype != "fp32"

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
        chunks: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config

        def rows(t):  # (token, channel, head, b)
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))

        def loaded(t, dtype):
            """TMA atom and tensor, and the layout, of 16 rows of a piece."""
            layout = rows_layout(BLOCK, 64, 1, dtype)
            one = cute.slice_(layout, (None, None, 0))
            load = cpasync.CopyBulkTensorTileG2SOp()
            return (*cpasync.make_tiled_tma_atom(load, rows(t), one, (BLOCK, 64)), one)

        divisor = cute.FastDivmodDivisorV2
        aQ, tQ, lX = loaded(mQ, self.io)
        aK, tK, _ = loaded(mK, self.io)
        aG, tG, lG = None, None, None
        if cutlass.const_expr(self.gates_by_tma):
            aG, tG, lG = loaded(mG, DTYPES[c.gate_dtype])

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, 4]  # a warp's k and q have come
            gates: cute.struct.MemRange[Int64, 4]
            norms: cute.struct.Align[cute.struct.MemRange[Int32, NORMS], 16]  # of four warps
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 4 * c.K], 16]
            between: cute.struct.Align[cute.struct.MemRange[Float16, 8 * c.K], 16]
            triangle: cute.struct.Align[cute.struct.MemRange[Int32, TRIANGLE], 16]
            minus_a: cute.struct.Align[cute.struct.MemRange[Float16, CHUNK * BETWEEN // 2], 16]
            column: cute.struct.Align[cute.struct.MemRange[Int32, COLUMN], 16]
            k: cute.struct.Align[cute.struct.MemRange[self.io, CHUNK * 128], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.io, CHUNK * 128], 1024]
            back: cute.struct.Align[cute.struct.MemRange[Float16, CHUNK * c.K], 1024]

        self.Shared = Shared
        self.kernel(
            aQ, tQ, aK, tK, lX, aG, tG, lG, mG, mBeta, mA, mBias, mWork, mRecords, scale,
            lower_bound, chunks_at, mQ.shape[1], divisor(mG.shape[2]),
            divisor(mG.shape[2] // mQ.shape[2]), divisor(ceil_div(mQ.shape[1], CHUNK)),
            chunks * mG.shape[2],
        ).launch(
            grid=[blocks, 1, 1],
            block=[128, 1, 1],
            stream=stream,
            min_blocks_per_mp=PREP_BLOCKS_PER_SM,
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    # ------------------------------------------------------------------ device
    @cute.kernel
    def kernel(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        lX: cute.ComposedLayout,
        aG: cute.CopyAtom | None,
        tG: cute.Tensor | None,
        lG: cute.ComposedLayout | None,
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
        heads: cute.FastDivmodDivisorV2,
        group: cute.FastDivmodDivisorV2,
        chunks: cute.FastDivmodDivisorV2,
        count: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.Shared)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.gates.data_ptr() + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # launched before the schedule is complete, and before a call ahead has ended: nothing may
        # be read or written before this
        cute.arch.griddepcontrol_wait()

        if cutlass.const_expr(mWork is not None):  # the bound is for the host
            count = chunk_count(mWork.iterator) * mG.shape[2]
        inputs = Inputs(
            q=(aQ, tQ, lX, self.io),
            k=(aK, tK, lX, self.io),
            g=(aG, tG, lG, DTYPES[self.config.gate_dtype]) if self.gates_by_tma else None,
            mG=mG,
            mBeta=mBeta,
            mA=mA,
            mBias=mBias,
            mWork=mWork,
            chunks_at=chunks_at,
            length=length,
            heads=heads,
            group=group,
            chunks=chunks,
        )
        # the last chunks first: what the scan begins with is then still in L2
        block, blocks = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        last = count - 1 - block
        self.load_keys(inputs, storage, warp, last)
        if warp == LAST:
            self.load_gates(inputs, storage, last)
        for turn in cutlass.range(ceil_div(count - block, blocks), unroll=1):
            index = last - turn * blocks
            record = Int64(mRecords.iterator.toint()) + Int64(index) * Int64(self.record.bytes)
            self.prepare(inputs, storage, turn, index, index - blocks, record, scale, lower_bound)

    def place_of(self, inputs, index: Int32) -> Place:
        """Of the index-th (chunk, head). Heads are fastest: neighbours in memory."""
        chunk, head = (Int32(x) for x in divmod(index, inputs.heads))
        if cutlass.const_expr(inputs.mWork is None):
            b, number = (Int32(x) for x in divmod(chunk, inputs.chunks))
            first = number * CHUNK
            left = inputs.length - first
            return Place(b, first, where(left < CHUNK, left, CHUNK), head)
        row = read_chunk(inputs.mWork.iterator, inputs.chunks_at, chunk)
        return Place(Int32(0), row.begin, row.tokens, head)

    @cute.jit
    def prepare(
        self,
        inputs,
        storage,
        turn: Int32,
        index: Int32,
        next_index: Int32,
        record: Int64,
        scale: Float32,
        lower_bound: Float32,
    ):
        """The index-th (chunk, head): a warp's tokens, or zeros where it has none.

        The same barriers in both, for some of a block's warps may have tokens and others none.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = self.place_of(inputs, index)
        valid = place.tokens - 16 * warp
        if valid <= 0:
            self.prepare_zeros(inputs, storage, warp, turn, next_index, record)
        else:
            self.prepare_tokens(
                inputs, storage, warp, turn, place, valid, next_index, record, scale, lower_bound
            )

    @cute.jit
    def prepare_tokens(
        self,
        inputs,
        storage,
        warp: Int32,
        turn: Int32,
        place,
        valid: Int32,
        next_index: Int32,
        record: Int64,
        scale: Float32,
        lower_bound: Float32,
    ):
        c, pieces = self.config, self.pieces
        # anew, in both ways: what they have in common would wait in registers for the branch
        lane, next_index = ptx.anew(cute.arch.lane_idx()), ptx.anew(next_index)
        me = self.warp_of(storage, warp, lane)
        token = lane & 15
        beta = Float32(0.0)
        if token < valid:
            beta = step_size(c.beta, self.given_beta(inputs.mBeta, place, 16 * warp + token))
        bias = self.bias(inputs, place, 0, lane)
        gates = self.gates(inputs, me, lower_bound, place, warp, lane, valid)
        words = [] if self.gates_by_tma else gates.load(0)

        cute.arch.mbarrier_wait(storage.full.data_ptr() + warp, turn & 1)
        if valid < 16:
            for tile in (me.k, me.q):
                me.fill_past_end(tile, valid, pieces, 0)
            cute.arch.sync_warp()
        me.write_norms(scale, pieces)
        me.write_beta(beta)
        cute.arch.sync_warp()

        if cutlass.const_expr(self.gates_by_tma):
            cute.arch.mbarrier_wait(storage.gates.data_ptr() + warp, turn & 1)
            if valid < 16:
                gates.clear_past_end(pieces)
                cute.arch.sync_warp()

        scores = [[Float32(0.0)] * 4 for _ in LEVELS]
        for piece in cutlass.range_constexpr(pieces):
            if cutlass.const_expr(piece > 0 or self.gates_by_tma):
                words = gates.load(piece)
            if cutlass.const_expr(piece > 0):
                bias = self.bias(inputs, place, piece, lane)
            decays, total = decay_products(gates.factors(words, bias))
            me.write_totals(piece, total)
            kb, q = me.normalised(piece)
            kf = [ptx.multiply_halves(x, d) for x, d in zip(kb, decays[1], strict=True)]
            qf = [ptx.multiply_halves(x, d) for x, d in zip(q, decays[1], strict=True)]
            cute.arch.sync_warp()  # the piece's inputs have been read
            for level in cutlass.range_constexpr(len(LEVELS)):
                me.write_level(level, piece, kf, qf, kb)
                cute.arch.sync_warp()
                scores[level] = me.multiply_level(level, piece, scores[level])
                widen(LEVELS[level], kf, qf, kb, decays[LEVELS[level]])
            cute.arch.sync_warp()
            me.write_operands(piece, kf, qf, kb)
        cute.arch.sync_threads()

        lane = ptx.anew(lane)  # the addresses that follow would wait in registers
        me = self.warp_of(storage, warp, lane)
        before, after, total = me.read_totals()
        rows = record + Int64(warp * ROWS)
        me.write_rows(me.k, rows + Int64(self.record.kg), before)
        me.write_rows(me.q, rows + Int64(self.record.qg), before)
        me.write_rows(me.back, rows + Int64(self.record.kr), after)
        if warp == 0:
            target = record + Int64(self.record.decay) + Int64(lane % (c.K // 8) * 32)
            for half in cutlass.range_constexpr(2):
                sums = [x.bitcast(Int32) for x in total[4 * half : 4 * half + 4]]
                ptx.store_global(target, 16 * half, sums)

        kf, qf = me.fragments(me.k, pieces), me.fragments(me.q, pieces)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.load_keys(inputs, storage, warp, next_index)  # the warp's rows of k and q are free
        aqk = me.column
        ptx.store_shared(aqk + warp * PANEL_BLOCK + lane * 16, 0, [0] * 4)  # the diagonal block
        cute.arch.sync_warp()
        me.write_diagonal(scores, aqk)
        if warp > 0:
            me.multiply_earlier(0, kf, qf, aqk)
        if warp > 1:
            me.multiply_earlier(1, kf, qf, aqk)
        cute.arch.fence_proxy("async.shared", space="cta")
        if warp == LAST:
            me.multiply_earlier(2, kf, qf, aqk)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            self.load_gates(inputs, storage, next_index)
        else:
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=128)
        cute.arch.sync_warp()
        target = record + Int64(self.record.aqk) + Int64(warp * PANEL_BLOCK) + Int64(lane * 16)
        for j in cutlass.range_constexpr(PANELS):
            words = ptx.load_shared(aqk + lane * 16, PANEL_BLOCK * j, 4)
            ptx.store_global_if(warp >= j, target, panel_origin(j), words)
        invert_diagonal(me)
        cute.arch.sync_threads()
        write_column(me, record + Int64(self.record.t))

    @cute.jit
    def prepare_zeros(
        self, inputs, storage, warp: Int32, turn: Int32, next_index: Int32, record: Int64
    ):
        """What 16 tokens past the end leave: 0 in the record's triangles, nothing in its rows of K
        columns, and for other warps decays of 1.

        Their inputs are loaded all the same, so that every chunk is a phase of the warp's barriers.
        """
        warp, next_index = ptx.anew(warp), ptx.anew(next_index)
        me = self.warp_of(storage, warp, ptx.anew(cute.arch.lane_idx()))
        for piece in cutlass.range_constexpr(self.pieces):
            me.write_totals(piece, [Float32(1.0)] * 2)
        cute.arch.mbarrier_wait(storage.full.data_ptr() + warp, turn & 1)
        if cutlass.const_expr(self.gates_by_tma):
            cute.arch.mbarrier_wait(storage.gates.data_ptr() + warp, turn & 1)
        cute.arch.sync_threads()

        self.load_keys(inputs, storage, warp, next_index)
        me.write_zero_triangles(ptx.anew(record), self.record)
        if warp == LAST:
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            self.load_gates(inputs, storage, next_index)
        else:
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=128)
        me.write_zero_scores()
        cute.arch.sync_threads()

    @cute.jit
    def load_keys(self, inputs, storage, warp: Int32, index: Int32):
        """Starts the loads of the warp's k and q of the index-th (chunk, head), if there is one."""
        if index >= 0:
            place = self.place_of(inputs, index)
            full = storage.full.data_ptr() + warp
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.pieces * ROWS)
            key_head = Int32(divmod(place.head, inputs.group)[0])
            self.load_rows(inputs.k, storage.k, full, warp, place, key_head)
            self.load_rows(inputs.q, storage.q, full, warp, place, key_head)

    @cute.jit
    def load_gates(self, inputs, storage, index: Int32):
        """The same for all warps' gates of 16 bits, over `back`, which the block has used up."""
        if cutlass.const_expr(self.gates_by_tma):
            if index >= 0:
                place = self.place_of(inputs, index)
                for warp in cutlass.range_constexpr(4):
                    full = storage.gates.data_ptr() + warp
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.pieces * ROWS)
                    self.load_rows(inputs.g, storage.back, full, warp, place, place.head)

    def load_rows(self, source: tuple, tile, full, warp: Int32, place, head: Int32) -> None:
        """Past the tensor's end TMA fills in zeros."""
        atom, tensor, layout, dtype = source
        rows = cute.domain_offset(
            (place.first + BLOCK * warp, 0), tensor[None, None, head, place.b]
        )
        for piece in range(self.pieces):
            start = tile.data_ptr() + (piece * PIECE + warp * ROWS) // 2
            shared = cute.make_tensor(
                cute.recast_ptr(start, layout.inner, dtype=dtype), layout.outer
            )
            sX, gX = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(shared, 0, 2),
                cute.group_modes(cute.local_tile(rows, (BLOCK, 64), (0, piece)), 0, 2),
            )
            cute.copy(atom, gX, sX, tma_bar_ptr=full)

    # ------------------------------------------------------------------ pieces
    def warp_of(self, storage, warp: Int32, lane: Int32) -> BlockWarp:
        names = ("k", "q", "back", "norms", "totals", "between", "triangle", "minus_a", "column")
        at = {name: Int32(getattr(storage, name).data_ptr().toint()) for name in names}
        return BlockWarp(
            config=self.config,
            warp=warp,
            lane=lane,
            k=at["k"] + warp * ROWS,
            q=at["q"] + warp * ROWS,
            back=at["back"] + warp * ROWS,
            tile_back=at["back"],
            norms=at["norms"] + warp * NORMS,
            totals=at["totals"],
            between=at["between"] + warp * (4 * self.config.K),
            triangles=at["triangle"],
            minus_a=at["minus_a"],
            column=at["column"] + warp * COLUMN,
        )

    def given_beta(self, mBeta, place, token: Int32) -> Float32:
        at = (
            Int64(place.b) * Int64(mBeta.stride[0])
            + Int64(place.first + token) * Int64(mBeta.stride[1])
            + Int64(place.head) * Int64(mBeta.stride[2])
        )
        return Float32(cute.make_tensor(mBeta.iterator + at, cute.make_layout(1))[0])

    def bias(self, inputs, place, piece: int, lane: Int32) -> list:
        """Of the lane's two channels."""
        if not self.config.bias:
            return [Float32(0.0)] * 2
        at = place.head * self.config.K + (64 * piece + 2 * lane)
        return [inputs.mBias[at], inputs.mBias[at + 1]]

    def gates(self, inputs, me, lower_bound, place, warp, lane, valid) -> GateReader:
        mG, mA = inputs.mG, inputs.mA
        rate = Float32(1.0)
        if cutlass.const_expr(mA is not None):
            rate = cute.arch.fmax(math.exp(mA[place.head]), Float32(LEAST_RATE))
            rate = cute.arch.fmin(rate, Float32(MOST_RATE))
        size = mG.element_type.width // 8
        at = (
            Int64(place.b) * Int64(mG.stride[0])
            + Int64(place.first + 16 * warp) * Int64(mG.stride[1])
            + Int64(place.head) * Int64(mG.stride[2])
            + Int64(2 * lane)
        )
        return GateReader(
            config=self.config,
            warp=me,
            address=Int64(mG.iterator.toint()) + at * Int64(size),
            stride=Int64(mG.stride[1]) * Int64(size),
            valid=valid,
            rate=rate,
            lower_bound=lower_bound,
        )
