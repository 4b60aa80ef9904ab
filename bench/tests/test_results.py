"""The result format: what is written, what is refused."""

import json

import pytest

from bench import results
from bench.results import Measured, Row

ENV = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "commit": "abc",
    "dirty": False,
}
ROW = Row(
    "kda_decode",
    "kernel B=64 H=64 D=128",
    Measured(ms=0.13123456, error=1.7e-3),
    floor_ms=0.126,
    baselines={"fla": Measured(ms=0.167, error=1.8e-3)},
)


def test_the_format_is_the_documented_one():
    assert ROW.to_json() == {
        "op": "kda_decode",
        "case": "kernel B=64 H=64 D=128",
        "ms": 0.13123,
        "error": 0.0017,
        "floor_ms": 0.126,
        "baselines": {"fla": {"ms": 0.167, "error": 0.0018}},
    }


def test_what_was_not_measured_is_absent():
    assert Row("op", "case", Measured(host_us=3.0)).to_json() == {
        "op": "op",
        "case": "case",
        "host_us": 3.0,
    }


def test_ratio_and_share():
    assert ROW.ratio("fla") == pytest.approx(0.167 / 0.13123456)
    assert ROW.ratio("somebody else") is None
    assert ROW.share() == pytest.approx(0.126 / 0.13123456)
    assert Row("op", "case", Measured(error=1e-3), floor_ms=1.0).share() is None


def test_the_floor_is_the_bytes_at_the_copy_rate():
    # 537 MB, the states of 64 x 64 heads read and written, at 4.25 TB/s
    row = results.with_floor(ROW, 2 * 64 * 64 * 128 * 128 * 4, 4.25)
    assert row.floor_ms == pytest.approx(0.12632, rel=1e-4)


def test_a_file_is_written_whole_and_read_back(tmp_path):
    path = results.result_path(ENV, "decode", tmp_path)
    assert path == tmp_path / "h200" / "decode.json"
    results.write(path, ENV, [ROW])
    assert set(json.loads(path.read_text())) == {"env", "rows"}
    env, rows = results.read(path)
    assert env == ENV
    assert [row.to_json() for row in rows] == [ROW.to_json()]
    assert list(path.parent.iterdir()) == [path]


def test_a_run_in_progress_never_touches_the_result():
    part = results.result_path(ENV, "decode", part=True)
    assert part.name == "decode.part.json"
    assert part.parent == results.RESULTS / "h200"


@pytest.mark.parametrize(
    "row",
    [
        Row("op", "case", Measured(ms=float("nan"))),
        Row("op", "case", Measured(ms=float("inf"))),
        Row("op", "case", Measured(ms=-1.0)),
        Row("", "case", Measured(ms=1.0)),
        Row("op", "case", Measured(), baselines={"fla": Measured(error=float("nan"))}),
    ],
)
def test_nothing_but_finite_figures_is_written(tmp_path, row):
    path = tmp_path / "decode.json"
    with pytest.raises(ValueError):
        results.write(path, ENV, [row])
    assert not path.exists()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"env": ENV}, "must be env and rows"),
        ({"env": {"gpu": "x"}, "rows": []}, "env: has no date"),
        ({"env": {k: v for k, v in ENV.items() if k != "dirty"}, "rows": []}, "without dirty"),
        ({"env": ENV, "rows": [{"op": "a", "case": "b", "speed": 1}]}, "speed"),
        ({"env": ENV, "rows": [{"op": "a", "case": "b"}] * 2}, "stands twice"),
        (
            {"env": ENV, "rows": [{"op": "a", "case": "b", "baselines": {"fla": {"x": 1}}}]},
            "a b, fla",
        ),
        ({"env": ENV, "rows": [{"op": "a", "case": "b", "ms": None}]}, "ms = None"),
    ],
)
def test_other_documents_are_refused(document, message):
    with pytest.raises(ValueError, match=message):
        results.check_document(document)


def test_every_committed_result_is_a_result_file():
    for path in results.RESULTS.glob("*/*.json"):
        env, rows = results.read(path)
        assert rows, path
        assert not env["dirty"], f"{path}: a committed result is a run of committed code"
