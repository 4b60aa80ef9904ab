"""One warp's 16 tokens in the preparation of a chunk; prep.py says when.

Anchors make every exponent at most 0, so that no gate can overflow: what lies between a row i and
an earlier column j is split at a boundary between them. Level L (1, 2, 4, 8) takes rows in the
upper half and columns in the lower half of groups of 2 L tokens, the boundary in the middle. With

    kf[i] = k_i * product of the decays of block start .. i      (blocks of L tokens)
    kb[j] = k_j * product of the decays of j + 1 .. block end

the scores of a level are kf . kb, and qf . kb. From L to 2 L half of the vectors are multiplied by
another block's total. After level 8 the same vectors, now of 16 tokens, serve the products with
earlier warps' tokens, where the totals of the blocks between come in.

All vectors are float16; products of decays are taken in float32 and rounded once.
"""

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from cula.common.cute import math
from cula.kda.sm90 import ptx
from cula.kda.sm90.config import BLOCK, PANEL_BLOCK, PANELS, panel_origin

PIECE = 8192  # bytes of 64 rows of 64 channels
ROWS = 2048  # bytes of 16 such rows
LEVELS = (1, 2, 4, 8)
NORMS = 256  # bytes a warp: 1/|k|, scale/|q|, the diagonal of the scores, beta; 16 numbers each
TRIANGLE = 1024  # bytes of a warp's 16 x 16 numbers
BETWEEN = 3 * BLOCK * 2 + BLOCK  # bytes a row of -A left of the diagonal: 48 halves, and a skew


