"""What is known of the prefill kernels when they are compiled.

No import of cutlass: a cached kernel needs none.
"""

from dataclasses import dataclass, replace
from typing import Literal

from cula.common.kernel_args import States

CHUNK = 64  # tokens a chunk
PART = 64  # value channels that one block of the scan holds the state of
SLICE = 1024  # elements of a state, of whole value channels, that one block of combine holds
BLOCK = 16  # tokens whose decays one warp of the preparation multiplies up
PANELS = CHUNK // BLOCK  # of a triangle
PANEL_BLOCK = 2 * BLOCK * BLOCK  # bytes of 16 rows of a panel
PREP_BLOCKS_PER_SM = 3  # blocks of the preparation that run at once


def panel_origin(j):
    """Where row 0 of panel j of a record's triangle would lie, if the panel went up so far.

    Its block i, 16 rows, lies PANEL_BLOCK i bytes on; panel j has blocks j .. PANELS - 1.
    """
    return PANEL_BLOCK // 2 * j * (2 * PANELS - 1 - j)


@dataclass(frozen=True)
class Record:
    """Where the preparation of one (chunk, value head) lies in the workspace, in bytes.

    A record is what the scan's shared memory holds, but for zeros, so that it is copied as it lies.
    Where a chunk has fewer tokens, rows of kg, qg and kr past its last 16 that has some are not
    written.

    Tiles of K columns lie in pieces of 64, a piece's rows of 128 bytes one after the other, the
    16-byte units of row r in the order ``unit ^ (r % 8)`` (the 128-byte swizzle). Triangles lie in
    panels of 16 columns, each from its diagonal block down: panel j has rows 16 j .. 63, of 32
    bytes one after the other, the two units of row r in the order ``unit ^ (r / 4 % 2)`` (the
    32-byte swizzle).

    kg, qg, kr: [64, K] float16, the decayed keys and queries: `K e^G`, `scale Q e^G`,
        `K e^(G_C - G)`.
    t, aqk: [64, 64] float16, triangles: the inverse times beta, and the decayed scores.
    decay: [K] float32, `e^(G_C)`.
    """

    K: int

    @property
    def rows(self) -> int:
        """Bytes of a [64, K] tile of 16-bit elements."""
        return 2 * CHUNK * self.K

    @property
    def triangle(self) -> int:
        """Bytes of a lower triangular [64, 64] tile of 16-bit elements."""
        return PANEL_BLOCK * (PANELS * (PANELS + 1) // 2)

    @property
    def kg(self) -> int:
        return 0

    @property
    def qg(self) -> int:
        return self.rows

    @property
    def kr(self) -> int:
        return 2 * self.rows

    @property
    def t(self) -> int:
        return 3 * self.rows

    @property
    def aqk(self) -> int:
        return self.t + self.triangle

    @property
    def decay(self) -> int:
        return self.aqk + self.triangle

    @property
    def bytes(self) -> int:
        """936 bytes a token at K = 128, 548 at K = 64."""
        return self.decay + 4 * self.K


@dataclass(frozen=True)
class PrepConfig:
    """The compile key of the preparation. Dtypes: "bf16", "fp16", "fp32".

    K: channels of a key, 64 or 128.
    io: dtype of q and k.
    gate: form of the gate (cula.common.gates); gate_dtype: of g; bias: dt_bias is given.
    beta: form of beta; beta_dtype: its dtype.
    l2norm: q and k are normalised.
    varlen: the sequences are packed, and a schedule (cula.common.varlen) says where they lie.
    """

    K: int
    io: str
    gate: str
    gate_dtype: str
    bias: bool
    beta: str
    beta_dtype: str
    l2norm: bool
    varlen: bool

    def kernel(self):
        from cula.kda.sm90.prep import KdaPrep

        return KdaPrep(self)


@dataclass(frozen=True)
class ScanConfig:
    """The compile key of the scan; None for an argument that is absent.

    K, V: channels of a key (64 or 128) and of a value (a multiple of 64).
    io: dtype of v and the output, "bf16" or "fp16".
    initial, final: the states that sequences start from and where their last ones go, in slots that
        `state_indices` ("int32", "int64") names (absent: sequence n has slot n).
    mask: has_initial_state is given.
    checkpoints: states kept along the way: after every so many tokens, or with `starts` before
        every chunk, in its row.
    varlen: as in PrepConfig.
    segments: None: sequences are whole. Where they are cut along time, the pass: "first" finds what
        each segment does to a state, "second" is the scan from the states before segments.
    """

    K: int
    V: int
    io: str
    initial: States | None = None
    final: States | None = None
    state_indices: str | None = None
    mask: bool = False
    checkpoints: States | None = None
    starts: bool = False
    varlen: bool = False
    segments: Literal["first", "second"] | None = None

    @property
    def parts(self) -> int:
        """Units that share a head."""
        return self.V // PART

    @property
    def cluster(self) -> int:
        """Blocks that load each record together: those of a head; see DESIGN.md, Segments."""
        return self.parts if self.segments == "second" else 1

    @property
    def pairs(self) -> int:
        """Blocks of the first pass that share a head: each takes 128 of V + K channels."""
        return -(-(self.V + self.K) // (2 * PART))

    @property
    def first_pass(self) -> "ScanConfig":
        """What goes before a "second" pass."""
        return replace(self, segments="first", final=None, checkpoints=None)

    @property
    def combine(self) -> "CombineConfig":
        """What goes between the two."""
        return CombineConfig(self.K, self.V, self.varlen)

    def kernel(self):
        if self.segments == "first":
            from cula.kda.sm90.segments import KdaSegments

            return KdaSegments(self)
        from cula.kda.sm90.scan import KdaScan

        return KdaScan(self)


@dataclass(frozen=True)
class CombineConfig:
    """The compile key of the kernel that makes states of what segments do; as in ScanConfig."""

    K: int
    V: int
    varlen: bool

    @property
    def slices(self) -> int:
        """Blocks that share a head."""
        return self.V * self.K // SLICE

    def kernel(self):
        from cula.kda.sm90.combine import KdaCombine

        return KdaCombine(self)
