"""Whether sequences are cut along time, and where: a prediction, from shapes alone."""

from dataclasses import replace

from cula.common.dims import Dims
from cula.kda.sm90.config import CHUNK, PART, Record, ScanConfig

MIN_SEGMENT = 4
"""Chunks of the shortest segment that is cut unasked."""

LEAST_GAIN = 0.15
"""Of the predicted time, for sequences to be cut unasked."""

# What `suitable_segment` reckons with, in microseconds of an H200; DESIGN.md, Segments.
CHUNK_TIME = 1.0  # of the scan
FIRST_CHUNK_TIME = 0.9  # of the first pass, 128 channels
COMBINE_TIME = 0.95  # a segment
PASS_TIME = 3.0  # between one kernel and the next, and the states that it loads and stores
L2_BYTES, MEMORY_BYTES = 5.5e6, 4.1e6  # a microsecond, of all SMs


def suitable_segment(dims: Dims, sequences: int, varlen: bool, sms: int) -> int:
    """Chunks a segment that suit a call; 0: sequences had better stay whole.

    The least predicted time, if it is less by LEAST_GAIN than that of whole sequences. Of packed
    sequences nobody knows the lengths: the mean of two guesses, all even and one of all the tokens.
    Not where the segments' states would take more memory than the records do.
    """
    scan = ScanConfig(dims.K, dims.V, "bf16")
    chunks = -(-dims.T // CHUNK)
    guesses = [(chunks, sequences)]
    if varlen:
        guesses = [(chunks, 1), (-(-chunks // max(sequences, 1)), sequences)]

    def time(segment: int) -> float:
        times = (predicted_time(scan, each, segment, n, dims.HV, sms) for each, n in guesses)
        return sum(times)

    def fits(segment: int) -> bool:
        places = sequences + guesses[0][1] * (chunks // segment)
        states = 4 * (dims.K + dims.V) * dims.K * places
        return states <= guesses[0][1] * chunks * Record(dims.K).bytes

    lengths = {-(-chunks // n) for n in range(2, chunks // MIN_SEGMENT + 1)}
    best = min(filter(fits, sorted(lengths)), key=time, default=0)
    return best if best and time(best) < (1 - LEAST_GAIN) * time(0) else 0


def predicted_time(
    scan: ScanConfig, chunks: int, segment: int, batch: int, heads: int, sms: int
) -> float:
    """Microseconds of all passes after `prep`, with segments of `segment` chunks; 0: uncut.

    A pass takes as long as its blocks one after the other, or as its bytes from L2 or from memory.
    """
    segments = -(-chunks // segment) if segment else 1
    record, values = Record(scan.K), 2 * CHUNK * PART

    def walk(
        blocks: int, chunk_time: float, record_bytes: int, shared_by: int, tiles: int
    ) -> float:
        each = min(segment or chunks, chunks)
        in_turn = -(-blocks // sms) * each * chunk_time
        l2 = blocks * each * (record_bytes // shared_by + tiles * values) / L2_BYTES
        memory = batch * heads * chunks * (record_bytes + tiles * scan.parts * values)
        return max(in_turn, l2, memory / MEMORY_BYTES)

    blocks = batch * segments * heads * scan.parts
    cluster = replace(scan, segments="second" if segment else None).cluster
    second = walk(blocks, CHUNK_TIME, record.bytes, cluster, 2)
    if segment == 0:
        return second
    blocks = max((segments - 1) * scan.pairs - scan.K // (2 * PART), 0)
    part = record.bytes - record.rows - record.triangle
    first = walk(batch * heads * blocks, FIRST_CHUNK_TIME, part, 1, 1)
    turns = -(-batch * heads * scan.combine.slices // (2 * sms))
    combine = turns * max(segments - 2, 0) * COMBINE_TIME
    return first + combine + second + 3 * PASS_TIME
