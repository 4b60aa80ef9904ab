"""Copies by the tensor memory accelerator (TMA)."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def tile_copies(atom, tiles, buffers):
    """A copy's view of (buffers in shared memory, tiles in global memory).

    buffers: (rows, columns, stage); tiles: (rows, columns, ...). The results' first mode is a whole
    tile, their others count: `cute.copy(atom, tiles[(None, i)], buffers[(None, s)], ...)`.
    """
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(buffers, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
