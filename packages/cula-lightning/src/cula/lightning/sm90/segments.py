"""States of segments: the first of two passes over sequences that are cut along time.

A segment takes a state S to l^(its tokens) S + A, where A is what its own tokens add: the state
after it, from zero. This pass finds A of every segment but a sequence's last, from k and v alone,
and leaves it in the row of the segment after it; prefix.py turns the rows into the states that
segments start from; the second pass (prefill.py) starts from them.

The first segment adds the sequence's initial state, too, and leaves that in its own row: the
second pass may write the final state over it at any time.

Chunks are walked backwards:

    A = sum over i of l^(64 i) D_i,    D_i = (V l^(63-j))^T K    of the i-th chunk from the end

so no product waits for another; what the second pass reads first was read last here, and is in L2;
and a chunk whose power l^(64 i) is 0 in float32 is not read at all, nor what lies before it.

Tile, roles, shared memory: as prefill.py, without q and outputs.
Chunk:    the next chunk's values are loaded and decayed under the running product.
Registers: S 64, D 64, decayed V 16 + 32.
Bytes:    512 a token and head within reach: k and v in.
Floor:    those bytes at the memory's rate.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cula.common.cute import math
from cula.common.cute.units import hear
from cula.common.varlen.device import where
from cula.lightning.sm90.config import CHUNK, PART
from cula.lightning.sm90.prefill import LightningPrefill
from cula.lightning.sm90.states import KeptState
from cula.lightning.sm90.warpgroup import state_warpgroup

NOTHING = 104.0  # e^-x is 0 in float32, the smallest numbers included, for every larger x


@cute.jit
def within_reach(g: Float32, chunks: Int32):
    """How many of a segment's chunks, from its end, have a power of the decay that is not 0."""
    reach = chunks
    if -g * Float32(chunks * CHUNK) > Float32(NOTHING):
        reach = Int32(Float32(NOTHING / CHUNK) / -g) + 1
    return reach


class SegmentStates(LightningPrefill):
    """`config`: with segments "first". Takes the second pass's arguments."""

    @cute.jit
    def chunks_to_load(self, unit, decay: Float32):
        """How many, the first, the step to the next."""
        chunks = unit.tokens // CHUNK
        reach = within_reach(decay, chunks)
        # nothing starts from the last segment's state
        return where(unit.segment + 1 < unit.segments, reach, 0), chunks - 1, -1

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
        """A state warpgroup: walks the segments' chunks, which are all whole."""
        groups, stages = self.groups, self.stages
        thread = cute.arch.thread_idx()[0] % 128
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        g = state_warpgroup(shared, self.config, self.io, thread, wg)
        D = g.states.accumulator(thread)
        # The next chunk's values, decayed. They are rounded once the product under way has read its
        # own: else ptxas gives both the same registers and serialises all products.
        ahead = cute.make_rmem_tensor_like(g.O)
        told = Int32(0)
        stage, phase = Int32(0), Int32(0)
        u = hear(shared, told)
        while u.n >= 0:
            told += 1
            if u.segment + 1 < u.segments:
                value = (u.part * groups + wg) * PART
                log_decay = u.more.bitcast(Float32)
                chunks = within_reach(log_decay, u.tokens // CHUNK)  # as many as were loaded
                # beyond that, one token's decay is 0 already, and -inf times 0 chunks would be nan
                log_decay = cute.arch.fmax(log_decay, Float32(-NOTHING))
                g.barrier()  # the last unit's powers have been read
                g.store_powers(log_decay, scale)
                g.barrier()
                g.S.fill(0.0)
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                ahead.store(g.decayed_values(stage, Int32(CHUNK)).load())
                for i in cutlass.range(chunks - 1, unroll=1):
                    wraps = stage + 1 == stages
                    stage1, phase1 = where(wraps, 0, stage + 1), where(wraps, phase ^ 1, phase)
                    g.take_values(ahead)
                    warpgroup.fence()
                    g.issue_added(D, stage)
                    power = math.decay(log_decay * Float32(i * CHUNK))
                    cute.arch.mbarrier_wait(shared.full + stage1, phase1)
                    ahead.store(g.decayed_values(stage1, Int32(CHUNK)).load())
                    warpgroup.wait_group(0)
                    self.release(shared, stage)
                    g.add(D, power)
                    stage, phase = stage1, phase1
                g.take_values(ahead)
                warpgroup.fence()
                g.issue_added(D, stage)
                warpgroup.wait_group(0)
                self.release(shared, stage)
                g.add(D, math.decay(log_decay * Float32((chunks - 1) * CHUNK)))
                wraps = stage + 1 == stages
                stage, phase = where(wraps, 0, stage + 1), where(wraps, phase ^ 1, phase)

                if cutlass.const_expr(self.config.initial is not None):
                    if u.segment == 0:
                        D.fill(0.0)
                        self.load_initial(states, u, value, thread, D)
                        KeptState(states.local, u.place, u.head, value, thread).store(D)
                        g.add(D, math.decay(log_decay * Float32(u.tokens)))
                KeptState(states.local, u.place + u.segment + 1, u.head, value, thread).store(g.S)

            u = hear(shared, told)

    @cute.jit
    def release(self, shared, stage: Int32):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.empty + stage)
