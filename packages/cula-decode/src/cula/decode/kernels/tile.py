"""The part of one head's state that a thread block holds in registers, and who holds what.

`lanes` lanes share a value channel and split its K entries; 32 / lanes such groups make a warp, and
every thread keeps `v_per_thread` neighbouring value channels. Both memory layouts use this one map,
so a kernel's arithmetic does not know which of them the state lives in:

    lane % lanes    which of the K entries (so sums over K are a few shuffles)
    lane // lanes   which value channels of the warp
    warp            which value channels of the block

V-first [V, K]: a thread reads 16-byte pieces of its rows, the lanes of a row whole 128-byte lines.
K-first [K, V]: a thread reads v_per_thread neighbours of each of its K rows in one access.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from cula.common.cute import vector


@dataclass(frozen=True)
class StateTile:
    """A block's share (warps, v_per_thread, lanes) of a head's state (K, V), whose entries take
    `itemsize` bytes in memory."""

    K: int
    V: int
    warps: int
    v_per_thread: int
    lanes: int
    v_first: bool
    itemsize: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Value channels of one block."""
        return 32 // self.lanes * self.v_per_thread * self.warps

    @property
    def blocks_per_head(self) -> int:
        return self.V // self.rows

    @property
    def k_per_thread(self) -> int:
        return self.K // self.lanes

    @property
    def vector(self) -> int:
        """Neighbouring K entries that one thread holds."""
        return min(16 // self.itemsize, self.k_per_thread) if self.v_first else 4

    def k_of(self, lane, i: int):
        """The K index of a thread's i-th entry."""
        piece, within = divmod(i, self.vector)
        return piece * self.lanes * self.vector + (lane % self.lanes) * self.vector + within

    def v_of(self, thread, j: int):
        """The value channel, counted within the block, of a thread's j-th row."""
        return (thread // self.lanes) * self.v_per_thread + j

    def registers(self):
        """Register tensor (v_per_thread, k_per_thread), float32."""
        return cute.make_rmem_tensor((self.v_per_thread, self.k_per_thread), Float32)

    def load(self, pointer, dtype, thread, v0, rS, hints):
        """Fills rS from the head's state at `pointer`; v0 is the block's first value channel."""
        v = v0 + self.v_of(thread, 0)
        if self.v_first:
            for j in range(self.v_per_thread):
                row = pointer + (v + j) * self.K + self.k_of(thread, 0)
                for i in range(0, self.k_per_thread, self.vector):
                    piece = row + i * self.lanes
                    for e, x in enumerate(vector.load_floats(piece, dtype, self.vector, **hints)):
                        rS[j, i + e] = x
        else:
            for i in range(self.k_per_thread):
                piece = pointer + self.k_of(thread, i) * self.V + v
                for j, x in enumerate(vector.load_floats(piece, dtype, self.v_per_thread, **hints)):
                    rS[j, i] = x

    def store(self, pointer, dtype, thread, v0, rS, hints):
        """The reverse of `load`, rounding to dtype."""
        v = v0 + self.v_of(thread, 0)
        if self.v_first:
            for j in range(self.v_per_thread):
                row = pointer + (v + j) * self.K + self.k_of(thread, 0)
                for i in range(0, self.k_per_thread, self.vector):
                    values = [rS[j, i + e] for e in range(self.vector)]
                    vector.store_floats(row + i * self.lanes, dtype, values, **hints)
        else:
            for i in range(self.k_per_thread):
                values = [rS[j, i] for j in range(self.v_per_thread)]
                piece = pointer + self.k_of(thread, i) * self.V + v
                vector.store_floats(piece, dtype, values, **hints)

    def pieces(self) -> list[range]:
        """A thread's K entries by fours that lie together (two of them in a bfloat16 piece)."""
        return [range(i, i + 4) for i in range(0, self.k_per_thread, 4)]

    def gather(self, table, token, thread, piece: range) -> list:
        """Those entries of a staged token's row, as Float32 values."""
        start = table[token, None].iterator + self.k_of(thread, piece.start)
        return vector.load_shared(start, len(piece))
