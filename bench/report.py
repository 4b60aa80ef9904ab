"""``python -m bench report``: BENCHMARKS.md, its plots and the READMEs' figures.

All of it is made from the committed runs, so it says nothing that was not measured; the same runs
give the same bytes.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from bench import drawing, page, plots, published, readme, results, runs
from bench.checkout import ROOT
from bench.runs import Run

COMMAND = "BENCHMARKS.md, its plots and the READMEs' figures, from the committed runs"

PAGE = "BENCHMARKS.md"
PLOTS = "docs/plots"


def main(argv: list[str]) -> int:
    """The command.

    Args:
        argv: its options.

    Returns:
        0 if all of it is as it should be, or was made so; else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m bench report", description=COMMAND)
    parser.add_argument("--gpu", default="h200", help="whose runs: a folder of bench/results")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    options = parser.parse_args(argv)
    folder = results.RESULTS / options.gpu
    found = runs.load(folder)
    if not found:
        print(f"bench report: {folder} holds no result", file=sys.stderr)
        return 1
    can_draw = importlib.util.find_spec("matplotlib") is not None
    wanted = {**texts(found, options.gpu), **(drawn(found) if can_draw else {})}
    changed = [path for path, content in wanted.items() if _content(path) != content]
    if not options.check:
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[path])
    word = "stale" if options.check else "written"
    for path in changed:
        print(f"{word}: {path.relative_to(ROOT)}")
    undrawn = [] if can_draw else stale_plots(found)
    for path in undrawn:
        print(f"stale, and drawn only with matplotlib: {path.relative_to(ROOT)}")
    print(f"{len(wanted) - len(changed)} of {len(wanted)} files were as they should be.")
    return 1 if undrawn or (options.check and changed) else 0


def texts(found: Mapping[str, Run], gpu: str) -> dict[Path, bytes]:
    """The documents as they should be.

    Args:
        found: the committed runs.
        gpu: their folder's name.

    Returns:
        Contents by path.
    """
    where = (results.RESULTS / gpu).relative_to(ROOT).as_posix()
    whole = page.page(found, published.load(), where, PLOTS)
    wanted = {ROOT / PAGE: whole.encode()}
    for path in readme.documents(ROOT):
        wanted[path] = readme.filled(path.read_text(), found).encode()
    return wanted


def drawn(found: Mapping[str, Run]) -> dict[Path, bytes]:
    """The plots as they should be.

    Args:
        found: the committed runs.

    Returns:
        Contents by path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return {
        ROOT / PLOTS / name: content
        for figure in plots.figures(found, published.load())
        for name, content in drawing.draw(figure).items()
    }


def stale_plots(found: Mapping[str, Run]) -> list[Path]:
    """The plots that show something else than the runs; matplotlib need not be installed.

    Args:
        found: the committed runs.

    Returns:
        Their paths.
    """
    figures = plots.figures(found, published.load())
    return [path for figure in figures for path in plots.stale(figure, ROOT / PLOTS)]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
