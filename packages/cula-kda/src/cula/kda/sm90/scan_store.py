"""States on their way out: final ones, and checkpoints along the way.

Straight from the accumulator a state takes 32 or 64 stores a thread, each of which meets eight
rows: 1.5 us, where a chunk takes as long. Here it is laid out in shared memory, where the chunk
just computed has left its tiles, and bulk copies take it to memory while the next one is computed;
the stage is free when they have read it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cula.common.cute import vector
from cula.common.cute.dtypes import DTYPES
from cula.common.kernel_args import States
from cula.common.varlen.device import where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import CHUNK, PART

TILES = ("kg", "qg", "kr")  # of a stage, all of one size


@dataclass(frozen=True)
class StateRows:
    """How 64 value channels of a state lie in a stage.

    A row is what lies together in memory: a value channel's keys (V-first), or a key channel's 64
    values. Rows lie `pitch` bytes apart, so that what a warp stores at once meets every bank as
    seldom as can be, and fill one tile after the other, eight at a time.
    """

    kind: States
    K: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.kind.dtype].width // 8

    @property
    def count(self) -> int:
        return PART if self.kind.v_first else self.K

    @property
    def bytes(self) -> int:
        """Of a row."""
        return (self.K if self.kind.v_first else PART) * self.size

    @property
    def pitch(self) -> int:
        return self.bytes + (8 * self.size if self.kind.v_first else 16)

    @property
    def tile_bytes(self) -> int:
        return 2 * CHUNK * self.K

    @property
    def tile_rows(self) -> int:
        """Rows in a tile."""
        rows = self.tile_bytes // self.pitch // 8 * 8
        assert rows * len(TILES) >= self.count, "a state does not fit into a stage"
        return rows

    def start(self, shared, stage, row) -> Int32:
        """Where a row lies; shared: scan_block.SharedMemory."""
        tile = row // self.tile_rows
        starts = [Int32(shared.starts[name]) for name in TILES]
        first = where(tile == 0, starts[0], where(tile == 1, starts[1], starts[2]))
        return first + stage * self.tile_bytes + (row - tile * self.tile_rows) * self.pitch


@cute.jit
def store_state(
    rows: cutlass.Constexpr[StateRows],
    shared,
    stage: Int32,
    states: cute.Tensor,
    slot: Int64,
    unit,
    thread: Int32,
    g,
):
    """The unit's channels of the state, in units of 1, to a slot of `states`, (slots, HV, V, K).

    By the state warpgroup, each thread when it has left the stage's tiles. Which element of the
    accumulator is which of the state: cula.common.cute.states.
    """
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    g.barrier()  # all four have left the stage
    if cutlass.const_expr(rows.kind.v_first):
        lay_out_values(rows, shared, stage, warp, lane, g)
    else:
        lay_out_keys(rows, shared, stage, warp, lane, g)
    cute.arch.fence_proxy("async.shared", space="cta")
    if cutlass.const_expr(rows.kind.v_first):
        cute.arch.sync_warp()  # what a warp lays out, it copies
    else:
        g.barrier()
    share = rows.count // 4
    element = (
        slot * Int64(states.stride[0])
        + Int64(unit.head) * Int64(states.stride[1])
        + Int64(unit.part * PART) * Int64(states.stride[2])
    )
    start = Int64(states.iterator.toint()) + element * Int64(rows.size)
    step = states.stride[2 if rows.kind.v_first else 3] * rows.size
    with cute.arch.elect_one():
        for first in cutlass.range_constexpr(0, share, 8):  # a tile has whole eights of rows
            row = warp * share + first
            source, target = rows.start(shared, stage, row), start + Int64(row) * Int64(step)
            for i in cutlass.range_constexpr(8):
                ptx.copy_from_shared(source + i * rows.pitch, target + Int64(i * step), rows.bytes)
        cute.arch.cp_async_bulk_commit_group()


def lay_out_values(rows: StateRows, shared, stage, warp, lane, g) -> None:
    """Rows are value channels: a thread has two, and pairs of keys in each."""
    dtype = DTYPES[rows.kind.dtype]
    for i in range(2):
        place = rows.start(shared, stage, warp * 16 + 8 * i + lane // 4)
        place += lane % 4 * (2 * rows.size)
        for block in range(rows.K // 8):
            pair = [g.S[4 * block + 2 * i + j] * g.units[2 + i] for j in range(2)]
            offset = 8 * block * rows.size
            if dtype is Float32:
                ptx.store_shared(place, offset, pair, "f")
            else:
                ptx.store_shared(place, offset, [vector.pack(pair, dtype)])


def lay_out_keys(rows: StateRows, shared, stage, warp, lane, g) -> None:
    """Rows are key channels: a thread has two neighbours of every eight, and two values in each."""
    dtype = DTYPES[rows.kind.dtype]
    across = lane % 4 * (2 * rows.pitch) + (warp * 16 + lane // 4) * rows.size
    for tile, name in enumerate(TILES):
        place = shared.starts[name] + stage * rows.tile_bytes + across
        first = tile * rows.tile_rows
        for key in range(first, min(first + rows.tile_rows, rows.K), 8):
            for i in range(2):
                x = key // 8 * 4 + 2 * i
                pair = [g.S[x + j] * g.units[2 + i] for j in range(2)]
                offset = (key - first) * rows.pitch + 8 * i * rows.size
                if dtype is Float32:
                    for j in range(2):
                        ptx.store_shared(place, offset + j * rows.pitch, [pair[j]], "f")
                else:
                    word = vector.pack(pair, dtype)
                    ptx.store_shared_halves(place, offset, offset + rows.pitch, word)
