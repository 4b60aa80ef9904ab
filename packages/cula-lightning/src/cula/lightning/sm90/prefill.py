"""Lightning Attention prefill on Hopper: a chunk scan with the state in wgmma registers.

Tile:      a block takes units (sequence, head, part of V) and walks each in chunks of 64 tokens; a
           state warpgroup holds the transposed state of 64 value channels, S^T [64, K] in float32.
Roles:     warp 0 loads (TMA) and hands out units; state warpgroups (1 or 2) compute and store. With
           two, they share a head: q and k are loaded once, and each computes half of the scores.
Chunk:     O^T = scale (diag(l^(i+1)) S^T Q^T + V^T P^T),  P = tril(Q K^T * l^(i-j)),  l = e^g
           S^T <- l^L S^T + (V l^(L-1-j))^T K      for a chunk of L tokens
           P of the next chunk is computed among this one's products.
Shared:    stages of q, k, v (40 KB; 48 KB with two warpgroups), two buffers of P (8 KB each) and of
           O (8 KB a warpgroup each), 256 powers of l a warpgroup: 194 KB at D = 128.
Registers: S 64, its 16-bit copy 32, O 64, scores 32 / warpgroups, decayed V 16: 255, or 240 a
           thread with two warpgroups.
Bytes:     1,024 a token and head: q, k, v in and o out (two parts read q and k twice, from L2).
Floor:     those bytes at the memory's copy rate.
"""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cula.common.cute.dtypes import DTYPES
from cula.common.cute.smem import SmemAllocator
from cula.common.cute.stand_ins import fake_states, fake_tokens, fake_vector
from cula.common.cute.states import HeadState
from cula.common.cute.tma import tile_copies
from cula.common.cute.units import (
    END,
    RING,
    WORDS,
    draw,
    hear,
    next_index,
    tell,
    unit_at,
    with_slots,
)
from cula.common.cute.wgmma import columns_layout, rows_layout
from cula.common.kernel_args import States
from cula.common.varlen.device import ceil_div, load4, store4, where
from cula.lightning.sm90.block import (
    SharedMemory,
    StatesInMemory,
    columns_from,
    rows_from,
)
from cula.lightning.sm90.config import CHUNK, PART
from cula.lightning.sm90.states import KeptState
from cula.lightning.sm90.warpgroup import TABLE, state_warpgroup

SEGMENT_STATES = States("fp32", True)
SHARED = 220 * 1024
PRODUCER_REGISTERS = 24
STATE_REGISTERS = 240


