"""The page, the READMEs' figures and the command: what is said comes from the runs."""

import json
import re
import subprocess
import sys

import pytest

from bench import page, plots, published, readme, report, results, runs
from bench.checkout import ROOT
from bench.results import Measured, Row
from bench.runs import Remark, Run

PUBLISHED = published.load()
ENV = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "copy_tbps": 4.2,
    "commit": "0123456789abcdef",
    "dirty": False,
    "baselines": {"fla": "0.6.0"},
}


def whole(*found: Run) -> str:
    return page.page({run.family: run for run in found}, PUBLISHED, "bench/results/h200", "plots")


def line_of(text: str, *starts: str) -> list[str]:
    """The cells of the one table line whose first cells are these."""
    (line,) = [
        cells
        for raw in text.splitlines()
        if raw.startswith("| ")
        and (cells := [cell.strip() for cell in raw.strip("|").split("|")])[: len(starts)]
        == list(starts)
    ]
    return line


def kda_run(**others) -> Run:
    """Two of the published fixed lengths, and a case of our own."""
    rows = [
        Row(
            "kda_prefill",
            case,
            Measured(ms=ms, error=1.5e-3),
            floor_ms=ms / 2,
            baselines={"fla": Measured(ms=ms * 3, error=4e-3)},
        )
        for case, ms in (
            ("wrapper B=1 T=4096 H=64 D=128", 0.25),
            ("wrapper B=2 T=4096 H=64 D=128", 0.4375),
            ("kernel B=1 T=777 H=3 D=128", 0.1111),
        )
    ]
    return Run("kda", ENV, rows, **others)


# --- what is committed --------------------------------------------------------------------------


def test_the_page_and_the_readmes_are_those_of_the_committed_runs():
    wanted = report.texts(runs.load(results.RESULTS / "h200"), "h200")
    stale = [path.name for path, content in wanted.items() if path.read_bytes() != content]
    assert not stale, "python -m bench report writes them anew"


def test_the_plots_are_those_of_the_committed_runs():
    found = runs.load(results.RESULTS / "h200")
    assert not report.stale_plots(found), "python -m bench report draws them anew"


@pytest.mark.parametrize("document", ["BENCHMARKS.md", "README.md"])
def test_the_pictures_are_there(document):
    pictures = re.findall(r'src(?:set)?="([^"]+)"', (ROOT / document).read_text())
    assert pictures and not [name for name in pictures if not (ROOT / name).exists()]


def test_no_plot_is_left_over():
    figures = plots.figures(runs.load(results.RESULTS / "h200"), PUBLISHED)
    known = {f"{figure.name}-{theme}.svg" for figure in figures for theme in plots.THEMES}
    assert {path.name for path in (ROOT / report.PLOTS).iterdir()} == known


def test_a_remark_is_about_something_that_was_measured():
    committed = runs.load(results.RESULTS / "h200")
    for remark in runs.read_remarks(results.RESULTS / "remarks.json"):
        run = committed[remark.family]
        if run.env["commit"] == remark.commit:
            rows = [row for row in run.rows if row.op == remark.op]
            for name in remark.baselines:
                assert any(name in row.baselines for row in rows)


# --- the page -----------------------------------------------------------------------------------


def test_a_published_row_stands_beside_ours():
    text = whole(kda_run())
    line = line_of(text, "1", "4096")
    # B, T, ours, FLA, ratio, published, FlashKDA, floor, share, errors
    expected = "1 4096 0.2500 0.7500 3.00x 1.39x 0.6210 0.1250 50% 1.5e-03 4.0e-03"
    assert line == expected.split()
    assert "FlashKDA: one NVIDIA H200" in text


def test_a_published_row_that_was_not_measured_is_not_invented():
    line = line_of(whole(kda_run()), "1", "512")
    assert line == ["1", "512", "-", "-", "-", "1.22x", "0.1064", "-", "-", "-", "-"]


def test_summaries_are_of_what_was_measured():
    text = whole(kda_run())
    line = line_of(text, "KDA prefill, fixed length")
    assert line[1:] == ["2", "3.00x (3.00x to 3.00x)", "1.32x (1.17x to 1.41x)", "50% (50% to 50%)"]
    assert line_of(text, "KDA prefill, variable length")[1] == "0"


def test_a_case_that_nobody_published_is_shown_too():
    run = kda_run(
        groups={"odd": "Odd shapes"},
        group_of={("kda_prefill", "kernel B=1 T=777 H=3 D=128"): "odd"},
    )
    part = whole(run).split("### Odd shapes")[1]
    assert line_of(part, "kernel B=1 T=777 H=3 D=128")[1] == "0.1111"
    # and one that the family's cases know no more
    assert "### Others" in whole(kda_run())


