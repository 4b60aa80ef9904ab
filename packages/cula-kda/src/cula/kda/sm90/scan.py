"""KDA prefill on Hopper, second kernel: a scan over chunks with the state in wgmma registers.

Tile:     a block, one an SM, takes units (sequence, value head, 64 value channels), longest first,
          and walks each in chunks of 64 tokens, with the transposed state S^T [64, K] in float32.
Roles:    warp 0 hands out units and loads (bulk copies of records, TMA of v), ahead into the next
          unit; warps 4-7, the state warpgroup, compute and store. Warps 1-3 only fill up the first
          warpgroup.
Chunk:    X^T = V^T - S^T Kg^T,  V'^T = X^T T^T,  O^T = S^T Qg^T + V'^T Aqk^T,
          S^T <- S^T diag(e^G_C) + V'^T Kr. Every left operand is an accumulator, rounded in place;
          the state and V' never leave the registers.
Shared:   stages of a record (64.5 KB at K = 128, its zeros too) and v (8 KB), one buffer of o
          (8 KB): 226 KB with three stages. States leave by way of a stage (scan_store.py).
Registers: S 64, what is added to it 64, its rounded copy 32, O 32, X and V' 16 each, v and o 16
          each, of which S, its copy and O always live.
Segments: where sequences are cut along time (config.segments), this is the last of three passes, a
          unit is a segment, there is a block for each, and the state before it lies in a workspace
          (segments.py, combine.py).
Bytes:    936 a token and head of records (for both halves of V, the second from L2), v, o 512.
Floor:    those bytes at the memory's copy rate.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
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
from cula.common.cute.wgmma import columns_layout, rows_layout, slices_layout
from cula.common.kernel_args import States
from cula.common.varlen.device import ceil_div, load4, store4, where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import CHUNK, PART, Record
from cula.kda.sm90.scan_block import (
    StatesInMemory,
    columns_from,
    segment_states,
    shared_memory,
)
from cula.kda.sm90.scan_record import (
    ROW,
    arriving_bytes,
    existing_rows,
    panels_layout,
    record_pieces,
    tile_bytes,
    write_absent,
    write_zeros,
)
from cula.kda.sm90.scan_state import scan_state
from cula.kda.sm90.scan_store import StateRows, store_state

SEGMENT_STATES = States("fp32", True)
SHARED = 226 * 1024
WARP_CHANNELS = 16  # whose outputs one warp stores
LOADING_REGISTERS, STATE_REGISTERS = 24, 240  # a thread, where two warpgroups compute


class KdaScan:
    """Host launch and device code; `config` (config.py) is everything known when compiling.

    groups: state warpgroups of a block. outputs: whether it makes outputs, or states alone.
    """

    groups = 1
    outputs = True

    def __init__(self, config):
        self.config = config
        self.io = DTYPES[config.io]
        self.record = Record(config.K)
        self.parts = config.parts
        self.cluster = config.cluster
        self.value_bytes = 2 * CHUNK * PART
        self.pieces = record_pieces(self.record, self.outputs)
        self.tile_bytes = tile_bytes(self.pieces)
        free = SHARED - (self.value_bytes if self.outputs else 0)
        stage_bytes = sum(self.tile_bytes.values()) + self.groups * self.value_bytes
        self.stages = min(4, free // stage_bytes)
        assert self.stages >= 2, "a unit's first chunk is loaded before the state warps hear of it"

    # ------------------------------------------------------------------ host
    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `__call__`."""
        c = self.config
        B, T, HV = (cute.sym_int() for _ in range(3))

        def states(kind):
            return fake_states(kind, HV, c.V, c.K)

        index = c.state_indices
        return (
            fake_tokens(self.io, B, T, HV, c.V),
            make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16),
            states(c.initial),
            states(c.final),
            None if index is None else fake_vector(DTYPES[index]),
            fake_vector(cutlass.Uint8) if c.mask else None,
            states(c.checkpoints),
            None if c.segments is None else segment_states(c, HV),
            fake_vector(Int32, 16) if c.varlen else None,
            fake_tokens(self.io, B, T, HV, c.V),
            Int32(1),
            Int32(1),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,  # (B, T, HV, V)
        mRecords: cute.Tensor,  # records [chunk, head], in words
        mInitial: cute.Tensor | None,  # (slots, HV, V, K), any of the two layouts
        mFinal: cute.Tensor | None,
        mIndex: cute.Tensor | None,  # (N)
        mMask: cute.Tensor | None,  # (N)
        mMarks: cute.Tensor | None,  # (rows, HV, V, K), states along the way
        mSegments: cute.Tensor | None,  # (segments, HV, V + K, K): segments.py
        mWork: cute.Tensor | None,  # the schedule's workspace
        mO: cute.Tensor,  # (B, T, HV, V)
        interval: Int32,  # tokens between checkpoints
        segment_chunks: Int32,  # chunks a segment, of equal lengths
        units: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        lK = rows_layout(CHUNK, c.K, self.stages, Float16)
        lSquare = panels_layout(self.stages, Float16)
        lKr = columns_layout(c.K, CHUNK, self.stages, Float16)
        lV = columns_layout(PART, CHUNK, self.stages * self.groups, self.io)

        def columns(t):  # (channel, token, head, b)
            return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))

        def one(layout):
            return cute.slice_(layout, (None, None, 0))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        aV, tV = cpasync.make_tiled_tma_atom(load, columns(mV), one(lV), (PART, CHUNK))
        aO, tO, lO, lSlices = None, None, None, None
        if cutlass.const_expr(self.outputs):
            lO = slices_layout(PART, CHUNK, 1, self.io)
            lSlices = slices_layout(WARP_CHANNELS, CHUNK, PART // WARP_CHANNELS, self.io)
            tile = (WARP_CHANNELS, CHUNK)
            aO, tO = cpasync.make_tiled_tma_atom(store, columns(mO), one(lSlices), tile)
        self.Shared = self.shared_struct(lK, lSquare, lKr, lV, lO)
        self.kernel(
            aV, tV, aO, tO, lK, lSquare, lKr, lV, lO, lSlices,
            mRecords, mInitial, mFinal, mIndex, mMask, mMarks, mSegments, mWork, mO, interval,
            segment_chunks, units,
        ).launch(
            grid=[blocks, 1, 1],
            block=[128 + 128 * self.groups, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def shared_struct(self, lK, lSquare, lKr, lV, lO):
        """The block's shared memory: what of SharedMemory it has."""
        tiles = {
            "kg": (lK, Float16),
            "qg": (lK, Float16),
            "kr": (lKr, Float16),
            "t": (lSquare, Float16),
            "aqk": (lSquare, Float16),
        }
        tiles = {name: tiles[name] for name in tiles if name in self.tile_bytes}
        tiles["v"] = (lV, self.io)
        if self.outputs:
            tiles["o"] = (lO, self.io)
        fields = {
            "full": cute.struct.MemRange[Int64, self.stages],
            "empty": cute.struct.MemRange[Int64, self.stages],
            "unit_full": cute.struct.MemRange[Int64, RING],
            "unit_empty": cute.struct.MemRange[Int64, RING],
            "units": cute.struct.Align[cute.struct.MemRange[Int32, RING * WORDS], 16],
            "decay": cute.struct.Align[
                cute.struct.MemRange[Float32, self.config.K * self.stages], 16
            ],
        }
        for name, (layout, dtype) in tiles.items():
            fields[name] = cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]
        return cute.struct(type("Shared", (), {"__annotations__": fields}))

    # ------------------------------------------------------------------ device
    @cute.kernel
    def kernel(
        self,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aO: cute.CopyAtom | None,
        tO: cute.Tensor | None,
        lK: cute.ComposedLayout,
        lSquare: cute.ComposedLayout,
        lKr: cute.ComposedLayout,
        lV: cute.ComposedLayout,
        lO: cute.ComposedLayout | None,
        lSlices: cute.ComposedLayout | None,
        mRecords: cute.Tensor,
        mInitial: cute.Tensor | None,
        mFinal: cute.Tensor | None,
        mIndex: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mMarks: cute.Tensor | None,
        mSegments: cute.Tensor | None,
        mWork: cute.Tensor | None,
        mO: cute.Tensor,
        interval: Int32,
        segment_chunks: Int32,
        units: Int32,
    ):
        # blocks of what follows may be there early; elsewhere that cost more than it brought
        if cutlass.const_expr(self.config.segments == "first"):
            cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.Shared)
        tiles = {"kg": lK, "qg": lK, "kr": lKr, "t": lSquare, "aqk": lSquare, "v": lV, "o": lO}
        shared = shared_memory(storage, tiles, lSlices)
        readers = 128 if self.cluster == 1 else 4 * self.cluster  # see release
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(shared.full + s, 1)
                    cute.arch.mbarrier_init(shared.empty + s, self.groups * readers)
                for s in cutlass.range_constexpr(RING):
                    cute.arch.mbarrier_init(shared.unit_full + s, 1)
                    cute.arch.mbarrier_init(shared.unit_empty + s, self.groups * 128)
        cute.arch.mbarrier_init_fence()
        write_zeros(self.pieces, shared.starts, self.stages, Int32(cute.arch.thread_idx()[0]))
        self.meet()
        # launched before the kernels ahead have ended: nothing may be read or written before this
        cute.arch.griddepcontrol_wait()

        states = StatesInMemory(mInitial, mFinal, mIndex, mMask, mMarks, mSegments, interval)
        if warp < 4:
            if cutlass.const_expr(self.groups > 1):
                cute.arch.setmaxregister_decrease(LOADING_REGISTERS)
            if warp == 0:
                self.load(aV, tV, shared, states, mRecords, mWork, mO.shape, segment_chunks, units)
        else:
            if cutlass.const_expr(self.groups > 1):
                cute.arch.setmaxregister_increase(STATE_REGISTERS)
            self.scan(aO, tO, shared, states, mO)
        if cutlass.const_expr(self.cluster > 1):
            self.meet()  # the other block may still release stages of both

    def used(self, unit):
        """Whether there is anything to do. Segments are fewer than their bound: n is -1 there."""
        return unit.n >= 0

    def meet(self):
        """All threads of the cluster."""
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ------------------------------------------------------------------ loads
    @cute.jit
    def load(
        self,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        shared,
        states,
        mRecords: cute.Tensor,
        mWork: cute.Tensor | None,
        shape: cute.Shape,
        segment_chunks: Int32,
        units: Int32,
    ):
        """The load warp: draws units, tells the state warps, and keeps the stages filled."""
        cut = segment_chunks if self.config.segments is not None else None
        index = Int32(cute.arch.block_idx()[0])
        told, loaded = Int32(0), Int32(0)  # units and chunks so far
        while index < units:
            unit = unit_at(index, mWork, shape, self.parts, CHUNK, cut)
            sV, gV = tile_copies(aV, columns_from(tV, unit), shared.v)
            chunks, ticket = Int32(0), Int32(0)
            if self.used(unit):
                chunks = ceil_div(unit.tokens, CHUNK)
            if chunks <= 1:
                ticket = draw(self.tickets(mWork))
            if self.used(unit):
                message = with_slots(unit, states)
                # first what takes longest
                if chunks > 0:
                    self.load_chunk(aV, gV, sV, shared, mRecords, unit, shape[2], 0, loaded)
                    loaded += 1
                tell(shared, told, message)
                told += 1
            for i in cutlass.range(1, chunks - 1, unroll=1):
                self.load_chunk(aV, gV, sV, shared, mRecords, unit, shape[2], i, loaded)
                loaded += 1
            if chunks > 1:
                # on its way while the last chunk waits for its stage
                ticket = draw(self.tickets(mWork))
                self.load_chunk(aV, gV, sV, shared, mRecords, unit, shape[2], chunks - 1, loaded)
                loaded += 1
            index = next_index(index, ticket, self.tickets(mWork))
        tell(shared, told, END)

    def tickets(self, mWork):
        """Where blocks draw units, in order; None: they take every so many-th.

        It pays where lengths differ. The blocks of a cluster must take neighbours.
        """
        return mWork if self.config.varlen and self.config.segments is None else None

    @cute.jit
    def load_chunk(
        self,
        aV: cute.CopyAtom,
        gV,
        sV,
        shared,
        mRecords: cute.Tensor,
        unit,
        heads: Int32,
        i: Int32,
        loaded: Int32,
    ):
        """Chunk i of the unit, the block's loaded-th."""
        s = loaded % self.stages
        full = shared.full + s
        cute.arch.mbarrier_wait(shared.empty + s, loaded // self.stages % 2 ^ 1)
        rows = existing_rows(unit.tokens - i * CHUNK)
        if rows < CHUNK:
            write_absent(self.pieces, shared, s, rows)
        number = Int64(unit.chunk + i) * Int64(heads) + Int64(unit.head)
        source = Int64(mRecords.iterator.toint()) + number * Int64(self.record.bytes)
        with cute.arch.elect_one():
            arriving = arriving_bytes(self.pieces, rows) + self.arriving_values(unit)
            cute.arch.mbarrier_arrive_and_expect_tx(full, arriving)
            if cutlass.const_expr(self.cluster == 1):
                self.copy(self.pieces, shared, source, s, rows, full)
            elif unit.part == 0:
                self.copy(self.pieces[::2], shared, source, s, rows, full)
            else:
                self.copy(self.pieces[1::2], shared, source, s, rows, full)
        self.load_values(aV, gV, sV, unit, i, s, full)

    def copy(self, pieces, shared, source, s, rows, full):
        """Starts copies of a record's pieces into stage s, of all blocks of the cluster."""
        barrier = Int32(full.toint())
        for x in pieces:
            target = shared.starts[x.tile] + (s * self.tile_bytes[x.tile] + x.place)
            start = source + Int64(x.start)
            size = rows * ROW if x.by_row else Int32(x.size)
            ptx.copy_to_shared(target, start, size, barrier, blocks=self.cluster)

    def arriving_values(self, unit):
        """Bytes of values that arrive in a stage."""
        return self.value_bytes

    @cute.jit
    def load_values(self, aV: cute.CopyAtom, gV, sV, unit, i: Int32, s: Int32, full: cute.Pointer):
        """Values of chunk i into stage s."""
        cute.copy(
            aV,
            gV[(None, unit.part, i)],
            sV[(None, s)],
            tma_bar_ptr=full,
        )

    @cute.jit
    def release_past(self, shared, number: Int32):
        """Releases the stage of the chunk before, when any state has left by it."""
        if number > 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.release(shared.empty + (number - 1) % self.stages)

    @cute.jit
    def release(self, empty):
        """Tells all that fill this stage, here and in the other block, that it has been read.

        Every thread does so for itself: compute-sanitizer does not see that a warp's election, or
        the barrier before it, orders the other lanes' reads as well. Across blocks one of a warp.
        """
        if cutlass.const_expr(self.cluster == 1):
            cute.arch.mbarrier_arrive(empty)
        else:
            with cute.arch.elect_one():
                for block in cutlass.range_constexpr(self.cluster):
                    cute.arch.mbarrier_arrive(empty, block)

    # ------------------------------------------------------------------ computes
    @cute.jit
    def scan(
        self,
        aO: cute.CopyAtom | None,
        tO: cute.Tensor | None,
        shared,
        states,
        mO: cute.Tensor,
    ):
        """A state warpgroup: walks the units that the load warp tells of."""
        thread = cute.arch.thread_idx()[0] % 128
        g = scan_state(shared, self.config, self.io, thread)
        told, walked = Int32(0), Int32(0)  # units and chunks so far
        unit = hear(shared, told)
        while unit.n >= 0:
            self.walk(aO, tO, shared, states, unit, mO, g, thread, walked)
            walked += ceil_div(unit.tokens, CHUNK)
            told += 1
            unit = hear(shared, told)
        if cutlass.const_expr(self.outputs):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory goes with the block

    @cute.jit
    def walk(
        self,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        shared,
        states,
        unit,
        mO: cute.Tensor,
        g,
        thread: Int32,
        walked: Int32,
    ):
        """The unit's chunks, with S^T in registers."""
        stages, kept = self.stages, self.config.checkpoints is not None
        warp = cute.arch.make_warp_uniform(thread // 32)
        sO, gO = tile_copies(aO, columns_from(tO, unit, WARP_CHANNELS), shared.slices)
        sO, gO = sO[(None, warp)], gO[(None, unit.part * (PART // WARP_CHANNELS) + warp, None)]
        self.load_state(states, unit, thread, g)
        if cutlass.const_expr(self.config.starts):
            self.keep_state(states, unit, Int32(0), thread, g, shared, None)
        g.round_state()
        g.O.fill(0.0)

        chunks = ceil_div(unit.tokens, CHUNK)
        for i in cutlass.range(chunks, unroll=1):
            number = walked + i
            s = number % stages
            # the last chunk's output is still being added up here. Waiting for the tile first puts
            # a branch between the state's update and that wait, or ptxas would move the update
            # behind it
            cute.arch.mbarrier_wait(shared.full + s, number // stages % 2)
            warpgroup.wait_group(0)
            g.round_output()
            g.load_values(s)
            if cutlass.const_expr(self.config.varlen):
                if unit.tokens - i * CHUNK < CHUNK:
                    g.clear_values(unit.tokens - i * CHUNK)
            largest = g.largest_value()
            if cute.arch.vote_any_sync(g.outgrown(largest)):
                g.grow_units(largest)

            warpgroup.fence()
            g.issue_past(s)
            # while these run: what the chunk before leaves
            if i > 0:
                self.lay_out_output(g)
                if cutlass.const_expr(kept):
                    self.keep_state(states, unit, i, thread, g, shared, (number - 1) % stages)
            if cutlass.const_expr(not kept):
                self.release_past(shared, number)
            if i > 0:
                cute.copy(aO, sO, gO[(None, i - 1)])
                cute.arch.cp_async_bulk_commit_group()
            warpgroup.wait_group(1)
            g.round_difference()
            warpgroup.fence()
            g.issue_values(s)
            warpgroup.wait_group(0)
            g.round_values()
            warpgroup.fence()
            g.issue_present(s)
            warpgroup.wait_group(1)
            g.update_state(s)
            if cutlass.const_expr(kept):
                self.release_past(shared, number)  # late: a state leaves by that stage
        warpgroup.wait_group(0)
        g.round_output()

        last = (walked + chunks - 1) % stages
        if chunks > 0:
            self.lay_out_output(g)
            if cutlass.const_expr(kept):
                self.keep_state(states, unit, chunks, thread, g, shared, last)
            tail = unit.tokens - (chunks - 1) * CHUNK
            whole = True  # of equal lengths, what lies past the end is cut off
            if cutlass.const_expr(self.config.varlen):
                whole = tail == CHUNK
                if tail < CHUNK:
                    self.store_rows(
                        shared, mO, unit, unit.first + (chunks - 1) * CHUNK, tail, thread
                    )
            if whole:
                cute.copy(aO, sO, gO[(None, chunks - 1)])
                cute.arch.cp_async_bulk_commit_group()
        self.store_final(states, unit, thread, g, shared, last, chunks)

    @cute.jit
    def lay_out_output(self, g):
        """The output into its buffer, once the last copy has read it. A warp's is its own."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        g.write_output()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def store_rows(self, shared, mO: cute.Tensor, unit, first: Int32, tokens: Int32, thread: Int32):
        """The rows of a sequence's last chunk: what follows them is another sequence's."""
        warp, piece = thread // 32, thread % 2
        for i in cutlass.range_constexpr(CHUNK // 16):
            row = thread % 32 // 2 + 16 * i
            if row < tokens:
                # 32-byte swizzle: the row's third bit turns the place of each 16 bytes
                at = (warp * CHUNK + row) * WARP_CHANNELS + (piece ^ (row // 4 % 2)) * 8
                words = load4((shared.o_start + at).align(16), shared=True)
                o = mO.iterator + (
                    Int64(unit.b) * Int64(mO.stride[0])
                    + Int64(first + row) * Int64(mO.stride[1])
                    + Int64(unit.head) * Int64(mO.stride[2])
                    + Int64(unit.part * PART + warp * WARP_CHANNELS + piece * 8)
                )
                store4(o.align(16), words)

    # ------------------------------------------------------------------ states
    @cute.jit
    def load_state(self, states, unit, thread: Int32, g):
        """The state before the unit's tokens, and units for it."""
        if cutlass.const_expr(self.config.segments is None):
            if unit.initial >= 0:
                self.load_initial(states, unit, unit.part, thread, g.S)
                g.start_units()
            else:
                g.start_from_zero()
        else:
            g.S.fill(0.0)
            # A first segment's initial state was copied: the slot may already hold the final one.
            alone = unit.segments == 1
            if cutlass.const_expr(self.config.initial is None):
                alone = unit.segment == 0
            if alone:
                self.load_initial(states, unit, unit.part, thread, g.S)
            else:
                place = where(unit.segment == 0, unit.segments, unit.segment) - 1
                self.segment_state(states, unit, place, unit.part, thread).load(g.S)
            g.start_units()

    @cute.jit
    def load_initial(self, states, unit, part: Int32, thread: Int32, S: cute.Tensor):
        """The state that the sequence starts from, if it has one."""
        if cutlass.const_expr(self.config.initial is not None):
            if unit.initial >= 0:
                kind, slot = self.config.initial, unit.initial
                self.in_memory(states.initial, kind, slot, unit, part, thread).load(S)

    @cute.jit
    def store_final(self, states, unit, thread: Int32, g, shared, stage: Int32, chunks: Int32):
        """The state after the unit, if it is its sequence's last; by the last chunk's stage."""
        kind = self.config.final
        if cutlass.const_expr(kind is not None):
            last = True
            if cutlass.const_expr(self.config.segments is not None):
                last = unit.segment + 1 == unit.segments
            if (unit.final >= 0) & last:
                if chunks > 0:
                    if cutlass.const_expr(self.config.checkpoints is not None):
                        # one may leave by the same stage
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    rows, slot = StateRows(kind, self.config.K), Int64(unit.final)
                    store_state(rows, shared, stage, states.final, slot, unit, thread, g)
                else:
                    self.store_directly(states.final, kind, unit.final, unit, thread, g)

    @cute.jit
    def keep_state(self, states, unit, chunks: Int32, thread: Int32, g, shared, stage):
        """A checkpoint, if one is due after so many chunks of the unit; stage: the last one's."""
        kind = self.config.checkpoints
        done = unit.before + chunks * CHUNK
        if cutlass.const_expr(self.config.starts):
            row = Int64(unit.chunk + chunks)
            # the host counted the rows: by its copy of cu_seqlens, or before a graph's replay
            due = (chunks * CHUNK < unit.tokens) & (row < Int64(states.marks.shape[0]))
        else:
            due = (chunks * CHUNK <= unit.tokens) & (done % states.interval == 0)
            row = Int64(unit.start // states.interval + done // states.interval - 1)
        if due:
            if cutlass.const_expr(stage is None):
                self.store_directly(states.marks, kind, row, unit, thread, g)
            else:
                rows = StateRows(kind, self.config.K)
                store_state(rows, shared, stage, states.marks, row, unit, thread, g)

    def store_directly(self, tensor, kind, slot, unit, thread, g):
        """Where no chunk has left a stage to lay the state out in."""
        place = self.in_memory(tensor, kind, slot, unit, unit.part, thread)
        place.store(g.S, [g.units[2], g.units[3]])

    def in_memory(self, tensor, kind, slot, unit, part, thread):
        value = part * PART
        return HeadState(tensor, slot, unit.head, value, thread, self.config.K, kind.v_first)

    def segment_state(self, states, unit, segment, part, thread):
        """64 rows of a segment of the unit's sequence in the workspace."""
        place = unit.place + segment
        return self.in_memory(states.segments, SEGMENT_STATES, place, unit, part, thread)
