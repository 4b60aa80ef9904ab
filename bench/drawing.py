"""Draws the plots with matplotlib, which nothing else here needs. Same data, same bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from bench.plots import THEMES, Figure, Line, Panel

_COLOURS = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "ours": "#0969da", "others": "#bc4c00"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "ours": "#58a6ff", "others": "#f0883e"},
}


def draw(figure: Figure) -> dict[str, bytes]:
    """Draw a figure.

    Args:
        figure: what.

    Returns:
        The contents of its files, by file name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return {f"{figure.name}-{theme}.svg": _svg(figure, theme) for theme in THEMES}


def _svg(figure: Figure, theme: str) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own settings must not change a byte
        matplotlib.rcParams.update(_style(_COLOURS[theme]))
        # the ids in the file would differ from run to run without a salt
        matplotlib.rcParams.update({"svg.hashsalt": figure.name, "svg.fonttype": "none"})
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Title": figure.title, "Source": figure.digest()}
        canvas = FigureCanvasSVG(_canvas(figure, _COLOURS[theme]))
        canvas.print_svg(out, metadata=metadata)
    lines = out.getvalue().decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def _style(colours: Mapping[str, str]) -> dict[Any, Any]:
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
    from matplotlib.ticker import LogLocator, NullLocator

    for line, dash in zip(panel.lines, _dashes(panel.lines), strict=True):
        xs, ys = zip(*line.points, strict=True)
        colour = {"ours": colours["ours"], "floor": colours["text"]}.get(line.role)
        marker = None if line.role == "floor" else "o"
        style = {"linestyle": dash, "marker": marker, "markersize": 4, "linewidth": 1.6}
        ax.plot(xs, ys, color=colour or colours["others"], label=line.label, **style)
    ax.set_xscale("log", base=2)
    ticks = sorted({x for line in panel.lines for x, _ in line.points})
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    if panel.log_y:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(0, 105)
        ax.axhline(100, color=colours["text"], linestyle=":", linewidth=1)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x)
    ax.legend(frameon=False, loc="lower right")


def _dashes(lines: Sequence[Line]) -> list[Any]:
    """Solid for ours, dotted for the floor; baselines differ from each other by their dashes."""
    kinds = iter(["--", "-.", (0, (1, 1)), (0, (5, 1))])
    fixed = {"ours": "-", "floor": ":"}
    return [fixed[line.role] if line.role in fixed else next(kinds) for line in lines]
