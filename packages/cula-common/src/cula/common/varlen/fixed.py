"""The plan of sequences of one length: [B, T, ...] without cu_seqlens."""

from dataclasses import dataclass

from cula.common.varlen.plan import INT32_MAX, ceil_div, require_counts, require_range


@dataclass(frozen=True)
class FixedPlan:
    """VarlenPlan's bounds, here exact, for `batch` sequences of `length` tokens each.

    Every row of such a schedule is arithmetic (`device.fixed_segment`, `device.fixed_chunk`):
    nothing is launched and there is no workspace. Fields as in VarlenPlan.
    """

    batch: int
    length: int
    chunk: int
    heads: int = 1
    parts: int = 1
    segment_chunks: int = 0

    def __post_init__(self) -> None:
        require_counts(self, "batch", "length", "segment_chunks")
        require_range(self.batch * self.length, self.chunk, self.max_units)

    @property
    def chunks_each(self) -> int:
        return ceil_div(self.length, self.chunk)

    @property
    def segments_each(self) -> int:
        if self.segment_chunks == 0:
            return 1
        return max(1, ceil_div(self.chunks_each, self.segment_chunks))

    @property
    def max_chunks(self) -> int:
        return self.batch * self.chunks_each

    @property
    def max_segments(self) -> int:
        return self.batch * self.segments_each

    @property
    def max_units(self) -> int:
        return self.max_segments * self.heads * self.parts

    @property
    def device_segment_chunks(self) -> int:
        """As VarlenPlan's."""
        return self.segment_chunks or INT32_MAX
