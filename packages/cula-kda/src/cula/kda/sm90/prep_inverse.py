"""T = (I + A)^-1 diag(beta) of a chunk, by warps that each own 16 rows of A.

Blocks on the diagonal are inverted in float32 by substitution. Below it, for block column j,
T_jj = X_jj diag(beta_j) and T_ij = -X_ii (sum of A_im T_mj over m = j .. i - 1), in float16 with
float32 sums: no power of A is formed, so correlated keys do not cancel. Warp j makes column j; what
a product gives is the next one's operand, transposed, in registers.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cula.common.cute import math
from cula.common.varlen.device import where
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import BLOCK, PANEL_BLOCK, PANELS, panel_origin
from cula.kda.sm90.prep_block import BETWEEN, TRIANGLE

INVERSE_ROW = 48  # bytes a row of X: 16 halves, and a skew
COLUMN_ROW = 32  # bytes a row of a block column of T, which lies as a record's panel does
COLUMN = PANELS * PANEL_BLOCK  # bytes of one


def invert_diagonal(warp) -> None:
    """X = (I + A)^-1 of the warp's own block, over -A; and X diag(beta) into its place in T.

    Lane l has column l % 16 of X.
    """
    triangle, column = warp.triangle, warp.column
    c = warp.lane & 15
    x = [math.select((c == row), 1.0, 0.0) for row in range(BLOCK)]
    for m in range(BLOCK - 1):
        for quarter in range((m + 1) // 4, 4):
            minus_a = ptx.load_shared(triangle, m * 64 + quarter * 16, 4, "f")
            for row in range(max(4 * quarter, m + 1), 4 * quarter + 4):
                x[row] = x[row] + minus_a[row % 4] * x[m]
    beta = ptx.load_shared(warp.norms + c * 4, 192, 1, "f")[0]
    cute.arch.sync_warp()
    # lanes 0-15 write X, the others T
    first = warp.lane < 16
    factor = math.select(first, 1.0, beta)
    place = where(first, triangle, column + warp.warp * PANEL_BLOCK) + c * 2
    pitch = where(first, INVERSE_ROW, COLUMN_ROW)
    swap = where(first, 0, 16 - (c >> 3 << 5))  # to the other unit
    for row in range(BLOCK):
        here = place + swap if row // 4 % 2 else place
        ptx.store_shared_half(here + pitch * row, 0, x[row] * factor)


def write_column(warp, target: Int64) -> None:
    """Block column `warp` of T: a panel of a record; all warps have inverted their blocks."""
    column = warp.column
    row, unit = (warp.lane & 7) + ((warp.lane >> 4) << 3), (warp.lane >> 3) & 1
    mine = column + row * COLUMN_ROW + (unit ^ (row >> 2 & 1)) * 16
    minus_a = warp.minus_a + row * BETWEEN + unit * 16
    inverses = warp.triangles + row * INVERSE_ROW + unit * 16
    diagonal = ptx.load_matrices(mine + warp.warp * PANEL_BLOCK, 0, transposed=True)
    zero = [Float32(0.0)] * 4
    # blocks[i] = T_ij transposed; above the diagonal 0
    blocks: list[list] = []
    for i in range(4):
        below = [Int32(0)] * 4
        if i > 0:
            total = [zero, zero]
            for m in range(i):
                b = ptx.load_matrices(minus_a, i * BLOCK * BETWEEN + 32 * m)
                total = [
                    ptx.multiply_add(total[n], blocks[m], b[2 * n : 2 * n + 2]) for n in range(2)
                ]
            b = ptx.load_matrices(inverses, i * TRIANGLE)
            operand = _operand(total)
            below = _operand(
                [ptx.multiply_add(zero, operand, b[2 * n : 2 * n + 2]) for n in range(2)]
            )
        here = warp.warp == i
        blocks.append([where(here, x, y) for x, y in zip(diagonal, below, strict=True)])
    for i in range(4):
        ptx.store_matrices_transposed_if(warp.warp <= i, mine, i * PANEL_BLOCK, blocks[i])
    cute.arch.sync_warp()
    target = target + Int64(panel_origin(warp.warp)) + Int64(warp.lane * 16)
    for i in range(4):
        words = ptx.load_shared(column + warp.lane * 16, i * PANEL_BLOCK, 4)
        ptx.store_global_if(warp.warp <= i, target, i * PANEL_BLOCK, words)


def _operand(x: list) -> list:
    """Two 16 x 8 tiles of numbers as the 16 x 16 left operand of a product."""
    return [ptx.pack_half(*tile[2 * i : 2 * i + 2]) for tile in x for i in range(2)]
