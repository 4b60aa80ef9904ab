"""The demo on a CPU: what it prints, and that it notices when something is wrong."""

import math
import re

import pytest
import torch

from bench.timing import CallTimes, Sample
from demo import clock, layers
from demo.__main__ import main
from demo.clock import Clock, Times
from demo.run import BACKENDS, Step, Told, best_backend
from demo.show import conclusion, table

SMALL = ["--device", "cpu", "--prompt", "20", "--new", "5"]
CPU = torch.device("cpu")


def told(*errors: float, state_error: float = 1e-7) -> Told:
    steps = [Step("call", "cute", 1, error, Times(0.2, 0.5, 0.1)) for error in errors]
    return Told(steps, state_error, [1, 2, 3])


def test_both_families_run_are_right_and_are_shown(capsys):
    assert main(SMALL) == 0
    said = capsys.readouterr().out
    for call in ("kda_prefill", "kda_decode", "lightning_prefill", "lightning_decode"):
        assert re.search(rf"{call} +reference .* ok$", said, re.M), call
    assert said.count("the state at the end") == 2
    assert "WRONG" not in said and "All right" in said
    assert "not measured: there is no GPU" in said


@pytest.mark.parametrize("broken", ["decode", "prefill"])
def test_a_forgotten_state_is_found_and_fails(monkeypatch, capsys, broken):
    right = getattr(layers.KdaModel, broken)

    def forgetful(self, inputs, state, out, backend):
        return right(self, inputs, torch.zeros_like(state), out, backend)

    monkeypatch.setattr(layers.KdaModel, broken, forgetful)
    assert main(SMALL) == 1
    said = capsys.readouterr().out
    assert re.search(r"KDA +kda_decode .* WRONG$", said, re.M)
    assert re.search(r"Lightning +lightning_decode .* ok$", said, re.M)
    assert said.rstrip().splitlines()[-1].startswith("WRONG: KDA")


def test_a_family_that_fails_does_not_hide_the_other(monkeypatch, capsys):
    def failing(self, inputs, state, out, backend):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(layers.KdaModel, "prefill", failing)
    assert main(SMALL) == 1
    said = capsys.readouterr().out
    assert "FAILED: KDA: RuntimeError: no such thing" in said
    assert re.search(r"lightning_decode .* ok$", said, re.M)


@pytest.mark.parametrize("option", [["--prompt", "0"], ["--new", "-1"]])
def test_impossible_sizes_are_refused(option, capsys):
    with pytest.raises(SystemExit) as refused:
        main(option)
    assert refused.value.code == 2
    assert f"{option[0]}: {option[1]}; must be at least 1" in capsys.readouterr().err


def test_the_best_backend_is_the_first_that_does_not_decline():
    def only(*possible: str):
        def call(backend: str) -> None:
            if backend not in possible:
                raise NotImplementedError(backend)

        return call

    assert best_backend(only("cute", "fla", "reference")) == "cute"
    assert best_backend(only("fla", "reference")) == "fla"
    assert best_backend(only("reference")) == BACKENDS[-1] == "reference"


def test_other_errors_are_not_taken_for_a_missing_backend():
    def call(backend: str) -> None:
        raise ValueError("g: wrong shape")

    with pytest.raises(ValueError, match="wrong shape"):
        best_backend(call)


def test_nan_is_the_worst_error_and_fails():
    family = told(1e-3, math.nan, 2e-3)
    assert math.isnan(family.worst())
    text, code = conclusion({"KDA": family}, {}, CPU)
    assert code == 1 and text.startswith("WRONG: KDA")
    assert table({"KDA": family}).count("WRONG") == 1


def test_the_table_shows_ratio_and_share():
    line = table({"KDA": told(1e-3)}).splitlines()[2]
    assert line.split() == ["KDA", "call", "cute", "1", "0.2000", "2.50x", "50%", "1.0e-03", "ok"]


def test_the_state_alone_can_fail():
    _, code = conclusion({"KDA": told(1e-3, state_error=0.1)}, {}, CPU)
    assert code == 1


@pytest.fixture
def gpu_clock(monkeypatch) -> tuple[Clock, list[str]]:
    """A clock that believes in a GPU and in FLA, and the methods it timed by."""
    methods: list[str] = []

    def whole_calls(call, **options) -> CallTimes:
        methods.append("whole calls")
        call()
        return CallTimes(Sample(0.4, 0.0), Sample(9.0, 0.0))

    def graph(calls) -> Sample:
        methods.append("graph")
        for call in calls:
            call()
        return Sample(0.2, 0.0)

    def prefill(call, inputs, **constants):
        assert call == "kda_prefill" and set(constants) == {"A_log", "dt_bias", "lower_bound"}
        return lambda: None

    def decode_baselines(case):
        assert (case.op, case.B, case.T, case.HV) == ("kda_decode", 2, 1, 2)
        return {"fla": lambda inputs: lambda: inputs.beta.shape == (2, 1, 2)}

    monkeypatch.setattr(clock.timing, "copy_rate", lambda: Sample(4.0, 0.0))
    monkeypatch.setattr(clock.timing, "call_times", whole_calls)
    monkeypatch.setattr(clock.timing, "graph_time", graph)
    monkeypatch.setattr(clock.baselines, "missing", lambda: None)
    monkeypatch.setattr(clock.baselines, "prefill", prefill)
    monkeypatch.setattr(clock.baselines, "decode_baselines", decode_baselines)
    return Clock(torch.device("cuda")), methods


def test_on_a_gpu_both_sides_are_timed_alike_beside_the_floor(gpu_clock, monkeypatch):
    on_gpu, methods = gpu_clock
    sizes = layers.Sizes(batch=2, prompt=3, new=1, heads=2, dim=16)
    model = layers.KdaModel(sizes, CPU)
    inputs = model.inputs(model.prompts())
    times = on_gpu.prefill(model, "reference", inputs)
    assert methods == ["whole calls", "whole calls"]
    # q, k, v, g and o in bf16, beta in fp32, the final states in fp32, at 4 TB/s
    nbytes = 2 * 3 * 2 * (5 * 16 * 2 + 4) + 2 * 2 * 16 * 16 * 4
    assert times == Times(0.4, 0.4, pytest.approx(nbytes / 4e9))

    methods.clear()
    monkeypatch.setattr(model, "decode", lambda inputs, state, out, backend: out)
    step, state = model.inputs(model.prompts()[:, :1]), model.new_state()
    times = on_gpu.decode(model, "cute", step, state)
    assert methods == ["graph", "graph"]
    nbytes = 2 * 2 * (5 * 16 * 2 + 4) + 2 * 2 * 2 * 16 * 16 * 4
    assert times == Times(0.2, 0.2, pytest.approx(nbytes / 4e9))
