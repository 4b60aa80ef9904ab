"""The plots: what they show, as data, and how matplotlib draws it. Same data, same bytes.

A figure is data first, so that what a committed SVG shows can be compared with the committed runs
where matplotlib is not installed: the file carries a digest of it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.published import Published, PublishedTable
from bench.runs import Run

# Shown in one style each, in every plot.
_LINES = {"ours": "cuLA", "floor": "floor: its bytes at the copy rate"}
_THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "ours": "#0969da", "others": "#bc4c00"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "ours": "#58a6ff", "others": "#f0883e"},
}
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
    """Time over T, a panel for each B: ours, the baselines, the floor."""
    panels = []
    for B in dict.fromkeys(line.keys["B"] for line in table.rows):
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line in table.rows:
            row = run.row(table.op, line.case)
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
                    times.setdefault(key, []).append((line.keys["T"], ms))
        lines = tuple(Line(*key, tuple(sorted(points))) for key, points in times.items())
        if lines:
            panels.append(Panel(f"B = {B}", "tokens a sequence, T", "ms", lines, log_y=True))
    return Figure(f"{table.name}-time", f"{table.title}: time over the length", tuple(panels))


def stale(figure: Figure, folder: Path) -> list[Path]:
    """The files of a figure that do not show it.

    Args:
        figure: as it should be.
        folder: of the plots.

    Returns:
        Files that are missing or carry another digest.
    """
    paths = [folder / f"{figure.name}-{theme}.svg" for theme in _THEMES]
    return [p for p in paths if not p.exists() or figure.digest() not in p.read_text()]


def draw(figure: Figure) -> dict[str, bytes]:
    """Draw a figure.

    Args:
        figure: what.

    Returns:
        The contents of its files, by file name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return {f"{figure.name}-{theme}.svg": _svg(figure, theme) for theme in _THEMES}


def _svg(figure: Figure, theme: str) -> bytes:
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    # a run's ids would differ from the next run's without a salt
    style = {"svg.hashsalt": figure.name, "svg.fonttype": "none", **_style(_THEMES[theme])}
    # the defaults first: a user's own matplotlibrc must not change a byte
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Title": figure.title, "Source": figure.digest()}
        canvas = FigureCanvasSVG(_canvas(figure, _THEMES[theme]))
        canvas.print_svg(out, metadata=metadata)
    lines = out.getvalue().decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def _style(colours: Mapping[str, str]) -> dict[str, object]:
    """What differs from matplotlib's defaults."""
    return {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.edgecolor": colours["grid"],
        "axes.labelcolor": colours["text"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "grid.color": colours["grid"],
        "grid.linewidth": 0.6,
        "text.color": colours["text"],
        "xtick.color": colours["text"],
        "ytick.color": colours["text"],
    }


def _canvas(figure: Figure, colours: Mapping[str, str]):
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(4.2 * len(figure.panels), 3.2), layout="constrained")
    axes = canvas.subplots(1, len(figure.panels), squeeze=False, sharey=True)[0]
    for ax, panel in zip(axes, figure.panels, strict=True):
        _panel(ax, panel, colours)
    axes[0].set_ylabel(figure.panels[0].y)
    return canvas


def _panel(ax, panel: Panel, colours: Mapping[str, str]) -> None:
    for line, dash in zip(panel.lines, _dashes(panel.lines), strict=True):
        xs, ys = zip(*line.points, strict=True)
        colour = {"ours": colours["ours"], "floor": colours["text"]}.get(line.role)
        marker = None if line.role == "floor" else "o"
        style = {"linestyle": dash, "marker": marker, "markersize": 4, "linewidth": 1.6}
        ax.plot(xs, ys, color=colour or colours["others"], label=line.label, **style)
    ax.set_xscale("log", base=2)
    ticks = sorted({x for line in panel.lines for x, _ in line.points})
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    if panel.log_y:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 105)
        ax.axhline(100, color=colours["text"], linestyle=":", linewidth=1)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x)
    ax.legend(frameon=False, loc="upper left" if panel.log_y else "lower right")


def _dashes(lines: Sequence[Line]) -> list[str]:
    """Solid for ours, dotted for the floor; baselines differ from each other by their dashes."""
    kinds = iter(["--", "-.", (0, (1, 1)), (0, (5, 1))])
    fixed = {"ours": "-", "floor": ":"}
    return [fixed[line.role] if line.role in fixed else next(kinds) for line in lines]