class LightningPrefill:
    """Host launch and device code; `config` (config.py) is everything known when compiling."""

    # The accumulators fill the register file: some configurations keep a few addresses in memory.
    allowed_spill_bytes = 96

    def __init__(self, config):
        self.config = config
        self.io = DTYPES[config.io]
        self.groups = config.warpgroups
        self.threads = 128 * (1 + self.groups)
        self.columns = CHUNK // self.groups  # of the scores, a warpgroup
        self.first_pass = config.segments == "first"
        # The first pass lets no kernel after it start before its own wait is over. So what ran
        # before that pass has ended when this one starts, and the call's inputs (q, k, v, decays,
        # indices, mask) may be read while the prefix kernel still runs. Packed: the load warp reads
        # the schedule, too, so it waits.
        self.loads_early = config.segments == "second" and not config.varlen
        loaded = 1 if self.first_pass else 2  # of k and q
        self.stage_bytes = 2 * CHUNK * (loaded * config.K + PART * self.groups)
        tiles = 2 * 2 * CHUNK * (CHUNK + PART * self.groups)
        stage = 2 * CHUNK * (2 * config.K + PART * self.groups)
        self.stages = min(4, (SHARED - tiles) // stage)
        assert self.stages >= 2, "a unit's first chunk is loaded before the state warps hear of it"

    # ------------------------------------------------------------------ host
    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`."""
        c = self.config
        B, T, H, HV = (cute.sym_int() for _ in range(4))

        def tokens(heads, channels):
            return fake_tokens(self.io, B, T, heads, channels)

        def states(kind):
            return fake_states(kind, HV, c.V, c.K)

        index = c.state_indices
        return (
            tokens(H, c.K),
            tokens(H, c.K),
            tokens(HV, c.V),
            make_fake_tensor(Float32, (HV,), (cute.sym_int64(),)),
            states(c.initial),
            states(c.final),
            None if index is None else fake_vector(DTYPES[index]),
            fake_vector(cutlass.Uint8) if c.mask else None,
            states(c.checkpoints),
            states(SEGMENT_STATES if c.segments else None),
            fake_vector(Int32, 16) if c.varlen else None,
            tokens(HV, c.V),
            Float32(1.0),
            Int32(1),
            Int32(1),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (B, T, H, K)
        mK: cute.Tensor,  # (B, T, H, K)
        mV: cute.Tensor,  # (B, T, HV, V)
        mG: cute.Tensor,  # (HV), log decay
        mInitial: cute.Tensor | None,  # (slots, HV, V, K), any of the two layouts
        mFinal: cute.Tensor | None,
        mIndex: cute.Tensor | None,  # (N)
        mMask: cute.Tensor | None,  # (N)
        mMarks: cute.Tensor | None,  # (rows, HV, V, K), states along the way
        mLocal: cute.Tensor | None,  # (segments, HV, V, K), states of segments: see KeptState
        mWork: cute.Tensor | None,  # the schedule's workspace
        mO: cute.Tensor,  # (B, T, HV, V)
        scale: Float32,
        interval: Int32,  # tokens between checkpoints
        segment_chunks: Int32,
        units: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        c, io, groups = self.config, self.io, self.groups
        lQ = rows_layout(CHUNK, c.K, self.stages, io)
        lKt = columns_layout(c.K, CHUNK, self.stages, io)
        lV = columns_layout(PART, CHUNK, self.stages * groups, io)
        lP = rows_layout(CHUNK, CHUNK, 2, io)
        lO = columns_layout(PART, CHUNK, 2 * groups, io)

        def rows(t):  # (token, channel, head, b)
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))

        def columns(t):  # (channel, token, head, b)
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))

        def one(layout):
            return cute.slice_(layout, (None, None, 0))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        aQ, tQ = cpasync.make_tiled_tma_atom(load, rows(mQ), one(lQ), (CHUNK, c.K))
        aK, tK = cpasync.make_tiled_tma_atom(load, rows(mK), one(lQ), (CHUNK, c.K))
        aV, tV = cpasync.make_tiled_tma_atom(load, columns(mV), one(lV), (PART, CHUNK))
        aO, tO = cpasync.make_tiled_tma_atom(store, columns(mO), one(lO), (PART, CHUNK))

        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[io, cute.cosize(layout)], 1024]

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            unit_full: cute.struct.MemRange[Int64, RING]
            unit_empty: cute.struct.MemRange[Int64, RING]
            units: cute.struct.Align[cute.struct.MemRange[Int32, RING * WORDS], 16]
            powers: cute.struct.Align[cute.struct.MemRange[Float32, TABLE * groups], 16]
            q: tile(lQ)
            k: tile(lQ)
            v: tile(lV)
            p: tile(lP)
            o: tile(lO)

        self.Shared = Shared
        self.kernel(
            aQ, tQ, aK, tK, aV, tV, aO, tO, lQ, lKt, lV, lP, lO,
            mG, mInitial, mFinal, mIndex, mMask, mMarks, mLocal, mWork, mO, mV.shape,
            scale, interval, segment_chunks, units,
            mQ.shape[2],
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
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
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        lQ: cute.ComposedLayout,
        lKt: cute.ComposedLayout,
        lV: cute.ComposedLayout,
        lP: cute.ComposedLayout,
        lO: cute.ComposedLayout,
        mG: cute.Tensor,
        mInitial: cute.Tensor | None,
        mFinal: cute.Tensor | None,
        mIndex: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mMarks: cute.Tensor | None,
        mLocal: cute.Tensor | None,
        mWork: cute.Tensor | None,
        mO: cute.Tensor,
        shape: cute.Shape,  # of v
        scale: Float32,
        interval: Int32,
        segment_chunks: Int32,
        units: Int32,
        key_heads: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.Shared)
        shared = SharedMemory(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            unit_full=storage.unit_full.data_ptr(),
            unit_empty=storage.unit_empty.data_ptr(),
            units=storage.units.data_ptr(),
            powers=storage.powers.data_ptr(),
            q=storage.q.get_tensor(lQ.outer, swizzle=lQ.inner),
            k=storage.k.get_tensor(lQ.outer, swizzle=lQ.inner),
            k_columns=storage.k.get_tensor(lKt.outer, swizzle=lKt.inner),
            v=storage.v.get_tensor(lV.outer, swizzle=lV.inner),
            p=storage.p.get_tensor(lP.outer, swizzle=lP.inner),
            o=storage.o.get_tensor(lO.outer, swizzle=lO.inner),
            k_start=storage.k.data_ptr(),
            v_start=storage.v.data_ptr(),
            o_start=storage.o.data_ptr(),
        )
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(shared.full + s, 1)
                    cute.arch.mbarrier_init(shared.empty + s, 4 * self.groups)
                for s in cutlass.range_constexpr(RING):
                    cute.arch.mbarrier_init(shared.unit_full + s, 1)
                    cute.arch.mbarrier_init(shared.unit_empty + s, 128 * self.groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Launched before the kernel ahead of it has ended, be it ours or the caller's: nothing that
        # it writes may be read, and nothing written, before this.
        if cutlass.const_expr(not self.loads_early):
            cute.arch.griddepcontrol_wait()
        # After the wait, not before: second reads the call's inputs without one, and counts on it
        # that all before first has ended. Calls of whole sequences took 1 to 7% longer with it.
        if cutlass.const_expr(self.config.segments is not None):
            cute.arch.griddepcontrol_launch_dependents()

        states = StatesInMemory(mInitial, mFinal, mIndex, mMask, mMarks, mLocal, interval)
        if warp < 4:
            if cutlass.const_expr(self.groups > 1):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(
                    aQ, tQ, aK, tK, aV, tV, shared, mG, states, mWork, shape, segment_chunks, units,
                    key_heads,
                )  # fmt: skip
        else:
            if cutlass.const_expr(self.groups > 1):
                cute.arch.setmaxregister_increase(STATE_REGISTERS)
            if cutlass.const_expr(self.loads_early):
                cute.arch.griddepcontrol_wait()
            self.scan(aO, tO, shared, states, mO, scale)

    # ------------------------------------------------------------------ loads
    @cute.jit
    def load(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        shared,
        mG: cute.Tensor,
        states,
        mWork: cute.Tensor | None,
        shape: cute.Shape,
        segment_chunks: Int32,
        units: Int32,
        key_heads: Int32,
    ):
        """The load warp: draws units, tells the state warps, and keeps the stages filled."""
        group, counter = shape[2] // key_heads, 1 if self.first_pass else 0
        index = Int32(cute.arch.block_idx()[0])
        told, loaded = Int32(0), Int32(0)  # units and chunks so far
        while index < units:
            unit = unit_at(index, mWork, shape, self.config.parts, CHUNK, segment_chunks)
            key_head, K = unit.head // group, self.config.K
            sQ, gQ = tile_copies(aQ, rows_from(tQ, unit.b, unit.first, key_head, K), shared.q)
            sK, gK = tile_copies(aK, rows_from(tK, unit.b, unit.first, key_head, K), shared.k)
            sV, gV = tile_copies(aV, columns_from(tV, unit.b, unit.first, unit.head), shared.v)
            copies = (aQ, gQ, sQ, aK, gK, sK, aV, gV, sV)
            decay = Float32(mG[unit.head])
            chunks, first, step = self.chunks_to_load(unit, decay)
            ticket = Int32(0)
            if chunks <= 1:
                ticket = draw(mWork, counter)
            if unit.n >= 0:
                message = replace(with_slots(unit, states), more=decay.bitcast(Int32))
                # first what takes longest
                if chunks > 0:
                    self.load_chunk(copies, shared, unit, first, loaded)
                    loaded += 1
                tell(shared, told, message)
                told += 1
            for i in cutlass.range(1, chunks - 1, unroll=1):
                self.load_chunk(copies, shared, unit, first + step * i, loaded)
                loaded += 1
            if chunks > 1:
                # on its way while the last chunk waits for its stage
                ticket = draw(mWork, counter)
                self.load_chunk(copies, shared, unit, first + step * (chunks - 1), loaded)
                loaded += 1
            index = next_index(index, ticket, mWork)
        tell(shared, told, END)

    @cute.jit
    def load_chunk(self, copies, shared, unit, at: Int32, loaded: Int32):
        """Chunk `at` of the unit, the block's loaded-th."""
        aQ, gQ, sQ, aK, gK, sK, aV, gV, sV = copies
        stages, groups = self.stages, self.groups
        s = loaded % stages
        full = shared.full + s
        cute.arch.mbarrier_wait(shared.empty + s, loaded // stages % 2 ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
        if cutlass.const_expr(not self.first_pass):
            cute.copy(aQ, gQ[(None, at)], sQ[(None, s)], tma_bar_ptr=full)
        cute.copy(aK, gK[(None, at)], sK[(None, s)], tma_bar_ptr=full)
        for w in cutlass.range_constexpr(groups):
            part = unit.part * groups + w
            cute.copy(aV, gV[(None, part, at)], sV[(None, s * groups + w)], tma_bar_ptr=full)

    def chunks_to_load(self, unit, decay):
        """How many, the first, the step to the next."""
        return ceil_div(unit.tokens, CHUNK), 0, 1

    # ------------------------------------------------------------------ computes
    @cute.jit
    def scan(
        self,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        shared,
        states,
        mO: cute.Tensor,
        scale: Float32,
    ):
        """A state warpgroup: walks the units' chunks with S^T in registers."""
        c, stages, groups = self.config, self.stages, self.groups
        thread = cute.arch.thread_idx()[0] % 128
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        g = state_warpgroup(shared, c, self.io, thread, wg)

        told = Int32(0)  # units so far
        stage, phase, buffer = Int32(0), Int32(0), Int32(0)  # of the next chunk
        u = hear(shared, told)
        while u.n >= 0:
            told += 1
            value = (u.part * groups + wg) * PART  # the warpgroup's first value channel
            self.load_state(states, u, value, thread, g.S)
            chunks = ceil_div(u.tokens, CHUNK)
            if chunks > 0:
                tail = u.tokens - (chunks - 1) * CHUNK
                # everyone has read the last unit's powers: a barrier came after that
                g.store_powers(u.more.bitcast(Float32), scale)
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                tokens = where(chunks > 1, CHUNK, tail)
                self.clear_tail(shared, stage, tokens, thread, wg)
                g.barrier()
                warpgroup.fence()
                g.issue_scores(stage)
                g.load_values(stage, tokens)
                warpgroup.wait_group(0)
                g.round_state(tokens)
                g.store_scores(buffer)

                gO = cute.domain_offset((0, u.first), tO[None, None, u.head, u.b])
                copy_s, copy_g = tile_copies(
                    aO, cute.local_tile(gO, (PART, CHUNK), (value // PART, None)), shared.o
                )
                for i in cutlass.range(chunks - 1, unroll=1):
                    wraps = stage + 1 == stages
                    stage1, phase1 = where(wraps, 0, stage + 1), where(wraps, phase ^ 1, phase)
                    cute.arch.mbarrier_wait(shared.full + stage1, phase1)
                    tokens = where(i + 2 < chunks, CHUNK, tail)
                    self.clear_tail_together(shared, stage1, tokens, thread, wg)
                    # the state's products first: while the others run, it is rounded for the next
                    warpgroup.fence()
                    g.issue_past(stage)
                    g.issue_state(stage)
                    g.issue_scores(stage1)
                    self.meet(g, thread)
                    if (thread < 32) & (i > 0):
                        before = (buffer ^ 1) * groups + wg
                        cute.copy(aO, copy_s[(None, before)], copy_g[(None, i - 1)])
                        cute.arch.cp_async_bulk_commit_group()
                    g.issue_present(stage, buffer)
                    if cutlass.const_expr(c.checkpoints is None):
                        warpgroup.wait_group(2)
                        g.round_state(tokens)
                    g.load_values(stage1, tokens)
                    warpgroup.wait_group(1)
                    g.store_scores(buffer ^ 1)
                    warpgroup.wait_group(0)
                    g.store_output(buffer)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(shared.empty + stage)
                    if cutlass.const_expr(c.checkpoints is not None):
                        # it branches, so it waits until no accumulator is in flight
                        self.keep_state(states, u, i + 1, value, thread, g.S)
                        g.round_state(tokens)
                    stage, phase, buffer = stage1, phase1, buffer ^ 1

                warpgroup.fence()
                g.issue_past(stage)
                g.issue_state(stage)
                self.meet(g, thread)
                if (thread < 32) & (chunks > 1):
                    before = (buffer ^ 1) * groups + wg
                    cute.copy(aO, copy_s[(None, before)], copy_g[(None, chunks - 2)])
                    cute.arch.cp_async_bulk_commit_group()
                g.issue_present(stage, buffer)
                warpgroup.wait_group(0)
                g.store_output(buffer)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
                self.meet(g, thread)
                mine = buffer * groups + wg
                whole = True  # of equal lengths, what lies past the end is cut off
                if cutlass.const_expr(c.varlen):
                    whole = tail == CHUNK
                    if tail < CHUNK:
                        first = u.first + (chunks - 1) * CHUNK
                        self.store_rows(shared, mine, mO, u, value, first, tail, thread)
                if (thread < 32) & whole:
                    cute.copy(aO, copy_s[(None, mine)], copy_g[(None, chunks - 1)])
                    cute.arch.cp_async_bulk_commit_group()
                if tail == CHUNK:
                    self.keep_state(states, u, chunks, value, thread, g.S)
                wraps = stage + 1 == stages
                stage, phase = where(wraps, 0, stage + 1), where(wraps, phase ^ 1, phase)
                buffer = buffer ^ 1
                self.store_state(states, u, value, thread, g.S)
            else:
                # not the path above with S merged: ptxas would copy accumulators that are in flight
                self.store_state(states, u, value, thread, g.S)

            u = hear(shared, told)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def meet(self, g, thread: Int32):
        """The state warpgroups' writes to shared memory become everyone's, TMA's included.

        The warp that stores sees to it that its last store has been read: its buffer is next.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        g.barrier()

    @cute.jit
    def clear_tail_together(self, shared, stage: Int32, tokens: Int32, thread: Int32, wg: Int32):
        """`clear_tail`, for all state warpgroups before they go on."""
        if cutlass.const_expr(self.config.varlen):
            if tokens < CHUNK:
                self.clear_tail(shared, stage, tokens, thread, wg)
                cute.arch.barrier(barrier_id=1, number_of_threads=128 * self.groups)

    @cute.jit
    def clear_tail(self, shared, stage: Int32, tokens: Int32, thread: Int32, wg: Int32):
        """Zeros the rows of k and v that are the next sequence's: even NaN there must not count.

        Equal lengths need none of it: TMA fills with zeros past a tensor's end.
        """
        if cutlass.const_expr(self.config.varlen):
            if tokens < CHUNK:
                K, groups = self.config.K, self.groups
                row, piece = thread // 8, thread % 8 * 8  # of 16 rows, 8 pieces of 16 bytes
                key = shared.k_start + stage * (CHUNK * K)
                value = shared.v_start + (stage * groups + wg) * (CHUNK * PART)
                for i in cutlass.range_constexpr(CHUNK // 16):
                    if row + 16 * i >= tokens:
                        at = (row + 16 * i) * PART + piece
                        store4((value + at).align(16), [0] * 4, shared=True)
                        if cutlass.const_expr(groups == 1):
                            for half in cutlass.range_constexpr(K // PART):
                                store4(
                                    (key + (at + half * CHUNK * PART)).align(16),
                                    [0] * 4,
                                    shared=True,
                                )
                        else:  # a half each
                            store4(
                                (key + (at + wg * (CHUNK * PART))).align(16), [0] * 4, shared=True
                            )
                cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def store_rows(
        self,
        shared,
        buffer: Int32,
        mO: cute.Tensor,
        u,
        value: Int32,
        first: Int32,
        tokens: Int32,
        thread: Int32,
    ):
        """The rows of a sequence's last chunk: those that follow are another sequence's."""
        piece = thread % 8
        for i in cutlass.range_constexpr(CHUNK // 16):
            row = thread // 8 + 16 * i
            if row < tokens:
                # 128-byte swizzle: the row's low bits turn the place of each 16 bytes
                at = buffer * (CHUNK * PART) + row * PART + (piece ^ (row % 8)) * 8
                words = load4((shared.o_start + at).align(16), shared=True)
                o = mO.iterator + (
                    Int64(u.b) * Int64(mO.stride[0])
                    + Int64(first + row) * Int64(mO.stride[1])
                    + Int64(u.head) * Int64(mO.stride[2])
                    + Int64(value + piece * 8)
                )
                store4(o.align(16), words)

    # ------------------------------------------------------------------ states
    @cute.jit
    def load_state(self, states, u, value: Int32, thread: Int32, S: cute.Tensor):
        """The state that a unit starts from."""
        S.fill(0.0)
        if cutlass.const_expr(self.config.segments == "second"):
            if u.segments > 1:
                # row 0 is the initial state, where there may be one: the pool may hold the final
                # state already
                if u.segment >= (1 if self.config.initial is None else 0):
                    KeptState(states.local, u.place + u.segment, u.head, value, thread).load(S)
            elif u.segments == 1:
                self.load_initial(states, u, value, thread, S)
        else:
            self.load_initial(states, u, value, thread, S)

    @cute.jit
    def load_initial(self, states, u, value: Int32, thread: Int32, S: cute.Tensor):
        if cutlass.const_expr(self.config.initial is not None):
            if u.initial >= 0:
                kind = self.config.initial
                self.in_memory(states.initial, kind, u.initial, u, value, thread).load(S)

    @cute.jit
    def store_state(self, states, u, value: Int32, thread: Int32, S: cute.Tensor):
        """The final state, by the unit with the sequence's last tokens."""
        if cutlass.const_expr(self.config.final is not None):
            if (u.final >= 0) & (u.segment + 1 == u.segments):
                kind = self.config.final
                self.in_memory(states.final, kind, u.final, u, value, thread).store(S)

    @cute.jit
    def keep_state(self, states, u, chunks: Int32, value: Int32, thread: Int32, S: cute.Tensor):
        """A checkpoint, if one is due after so many whole chunks of the unit."""
        if cutlass.const_expr(self.config.checkpoints is not None):
            done = u.before + chunks * CHUNK
            if done % states.interval == 0:
                row = Int64(u.start // states.interval + done // states.interval - 1)
                self.in_memory(states.marks, self.config.checkpoints, row, u, value, thread).store(
                    S
                )

    def in_memory(self, tensor, kind, slot, u, value, thread):
        return HeadState(tensor, slot, u.head, value, thread, self.config.K, kind.v_first)
