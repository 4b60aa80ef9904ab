"""The timing helpers, with clocks that tests can read in advance."""

import pytest

from bench.timing import QUEUE, Sample, call_times, graph_repeats, host_time, sets_beyond_cache


class FakeGpu:
    """Time that passes only when something is done: a host clock and a stream behind it."""

    def __init__(self, host_ns: int, gpu_ms: float) -> None:
        self.now_ns = 0
        self.stream_ms = 0.0
        self.host_ns, self.gpu_ms = host_ns, gpu_ms
        self.in_flight = self.most_in_flight = 0

    def call(self) -> None:
        self.now_ns += self.host_ns
        self.stream_ms += self.gpu_ms
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def clock(self) -> int:
        return self.now_ns

    def mark(self):
        return FakeEvent(self.stream_ms)

    def wait(self) -> None:
        self.now_ns += 10**9  # waiting is long and must be nobody's host time
        self.in_flight = 0


class FakeEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


def test_call_times_are_per_call_and_exclude_waiting():
    gpu = FakeGpu(host_ns=4_200, gpu_ms=0.13)
    times = call_times(gpu.call, clock=gpu.clock, mark=gpu.mark, wait=gpu.wait, rest=no_rest)
    assert times.host_us.value == pytest.approx(4.2)
    assert times.ms.value == pytest.approx(0.13)
    assert times.ms.spread == pytest.approx(0, abs=1e-9)
    assert gpu.most_in_flight <= QUEUE


def no_rest() -> None:
    pass


@pytest.mark.parametrize("batch", [0, QUEUE + 1])
def test_a_batch_that_could_fill_the_launch_queue_is_refused(batch):
    with pytest.raises(ValueError, match=f"batch: {batch}"):
        call_times(lambda: None, batch=batch)


def test_garbage_collection_is_off_while_timing_and_back_afterwards():
    import gc

    gpu, seen = FakeGpu(1, 1.0), []
    call_times(
        lambda: seen.append(gc.isenabled()),
        batch=2,
        repeats=1,
        warmup=0,
        clock=gpu.clock,
        mark=gpu.mark,
        wait=gpu.wait,
        rest=no_rest,
    )
    assert seen == [False] * 3  # one to wake the GPU up, then the batch
    assert gc.isenabled()


def test_a_sample_is_the_median_and_its_relative_interquartile_range():
    sample = Sample.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert sample.value == 3.0
    assert sample.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Sample.of([5.0]) == Sample(5.0, 0.0)


@pytest.mark.parametrize(
    ("replay_ms", "calls", "expected"),
    [
        (0.005, 1, 256),  # a tiny kernel: as many as a graph may hold
        (0.5, 1, 3),  # 1.5 ms at least
        (2.0, 1, 1),  # long enough by itself
        (0.2, 43, 5),  # rotated: 256 // 43 rounds, 8 would be wanted
        (0.2, 300, 1),  # never less than a round
    ],
)
def test_graphs_hold_enough_calls_to_hide_the_replay(replay_ms, calls, expected):
    assert graph_repeats(replay_ms, calls, target_ms=1.5, most_calls=256) == expected


@pytest.mark.parametrize(
    ("bytes_per_set", "expected"),
    [(4_194_304, 45), (268_435_456, 2), (1_073_741_824, 2), (1_000, 64)],
)
def test_rotated_sets_exceed_the_cache_three_times(bytes_per_set, expected):
    cache = 60 * 1024 * 1024
    sets = sets_beyond_cache(bytes_per_set, cache)
    assert sets == expected
    assert sets == 64 or sets * bytes_per_set >= 3 * cache


def test_host_time_warms_up_and_takes_the_median():
    ticks = iter([0, 9_000_000, 10_000_000, 12_000_000, 20_000_000, 21_000_000])
    calls = []
    sample = host_time(lambda: calls.append(1), repeats=3, clock=lambda: next(ticks))
    assert len(calls) == 4
    assert sample.value == 2.0
