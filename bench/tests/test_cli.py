"""The command line, the runner's isolation of failures, and what gets written when."""

import subprocess
import sys

import pytest
import torch

from bench import cli, results
from bench.__main__ import find_commands
from bench.__main__ import main as bench_main
from bench.accuracy import AccuracyError
from bench.checkout import ROOT
from bench.decode_cases import DecodeCase
from bench.results import Measured, Row
from bench.runner import Family, Outcome, Session, run_cases, select

ENV = {"gpu": "NVIDIA Test", "torch": "0", "date": "2026-12-01"}
CASES = [DecodeCase("kda_decode", "kernel", "kernel", B=B, quick=B == 1) for B in (1, 2, 4)]
SESSION = Session(copy_tbps=4.0, l2_bytes=1 << 20, use_baselines=False)


def family(measure) -> Family:
    return Family("decode", "title", lambda: CASES, measure, lambda rows: f"{len(rows)} rows")


def right(case, session) -> Row:
    return Row(case.op, case.name, Measured(ms=1.0, error=0.0))


def run(measure, device_works=lambda: True) -> tuple[Outcome, list[int]]:
    kept = []
    outcome = run_cases(
        family(measure),
        CASES,
        SESSION,
        lambda rows: kept.append(len(rows)),
        lambda: 0.0,
        device_works,
    )
    return outcome, kept


def test_a_failing_case_costs_only_itself(capsys):
    def measure(case, session):
        if case.B == 2:
            raise RuntimeError("out of\nmemory")
        return right(case, session)

    outcome, kept = run(measure)
    assert [row.case for row in outcome.rows] == [CASES[0].name, CASES[2].name]
    assert outcome.failed == [f"kda_decode {CASES[1].name}"]
    assert kept == [1, 2]
    assert "FAILED. RuntimeError: out of memory (test_cli.py:" in capsys.readouterr().out


def test_a_lost_device_ends_the_run(capsys):
    def measure(case, session):
        raise RuntimeError("illegal memory access")

    outcome, _ = run(measure, device_works=lambda: False)
    assert outcome.stopped and len(outcome.failed) == 1
    assert "2 cases were not run" in capsys.readouterr().out


def test_an_inaccurate_case_is_no_row():
    def measure(case, session):
        if case.B == 4:
            raise AccuracyError("o: error 1.0")
        return right(case, session)

    outcome, _ = run(measure)
    assert len(outcome.rows) == 2 and outcome.inaccurate == [f"kda_decode {CASES[2].name}"]


def test_ctrl_c_keeps_what_there_is():
    def measure(case, session):
        if case.B == 2:
            raise KeyboardInterrupt
        return right(case, session)

    outcome, _ = run(measure)
    assert outcome.stopped and len(outcome.rows) == 1


def test_a_baseline_that_fails_is_left_out_and_named(capsys):
    with SESSION.excused("fla"):
        raise RuntimeError("no kernel")
    assert "fla left out. RuntimeError: no kernel" in capsys.readouterr().out


def test_filters():
    assert select(CASES, quick=True, pattern=None) == CASES[:1]
    assert select(CASES, quick=False, pattern="decode kernel B=[24] ") == CASES[1:]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Everything of a run but the GPU."""
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = type("Properties", (), {"L2_cache_size": 1 << 20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cli.timing, "copy_rate", lambda: cli.timing.Sample(4.0, 0.01))
    env = {**ENV, "copy_tbps": 4.0, "cuda": "13", "baselines": {}, "commit": "abc", "dirty": True}
    monkeypatch.setattr(cli, "environment", lambda **_: dict(env))


def written(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*"))


def test_a_good_run_writes_its_result_and_says_dirty(on_a_gpu, tmp_path, capsys):
    assert cli.main(family(right), ["--out", str(tmp_path), "--baseline", "none"]) == 0
    assert written(tmp_path) == ["decode.json"]
    env, rows = results.read(tmp_path / "test" / "decode.json")
    assert len(rows) == 3 and env["dirty"] is True
    said = capsys.readouterr().out
    assert "DIRTY" in said and "baseline: none: not asked for" in said


def test_an_inaccurate_run_writes_no_result(on_a_gpu, tmp_path, capsys):
    def measure(case, session):
        if case.B == 2:
            raise AccuracyError("o: error 1.0")
        return right(case, session)

    assert cli.main(family(measure), ["--out", str(tmp_path)]) == 1
    assert written(tmp_path) == ["decode.part.json"]
    assert "No result written: an accuracy check failed" in capsys.readouterr().out


def test_a_failed_case_still_writes_the_others(on_a_gpu, tmp_path):
    def measure(case, session):
        if case.B == 2:
            raise RuntimeError("no")
        return right(case, session)

    assert cli.main(family(measure), ["--out", str(tmp_path)]) == 1
    assert len(results.read(tmp_path / "test" / "decode.json")[1]) == 2


@pytest.mark.parametrize("option", [["--quick"], ["--cases", "B=1 "], ["--baseline", "none"]])
def test_a_partial_run_replaces_no_committed_result(on_a_gpu, tmp_path, monkeypatch, option):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert cli.main(family(right), option) == 0
    assert written(tmp_path) == []
    assert cli.main(family(right), []) == 0
    assert written(tmp_path) == ["decode.json"]


def test_a_forced_backend_is_not_ours_to_time(on_a_gpu, monkeypatch, capsys):
    monkeypatch.setenv("CULA_BACKEND", "reference")
    assert cli.main(family(right), []) == 1
    assert "CULA_BACKEND" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_exits_cleanly(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(family(right), []) == 0
    assert "no CUDA GPU" in capsys.readouterr().out


def test_commands_are_found_and_unknown_ones_refused(capsys):
    assert "decode" in find_commands()
    assert bench_main([]) == 0
    assert "decode " in capsys.readouterr().out
    assert bench_main(["no-such-family"]) == 2
    assert "no command 'no-such-family'" in capsys.readouterr().err


def test_the_published_command_lists_the_published_cases():
    script = [sys.executable, "bench/bench_la_decode_vs_fla.py", "--list"]
    command = [*script, "--heads", "32", "--head-dim", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [
        f"lightning_decode {mode} B={B} H=32 D=64"
        for mode in ("kernel", "wrapper")
        for B in (1, 4, 16, 64, 256)
    ]
    assert done.stdout.splitlines() == expected
