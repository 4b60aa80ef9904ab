"""Checkpoints: states along the way, on their way to memory while the scan goes on.

Straight from the accumulator a state takes 32 stores a thread, each of which meets eight rows:
where every chunk leaves one, the scan takes twice its time. Here each warp lays its sixteen rows
out in shared memory, and bulk copies take them from there while the next chunk is computed. For
V-first states alone: of a K-first one no row lies together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cula.common.cute import vector
from cula.common.cute.dtypes import DTYPES
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import PART

ROWS = 16  # of a warp
PAD = 8  # elements a row: so the stores of a warp's eight rows meet every bank once


def mark_row(config) -> int:
    """Bytes between rows in shared memory; 0 where states are stored directly, or none are kept."""
    kind = config.checkpoints
    if kind is None or not kind.v_first:
        return 0
    return (config.K + PAD) * DTYPES[kind.dtype].width // 8


@cute.jit
def write_mark(
    start: Int32,
    pitch: cutlass.Constexpr[int],
    marks: cute.Tensor,
    row: Int64,
    unit,
    thread: Int32,
    g,
):
    """The state, in units of 1, to a row of `marks`, (rows, HV, V, K); by a whole warp.

    start: of the room in shared memory. pitch: `mark_row`. Which element of the accumulator is
    which of the state: cula.common.cute.states.
    """
    warp, lane = thread // 32, thread % 32
    dtype, size = marks.element_type, marks.element_type.width // 8
    mine = start + warp * (ROWS * pitch)
    cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last one is still read there
    cute.arch.sync_warp()
    place = mine + lane // 4 * pitch + lane % 4 * (2 * size)
    for x in cutlass.range_constexpr(0, cute.size(g.S), 2):
        block, i = x // 4, x // 2 % 2
        pair = [g.S[x + j] * g.units[2 + i] for j in range(2)]
        offset = 8 * i * pitch + 8 * block * size
        if cutlass.const_expr(dtype is Float32):
            ptx.store_shared(place, offset, pair, "f")
        else:
            ptx.store_shared(place, offset, [vector.pack(pair, dtype)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane < ROWS:
        value = unit.part * PART + warp * ROWS + lane
        element = (
            row * Int64(marks.stride[0])
            + Int64(unit.head) * Int64(marks.stride[1])
            + Int64(value) * Int64(marks.stride[2])
        )
        target = Int64(marks.iterator.toint()) + element * Int64(size)
        ptx.copy_from_shared(mine + lane * pitch, target, pitch - PAD * size)
        cute.arch.cp_async_bulk_commit_group()
