"""How a record (config.Record) lies in the scan's shared memory.

Tiles are copied as they lie. T and Aqk are squares of four panels there, each of 16 columns and all
64 rows: one step of a product takes a whole panel. What is above a panel's diagonal block is not in
the record: those zeros are written once, before the first copy, and no copy touches them. Products
of the panels alone would be 64, 48, 32 and 16 columns wide, but ptxas serialises all wgmma of a
function where such widths meet in one accumulator (C7511).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cula.kda.sm90 import ptx
from cula.kda.sm90.config import CHUNK, PANEL_BLOCK, PANELS, Record, panel_origin

PANEL = PANELS * PANEL_BLOCK  # bytes of one, zeros and all


@dataclass(frozen=True)
class Piece:
    """What one copy brings. tile: where to; place: first byte there; start: in the record."""

    tile: str
    place: int
    start: int
    size: int


def record_pieces(record: Record, outputs: bool) -> list[Piece]:
    """What is loaded of a record; without outputs neither Qg nor Aqk."""
    pieces = [
        Piece("kg", 0, record.kg, record.rows),
        Piece("qg", 0, record.qg, record.rows),
        Piece("kr", 0, record.kr, record.rows),
        *_panels("t", record.t),
        *_panels("aqk", record.aqk),
        Piece("decay", 0, record.decay, 4 * record.K),
    ]
    return [x for x in pieces if outputs or x.tile not in ("qg", "aqk")]


def _panels(tile: str, start: int) -> list[Piece]:
    return [
        Piece(
            tile,
            PANEL * j + PANEL_BLOCK * j,
            start + panel_origin(j) + PANEL_BLOCK * j,
            PANEL - PANEL_BLOCK * j,
        )
        for j in range(PANELS)
    ]


def tile_bytes(pieces: list[Piece]) -> dict[str, int]:
    """Shared memory of each tile of a stage."""
    return {x.tile: x.place + x.size for x in pieces}


def panels_layout(stages: int, dtype):
    """(row, column, stage) of a square of panels: a K-major operand, 32-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, dtype)
    return cute.tile_to_shape(atom, (CHUNK, CHUNK, stages), order=(0, 1, 2))


def write_zeros(pieces: list[Piece], starts: dict, stages: int, thread) -> None:
    """The zeros of all squares, by all threads of a block, before its first copy."""
    sizes = tile_bytes(pieces)
    for piece in pieces:
        above = piece.place % PANEL if piece.tile in ("t", "aqk") else 0
        if above:
            for stage in range(stages):
                place = starts[piece.tile] + (stage * sizes[piece.tile] + piece.place - above)
                ptx.store_shared_zeros_if(thread < above // 16, place + thread * 16)
    cute.arch.fence_proxy("async.shared", space="cta")
