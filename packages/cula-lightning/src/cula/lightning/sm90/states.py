"""States of segments, between memory and the registers of a warpgroup's 64 x K accumulator."""

import cutlass.cute as cute
from cutlass import Float32, Int64

from cula.common.cute import vector


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
