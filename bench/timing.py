"""How everything here is timed: GPU time, time of whole calls, host time, and the copy ceiling.

* ``graph_time``: GPU time. Many calls are captured in one CUDA graph, and whole replays are timed
  by events, so that no host work is in the figure and the launch of the graph is spread thin.
* ``call_times``: what a caller sees. One batch of back-to-back calls is timed twice over: by
  events on the stream (time per call) and by the host's clock without waiting (time to enqueue).
* ``copy_rate``: a device-to-device copy, counting bytes read and bytes written, timed by events
  on the stream: the ceiling that memory-bound results of the same run are held against.

GPU time is a median over repeats; figures that hold host time are the least of theirs, since what
else runs on the host only ever adds. Each has its spread.
"""

import functools
import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# Calls in flight between two waits. Far below the driver's launch queue (1,024 entries) even when
# a call launches several kernels, so that enqueueing never waits for the GPU.
QUEUE = 64


@dataclass(frozen=True)
class Sample:
    """Repeats of one measurement.

    Attributes:
        value: the figure to report, the median or the least (`least_of`).
        spread: interquartile range over the median: differences smaller than this are noise.
    """

    value: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Summarise repeats.

        Args:
            values: at least one figure, in any unit.

        Returns:
            Their median and relative spread (0 for fewer than two values).
        """
        median = statistics.median(values)
        if len(values) < 2 or median == 0:
            return cls(median, 0.0)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, (high - low) / median)


def least_of(values: Sequence[float]) -> Sample:
    """Summarise repeats that other work on the machine can only have lengthened.

    Args:
        values: at least one figure, in any unit.

    Returns:
        The least of them, with the spread of all.
    """
    return Sample(min(values), Sample.of(values).spread)


@contextmanager
def _no_garbage_collection():
    """A collection in the middle of a batch would be charged to whichever call it hit."""
    was_enabled = gc.isenabled()
    gc.collect(1)  # the young: looking at all objects takes 0.1 s, and once a case is enough
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _wait() -> None:
    torch.cuda.synchronize()


def _rest() -> None:
    time.sleep(0.04)


def _no_rest() -> None:
    pass


def graph_repeats(replay_ms: float, calls: int, *, target_ms: float, most_calls: int) -> int:
    """How many times a round of calls goes into one graph.

    Args:
        replay_ms: time of a graph that holds the round once.
        calls: calls in a round.
        target_ms: a replay should last at least this long, so that what a replay costs beside
            its kernels (a few microseconds) does not show.
        most_calls: limit on the calls in a graph.

    Returns:
        At least 1.
    """
    wanted = math.ceil(target_ms / max(replay_ms, 1e-6))
    return max(1, min(wanted, most_calls // calls))


def graph_time(
    calls: Sequence[Call],
    *,
    replays: int = 15,
    warmup: int = 3,
    target_ms: float = 1.5,
    most_calls: int = 256,
) -> Sample:
    """GPU time of one call: CUDA-graph replays of many.

    Args:
        calls: a round of calls: one over fixed buffers, or one for each of several sets of
            buffers, so that the data of a round exceeds the L2 cache. As many results as the
            round has calls are kept alive, so that allocations rotate with the buffers.
        replays: replays timed, each by its own pair of events.
        warmup: replays before those.
        target_ms: least duration of a replay; the round is repeated in the graph to reach it.
        most_calls: limit on the calls in a graph.

    Returns:
        Milliseconds per call.
    """
    for call in calls:  # compiles, tunes and loads whatever a first call needs, outside the capture
        call()
    graph = _capture(calls, 1)
    graph.replay()
    once = _replay_times(graph, 3)
    repeats = graph_repeats(min(once), len(calls), target_ms=target_ms, most_calls=most_calls)
    if repeats > 1:
        del graph
        graph = _capture(calls, repeats)
    for _ in range(warmup):
        graph.replay()
    per_replay = _replay_times(graph, replays)
    return Sample.of([ms / (repeats * len(calls)) for ms in per_replay])


def _capture(calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
    _wait()
    graph = torch.cuda.CUDAGraph()
    alive: deque[object] = deque(maxlen=len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                alive.append(call())
        alive.clear()
    return graph


def _replay_times(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    marks = []
    for _ in range(replays):
        start = _recorded_event()
        graph.replay()
        marks.append((start, _recorded_event()))
    _wait()
    return [start.elapsed_time(end) for start, end in marks]


@dataclass(frozen=True)
class CallTimes:
    """What a whole call costs.

    Attributes:
        ms: time per call on the stream, back to back.
        host_us: the caller's time per call, waiting for nothing.
    """

    ms: Sample
    host_us: Sample


def call_times(
    call: Call,
    *,
    batch: int = QUEUE,
    repeats: int = 25,
    warmup: int = 10,
    clock: Callable[[], int] = time.perf_counter_ns,
    mark: Callable[[], "torch.cuda.Event"] = _recorded_event,
    wait: Callable[[], None] = _wait,
    rest: Callable[[], None] = _rest,
) -> CallTimes:
    """Time of whole calls, as a caller makes them: on the stream and on the host.

    Args:
        call: the call under test.
        batch: calls between two waits; at most ``QUEUE``, so that the launch queue never fills.
        repeats: batches timed.
        warmup: calls before those.
        clock: host time in nanoseconds.
        mark: records an event on the stream and returns it.
        wait: waits until the stream is empty.
        rest: between batches: spreads them over a second or so, since a shared machine's cores may
            be slow for a good part of one.

    Returns:
        Both figures, per call.

    Raises:
        ValueError: the batch could fill the launch queue.
    """
    if not 1 <= batch <= QUEUE:
        raise ValueError(f"batch: {batch}; must be between 1 and {QUEUE}")
    for _ in range(warmup):
        call()
    wait()
    stream_ms, host_us = [], []
    with _no_garbage_collection():
        for _ in range(repeats):
            rest()
            call()
            wait()
            first = mark()
            began = clock()
            for _ in range(batch):
                call()
            ended = clock()
            last = mark()
            wait()
            stream_ms.append(first.elapsed_time(last) / batch)
            host_us.append((ended - began) / 1e3 / batch)
    return CallTimes(least_of(stream_ms), least_of(host_us))


brief_call_times = functools.partial(call_times, batch=16, repeats=10, rest=_no_rest)
"""`call_times` for many long calls: enough for their GPU time, little for the host's."""


