"""The schedule on a GPU: every size of kernel, CUDA graphs, streams."""

import random

import pytest
import torch

from cula.common.arch import missing_compiler
from cula.common.varlen import VarlenPlan, build_schedule
from cula.common.varlen.twin import workspace_words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler())),
]


def lengths(draw, sequences, tokens):
    inner = sorted(draw.randint(0, tokens) for _ in range(max(sequences - 1, 0)))
    return [0, *inner, tokens] if sequences else [0]


def words_of(schedule):
    return schedule.workspace[: schedule.plan.scratch_at].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "sequences", [0, 1, 20, 32, 33, 128, 129, 1000, 2050, 4096, 4097, 10_000, 20_000]
)
def test_tables_equal_the_twin(sequences, dtype):
    draw = random.Random(sequences)
    tokens = 131_072
    for segment_chunks in (0, 8):
        plan = VarlenPlan(sequences, tokens, 64, heads=4, segment_chunks=segment_chunks)
        cu = lengths(draw, sequences, tokens)
        schedule = build_schedule(plan, torch.tensor(cu, dtype=dtype, device="cuda"))
        assert words_of(schedule) == workspace_words(plan, cu)


def test_values_out_of_range():
    far = [-(2**63), 2**63 - 1, 2**31, 2**32, 2**32 + 77, -1, 5, 300, 299]
    draw = random.Random(0)
    for sequences in (5, 100, 200, 5000):
        cu = [draw.choice(far) for _ in range(sequences + 1)]
        plan = VarlenPlan(sequences, 301, 64)
        schedule = build_schedule(plan, torch.tensor(cu, device="cuda"))
        assert words_of(schedule) == workspace_words(plan, cu)


@pytest.mark.parametrize("sequences", [20, 300, 6000])
def test_same_bits_run_after_run(sequences):
    plan = VarlenPlan(sequences, 50_000, 64, segment_chunks=4)
    cu = torch.tensor(lengths(random.Random(1), sequences, 50_000), device="cuda")
    first = build_schedule(plan, cu).workspace[: plan.scratch_at].clone()
    for _ in range(50):
        again = build_schedule(plan, cu)
        assert torch.equal(again.workspace[: plan.scratch_at], first)


@pytest.mark.parametrize("sequences", [20, 300, 6000])
def test_graph_replay_with_other_lengths(sequences):
    draw = random.Random(2)
    plan = VarlenPlan(sequences, 20_000, 64, segment_chunks=16)
    cu = torch.zeros(sequences + 1, dtype=torch.int64, device="cuda")
    workspace = torch.empty(plan.workspace_words, dtype=torch.int32, device="cuda")
    build_schedule(plan, cu, workspace)  # compiled and loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_schedule(plan, cu, workspace)
    for _ in range(5):
        values = lengths(draw, sequences, 20_000)
        cu.copy_(torch.tensor(values))
        workspace.fill_(-77)
        graph.replay()
        assert workspace[: plan.scratch_at].tolist() == workspace_words(plan, values)


def test_tickets_are_reset():
    plan = VarlenPlan(3, 100, 64)
    cu = torch.tensor([0, 10, 20, 100], device="cuda")
    schedule = build_schedule(plan, cu)
    schedule.tickets.fill_(9)
    build_schedule(plan, cu, schedule.workspace)
    assert schedule.tickets.tolist() == [0] * 8


def test_runs_on_the_current_stream():
    plan = VarlenPlan(64, 100_000, 64)
    values = lengths(random.Random(3), 64, 100_000)
    source, cu = torch.tensor(values, device="cuda"), torch.zeros(65, dtype=torch.int64)
    cu = cu.cuda()
    build_schedule(plan, cu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on any other stream would read zeros
        cu.copy_(source)
        schedule = build_schedule(plan, cu)
    stream.synchronize()
    assert words_of(schedule) == workspace_words(plan, values)


def test_early_release_changes_nothing():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90")
    plan = VarlenPlan(10, 1000, 64)
    cu = torch.tensor(lengths(random.Random(4), 10, 1000), device="cuda")
    schedule = build_schedule(plan, cu, early_release=True)
    assert words_of(schedule) == workspace_words(plan, cu.tolist())
