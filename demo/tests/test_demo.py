"""The demo on a CPU: what it prints, and that it notices when something is wrong."""

import math
import re

import pytest
import torch

from demo import layers
from demo.__main__ import main
from demo.clock import Times
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