def host_time(
    call: Call, *, repeats: int = 5, clock: Callable[[], int] = time.perf_counter_ns
) -> Sample:
    """Milliseconds of one call on the CPU, after one call to warm up.

    Args:
        call: a call that has finished when it returns.
        repeats: calls timed.
        clock: host time in nanoseconds.

    Returns:
        Milliseconds per call.
    """
    call()
    times = []
    for _ in range(repeats):
        began = clock()
        call()
        times.append((clock() - began) / 1e6)
    return Sample.of(times)


def copy_rate(nbytes: int = 1 << 30) -> Sample:
    """The device's copy rate, the practical ceiling of anything bound by memory.

    Args:
        nbytes: size of the buffer that is copied; far beyond any cache.

    Returns:
        TB/s (10^12 bytes per second), bytes read plus bytes written.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: a copy is a memcpy node there, a third slower than what a stream runs.
    ms = call_times(lambda: target.copy_(source), batch=4).ms
    return Sample(2 * nbytes / ms.value / 1e9, ms.spread)


def sets_beyond_cache(bytes_per_set: int, cache_bytes: int, *, most: int = 64) -> int:
    """How many sets of buffers to rotate through so that no call finds its data in the cache.

    Args:
        bytes_per_set: what one call touches.
        cache_bytes: the device's L2.
        most: limit on the number of sets.

    Returns:
        At least 2; together the sets hold three times the cache, unless ``most`` is reached.
    """
    return min(most, max(2, math.ceil(3 * cache_bytes / bytes_per_set)))
