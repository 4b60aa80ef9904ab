"""What the host knows of a batch from shapes alone: bounds, segments, the workspace's layout.

Nothing here reads a device value, so a plan is made once per shape and a CUDA graph may be
replayed with other `cu_seqlens` in the same buffer. The tables that depend on the values are
written by `ScheduleKernel` (or by `twin`).

Words used throughout:

    chunk     `chunk` consecutive tokens of one sequence, the last one possibly shorter; chunks
              never cross sequences
    segment   what one unit walks in order: a whole sequence, or `segment_chunks` chunks of one
              (its last may be shorter). A sequence of no tokens has one segment of no tokens:
              somebody has to write its final state
    unit      (segment, head, part): one block's share of the work; part is a slice of a head,
              e.g. half of V
"""

from dataclasses import dataclass
from functools import cached_property

from cula.common.checks import require
from cula.common.varlen.config import ScheduleConfig

INT32_MAX = 2**31 - 1

# The header, in int32 words.
HEADER_WORDS = 16
CHUNKS_WORD = 0
SEGMENTS_WORD = 1
END_WORD = 2
TICKETS_AT = 8
TICKETS = 8

SEGMENT_WORDS = 8
CHUNK_WORDS = 4

# Up to here a block keeps every per-sequence table in shared memory (80 KiB, which all
# architectures have).
SHARED_SEQUENCES = 4096
SMALL_SEQUENCES = 128
ROW = 32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def require_counts(plan, *may_be_zero: str) -> None:
    """Check the numbers that a plan was given."""
    for name in may_be_zero:
        require(getattr(plan, name) >= 0, name, getattr(plan, name), "must be >= 0")
    for name in ("chunk", "heads", "parts"):
        require(getattr(plan, name) >= 1, name, getattr(plan, name), "must be >= 1")


def require_range(tokens: int, chunk: int, units: int) -> None:
    """Check that int32 holds every token and unit.

    The end of a chunk is computed before it is cut off at the sequence's end.
    """
    rule = f"tokens + chunk must be below 2^31 (chunk is {chunk})"
    require(tokens + chunk <= INT32_MAX, "tokens", tokens, rule)
    require(units <= INT32_MAX, "units", units, "segments x heads x parts must be below 2^31")