def test_an_absent_family_is_said_to_be_absent():
    missing = whole(kda_run()).split("## Not measured yet")[1]
    assert line_of(missing, "Lightning prefill, fixed length")[1:] == [
        "8",
        "1.47x (1.11x to 1.80x)",
    ]
    assert "KDA prefill" not in missing
    assert "Not measured yet" not in whole(
        *(Run(name, ENV, []) for name in ("kda", "lightning", "decode"))
    )


def test_no_ratio_is_drawn_from_a_baseline_with_a_remark():
    remark = Remark("kda", ENV["commit"], "kda_prefill", ("fla",), "FLA was badly tuned.")
    text = whole(kda_run(remarks=[remark]))
    assert "3.00x" not in text and "FLA was badly tuned." in text
    line = line_of(text, "1", "4096")
    assert line == [
        "1",
        "4096",
        "0.2500",
        "0.7500",
        "1.39x",
        "0.6210",
        "0.1250",
        "50%",
        "1.5e-03",
        "4.0e-03",
    ]


def test_what_is_slower_than_a_baseline_is_named():
    slow = Row("kda_prefill", "kernel B=9", Measured(ms=2.0), baselines={"fla": Measured(ms=1.0)})
    text = whole(Run("kda", ENV, [*kda_run().rows, slow]))
    assert "of 4 comparisons: kda_prefill kernel B=9 (0.50x FLA 0.6.0)." in text
    assert "of 3 comparisons: none." in whole(kda_run())


def test_many_rows_over_two_figures_are_a_matrix_and_a_fold():
    rows = [
        Row("kda_decode", f"kernel B={B} H={H} D=128", Measured(ms=B * H / 1000), floor_ms=0.001)
        for B in (1, 2, 4, 8, 16)
        for H in (4, 8, 12, 16, 32)
    ]
    text = whole(Run("decode", ENV, rows))
    assert line_of(text, "B=1")[1:] == ["25%", "12%", "8%", "6%", "3%"]
    folded = text.split("<details>")[1].split("</details>")[0]
    assert len([line for line in folded.splitlines() if line.startswith("| B=")]) == 25


def test_another_baseline_in_a_run_of_its_own_has_a_column():
    older = kda_run()
    older = Run("kda", {**ENV, "baselines": {"fla": "0.4.2"}}, older.rows[:1])
    text = whole(kda_run(variants=[older]))
    # the ratio in that run, beside ours and the published one
    assert line_of(text, "1", "4096")[4:7] == ["3.00x", "3.00x", "1.39x"]
    assert line_of(text, "2", "4096")[4:7] == ["3.00x", "-", "1.38x"]
    assert "| ratio to FLA 0.4.2, another run |" in text
    assert line_of(text, "baselines")[1:] == ["fla 0.6.0", "fla 0.4.2"]


def test_a_dirty_run_is_said_to_be_one():
    dirty = Run("kda", {**ENV, "dirty": True}, kda_run().rows)
    assert line_of(whole(dirty), "commit")[1] == "`0123456789ab`, with changes"
    assert line_of(whole(kda_run()), "commit")[1] == "`0123456789ab`"


# --- the READMEs --------------------------------------------------------------------------------


def decode_run(remarks=()) -> Run:
    def row(op, case, ms, fla):
        return Row(op, case, Measured(ms=ms), floor_ms=0.004, baselines={"fla": Measured(ms=fla)})

    rows = [
        row("kda_decode", "rotated B=1 H=64 D=128", 0.005, 0.0075),
        row("lightning_decode", "rotated B=1 H=64 D=128", 0.008, 0.024),
        row("kda_decode", "wrapper B=1 H=64 D=128", 0.0102, 0.114),
        row("kda_decode", "kernel B=1 H=64 D=128", 0.9, 0.9),
    ]
    return Run("decode", ENV, rows, remarks=remarks)


def test_a_block_holds_the_runs_figures_and_nothing_else_changes():
    text = "before\n<!-- figures: decode -->\nold\n<!-- end of figures -->\nafter\n"
    remark = Remark("decode", ENV["commit"], "lightning_decode", ("fla",), "why")
    filled = readme.filled(text, {"decode": decode_run([remark])})
    assert filled.startswith("before\n<!-- figures: decode -->\nOne token a step, NVIDIA H200")
    assert filled.endswith("<!-- end of figures -->\nafter\n") and "old" not in filled
    # sequences, KDA with FLA, Lightning without
    assert line_of(filled, "1") == ["1", "5.0", "80%", "7.5", "1.50x", "8.0", "50%"]
    assert "KDA 10.2 µs (FLA 0.6.0: 114)." in filled and "commit 0123456" in filled
    assert readme.filled(filled, {"decode": decode_run([remark])}) == filled
    assert "3.00x" in readme.filled(text, {"decode": decode_run()})


