"""Whether, and how finely, a call's sequences are cut along time: a model of what it would take.

Microseconds on an H200, from shapes alone. It ranks choices; DESIGN.md says what was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cula.common.dims import Dims
from cula.common.varlen.plan import ceil_div
from cula.lightning.sm90.config import CHUNK, PART

BYTES = 4.2e6
"""Bytes a microsecond: the memory's copy rate."""

WITHIN_REACH = 0.5
"""Share of its bytes that the first pass reads: the rest, a layer's decays bring to 0."""

IN_L2 = 20e6
"""Bytes of k and v that the second pass finds where the first one read them last."""

CHUNK_TIME = {(128, 1): 0.97, (128, 2): 1.55, (64, 1): 0.75}
"""A chunk where nothing but its own latency counts, by D and warpgroups of a block. Measured."""

FIRST_TIME = 0.35
"""The same of the first pass. Predicted."""

START = 3.0
"""From a pass's launch to its first product, and from its last one to its end."""

LAUNCH = 1.5
"""A launch that waits for the one before it."""

ROW_BYTES = 1.2e7
"""Bytes a microsecond of the prefix kernel; its rows are in L2."""

LATENCY = 0.8
"""A load of the prefix kernel; it takes 16 segments at a time."""

SHORTEST = 4  # chunks a segment
WAVES = 6  # of units, at most, that a candidate makes
ROOM = 256e6  # bytes of the workspace; packed sequences take a row each, even where not cut

GAIN = 1.15
"""Sequences are cut where that is so many times faster, by this model, ..."""

HOST = 5.0
"""... and saves so many microseconds, for more launches cost the host, too."""


@dataclass(frozen=True)
class Cut:
    """How a call is cut.

    segment_chunks: chunks a segment, 0: sequences stay whole. warpgroups: of a block.
    """

    segment_chunks: int
    warpgroups: int


@dataclass(frozen=True)
class Work:
    """A call, as far as its time depends on it.

    longest: chunks of the longest sequence. chunks: of all sequences. even: all are as long.
    H, HV, D: as in Dims. sms: multiprocessors.
    """

    sequences: int
    longest: int
    chunks: int
    even: bool
    H: int
    HV: int
    D: int
    sms: int

    def whole(self, warpgroups: int) -> float:
        """Microseconds of one pass over whole sequences."""
        busiest = self._busiest(self.sequences, self.longest, self.chunks, warpgroups)
        return START + max(busiest * CHUNK_TIME[self.D, warpgroups], 2 * self._bytes)

    def cut(self, length: int, warpgroups: int) -> float:
        """Microseconds of two passes over segments of `length` chunks, and the prefix kernel."""
        each = ceil_div(self.longest, length)  # segments of the longest sequence
        length = min(length, self.longest)
        segments = self._segments(length)
        # the first pass leaves out the last segment of a sequence
        left = segments - self.sequences if self.even else segments
        share = left / segments
        first = self._busiest(left, length, self.chunks * share, warpgroups) * FIRST_TIME
        second = self._busiest(segments, length, self.chunks, warpgroups)
        again = WITHIN_REACH * share * self._bytes
        time = START + max(first, again) + LAUNCH + START
        found = min(IN_L2 / BYTES, again)
        time += max(second * CHUNK_TIME[self.D, warpgroups], 2 * self._bytes - found)
        if each > 2:
            time += LAUNCH + LATENCY * (1 + ceil_div(each - 2, 16))
            time += 8 * segments * self.HV * self.D * self.D / ROW_BYTES
        return time

    def workspace(self, length: int) -> int:
        """Bytes of the segments' states, at most."""
        return 4 * self._segments(length) * self.HV * self.D * self.D

    def lengths(self, warpgroups: int) -> Iterator[int]:
        """Chunks a segment with which the units fill the GPU once, twice, ..., if they can."""
        units = self._units(warpgroups)
        for waves in range(1, WAVES + 1):
            if self.even:
                segments = waves * self.sms // (self.sequences * units)
                chunks = ceil_div(self.longest, segments) if segments else self.longest
            else:
                chunks = ceil_div(self.chunks * units, waves * self.sms)
            chunks = max(chunks, SHORTEST)
            if chunks < self.longest and self.workspace(chunks) <= ROOM:
                yield chunks

    @property
    def _bytes(self) -> float:
        """Microseconds of k and v, or of q and o."""
        return self.chunks * CHUNK * 2 * self.D * (self.H + self.HV) / BYTES

    def _segments(self, length: int) -> int:
        if self.even:
            return self.sequences * ceil_div(self.longest, length)
        return self.sequences + self.chunks // length

    def _units(self, warpgroups: int) -> int:
        """Units of a segment."""
        return self.HV * self.D // (PART * warpgroups)

    def _busiest(self, pieces: int, length: int, chunks: float, warpgroups: int) -> float:
        """Chunks of the block with the most work: pieces of `length` chunks, `chunks` in all."""
        units = self._units(warpgroups)
        if self.even:
            return ceil_div(pieces * units, self.sms) * length
        return max(length, chunks * units / self.sms + length / 2)


def works(dims: Dims, sequences: int, varlen: bool, sms: int) -> list[Work]:
    """What a call may be; nothing where there is nothing to do.

    Packed sequences may all be of one length, or one may have half of all tokens: whole ones are
    charged with both.
    """
    if not sequences or not dims.T or not dims.HV:
        return []
    sizes = {"H": dims.H, "HV": dims.HV, "D": dims.V, "sms": sms}
    if not varlen or sequences == 1:
        chunks = ceil_div(dims.T, CHUNK)
        return [Work(sequences, chunks, sequences * chunks, True, **sizes)]
    total = sequences + dims.T // CHUNK
    lengths = (dims.T // sequences, dims.T // 2)
    return [Work(sequences, ceil_div(n, CHUNK), total, False, **sizes) for n in lengths]


def whole(dims: Dims, sequences: int, sms: int) -> Cut:
    """Sequences stay whole.

    A block with two warpgroups loads a head's q and k once; with one, twice as many blocks share
    the work: for when whole heads leave half of the GPU idle.
    """
    return Cut(0, 1 if dims.V == PART or 2 * sequences * dims.HV <= sms else 2)


def best_cut(dims: Dims, sequences: int, varlen: bool, sms: int) -> Cut:
    """The choice for a call of `sequences` sequences, packed ones of dims.T tokens in all."""
    best = whole(dims, sequences, sms)
    possible = works(dims, sequences, varlen, sms)
    time = sum(min(x / GAIN, x - HOST) for x in (w.whole(best.warpgroups) for w in possible))
    for warpgroups in (1, 2) if dims.V > PART else (1,):
        for length in sorted({n for work in possible for n in work.lengths(warpgroups)}):
            cut = sum(work.cut(length, warpgroups) for work in possible)
            if cut < time:
                best, time = Cut(length, warpgroups), cut
    return best


def given_cut(dims: Dims, sequences: int, varlen: bool, sms: int, segment_chunks: int) -> Cut:
    """Segments of so many chunks, 0 for none, and the warpgroups that suit them."""
    possible = works(dims, sequences, varlen, sms)
    if not segment_chunks or not possible:
        return whole(dims, sequences, sms)
    choices = (1, 2) if dims.V > PART else (1,)
    times = {n: sum(work.cut(segment_chunks, n) for work in possible) for n in choices}
    return Cut(segment_chunks, min(choices, key=times.__getitem__))