@dataclass(frozen=True)
class VarlenPlan:
    """Bounds and layout of the schedule of `sequences` sequences in `tokens` packed tokens.

    sequences       N = len(cu_seqlens) - 1, may be 0
    tokens          T, the length of the packed token axis, may be 0
    chunk           tokens a chunk
    heads, parts    units a segment: heads * parts
    segment_chunks  chunks a segment; 0 keeps every sequence whole. See `choose_segment_chunks`
    chunk_table     whether the table of chunks is wanted (kernels parallel over chunks); False
                    saves its bytes

    Raises ValueError naming the argument where a value is out of range or a bound would pass
    2^31 - 1.
    """

    sequences: int
    tokens: int
    chunk: int
    heads: int = 1
    parts: int = 1
    segment_chunks: int = 0
    chunk_table: bool = True

    def __post_init__(self) -> None:
        require_counts(self, "sequences", "tokens", "segment_chunks")
        require_range(self.tokens, self.chunk, self.max_units)
        words = self.workspace_words
        require(words <= INT32_MAX, "workspace", words, "must be fewer than 2^31 words")

    # ---------------------------------------------------------------- bounds
    @property
    def max_chunks(self) -> int:
        """Least upper bound of the number of chunks.

        k sequences that are not empty have at most k + (T - k) // chunk, which grows with k.
        """
        k = min(self.sequences, self.tokens)
        return k + (self.tokens - k) // self.chunk

    @property
    def max_segments(self) -> int:
        """Upper bound of the number of segments; exactly `sequences` where sequences stay whole."""
        if self.sequences == 0 or self.segment_chunks == 0:
            return self.sequences
        return self.sequences + max(self.tokens - 1, 0) // (self.segment_chunks * self.chunk)

    @property
    def max_units(self) -> int:
        return self.max_segments * self.heads * self.parts

    # ---------------------------------------------------------------- workspace, in int32 words
    @property
    def segments_at(self) -> int:
        return HEADER_WORDS

    @property
    def chunks_at(self) -> int:
        return self.segments_at + SEGMENT_WORDS * self.max_segments

    @property
    def chunk_rows(self) -> int:
        """Rows of the table of chunks: 0 where it is not wanted."""
        return self.max_chunks if self.chunk_table else 0

    @property
    def starts_at(self) -> int:
        return self.chunks_at + CHUNK_WORDS * self.chunk_rows

    @property
    def chunk_starts_at(self) -> int:
        return self.starts_at + self.sequences + 1

    @property
    def segment_starts_at(self) -> int:
        return self.chunk_starts_at + self.sequences + 1

    @property
    def scratch_at(self) -> int:
        """The end of what consumers may read."""
        return self.segment_starts_at + self.sequences + 1

    @cached_property
    def workspace_words(self) -> int:
        """Length of the int32 workspace."""
        if self.sequences <= SHARED_SEQUENCES:
            return self.scratch_at
        # Sort keys from a multiple of 16 bytes on, whole rows of them, and one more offset a
        # sequence.
        return (
            4 * ceil_div(self.scratch_at, 4)
            + ROW * ceil_div(self.sequences, ROW)
            + self.sequences
            + 1
        )

    # ---------------------------------------------------------------- launch
    def config(self, index_bits: int, *, early_release: bool = False) -> ScheduleConfig:
        """The kernel for this many sequences: a compile key for `cula.common.jit.compiled`."""
        small = self.sequences <= SMALL_SEQUENCES
        return ScheduleConfig(
            chunk=self.chunk,
            index_bits=index_bits,
            threads=128 if small else 1024,
            per_thread=1 if small else 4,
            in_shared=self.sequences <= SHARED_SEQUENCES,
            early_release=early_release,
        )

    @cached_property
    def blocks(self) -> int:
        """Thread blocks of the launch. Any number gives the same tables.

        One for every 32 sequences to rank and for every two rows a thread of the longer table;
        every block repeats the scans, so more than a wave of them would only add work.
        """
        threads = self.config(64).threads
        rows = max(self.chunk_rows, self.max_segments)
        wanted = max(ceil_div(self.sequences, ROW), ceil_div(rows, 2 * threads), 1)
        return min(wanted, 128)

    @property
    def device_segment_chunks(self) -> int:
        """`segment_chunks` as kernels take it; whole sequences: a segment that nothing fills."""
        return self.segment_chunks or INT32_MAX

    @cached_property
    def launch_args(self) -> tuple[int, int, int, int, int]:
        """What the compiled kernel takes after cu_seqlens and the workspace."""
        return (
            self.tokens,
            self.device_segment_chunks,
            self.max_segments,
            self.chunk_rows,
            self.blocks,
        )

    @property
    def fits_warp(self) -> bool:
        """Whether a consumer can do without the launch and workspace (`warp.warp_schedule`)."""
        return self.sequences <= ROW


def schedule_configs(chunk: int, *, early_release: bool = False) -> list[ScheduleConfig]:
    """Every kernel that plans of this chunk size can ask for, to compile them ahead of time."""
    return [
        VarlenPlan(n, n, chunk).config(bits, early_release=early_release)
        for n in (SMALL_SEQUENCES, SHARED_SEQUENCES, SHARED_SEQUENCES + 1)
        for bits in (32, 64)
    ]


def choose_segment_chunks(
    *,
    tokens: int,
    chunk: int,
    heads: int,
    parts: int,
    slots: int,
    min_chunks: int,
    longest: int | None = None,
) -> int:
    """Chunks a segment, from shapes alone, so that `slots` blocks share a long sequence; 0: whole.

    A sequence is cut only where it is longer than one block's fair share of all the work,
    tokens * heads * parts / slots. So a batch of many even sequences is not cut, nor charged for
    it, and one long sequence among short ones is; the plan does not know which it will be.

    slots       blocks that run at once (SMs x blocks an SM)
    min_chunks  the least length, in chunks, that pays for a segment's own cost; of the family's
                making
    longest     upper bound of a sequence's tokens if one is known (fixed lengths), else `tokens`
    """
    for name, value in (("chunk", chunk), ("heads", heads), ("parts", parts), ("slots", slots)):
        require(value >= 1, name, value, "must be >= 1")
    require(min_chunks >= 1, "min_chunks", min_chunks, "must be >= 1")
    longest_chunks = ceil_div(tokens if longest is None else longest, chunk)
    share = ceil_div(tokens * heads * parts, slots * chunk)
    segment = max(share, min_chunks)
    return segment if segment < longest_chunks else 0
