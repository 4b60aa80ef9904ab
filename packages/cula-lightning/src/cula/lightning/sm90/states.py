"""States between memory and the registers that a warpgroup's 64 x K accumulator has.

Accumulator element x = 4 block + 2 i + j of a thread is value channel 16 warp + lane / 4 + 8 i and
key channel 8 block + 2 (lane % 4) + j.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cula.common.cute import vector


def slot_of(mIndex, n, slots) -> Int64:
    """The slot of sequence n, or -1 where its index names none."""
    if mIndex is None:
        return Int64(n)
    index = Int64(mIndex[n])
    return Int64(select_((index >= 0) & (index < Int64(slots)), index, Int64(-1)))


class HeadState:
    """One head's K x 64 part of a state in memory, as this thread meets it.

    states: (slots, HV, V, K) or, K-first, (slots, HV, K, V); any stride between slots and heads.
    """

    def __init__(self, states, slot, head, value, thread, key_dim: int, v_first: bool):
        offset = Int64(slot) * Int64(states.stride[0]) + Int64(head) * Int64(states.stride[1])
        row = value + 16 * (thread // 32) + thread % 32 // 4
        column = 2 * (thread % 4)
        if v_first:
            self.row, self.column = states.shape[3], 1
        else:
            self.row, self.column = 1, states.shape[3]
        self.v_first, self.key_dim, self.dtype = v_first, key_dim, states.element_type
        self.pointer = states.iterator + (offset + Int64(row * self.row + column * self.column))

    def _places(self):
        for block in range(self.key_dim // 8):
            for i in range(2):
                yield 4 * block + 2 * i, self.pointer + (8 * i * self.row + 8 * block * self.column)

    def load(self, accumulator):
        for x, place in self._places():
            if self.v_first:
                pair = vector.load_floats(place, self.dtype, 2)
            else:
                pair = [Float32(element(place + j * self.column)[0]) for j in range(2)]
            accumulator[x], accumulator[x + 1] = pair

    def store(self, accumulator):
        for x, place in self._places():
            pair = [accumulator[x], accumulator[x + 1]]
            if self.v_first:
                vector.store_floats(place, self.dtype, pair)
            else:
                for j in range(2):
                    element(place + j * self.column)[0] = self.dtype(pair[j])


class KeptState:
    """A warpgroup's part of a state in a segment's row, in the order of its registers.

    Nothing but these kernels reads it, so four neighbouring registers of a thread lie together,
    and those of a warp's threads side by side. states: (segments, HV, V, K), Float32.
    """

    def __init__(self, states, row, head, value, thread):
        offset = Int64(row) * Int64(states.stride[0]) + Int64(head) * Int64(states.stride[1])
        self.pointer = states.iterator + (offset + Int64(value * states.shape[3] + 4 * thread))

    def load(self, accumulator):
        for x in range(0, cute.size(accumulator), 4):
            values = vector.load_floats(self.pointer + 128 * x, Float32, 4)
            for i in range(4):
                accumulator[x + i] = values[i]

    def store(self, accumulator):
        for x in range(0, cute.size(accumulator), 4):
            values = [accumulator[x + i] for i in range(4)]
            vector.store_floats(self.pointer + 128 * x, Float32, values)


def element(pointer):
    """One element at a pointer, as a tensor."""
    return cute.make_tensor(pointer, cute.make_layout(1))


DTYPES = {"fp32": Float32, "bf16": BFloat16, "int32": Int32, "int64": Int64}
