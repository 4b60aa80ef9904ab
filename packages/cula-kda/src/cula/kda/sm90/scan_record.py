"""How a record (config.Record) lies in the scan's shared memory.

Tiles are copied as they lie. T and Aqk are squares of four panels there, each of 16 columns and all
64 rows: one step of a product takes a whole panel. What is above a panel's diagonal block is not in
the record: those zeros are written once, before the first copy, and no copy touches them. Products
of the panels alone would be 64, 48, 32 and 16 columns wide, but ptxas serialises all wgmma of a
function where such widths meet in one accumulator (C7511).

Where a chunk has no more than 16, 32 or 48 tokens, the other rows of the K columns are not in the
record. The load warp makes zeros of those of Kg and Kr. Those of Qg keep whatever was there: the
outputs that they make are not stored.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cula.common.varlen.device import ceil_div, where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import BLOCK, CHUNK, PANEL_BLOCK, PANELS, Record, panel_origin

PANEL = PANELS * PANEL_BLOCK  # bytes of one, zeros and all
ROW = 128  # bytes of a row of 64 columns


@dataclass(frozen=True)
class Piece:
    """What one copy brings. tile: where to; place: first byte there; start: in the record.

    by_row: it is 64 columns of K, a row a token, of which the copy brings those that exist.
    """

    tile: str
    place: int
    start: int
    size: int
    by_row: bool = False


def record_pieces(record: Record, outputs: bool) -> list[Piece]:
    """What is loaded of a record; without outputs neither Qg nor Aqk."""
    pieces = [
        *_columns("kg", record.kg, record.rows),
        *_columns("qg", record.qg, record.rows),
        *_columns("kr", record.kr, record.rows),
        *_panels("t", record.t),
        *_panels("aqk", record.aqk),
        Piece("decay", 0, record.decay, 4 * record.K),
    ]
    return [x for x in pieces if outputs or x.tile not in ("qg", "aqk")]


def _columns(tile: str, start: int, size: int) -> list[Piece]:
    return [Piece(tile, at, start + at, CHUNK * ROW, True) for at in range(0, size, CHUNK * ROW)]


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


def existing_rows(tokens) -> Int32:
    """Of a record: a multiple of 16. tokens: from the chunk's first on, of its sequence."""
    return where(tokens > CHUNK - BLOCK, CHUNK, ceil_div(tokens, BLOCK) * BLOCK)


def arriving_bytes(pieces: list[Piece], rows) -> Int32:
    """Of a record with so many rows."""
    whole = sum(x.size for x in pieces if not x.by_row)
    return rows * (ROW * sum(x.by_row for x in pieces)) + whole


@cute.jit
def write_absent(pieces: cutlass.Constexpr, shared, stage: Int32, rows: Int32):
    """Zeros of the rows of keys that do not exist, by a warp."""
    lane = cute.arch.lane_idx()
    sizes = tile_bytes(pieces)
    for x in pieces:
        if cutlass.const_expr(x.by_row and x.tile != "qg"):
            piece = shared.starts[x.tile] + (stage * sizes[x.tile] + x.place)
            for row in cutlass.range(rows, CHUNK, 512 // ROW, unroll=1):  # 512 bytes at once
                ptx.store_shared(piece + (row * ROW + lane * 16), 0, [Int32(0)] * 4)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


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
