"""Short tables for a terminal: ours, the baseline, the ratio, the share of the ceiling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.results import Measured, Row


def milliseconds(ms: float | None) -> str:
    """A time.

    Args:
        ms: milliseconds, or None for not measured.

    Returns:
        Four digits after the point below 10 ms, two above; "-" for None.
    """
    if ms is None:
        return "-"
    return f"{ms:.4f}" if ms < 10 else f"{ms:.2f}"


def ratio(x: float | None) -> str:
    """A speed-up, "1.32x" or "-"."""
    return "-" if x is None else f"{x:.2f}x"


def percent(x: float | None) -> str:
    """A share, "93%" or "-"."""
    return "-" if x is None else f"{100 * x:.0f}%"


def error(x: float | None) -> str:
    """A relative error, "1.7e-03" or "-"."""
    return "-" if x is None else f"{x:.1e}"


def microseconds(us: float | None) -> str:
    """Host time, "4.2", "233870" or "-"."""
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Align a table.

    Args:
        header: the columns' names.
        rows: a cell per column.
        left: how many columns, from the first, are aligned to the left; the others hold numbers.

    Returns:
        Lines of text, with a rule under the header.
    """
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        pairs = list(zip(cells, widths, strict=True))
        parts = [cell.ljust(width) for cell, width in pairs[:left]]
        parts += [cell.rjust(width) for cell, width in pairs[left:]]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def row_tables(rows: Sequence[Row]) -> str:
    """A table an op, one line a row.

    Args:
        rows: the rows, in order.

    Returns:
        Lines of text: times in milliseconds, host time in microseconds.
    """
    ops = dict.fromkeys(row.op for row in rows)
    return "\n\n".join(_row_table(op, [row for row in rows if row.op == op]) for op in ops)


def by_group(
    groups: Mapping[str, str],
    measured: Sequence[tuple[Any, Row]],
    **special: Callable[[list[tuple[Any, Row]]], str],
) -> list[str]:
    """The tables of each group of cases that has rows, under its title.

    Args:
        groups: titles, in order.
        measured: cases with their rows.
        special: by group, what makes its text of its (case, row) pairs; else ``row_tables``.

    Returns:
        A text per group.
    """
    texts = []
    for group, title in groups.items():
        pairs = [(case, row) for case, row in measured if case.group == group]
        if pairs:
            made = special[group](pairs) if group in special else row_tables([r for _, r in pairs])
            texts.append(f"{title}\n{made}")
    return texts


def _row_table(op: str, rows: Sequence[Row]) -> str:
    """One op's table. What all its cases share stands in its corner; empty columns are left out."""
    cases = [row.case.split() for row in rows]
    shared = [word for word in cases[0] if all(word in case for case in cases)]
    if len(rows) == 1:
        shared = []
    own = [" ".join(word for word in case if word not in shared) for case in cases]
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    columns: list[tuple[str, list[str]]] = [
        (" ".join([op, *shared]), own),
        ("ms", [milliseconds(row.ours.ms) for row in rows]),
    ]
    for name in names:
        others = [row.baselines.get(name, Measured()) for row in rows]
        columns.append((name, [milliseconds(other.ms) for other in others]))
        columns.append(("ratio", [ratio(row.ratio(name)) for row in rows]))
    columns.append(("of copy", [percent(row.share()) for row in rows]))
    columns.append(("host us", [microseconds(row.ours.host_us) for row in rows]))
    for name in names:
        others = [row.baselines.get(name, Measured()) for row in rows]
        columns.append((f"{name} us", [microseconds(other.host_us) for other in others]))
    columns.append(("error", [error(row.ours.error) for row in rows]))
    for name in names[:1]:  # the others are the same code called otherwise; the file has them all
        others = [row.baselines.get(name, Measured()) for row in rows]
        columns.append((f"{name} err", [error(other.error) for other in others]))
    measured = [column for column in columns if any(cell != "-" for cell in column[1])]
    cells = zip(*(column for _, column in measured), strict=True)
    return grid([name for name, _ in measured], list(cells))


def matrix(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """A two-way table.

    Args:
        corner: what stands over the first column.
        cells: text per (line, column), both in order of first appearance.

    Returns:
        Lines of text; "-" where a cell is missing.
    """
    lines = list(dict.fromkeys(line for line, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    body = [[line, *(cells.get((line, column), "-") for column in columns)] for line in lines]
    return grid([corner, *columns], body)


def progress_line(row: Row) -> str:
    """A row as a line of progress, complete enough to survive the run.

    Args:
        row: the row just measured.

    Returns:
        One line.
    """
    parts = [f"{row.op} {row.case}:"]
    if row.ours.ms is not None:
        parts.append(f"{milliseconds(row.ours.ms)} ms")
    if row.ours.host_us is not None:
        parts.append(f"host {microseconds(row.ours.host_us)} us")
    for name, other in row.baselines.items():
        parts.append(f"{name} {milliseconds(other.ms)} ({ratio(row.ratio(name))})")
    if row.share() is not None:
        parts.append(f"copy {percent(row.share())}")
    if row.ours.error is not None:
        parts.append(f"err {error(row.ours.error)}")
    return "  ".join(parts)
