"""States of segments: the first of two passes over sequences that are cut along time.

A segment takes a state S to l^(its tokens) S + A, where A is what its own tokens add: the state
after it, from zero. This pass finds A of every segment but a sequence's last, from k and v alone;
the second (prefill.py) starts every segment from what those before it sum up to. Exact: nothing is
dropped.

The first segment begins with the sequence's initial state, which is also put where the last
segment's A would be: the second pass may write the final state over it at any time.

Tile, roles, shared memory: as prefill.py, without q and outputs.
Bytes:    512 a token and head: k and v in.
Floor:    those bytes at the memory's rate.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cula.common.varlen.device import where
from cula.lightning.sm90.config import CHUNK, PART
from cula.lightning.sm90.prefill import SEGMENT_STATES, LightningPrefill
from cula.lightning.sm90.units import RING, receive
from cula.lightning.sm90.warpgroup import state_warpgroup


class SegmentStates(LightningPrefill):
    """`config`: with segments "first". Takes the second pass's arguments."""

    @cute.jit
    def scan(
        self,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        shared,
        mG: cute.Tensor,
        states,
        mO: cute.Tensor,
        scale: Float32,
    ):
        """A state warpgroup: walks the segments' chunks, which are all whole."""
        groups, stages = self.groups, self.stages
        thread = cute.arch.thread_idx()[0] % 128
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        g = state_warpgroup(shared, self.config, self.io, thread, wg)
        told = Int32(0)
        stage, phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(shared.unit_full, 0)
        u = receive(shared.units, 0)
        while u.n >= 0:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.unit_empty + told % RING)
            told += 1

            if u.segment + 1 < u.segments:
                value = (u.part * groups + wg) * PART
                g.S.fill(0.0)
                if u.segment == 0:
                    self.load_initial(states, u, value, thread, g.S)
                    if cutlass.const_expr(self.config.initial is not None):
                        self.keep(states, u, u.place + u.segments - 1, value, thread, g.S)
                g.barrier()  # the last unit's powers have been read
                g.store_powers(Float32(mG[u.head]), scale)
                g.barrier()
                for _ in cutlass.range(u.tokens // CHUNK, unroll=1):
                    cute.arch.mbarrier_wait(shared.full + stage, phase)
                    g.load_values(stage, Int32(CHUNK))
                    g.decay_state(Int32(CHUNK))
                    warpgroup.fence()
                    g.issue_state(stage)
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(shared.empty + stage)
                    wraps = stage + 1 == stages
                    stage, phase = where(wraps, 0, stage + 1), where(wraps, phase ^ 1, phase)
                self.keep(states, u, u.place + u.segment, value, thread, g.S)

            cute.arch.mbarrier_wait(shared.unit_full + told % RING, told // RING % 2)
            u = receive(shared.units, told % RING)

    @cute.jit
    def keep(self, states, u, place: Int32, value: Int32, thread: Int32, S: cute.Tensor):
        self.in_memory(states.local, SEGMENT_STATES, place, u, value, thread).store(S)