@dataclass(frozen=True)
class BlockWarp:
    """Addresses of one warp's part of a block's shared memory.

    k, q, back: of its 16 rows in the tiles of keys, queries and kb. Each piece of 64 channels has
    rows of 128 bytes, 16-byte units in the order unit ^ (row % 8).
    tile_back: of the whole tile of kb. norms: of its numbers. totals: of all warps' products of
    decays, [warp, K] numbers. between: of its factors against blocks 0 and 1, [2, K] halves.
    triangles, minus_a: of all warps' 16 x 16 diagonal blocks of -A, [column, row] numbers, later of
    their inverses; and of what is left of them, BETWEEN bytes a row. column: see prep_inverse.
    """

    config: object
    warp: Int32
    lane: Int32
    k: Int32
    q: Int32
    back: Int32
    tile_back: Int32
    norms: Int32
    totals: Int32
    between: Int32
    triangles: Int32
    minus_a: Int32
    column: Int32

    # ---------------------------------------------------------------- places
    @property
    def triangle(self):
        """Of its own diagonal block."""
        return self.triangles + self.warp * TRIANGLE

    def channel(self, base, row: int):
        """(address, offset) of a row's two channels of this lane, in the first piece."""
        return base + ((self.lane * 4) ^ (row % 8 * 16)), row * 128

    def fragment(self, base, step: int):
        """Address of 16 rows x 16 channels for `load_matrices`, within a piece."""
        row = self.lane & 15
        unit = (self.lane >> 4) ^ (self.lane & 7)
        return base + (row * 128 + ((unit << 4) ^ (step * 32)))

    def columns(self, base, step: int):
        """The same as right operands: the two words of 8 rows next to each other."""
        row, unit = (self.lane & 7) + (self.lane >> 4 << 3), (self.lane >> 3) & 1
        return base + (row * 128 + ((unit ^ (self.lane & 7)) << 4 ^ (step * 32)))

    # ---------------------------------------------------------------- norms
    def fill_past_end(self, base, valid: Int32, pieces: int, word: int) -> None:
        """Its rows of a tile that are not the sequence's."""
        for row in range(BLOCK):
            gone = row >= valid
            for piece in range(pieces):
                place = base + self.lane * 4
                ptx.store_shared_if(gone, place, piece * PIECE + row * 128, word)

    def write_norms(self, scale, pieces: int) -> None:
        """1/|k|, scale/|q| and the scores' diagonal of the 16 tokens.

        k.k, q.q and q.k are the diagonals of 16 x 16 products: far fewer instructions than sums
        over lanes.
        """
        zero = [Float32(0.0)] * 4
        kk, qq, qk = [zero, zero], [zero, zero], [zero, zero]
        io = self.config.io
        for piece in range(pieces):
            for step in range(4):
                k = ptx.load_matrices(self.fragment(self.k, step), piece * PIECE)
                q = ptx.load_matrices(self.fragment(self.q, step), piece * PIECE)
                for n in range(2):
                    columns = (k[n], k[n + 2])
                    qk[n] = ptx.multiply_add(qk[n], q, columns, io)
                    if self.config.l2norm:
                        kk[n] = ptx.multiply_add(kk[n], k, columns, io)
                        qq[n] = ptx.multiply_add(qq[n], q, (q[n], q[n + 2]), io)
        # of rows 8 n + lane / 4, lane % 4 has columns 8 n + 2 (lane % 4) + {0, 1}
        mine = self.lane & 3 == self.lane >> 3
        odd = ((self.lane >> 2) & 1) == 1
        place = self.norms + (self.lane >> 2) * 4
        for n in range(2):
            inverse_k, inverse_q = Float32(1.0), Float32(scale)
            if self.config.l2norm:
                k2, q2 = (math.select(odd, x[n][2 * n + 1], x[n][2 * n]) for x in (kk, qq))
                inverse_k = math.rsqrt(k2 + Float32(1e-6))
                inverse_q = math.rsqrt(q2 + Float32(1e-6)) * scale
            score = math.select(odd, qk[n][2 * n + 1], qk[n][2 * n]) * inverse_k * inverse_q
            for i, value in enumerate((inverse_k, inverse_q, score)):
                ptx.store_shared_if(mine, place, 64 * i + 32 * n, value, "f")

    def write_beta(self, beta) -> None:
        """Lane l's beta is that of token l % 16."""
        ptx.store_shared(self.norms + (self.lane & 15) * 4, 192, [beta], "f")

    def gate_words(self, piece: int) -> list:
        """The lane's two channels of gates of 16 bits, for 16 tokens."""
        words = []
        for row in range(BLOCK):
            address, offset = self.channel(self.back, row)
            words.append(ptx.load_shared(address, piece * PIECE + offset, 1))
        return words

    def normalised(self, piece: int) -> tuple[list, list]:
        """The lane's two channels of k / |k| and scale q / |q|, as halves, for 16 tokens."""
        found = []
        for base, at in ((self.k, 0), (self.q, 64)):
            rows = []
            for row in range(BLOCK):
                if row % 4 == 0:
                    factors = ptx.load_shared(self.norms, at + row * 4, 4, "f")
                address, offset = self.channel(base, row)
                word = ptx.load_shared(address, piece * PIECE + offset, 1)[0]
                low, high = ptx.unpack(word, self.config.io)
                factor = factors[row % 4]
                rows.append(ptx.pack_half(low * factor, high * factor))
            found.append(rows)
        return found[0], found[1]

    # ---------------------------------------------------------------- levels
    def write_level(self, level: int, piece: int, kf, qf, kb) -> None:
        """The rows and columns of a level for the tensor cores: kf above qf, and kb.

        Levels take turns with two places, so that one is written while the other is read. Both are
        this warp's own rows of a piece whose words are in registers.
        """
        L = LEVELS[level]
        rows, columns = self._level_places(level, piece)
        for u in range(8):
            group = u // L * 2 * L + u % L
            address, offset = self.channel(rows, u)
            ptx.store_shared(address, offset, [kf[group + L]])
            ptx.store_shared(address, offset + 1024, [qf[group + L]])
            address, offset = self.channel(columns, u)
            ptx.store_shared(address, offset, [kb[group]])

    def multiply_level(self, level: int, piece: int, scores: list) -> list:
        """Adds a piece's part of a level's scores: rows 0-7 of k, 8-15 of q, against 8 columns."""
        rows, columns = self._level_places(level, piece)
        unit = (self.lane >> 3) ^ (self.lane & 7)
        for half in range(2):
            place = columns + ((self.lane & 7) * 128 + ((unit << 4) ^ (half * 64)))
            b = ptx.load_matrices(place, 0)
            for i in range(2):
                a = ptx.load_matrices(self.fragment(rows, 2 * half + i), 0)
                scores = ptx.multiply_add(scores, a, (b[2 * i], b[2 * i + 1]))
        return scores

    def _level_places(self, level: int, piece: int):
        odd = level % 2
        rows = self.q if odd else self.back
        return rows + piece * PIECE, self.k + (piece * PIECE + odd * 1024)

    def write_operands(self, piece: int, kf, qf, kb) -> None:
        """The vectors of whole blocks, where k, q were."""
        for row in range(BLOCK):
            for base, vectors in ((self.k, kf), (self.q, qf), (self.back, kb)):
                address, offset = self.channel(base, row)
                ptx.store_shared(address, piece * PIECE + offset, [vectors[row]])

    # ---------------------------------------------------------------- operands of the scan
    def place(self, step: int):
        """Within a tile's rows of this warp: the step-th 16-byte unit of this lane.

        All are of the same 8 channels.
        """
        units = self.config.K // 8
        together = 32 // units  # rows
        row, unit = self.lane // units, self.lane % units
        swizzled = (((unit & 7) ^ row) << 4) ^ (step * together % 8 * 16)
        return (unit >> 3) * PIECE + row * 128 + swizzled + step * together * 128

    def steps(self) -> range:
        return range(BLOCK * self.config.K // 256)

    def write_totals(self, piece: int, total: list) -> None:
        """The lane's two channels.

        Units of 16 bytes lie in the order unit ^ (unit / 8 % 2): neighbouring lanes, who read every
        other unit, then find them in different banks.
        """
        place = (
            self.totals + self.warp * (4 * self.config.K) + (self.lane * 8 ^ (self.lane >> 4 << 4))
        )
        ptx.store_shared(place, 256 * piece, total, "f")

    def read_totals(self) -> tuple[list, list, list]:
        """Of the lane's 8 channels: the decays of the blocks before and of those after, as halves,
        and of all.

        Writes the factors between blocks, too.
        """
        unit = self.lane % (self.config.K // 8)
        channel = unit * 8
        place = self.totals + (channel * 4 + (unit >> 2 & 1) * 16)
        other = self.totals + (channel * 4 + (unit >> 2 & 1 ^ 1) * 16)
        one = [Float32(1.0)] * 8
        before, after, total, between = one, one, one, [one, one]
        for block in range(4):
            row = block * 4 * self.config.K
            d = [*ptx.load_shared(place, row, 4, "f"), *ptx.load_shared(other, row, 4, "f")]
            earlier, later = (block < self.warp), (block > self.warp)
            total = _products(total, d)
            if block < 3:
                before = _products_if(earlier, before, d)
            if block > 0:
                after = _products_if(later, after, d)
            for j in range(min(block, 2)):
                if block < 3:
                    between[j] = _products_if(earlier, between[j], d)
        for j, factors in enumerate(between):
            place = self.between + channel * 2
            ptx.store_shared(place, j * 2 * self.config.K, _halves(factors))
        return _halves(before), _halves(after), total

    def write_rows(self, source: Int32, target, factors: list) -> None:
        """Vectors times the lane's factors, into a record's tile. target: of this warp's rows."""
        for step in self.steps():
            place = self.place(step)
            words = ptx.load_shared(source + place, 0, 4)
            words = [ptx.multiply_halves(x, f) for x, f in zip(words, factors, strict=True)]
            ptx.store_global(target + Int64(place), 0, words)

    def fragments(self, base, pieces: int) -> list:
        """The 16 rows of a tile as operands of `multiply_add`, 16 channels each."""
        return [
            ptx.load_matrices(self.fragment(base, step), piece * PIECE)
            for piece in range(pieces)
            for step in range(4)
        ]

    # ---------------------------------------------------------------- scores
    def write_diagonal(self, scores: list, aqk: Int32) -> None:
        """The levels' scores, where they belong; of -A only row > column is written.

        aqk: 16 rows of the scores of queries: of each panel a block, one after the other.
        """
        u, pair = self.lane >> 2, (self.lane & 3) * 2
        aqk = aqk + self.warp * PANEL_BLOCK
        for level, L in enumerate(LEVELS):
            row = ((u >> level) << (level + 1)) + L + (u & (L - 1))
            minus_beta = -ptx.load_shared(self.norms + row * 4, 192, 1, "f")[0]
            for j in range(2):
                low = pair + j
                column = ((low >> level) << (level + 1)) + (low & (L - 1))
                there = u >> level == low >> level
                place = self.triangle + (column * 64 + row * 4)
                value = scores[level][j] * minus_beta
                ptx.store_shared_if(there, place, 0, value, "f")
                ptx.store_shared_half_if(
                    there, self.aqk_place(aqk, row, column), scores[level][2 + j]
                )
        row = self.lane & 15
        value = ptx.load_shared(self.norms + row * 4, 128, 1, "f")[0]
        ptx.store_shared_half(self.aqk_place(aqk, row, row), 0, value)

    def aqk_place(self, aqk, row, column):
        """Of one element of the scores within this block of 16 tokens; aqk: of that block."""
        unit = (column >> 3) ^ (row >> 2 & 1)
        return aqk + (row * 32 + (unit << 4) + (column & 7) * 2)

    def multiply_earlier(self, j: int, kf: list, qf: list, aqk: Int32) -> None:
        """The scores against the tokens of warp j < this one, from fragments of kf and qf."""
        zero = [Float32(0.0)] * 4
        a, s = [zero, zero], [zero, zero]
        factors = self.between + (self.lane & 3) * 4
        for step, (k, q) in enumerate(zip(kf, qf, strict=True)):
            place = self.columns(self.tile_back, step % 4)
            b = ptx.load_matrices(place, step // 4 * PIECE + j * ROWS)
            if j < 2:  # block 2 is only ever next to block 3
                f0, f1 = (
                    ptx.load_shared(factors, j * 2 * self.config.K + step * 32 + 16 * i, 1)[0]
                    for i in range(2)
                )
                b = [ptx.multiply_halves(x, f) for x, f in zip(b, (f0, f1, f0, f1), strict=True)]
            for n in range(2):
                a[n] = ptx.multiply_add(a[n], k, b[2 * n : 2 * n + 2])
                s[n] = ptx.multiply_add(s[n], q, b[2 * n : 2 * n + 2])
        u, pair = self.lane >> 2, (self.lane & 3) * 4
        for i in range(2):
            minus_beta = -ptx.load_shared(self.norms + u * 4, 192 + 32 * i, 1, "f")[0]
            for n in range(2):
                word = ptx.pack_half(a[n][2 * i] * minus_beta, a[n][2 * i + 1] * minus_beta)
                place = self.minus_a + (self.warp * (BLOCK * BETWEEN) + u * BETWEEN + pair)
                ptx.store_shared(place, 8 * i * BETWEEN + 32 * j + 16 * n, [word])
                word = ptx.pack_half(s[n][2 * i], s[n][2 * i + 1])
                place = aqk + (u * 32 + ((u >> 2 ^ n) << 4) + pair)
                ptx.store_shared(place, j * PANEL_BLOCK + 256 * i, [word])

    # ---------------------------------------------------------------- past the end
    def write_zero_triangles(self, target, record) -> None:
        """Zeros for the warp's part of a record's triangles: its rows of Aqk, its columns of T.

        The other warps make zeros of its rows of T. Its rows of keys and queries nobody reads.
        """
        zeros, target = [0] * 4, target + Int64(self.lane * 16)
        block = target + Int64(self.warp * PANEL_BLOCK)
        for j in range(PANELS):
            ptx.store_global_if(self.warp >= j, block, record.aqk + panel_origin(j), zeros)
        column = target + Int64(panel_origin(self.warp))
        for i in range(PANELS):
            ptx.store_global_if(self.warp <= i, column, record.t + PANEL_BLOCK * i, zeros)

    def write_zero_scores(self) -> None:
        """Rows of -A; and over the inverse of its block, which only meets those, what is finite."""
        rows = self.minus_a + self.warp * (BLOCK * BETWEEN)
        for base, size in ((rows, BLOCK * BETWEEN), (self.triangle, TRIANGLE)):
            for start in range(0, size, 512):
                inside = self.lane * 16 < size - start
                ptx.store_shared_zeros_if(inside, base + (start + self.lane * 16))


def _products(x: list, y: list) -> list:
    return [a * b for a, b in zip(x, y, strict=True)]


def _products_if(condition, x: list, y: list) -> list:
    return [ptx.multiply_if(condition, a, b) for a, b in zip(x, y, strict=True)]


def _halves(x: list) -> list:
    return [ptx.pack_half(*x[i : i + 2]) for i in range(0, len(x), 2)]


def decay_products(factors) -> tuple[dict, list]:
    """Products over aligned groups of 1, 2, 4, 8 rows, rounded to halves, and over all 16.

    factors: row -> the two factors of the lane's channels.
    """
    rounded: dict[int, list] = {L: [] for L in LEVELS}
    pending: dict[int, list] = {}
    for row in range(BLOCK):
        value, L = factors(row), 1
        while L < BLOCK:
            rounded[L].append(ptx.pack_half(*value))
            if L not in pending:
                pending[L] = value
                break
            value, L = _products(pending.pop(L), value), 2 * L
    return rounded, value


def widen(L: int, kf: list, qf: list, kb: list, totals: list) -> None:
    """Vectors of blocks of L tokens become those of 2 L. totals: the blocks' products of decays."""
    for block, rows in enumerate(range(0, BLOCK, L)):
        other = totals[block ^ 1]
        for row in range(rows, rows + L):
            if block % 2 == 0:
                kb[row] = ptx.multiply_halves(kb[row], other)
            else:
                kf[row] = ptx.multiply_halves(kf[row], other)
                qf[row] = ptx.multiply_halves(qf[row], other)
