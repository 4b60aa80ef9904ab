"""The clocks on a real GPU, and one real case from end to end."""

import pytest
import torch

from bench import cli, decode, results, timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_the_copy_rate_is_that_of_a_memory_and_repeats():
    first, second = timing.copy_rate(1 << 28), timing.copy_rate(1 << 28)
    assert 0.05 < first.value < 20
    assert first.value == pytest.approx(second.value, rel=0.05)


def test_graph_time_scales_with_the_work_and_counts_calls_not_replays():
    small, large = (torch.ones(n << 20, device="cuda") for n in (64, 256))
    one = timing.graph_time([lambda: small.mul_(1.0)]).value
    four = timing.graph_time([lambda: large.mul_(1.0)]).value
    assert four / one == pytest.approx(4, rel=0.15)
    mixed = timing.graph_time([lambda: small.mul_(1.0), lambda: large.mul_(1.0)]).value
    assert mixed == pytest.approx((one + four) / 2, rel=0.1)


def test_graph_time_sees_the_gpu_alone_and_call_times_the_host_as_well():
    x = torch.ones(1024, device="cuda")
    gpu = timing.graph_time([lambda: x.mul_(1.0)]).value
    calls = timing.call_times(lambda: x.mul_(1.0))
    assert gpu < calls.ms.value
    assert calls.host_us.value / 1e3 <= calls.ms.value * 1.2


def test_results_kept_alive_within_a_round_rotate():
    """Calls that allocate their result must not all write one cached buffer."""
    seen = []
    x = torch.ones(1024, device="cuda")

    def call() -> torch.Tensor:
        y = x + 1
        seen.append(y.data_ptr())
        return y

    timing.graph_time([call, call, call], most_calls=3)
    assert len(set(seen[-3:])) == 3


def test_one_case_is_measured_checked_and_written(tmp_path):
    options = ["--out", str(tmp_path), "--baseline", "none"]
    pattern = "kda_decode (kernel|rotated|wrapper) B=4 H=64 D=128$"
    assert cli.main(decode.family(), [*options, "--cases", pattern]) == 0
    (path,) = tmp_path.glob("*/decode.json")
    env, rows = results.read(path)
    assert env["copy_tbps"] > 0
    kernel, rotated, wrapper = rows
    assert kernel.ours.ms <= rotated.ours.ms * 1.1
    assert kernel.ours.error <= 0.004
    assert wrapper.ours.host_us > 0 and kernel.ours.host_us is None
    assert 0.1 < rotated.share() < 1.1
