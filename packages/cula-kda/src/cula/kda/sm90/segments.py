"""What segments do to a state: the first of three passes over sequences that are cut along time.

A segment takes a state S to M S + b. b is the state after it from zero; M, K x K, is the same walk
over its chunks from the identity and without values: S^T's rows are independent, so the rows of M^T
are K more value channels, whose values are 0. This pass finds both for every segment but a
sequence's last; `combine` makes of them the state after each segment, and the scan starts from
those (scan.py).

The first segment starts from the sequence's initial state, so that its b is the state after it, and
has no M. It also puts the initial state where the last segment's b would be: the third pass may
write the final state over it at any time.

Workspace: (segments, HV, V + K, K) in float32, segments by sequence and time: b^T, then M^T.
Tile:     two state warpgroups walk a segment, each with 64 of the V + K channels.
Roles:    warp 0 loads; warps 4-7 and 8-11 compute.
Chunk:    X^T = V^T - S^T Kg^T,  V'^T = X^T T^T,  S^T <- S^T diag(e^G_C) + V'^T Kr.
Shared:   stages of Kg, Kr, T (40.5 KB at K = 128, zeros too) and two tiles of v (16 KB): 226 KB
          with four.
Registers: as scan.py's without O and o.
Bytes:    600 a token and head of records, twice (for V and for M) from L2 or memory; v 256.
Floor:    those bytes at the rate of L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cula.common.varlen.device import where
from cula.kda.sm90.config import CHUNK, PART
from cula.kda.sm90.scan import KdaScan


class KdaSegments(KdaScan):
    """`config`: with segments "first". Takes the scan's arguments."""

    groups = 2
    outputs = False

    def __init__(self, config):
        super().__init__(config)
        self.parts = config.pairs
        self.value_parts = config.parts

    def used(self, unit):
        """Not for a sequence's last segment, nor for M of its first; unused rows hold zeros."""
        only_matrix = unit.part * self.groups >= self.value_parts
        not_last = unit.segment + 1 < unit.segments
        return not_last & ((unit.segment > 0) | ~only_matrix)

    def arriving_values(self, unit):
        left = self.value_parts - unit.part * self.groups
        tiles = where(left < 0, 0, where(left > self.groups, self.groups, left))
        return tiles * self.value_bytes

    @cute.jit
    def load_values(self, aV: cute.CopyAtom, gV, sV, unit, i: Int32, s: Int32, full: cute.Pointer):
        for group in cutlass.range_constexpr(self.groups):
            part = unit.part * self.groups + group
            if part < self.value_parts:
                cute.copy(
                    aV, gV[(None, part, i)], sV[(None, s * self.groups + group)], tma_bar_ptr=full
                )

    @cute.jit
    def walk(
        self,
        aO: cute.CopyAtom | None,
        tO: cute.Tensor | None,
        shared,
        states,
        unit,
        mO: cute.Tensor,
        g,
        thread: Int32,
        walked: Int32,
    ):
        """The segment's chunks, which are all whole."""
        stages = self.stages
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        part = unit.part * self.groups + group
        values = part < self.value_parts
        self.start(states, unit, part, thread, g.S)
        g.start_units()
        g.round_state()

        for i in cutlass.range(unit.tokens // CHUNK, unroll=1):
            number = walked + i
            s = number % stages
            cute.arch.mbarrier_wait(shared.full + s, number // stages % 2)
            warpgroup.fence()
            g.issue_past(s)
            # while it runs, and without a branch: M's rows have values, too, of 0
            g.load_values(s * self.groups + group)
            self.only_values(g, values)
            largest = g.largest_value()
            outgrown = cute.arch.vote_any_sync(g.outgrown(largest))
            warpgroup.wait_group(0)
            if outgrown:
                g.rescale_past(g.grow_units(largest))
            g.round_difference()
            warpgroup.fence()
            g.issue_values(s)
            warpgroup.wait_group(0)
            g.round_values()
            warpgroup.fence()
            g.issue_present(s)
            warpgroup.wait_group(0)
            g.update_state(s)
            self.release(shared.empty + s)
        # K or V of 64: a lone channel group has a neighbour without channels
        if part < self.value_parts + self.config.K // PART:
            place = self.segment_state(states, unit, unit.segment, part, thread)
            place.store(g.S, [g.units[2], g.units[3]])

    def only_values(self, g, values):
        """Zeros for M's rows. By whole words, since all of a chunk's tokens exist."""
        words = cute.recast_tensor(g.copy_v[3], Int32)
        for x in range(cute.size(words)):
            words[x] = where(values, words[x], 0)

    @cute.jit
    def start(self, states, unit, part: Int32, thread: Int32, S: cute.Tensor):
        """Zero or the initial state for value channels, the identity for M's."""
        row = (part - self.value_parts) * PART + 16 * (thread // 32) + thread % 32 // 4
        for x in range(cute.size(S)):
            column = x // 4 * 8 + 2 * (thread % 4) + x % 2
            S[x] = where(row + 8 * (x // 2 % 2) == column, 1, 0).to(cutlass.Float32)
        if cutlass.const_expr(self.config.initial is not None):
            if (unit.segment == 0) & (part < self.value_parts):
                self.load_initial(states, unit, part, thread, S)
                last = unit.segments - 1
                self.segment_state(states, unit, last, part, thread).store(S, [1.0, 1.0])
