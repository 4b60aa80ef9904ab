"""The plots: what they show, that a file can be checked, and that drawing is repeatable."""

import pytest

from bench import drawing, plots, published
from bench.results import Measured, Row
from bench.runs import Remark, Run

ENV = {"baselines": {"fla": "0.6.0"}, "commit": "abc"}
PUBLISHED = published.load()


def row(op: str, case: str, ms: float, fla: float) -> Row:
    return Row(op, case, Measured(ms=ms), floor_ms=0.1, baselines={"fla": Measured(ms=fla)})


DECODE = Run(
    "decode",
    ENV,
    [
        row("kda_decode", "rotated B=4 H=64 D=128", 0.2, 0.4),
        row("kda_decode", "rotated B=1 H=64 D=128", 0.4, 0.5),
        row("kda_decode", "kernel B=1 H=64 D=128", 0.05, 0.5),
        row("lightning_decode", "rotated B=1 H=64 D=128", 0.2, 0.4),
    ],
    remarks=[Remark("decode", "abc", "lightning_decode", ("fla",), "why")],
)
LIGHTNING = Run(
    "lightning",
    ENV,
    [
        row("lightning_prefill", f"{mode} B={B} T={T} H=64 D=128", T * B / factor, T * B / 1000)
        for mode, factor in (("kernel", 4096), ("wrapper", 2048))
        for B in (1, 2)
        for T in (4096, 1024)
    ],
)


def test_decode_shows_shares_of_the_copy_rate_from_memory():
    (figure,) = plots.figures({"decode": DECODE}, PUBLISHED)
    kda, lightning = figure.panels
    # in the order of B, and not the case whose data came from the cache
    assert kda.lines[0] == plots.Line("cuLA", "ours", ((1, 25.0), (4, 50.0)))
    assert kda.lines[1] == plots.Line("FLA 0.6.0", "baseline", ((1, 20.0), (4, 25.0)))
    # a baseline with a remark is not drawn
    assert [line.label for line in lightning.lines] == ["cuLA"]


def test_prefill_shows_gpu_time_over_the_length():
    (figure,) = plots.figures({"lightning": LIGHTNING}, PUBLISHED)
    assert figure.name == "lightning-fixed-time"
    one, two = figure.panels
    assert (one.title, two.title, one.y) == ("B = 1", "B = 2", "GPU time, ms")
    lines = {line.role: line.points for line in one.lines}
    assert lines["ours"] == ((1024, 0.25), (4096, 1.0))
    assert lines["baseline"] == ((1024, 1.024), (4096, 4.096))
    assert lines["floor"] == ((1024, 0.1), (4096, 0.1))


def test_without_gpu_times_whole_calls_are_shown_and_said():
    rows = [r for r in LIGHTNING.rows if r.case.startswith("wrapper")]
    (figure,) = plots.figures({"lightning": Run("lightning", ENV, rows)}, PUBLISHED)
    assert figure.panels[0].y == "whole call, ms"
    assert figure.panels[0].lines[0].points[0] == (1024, 0.5)


def test_what_was_not_measured_has_no_plot():
    assert plots.figures({}, PUBLISHED) == []
    assert plots.figures({"kda": Run("kda", ENV, [])}, PUBLISHED) == []


def test_a_file_of_other_data_is_stale(tmp_path):
    (figure,) = plots.figures({"decode": DECODE}, PUBLISHED)
    assert [path.name for path in plots.stale(figure, tmp_path)] == [
        "decode-share-light.svg",
        "decode-share-dark.svg",
    ]
    for path in plots.stale(figure, tmp_path):
        path.write_text(f"<svg>{figure.digest()}</svg>")
    assert not plots.stale(figure, tmp_path)
    (other,) = plots.figures({"decode": Run("decode", ENV, DECODE.rows[:2])}, PUBLISHED)
    assert len(plots.stale(other, tmp_path)) == 2


def test_drawing_is_repeatable_and_carries_the_digest(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    for figure in plots.figures({"decode": DECODE, "lightning": LIGHTNING}, PUBLISHED):
        drawn = drawing.draw(figure)
        with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path"}):  # a user's own
            assert drawing.draw(figure) == drawn
        for name, content in drawn.items():
            (tmp_path / name).write_bytes(content)
            for line in figure.panels[0].lines:
                assert line.label.encode() in content
        assert not plots.stale(figure, tmp_path)
        assert drawn[f"{figure.name}-light.svg"] != drawn[f"{figure.name}-dark.svg"]
