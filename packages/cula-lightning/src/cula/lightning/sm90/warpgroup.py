"""What a state warpgroup holds and does; prefill.py says when.

Registers of a 64 x n accumulator: element x = 4 block + 2 i + j of a thread is row
16 warp + lane / 4 + 8 i, column 8 block + 2 (lane % 4) + j.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector
from cutlass.cute.nvgpu import warp

from cula.common.cute import math
from cula.common.cute.wgmma import Product
from cula.lightning.sm90.config import CHUNK

POWERS = 2 * CHUNK  # l^x for x = 1 - CHUNK .. CHUNK, l the decay of one token; 0 where x < 0
TABLE = 2 * POWERS  # the powers, and the same times the scale
ONE = CHUNK - 1  # where l^0 lies among them


def load_pair(pointer) -> tuple:
    """Two neighbouring Float32 of shared memory, the first at a multiple of 8 bytes."""
    kind = ir.VectorType.get([2], Float32.mlir_type)
    packed = cute.arch.load(pointer, kind, ss="cta")
    return tuple(Float32(vector.extract(packed, [], [i])) for i in range(2))


# Frozen: CuTe DSL lets dynamic loops read a frozen dataclass from outside.
@dataclass(frozen=True)
class StateWarpgroup:
    """Fragments and register tiles. Make it with `state_warpgroup`."""

    columns: int
    groups: int
    dtype: type
    thread: Int32
    wg: Int32
    powers: cute.Pointer
    scores: Product
    past: Product
    present: Product
    states: Product
    q_rows: cute.Tensor  # descriptors: q as A of the scores, k as B
    k_rows: cute.Tensor
    q_columns: cute.Tensor  # q as B of S^T Q^T
    v_rows: cute.Tensor  # V^T as A of V^T P^T, P as B
    p_columns: cute.Tensor
    k_columns: cute.Tensor  # K as B of V^T K
    S: cute.Tensor
    P: cute.Tensor
    O: cute.Tensor  # what the state adds to the outputs; then all of it
    O_present: cute.Tensor  # what the chunk's own tokens add
    s_operand: tuple  # A fragments: as the product takes them, and in the accumulator's order
    v_operand: tuple
    copy_v: tuple
    copy_p: tuple
    copy_o: tuple

    # ---------------------------------------------------------------- powers of the decay
    def store_powers(self, g, scale):
        """The tables of l^x = e^(g x) and of scale * l^x, one entry a thread."""
        x = self.thread - ONE
        power = math.decay(g * Float32(x))
        power = math.select(x == 0, 1.0, power)  # where g is -inf, too
        power = math.select(x < 0, 0.0, power)
        self.table(0)[self.thread] = power
        self.table(1)[self.thread] = power * scale

    def table(self, scaled: int):
        return cute.make_tensor(self.powers + scaled * POWERS, cute.make_layout(POWERS))

    def pair(self):
        """Column of the thread's first element in each block of an accumulator."""
        return 2 * (self.thread % 4)

    # ---------------------------------------------------------------- products
    def issue_scores(self, stage):
        q = self.q_rows[(None, None, None, stage)]
        self.scores.issue(self.P, q, self.k_rows, stage)

    def issue_past(self, stage):
        self.past.issue(self.O, self.s_operand[0], self.q_columns, stage)

    def issue_present(self, stage, buffer):
        v = self.v_rows[(None, None, None, stage * self.groups + self.wg)]
        self.present.issue(self.O_present, v, self.p_columns, buffer)

    def issue_state(self, stage):
        self.states.issue(self.S, self.v_operand[0], self.k_columns, stage, add=True)

    def issue_added(self, accumulator, stage):
        """What a chunk adds to the state, by itself."""
        self.states.issue(accumulator, self.v_operand[0], self.k_columns, stage)

    # ---------------------------------------------------------------- register work
    def load_values(self, stage, tokens):
        """V^T of a stage as A fragments, column j times l^(tokens - 1 - j)."""
        self.take_values(self.decayed_values(stage, tokens))

    def take_values(self, values):
        """Rounds decayed values for the product that takes them."""
        self.v_operand[1].store(values.load().to(self.dtype))

    def decayed_values(self, stage, tokens):
        """What `take_values` takes: of a later product, while an earlier one runs."""
        copy, source, target, raw = self.copy_v
        cute.copy(copy, source[(None, None, None, stage * self.groups + self.wg)], target)
        table, first = self.table(0), tokens - 1 + ONE - self.pair()
        values = cute.make_rmem_tensor_like(raw.layout, Float32)
        values.store(raw.load().to(Float32))
        for block in range(CHUNK // 8):
            for j in range(2):
                power = table[first - 8 * block - j]
                for i in range(2):
                    x = 4 * block + 2 * i + j
                    values[x] = values[x] * power
        return values

    def round_state(self, tokens):
        """The 16-bit copy of S that the outputs read; S itself decays by so many tokens."""
        self.s_operand[1].store(self.S.load().to(self.dtype))
        self.decay_state(tokens)

    def decay_state(self, tokens):
        """S decays by so many tokens."""
        power = self.table(0)[tokens + ONE]
        for x in range(cute.size(self.S)):
            self.S[x] = self.S[x] * power

    def add(self, accumulator, power):
        """S += power * accumulator."""
        for x in range(cute.size(self.S)):
            self.S[x] = self.S[x] + power * accumulator[x]

    def store_scores(self, buffer):
        """P, decayed and scaled, rounded, into shared memory; a power is 0 where j > i."""
        copy, source, target, rounded = self.copy_p
        table = self.table(1)
        row = 16 * (self.thread // 32) + self.thread % 32 // 4
        ahead = row - self.wg * self.columns - self.pair() + ONE
        powers = {}
        for block in range(self.columns // 8):
            for i in range(2):
                for j in range(2):
                    distance = 8 * (i - block) - j
                    if distance not in powers:
                        powers[distance] = table[ahead + distance]
                    x = 4 * block + 2 * i + j
                    self.P[x] = self.P[x] * powers[distance]
        rounded.store(self.P.load().to(self.dtype))
        cute.copy(copy, source, target[(None, None, None, buffer)])

    def store_output(self, buffer):
        """O^T = diag(scale l^(i + 1)) past + present, rounded, into shared memory."""
        copy, source, target, rounded = self.copy_o
        first = self.powers + (POWERS + ONE + 1 + self.pair())
        for block in range(CHUNK // 8):
            power = load_pair(first + 8 * block)
            for j in range(2):
                for i in range(2):
                    x = 4 * block + 2 * i + j
                    self.O[x] = self.O[x] * power[j] + self.O_present[x]
        rounded.store(self.O.load().to(self.dtype))
        cute.copy(copy, source, target[(None, None, None, buffer * self.groups + self.wg)])

    def barrier(self):
        """Of all state warpgroups."""
        cute.arch.barrier(barrier_id=1, number_of_threads=128 * self.groups)


def state_warpgroup(shared, config, dtype, thread, wg) -> StateWarpgroup:
    """Warpgroup wg's fragments; `shared` is the block's tiles."""
    groups = config.warpgroups
    columns = CHUNK // groups
    scores = Product(columns, dtype)
    past = Product(CHUNK, dtype, a_in_registers=True)
    present = Product(CHUNK, dtype, a_mn_major=True)
    states = Product(config.K, dtype, a_in_registers=True, b_mn_major=True)
    S, P, O, O_present = (
        product.accumulator(thread) for product in (states, scores, past, present)
    )

    def mine(tile, mode):
        """This warpgroup's half of a tile's rows (mode 0) or columns (mode 1)."""
        shape = (columns, config.K) if mode == 0 else (CHUNK, columns)
        return cute.local_tile(tile, shape, (wg, 0, None) if mode == 0 else (0, wg, None))

    raw = cute.make_rmem_tensor_like(O.layout, dtype)
    p_rounded = cute.make_rmem_tensor_like(P.layout, dtype)
    o_rounded = cute.make_rmem_tensor_like(O.layout, dtype)
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dtype)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    store_transposed = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dtype)
    copy_v = cute.make_tiled_copy_C(load, past.adding)
    copy_p = cute.make_tiled_copy_C(store, scores.adding)
    copy_o = cute.make_tiled_copy_C(store_transposed, past.adding)
    to_v, to_p, to_o = (copy.get_slice(thread) for copy in (copy_v, copy_p, copy_o))
    return StateWarpgroup(
        columns=columns,
        groups=groups,
        dtype=dtype,
        thread=thread,
        wg=wg,
        powers=shared.powers + wg * TABLE,
        scores=scores,
        past=past,
        present=present,
        states=states,
        q_rows=scores.a_operand(thread, shared.q),
        k_rows=scores.b_operand(thread, mine(shared.k, 0)),
        q_columns=past.b_operand(thread, shared.q),
        v_rows=present.a_operand(thread, shared.v),
        p_columns=present.b_operand(thread, shared.p),
        k_columns=states.b_operand(thread, shared.k_columns),
        S=S,
        P=P,
        O=O,
        O_present=O_present,
        s_operand=past.a_registers(S),
        v_operand=states.a_registers(O),
        copy_v=(copy_v, to_v.partition_S(shared.v), to_v.retile(raw), raw),
        copy_p=(copy_p, to_p.retile(p_rounded), to_p.partition_D(mine(shared.p, 1)), p_rounded),
        copy_o=(copy_o, to_o.retile(o_rounded), to_o.partition_D(shared.o), o_rounded),
    )
