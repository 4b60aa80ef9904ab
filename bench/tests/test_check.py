"""A new run against the committed one."""

import copy
import json

import pytest

from bench import check, results
from bench.results import Measured, Row

ENV = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "copy_tbps": 4.2,
    "spread": {"median": 0.002, "worst": 0.3},
}
KERNEL = Row(
    "kda_decode",
    "kernel B=64",
    Measured(ms=0.130),
    floor_ms=0.1295,
    baselines={"fla": Measured(ms=0.165)},
)
WRAPPER = Row(
    "kda_decode",
    "wrapper B=1",
    Measured(ms=0.010, host_us=9.9),
    floor_ms=0.002,
    baselines={"fla": Measured(ms=0.110)},
)
ALONE = Row("kda_decode", "kernel B=64 state=bf16", Measured(ms=0.068), floor_ms=0.065)
FIRST = Row("kda_decode", "first-call", Measured(host_us=2e5))
ROWS = [KERNEL, WRAPPER, ALONE, FIRST]


@pytest.fixture
def compared(tmp_path):
    """Runs the command on rows then and now; returns its exit code."""

    def run(now, then=ROWS, env=ENV, names=("decode", "decode")):
        paths = [tmp_path / side / f"{name}.json" for side, name in zip("ab", names, strict=True)]
        results.write(paths[0], ENV, then)
        results.write(paths[1], env, now)
        return check.main([str(paths[1]), "--against", str(paths[0])])

    return run


def slowed(row: Row, factor: float, baselines: float = 1.0) -> Row:
    """The row with our time and the baselines' times multiplied."""
    others = {name: Measured(ms=x.ms * baselines) for name, x in row.baselines.items()}
    host = row.ours.host_us and row.ours.host_us * factor
    ms = row.ours.ms and row.ours.ms * factor
    return Row(row.op, row.case, Measured(ms=ms, host_us=host), row.floor_ms, others)


def test_the_same_run_is_not_slower(compared, capsys):
    assert compared(ROWS) == 0
    said = capsys.readouterr().out
    # the first call has nothing to be compared with
    assert "3 cases compared, +0.0% in the geometric mean" in said
    assert "less than 4.0% is noise, 30.0% where the host decides" in said


@pytest.mark.parametrize("row", [KERNEL, ALONE], ids=lambda row: row.case)
def test_a_slowdown_beyond_the_margin_fails(compared, capsys, row):
    rows = [slowed(r, 1.06) if r is row else r for r in ROWS]
    assert compared(rows) == 1
    last = capsys.readouterr().out.split("1 slower:")[1]
    assert row.case in last and "-5.7%" in last


def test_noise_passes(compared, capsys):
    assert compared([slowed(KERNEL, 1.03), slowed(WRAPPER, 1.35), ALONE, FIRST]) == 0
    assert "slower" not in capsys.readouterr().out


def test_where_the_gpu_decides_a_wrapper_has_no_more_margin(compared):
    busy = Row("kda_decode", "wrapper B=64", Measured(ms=0.13, host_us=10.0), floor_ms=0.1295)
    assert compared([slowed(busy, 1.06)], then=[busy]) == 1


def test_a_slower_machine_is_no_slowdown(compared, capsys):
    assert compared([slowed(KERNEL, 1.2, baselines=1.2), WRAPPER, ALONE, FIRST]) == 0
    assert "1 all slowed alike:" in capsys.readouterr().out


def test_a_faster_baseline_is_no_slowdown(compared):
    assert compared([slowed(KERNEL, 1.0, baselines=0.7), WRAPPER, ALONE, FIRST]) == 0


def test_every_baseline_has_to_excuse_a_slowdown(compared):
    two = Row(
        KERNEL.op,
        KERNEL.case,
        KERNEL.ours,
        KERNEL.floor_ms,
        {"fla": Measured(ms=0.165), "fla-published": Measured(ms=0.160)},
    )
    now = slowed(two, 1.2, baselines=1.2)
    now.baselines["fla-published"] = Measured(ms=0.160)
    assert compared([now], then=[two]) == 1


def test_a_noisier_run_widens_the_margin(compared):
    noisy = copy.deepcopy(ENV)
    noisy["spread"]["median"] = 0.01
    assert compared([slowed(row, 1.06) for row in (KERNEL, ALONE)], env=noisy) == 0
    assert check.Margins.of(ENV, {"spread": {"median": 0.0, "worst": 3.0}}).host == 0.5


def test_what_is_missing_is_said(compared, capsys):
    assert compared([KERNEL]) == 0
    assert "3 committed cases are not in the new run" in capsys.readouterr().out


def test_nothing_in_common_is_no_pass(compared):
    assert compared([Row("kda_decode", "kernel B=3", Measured(ms=1.0), floor_ms=1.0)]) == 1
    assert compared([FIRST]) == 1


def test_another_gpu_is_refused(compared, capsys):
    assert compared(ROWS, env={**ENV, "gpu": "NVIDIA B200"}) == 1
    assert "NVIDIA B200 against NVIDIA H200" in capsys.readouterr().out


def test_the_committed_run_is_found_by_gpu_and_family(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "committed")
    new = tmp_path / "new" / "decode.part.json"
    results.write(new, ENV, ROWS)
    assert check.main([str(new)]) == 1
    assert "decode.json" in capsys.readouterr().err
    results.write(results.result_path(ENV, "decode"), ENV, ROWS)
    assert check.main([str(new)]) == 0


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    path = tmp_path / "decode.json"
    path.write_text(json.dumps({"rows": []}))
    assert check.main([str(path)]) == 1
    assert "must be env and rows" in capsys.readouterr().err
