"""What the plots show, as data; ``drawing.py`` draws it.

A figure is data first, so that what a committed SVG shows can be compared with the committed runs
where matplotlib is not installed: the file carries a digest of it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.published import Published, PublishedTable
from bench.runs import Run

# Shown in one style each, in every plot.
_LINES = {"ours": "cuLA", "floor": "floor (bytes)"}
THEMES = ("light", "dark")
_DIGEST = "data sha256 "


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        label: for people.
        role: "ours", "floor" or "baseline": its colour and dash.
        points: (x, y), in order.
    """

    label: str
    role: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: over it.
        x: what stands along.
        y: what stands up.
        lines: what is drawn.
        log_y: whether y is logarithmic; x always is, in powers of two.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_y: bool = False


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        name: of its files, ``<name>-light.svg`` and ``<name>-dark.svg``.
        title: a sentence for those who do not see it.
        panels: side by side.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]

    def digest(self) -> str:
        """The digest that a file of this figure carries."""
        data = json.dumps(asdict(self), sort_keys=True)
        return _DIGEST + hashlib.sha256(data.encode()).hexdigest()


def figures(runs: Mapping[str, Run], published: Published) -> list[Figure]:
    """The plots of what has been measured.

    Args:
        runs: the committed runs of one GPU, by family.
        published: says which cases the published tables hold; those over T are plotted.

    Returns:
        The figures, in order; of a family that has no run there is none.
    """
    found = [_decode_share(runs["decode"])] if "decode" in runs else []
    for table in published.tables:
        if table.family in runs and {"B", "T"} <= set(table.rows[0].keys):
            found.append(_time_over_length(runs[table.family], table))
    return [figure for figure in found if figure.panels]


def _decode_share(run: Run) -> Figure:
    """Share of the copy rate over B, where no call finds its data in the cache."""
    panels = []
    for op, title in (("kda_decode", "KDA"), ("lightning_decode", "Lightning")):
        cases = {
            int(match[1]): row
            for row in run.rows
            if row.op == op and (match := re.fullmatch(r"rotated B=(\d+) H=64 D=128", row.case))
        }
        shares = {B: row.share() for B, row in sorted(cases.items())}
        lines = [Line(_LINES["ours"], "ours", _points(shares))]
        ratios = {B: run.ratio(row, "fla") for B, row in cases.items()}
        others = {B: s / r for B, s in shares.items() if s is not None and (r := ratios[B])}
        lines.append(Line(run.label("fla"), "baseline", _points(others)))
        lines = [line for line in lines if line.points]
        if lines:
            y = "share of the device-copy rate, %"
            panels.append(Panel(f"{title} decode", "sequences, B", y, tuple(lines)))
    words = "Share of the device-copy rate that a decode step reaches, over the number of sequences"
    return Figure("decode-share", words, tuple(panels))


def _points(shares: Mapping[int, float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((B, round(100 * share, 2)) for B, share in shares.items() if share is not None)


def _time_over_length(run: Run, table: PublishedTable) -> Figure:
    """Time over T, a panel for each B: ours, the baselines, the floor. GPU time where there is."""
    panels = []
    rows = {line.case: run.gpu_row(table.op, line.case) for line in table.rows}
    whole = any(row is not None and row.case.startswith("wrapper ") for row in rows.values())
    for B in dict.fromkeys(line.keys["B"] for line in table.rows):
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line in table.rows:
            row = rows[line.case]
            if line.keys["B"] != B or row is None:
                continue
            figures = {
                (_LINES["ours"], "ours"): row.ours.ms,
                **{
                    (run.label(name), "baseline"): other.ms
                    for name, other in row.baselines.items()
                    if run.ratio(row, name) is not None
                },
                (_LINES["floor"], "floor"): row.floor_ms,
            }
            for key, ms in figures.items():
                if ms is not None:
                    times.setdefault(key, []).append((float(line.keys["T"]), ms))
        lines = tuple(Line(*key, tuple(sorted(points))) for key, points in times.items())
        if lines:
            y = "whole call, ms" if whole else "GPU time, ms"
            panels.append(Panel(f"B = {B}", "tokens a sequence, T", y, lines, log_y=True))
    return Figure(f"{table.name}-time", f"{table.title}: time over the length", tuple(panels))


def stale(figure: Figure, folder: Path) -> list[Path]:
    """The files of a figure that do not show it.

    Args:
        figure: as it should be.
        folder: of the plots.

    Returns:
        Files that are missing or carry another digest.
    """
    paths = [folder / f"{figure.name}-{theme}.svg" for theme in THEMES]
    return [p for p in paths if not p.exists() or figure.digest() not in p.read_text()]
