"""What the scan's state warpgroup holds and does; scan.py says when.

Registers of a 64 x n accumulator: element x = 4 block + 2 i + j of a thread is row
16 warp + lane / 4 + 8 i, column 8 block + 2 (lane % 4) + j. Rows are value channels.

Units. S, X, V' and O of a value channel are held in a unit of its own, a power of two near its
largest value so far: float16 X and V' neither overflow nor sink, whatever the size of v. Every
product acts on rows alone, so nothing else changes. A channel's unit only grows.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp

from cula.common.cute import math
from cula.common.cute.wgmma import Product
from cula.common.varlen.device import where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import CHUNK

GROWTH = 16.0  # a channel's values may reach this many units before the unit grows


# Frozen: CuTe DSL lets dynamic loops read a frozen dataclass from outside.
@dataclass(frozen=True)
class ScanState:
    """Fragments and register tiles. Make it with `scan_state`.

    kg, qg, t, aqk, kr: descriptors of the record's tiles. S .. D: accumulators. s_operand,
    x_operand, v_operand: the same rounded, as (fragments, in the accumulator's order).
    qg, aqk, O, copy_o: None where there are no outputs.
    units: 1 / unit of the thread's two rows, then the units.
    """

    key_dim: int
    thread: Int32
    decay: Int32
    tokens: Product
    states: Product
    kg: cute.Tensor
    qg: cute.Tensor | None
    t: cute.Tensor
    aqk: cute.Tensor | None
    kr: cute.Tensor
    S: cute.Tensor
    X: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor | None
    D: cute.Tensor
    s_operand: tuple
    x_operand: tuple
    v_operand: tuple
    copy_v: tuple
    copy_o: tuple | None
    units: cute.Tensor

    # ---------------------------------------------------------------- products
    def issue_past(self, stage):
        """X = S^T (K e^G)^T and O = S^T (Q e^G)^T."""
        self.tokens.issue(self.X, self.s_operand[0], self.kg, stage)
        if self.O is not None:
            self.tokens.issue(self.O, self.s_operand[0], self.qg, stage)

    def issue_values(self, stage):
        """V'^T = X^T T^T."""
        self.tokens.issue(self.V, self.x_operand[0], self.t, stage)

    def issue_present(self, stage):
        """What the chunk adds to the state; then O += V'^T Aqk^T."""
        self.states.issue(self.D, self.v_operand[0], self.kr, stage)
        if self.O is not None:
            self.tokens.issue(self.O, self.v_operand[0], self.aqk, stage, add=True)

    # ---------------------------------------------------------------- register work
    def load_values(self, stage):
        """V^T of a chunk."""
        copy, source, target, _ = self.copy_v
        cute.copy(copy, source[(None, None, None, stage)], target)

    def clear_values(self, tokens):
        """Zeros the tokens that are not the sequence's."""
        raw = self.copy_v[3]
        numbers = raw.load().to(Float32)
        kept = cute.make_rmem_tensor_like(raw.layout, Float32)
        kept.store(numbers)
        for x in range(CHUNK // 2):
            token = x // 4 * 8 + 2 * (self.thread % 4) + x % 2
            kept[x] = math.select(token < tokens, kept[x], 0.0)
        raw.store(kept.load().to(raw.element_type))

    def largest(self, values) -> list:
        """The largest magnitude in each of the thread's two rows, of all lanes of a row."""
        found = [Float32(0.0), Float32(0.0)]
        for x in range(cute.size(values)):
            value = values[x]
            i = x // 2 % 2
            found[i] = cute.arch.fmax(found[i], cute.arch.fmax(value, -value))
        for offset in (1, 2):
            found = [
                cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset)) for x in found
            ]
        return found

    def largest_value(self) -> list:
        raw = self.copy_v[3]
        numbers = cute.make_rmem_tensor_like(raw.layout, Float32)
        numbers.store(raw.load().to(Float32))
        return self.largest(numbers)

    def outgrown(self, largest):
        """Whether a value of this thread's rows needs a larger unit."""
        over = [x * self.units[i] > Float32(GROWTH) for i, x in enumerate(largest)]
        return over[0] | over[1]

    def start_units(self):
        """Units for the state that a sequence starts from, still in units of 1."""
        self._set_units(self.largest(self.S))
        self.S_times(self.units)

    def start_from_zero(self):
        """The same, where there is no such state."""
        self._set_units([Float32(0.0)] * 2)
        self.S.fill(0.0)

    def grow_units(self, largest) -> list:
        """New units where they are outgrown, for values of this size; S and its copy follow.

        Returns what the rows were multiplied by.
        """
        before = [self.units[2 + i] for i in range(2)]
        over = [x * self.units[i] > Float32(GROWTH) for i, x in enumerate(largest)]
        self._set_units([math.select(over[i], largest[i], before[i]) for i in range(2)])
        factors = [self.units[i] * before[i] for i in range(2)]
        self.S_times(factors)
        # not rounded anew: ptxas would then round every chunk's state here, where all wait for it
        rounded = self.s_operand[1]
        numbers = cute.make_rmem_tensor_like(rounded.layout, Float32)
        numbers.store(rounded.load().to(Float32))
        for x in range(cute.size(numbers)):
            numbers[x] = numbers[x] * factors[x // 2 % 2]
        rounded.store(numbers.load().to(Float16))
        return factors

    def rescale_past(self, factors):
        """X was found in the units before."""
        for x in range(cute.size(self.X)):
            self.X[x] = self.X[x] * factors[x // 2 % 2]

    def _set_units(self, largest):
        """The powers of two at or below the values, and their inverses; both stay normal."""
        for i, x in enumerate(largest):
            exponent = (x.bitcast(Int32) >> 23) & 255
            exponent = where(exponent < 1, 1, where(exponent > 253, 253, exponent))
            self.units[i] = (Int32(254 - exponent) << 23).bitcast(Float32)
            self.units[2 + i] = (Int32(exponent) << 23).bitcast(Float32)

    def S_times(self, factors):
        for x in range(cute.size(self.S)):
            self.S[x] = self.S[x] * factors[x // 2 % 2]

    def round_state(self):
        self.s_operand[1].store(self.S.load().to(Float16))

    def round_difference(self):
        """X = V - S^T (K e^G)^T, in the rows' units."""
        raw = self.copy_v[3]
        difference = cute.make_rmem_tensor_like(raw.layout, Float32)
        difference.store(raw.load().to(Float32))
        for x in range(cute.size(difference)):
            difference[x] = difference[x] * self.units[x // 2 % 2] - self.X[x]
        self.x_operand[1].store(difference.load().to(Float16))

    def round_values(self):
        self.v_operand[1].store(self.V.load().to(Float16))

    def update_state(self, stage):
        """S = diag(e^G_C) S + D, and its rounded copy."""
        place = self.decay + stage * (4 * self.key_dim) + self.thread % 4 * 8
        for block in range(self.key_dim // 8):
            pair = ptx.load_shared(place, 32 * block, 2, "f")
            for i in range(2):
                for j in range(2):
                    x = 4 * block + 2 * i + j
                    self.S[x] = self.S[x] * pair[j] + self.D[x]
        self.round_state()

    def round_output(self):
        """O, out of the rows' units, rounded."""
        rounded = self.copy_o[3]
        for x in range(cute.size(self.O)):
            self.O[x] = self.O[x] * self.units[2 + x // 2 % 2]
        rounded.store(self.O.load().to(rounded.element_type))

    def write_output(self):
        """The rounded output into shared memory."""
        copy, source, target, _ = self.copy_o
        cute.copy(copy, source, target[(None, None, None, 0)])

    def barrier(self):
        """All four warps."""
        cute.arch.barrier(barrier_id=1, number_of_threads=128)


def scan_state(shared, config, dtype, thread) -> ScanState:
    """`shared`: the block's tiles (scan_block.SharedMemory); dtype: of v and o."""
    outputs = shared.o is not None
    tokens = Product(CHUNK, Float16, a_in_registers=True)
    states = Product(config.K, Float16, a_in_registers=True, b_mn_major=True)
    S, D = states.accumulator(thread), states.accumulator(thread)
    X, V = (tokens.accumulator(thread) for _ in range(2))
    O = tokens.accumulator(thread) if outputs else None
    raw = cute.make_rmem_tensor_like(X.layout, dtype)
    copy_v = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dtype), tokens.adding
    )
    to_v, out = copy_v.get_slice(thread), None
    if outputs:
        copy_o = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dtype), tokens.adding
        )
        rounded = cute.make_rmem_tensor_like(O.layout, dtype)
        to_o = copy_o.get_slice(thread)
        out = (copy_o, to_o.retile(rounded), to_o.partition_D(shared.o), rounded)
    return ScanState(
        key_dim=config.K,
        thread=thread,
        decay=Int32(shared.decay.toint()),
        tokens=tokens,
        states=states,
        kg=tokens.b_operand(thread, shared.kg),
        qg=tokens.b_operand(thread, shared.qg) if outputs else None,
        t=tokens.b_operand(thread, shared.t),
        aqk=tokens.b_operand(thread, shared.aqk) if outputs else None,
        kr=states.b_operand(thread, shared.kr),
        S=S,
        X=X,
        V=V,
        O=O,
        D=D,
        s_operand=tokens.a_registers(S),
        x_operand=tokens.a_registers(X),
        v_operand=tokens.a_registers(V),
        copy_v=(copy_v, to_v.partition_S(shared.v), to_v.retile(raw), raw),
        copy_o=out,
        units=cute.make_rmem_tensor(4, Float32),
    )
