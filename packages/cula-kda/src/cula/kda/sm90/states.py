"""States between memory and a warpgroup's 64 x K accumulator.

Accumulator element x = 4 block + 2 i + j of a thread is value channel 16 warp + lane / 4 + 8 i and
key channel 8 block + 2 (lane % 4) + j.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cula.common.cute import vector
from cula.kda.sm90.config import States

SEGMENT_STATES = States("fp32", True)
DTYPES = {"fp32": Float32, "bf16": BFloat16, "int32": Int32, "int64": Int64}


@dataclass(frozen=True)
class StatesInMemory:
    """The tensors of states that a call has, and the rules of which sequence uses what."""

    initial: cute.Tensor | None  # (slots, HV, V, K), V-first or K-first
    final: cute.Tensor | None
    index: cute.Tensor | None  # (N)
    mask: cute.Tensor | None  # (N)
    marks: cute.Tensor | None  # (rows, HV, V, K)
    segments: cute.Tensor | None  # (segments, HV, V + K, K): segments.py
    interval: Int32


def slot_of(states: StatesInMemory, n, slots) -> Int64:
    """The slot of sequence n, or -1 where its index names none."""
    if states.index is None:
        return Int64(n)
    index = Int64(states.index[n])
    return Int64(select_((index >= 0) & (index < Int64(slots)), index, Int64(-1)))


@dataclass(frozen=True)
class HeadState:
    """One head's 64 value channels of a state in memory, as this thread meets it.

    row, column: elements between neighbouring value and key channels.
    """

    pointer: cute.Pointer
    row: Int32 | int
    column: Int32 | int
    v_first: bool
    key_dim: int

    def load(self, S) -> None:
        for x, place in self._pairs():
            if self.v_first:
                S[x], S[x + 1] = vector.load_floats(place, self.pointer.dtype, 2)
            else:
                for j in range(2):
                    S[x + j] = Float32(_one(place + j * self.column)[0])

    def store(self, S, factors) -> None:
        """Stores S times a factor for each i."""
        for x, place in self._pairs():
            factor = factors[x // 2 % 2]
            pair = [S[x] * factor, S[x + 1] * factor]
            if self.v_first:
                vector.store_floats(place, self.pointer.dtype, pair)
            else:
                for j in range(2):
                    _one(place + j * self.column)[0] = self.pointer.dtype(pair[j])

    def _pairs(self):
        for block in range(self.key_dim // 8):
            for i in range(2):
                step = 8 * i * self.row + 8 * block * self.column
                yield 4 * block + 2 * i, self.pointer + step


def _one(place):
    """A single element; CuTe DSL's own load of one knows no 16-bit numbers."""
    return cute.make_tensor(place, cute.make_layout(1))


def head_state(states, slot, head, value, thread, key_dim: int, v_first: bool) -> HeadState:
    """states: (slots, HV, V, K) by shape, slots and heads any stride apart.

    value: the first channel.
    """
    inner = states.shape[3] if v_first else states.shape[2]
    row, column = (inner, 1) if v_first else (1, inner)
    offset = (
        Int64(slot) * Int64(states.stride[0])
        + Int64(head) * Int64(states.stride[1])
        + Int64((value + 16 * (thread // 32) + thread % 32 // 4) * row + 2 * (thread % 4) * column)
    )
    return HeadState(states.iterator + offset, row, column, v_first, key_dim)