def test_a_prefill_block_prefers_gpu_time_and_says_which():
    text = "<!-- figures: kda -->\n<!-- end of figures -->"
    filled = readme.filled(text, {"kda": kda_run()})
    assert line_of(filled, "1", "4096") == ["1", "4096", "0.2500", "50%", "3.00x", "1.39x"]
    assert "whole calls; the floor" in filled and "| 1 | 512 |" not in filled
    gpu = [Row(r.op, r.case.replace("wrapper", "kernel"), Measured(ms=0.2)) for r in kda_run().rows]
    filled = readme.filled(text, {"kda": Run("kda", ENV, [*kda_run().rows, *gpu[:2]])})
    assert line_of(filled, "1", "4096") == ["1", "4096", "0.2000", "1.39x"]
    assert "GPU time; the floor" in filled


@pytest.mark.parametrize("name", ["nothing", "kda"])
def test_a_block_without_figures_is_an_error(name):
    with pytest.raises(ValueError, match=f"figures: {name};"):
        readme.filled(f"<!-- figures: {name} -->\n<!-- end of figures -->", {})


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a README and the decode run, where matplotlib is not installed."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "README.md").write_text("<!-- figures: decode -->\n<!-- end of figures -->\n")
    path = results.result_path(ENV, "decode")
    results.write(path, ENV, list(decode_run().rows))
    return tmp_path


def test_the_command_writes_once_and_says_what_is_stale(checkout, capsys):
    for figure in report.plots.figures(runs.load(results.RESULTS / "h200"), PUBLISHED):
        for theme in ("light", "dark"):
            path = checkout / report.PLOTS / f"{figure.name}-{theme}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<svg>{figure.digest()}</svg>")
    assert report.main(["--check"]) == 1
    assert not (checkout / report.PAGE).exists()
    assert report.main([]) == 0
    assert "1.50x" in (checkout / report.PAGE).read_text()
    assert "1.50x" in (checkout / "README.md").read_text()
    assert report.main(["--check"]) == 0
    faster = [Row(r.op, r.case, Measured(ms=r.ours.ms / 2), r.floor_ms) for r in decode_run().rows]
    results.write(results.result_path(ENV, "decode"), ENV, faster)
    capsys.readouterr()
    assert report.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "stale: BENCHMARKS.md" in said and "stale: README.md" in said
    assert "drawn only with matplotlib: docs/plots/decode-share-light.svg" in said


def test_without_matplotlib_missing_plots_are_no_success(checkout, capsys):
    assert report.main([]) == 1
    assert (checkout / report.PAGE).exists()
    assert "decode-share-dark.svg" in capsys.readouterr().out


def test_without_runs_nothing_is_written(checkout, capsys):
    assert report.main(["--gpu", "b200"]) == 1
    assert "holds no result" in capsys.readouterr().err
    assert not (checkout / report.PAGE).exists()


def test_a_remark_belongs_to_its_commit(checkout):
    remark = {"family": "decode", "op": "kda_decode", "baselines": ["fla"], "text": "why"}
    path = results.RESULTS / "remarks.json"
    path.write_text(json.dumps([{**remark, "commit": ENV["commit"]}]))
    run = runs.load(results.RESULTS / "h200")["decode"]
    kda, lightning = run.rows[0], run.rows[1]
    assert run.ratio(kda, "fla") is None and run.ratio(lightning, "fla") == 3.0
    path.write_text(json.dumps([{**remark, "commit": "another"}]))
    assert runs.load(results.RESULTS / "h200")["decode"].ratio(kda, "fla") == 1.5


def test_a_variant_stands_beside_its_run(checkout):
    older = {**ENV, "baselines": {"fla": "0.4.2"}}
    folder = results.RESULTS / "h200"
    results.write(folder / "decode.fla-0.4.2.json", older, list(decode_run().rows))
    found = runs.load(folder)
    assert list(found) == ["decode"]
    assert [run.label("fla") for run in found["decode"].variants] == ["FLA 0.4.2"]
    (folder / "decode.json").unlink()
    with pytest.raises(ValueError, match=r"must stand beside decode\.json"):
        runs.load(folder)


def test_the_published_command_is_the_report():
    done = subprocess.run(
        [sys.executable, "bench/generate_benchmark_md.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: python -m bench report" in done.stdout
