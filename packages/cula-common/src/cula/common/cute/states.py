"""States between memory and the registers of a warpgroup's 64 x K accumulator.

Accumulator element x = 4 block + 2 i + j of a thread is value channel 16 warp + lane / 4 + 8 i and
key channel 8 block + 2 (lane % 4) + j.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cutlass_dsl import select_

from cula.common.cute import vector


def slot_of(index, n, slots) -> Int64:
    """The slot of sequence n, or -1 where its index, of [N], names none; no index: slot n."""
    if index is None:
        return Int64(n)
    slot = Int64(index[n])
    return Int64(select_((slot >= 0) & (slot < Int64(slots)), slot, Int64(-1)))


class HeadState:
    """64 value channels, from `value` on, of one head's state in memory, as this thread meets it.

    states: (slots, HV, V, K) by shape, V-first or K-first in memory; slots and heads any stride
    apart. thread: of the warpgroup. row, column: elements between neighbouring value and key
    channels.
    """

    def __init__(self, states, slot, head, value, thread, key_dim: int, v_first: bool):
        inner = states.shape[3] if v_first else states.shape[2]
        self.row, self.column = (inner, 1) if v_first else (1, inner)
        self.v_first, self.key_dim, self.dtype = v_first, key_dim, states.element_type
        offset = Int64(slot) * Int64(states.stride[0]) + Int64(head) * Int64(states.stride[1])
        row = value + 16 * (thread // 32) + thread % 32 // 4
        column = 2 * (thread % 4)
        self.pointer = states.iterator + (offset + Int64(row * self.row + column * self.column))

    def load(self, accumulator) -> None:
        for x, place in self._pairs():
            if self.v_first:
                pair = vector.load_floats(place, self.dtype, 2)
            else:
                pair = [Float32(_one(place + j * self.column)[0]) for j in range(2)]
            accumulator[x], accumulator[x + 1] = pair

    def store(self, accumulator, factors=None) -> None:
        """Stores the accumulator, times a factor for each i where there are any."""
        for x, place in self._pairs():
            pair = [accumulator[x], accumulator[x + 1]]
            if factors is not None:
                pair = [value * factors[x // 2 % 2] for value in pair]
            if self.v_first:
                vector.store_floats(place, self.dtype, pair)
            else:
                for j in range(2):
                    _one(place + j * self.column)[0] = self.dtype(pair[j])

    def _pairs(self):
        """Elements x and x + 1, and where the first lies."""
        for block in range(self.key_dim // 8):
            for i in range(2):
                step = 8 * i * self.row + 8 * block * self.column
                yield 4 * block + 2 * i, self.pointer + step


def _one(place):
    """A single element; CuTe DSL's own load of one knows no 16-bit numbers."""
    return cute.make_tensor(place, cute.make_layout(1))
