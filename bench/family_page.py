"""The part of BENCHMARKS.md that is about one family: its plots, published tables, other cases."""

from collections.abc import Callable, Sequence

from bench import markdown, tables
from bench.plots import Figure
from bench.published import Peer, Published, PublishedTable, Summary
from bench.results import Measured, Row
from bench.runs import OTHER, Run

# More rows than this are folded away, under a table of the two figures in which they differ.
_MANY_ROWS = 24

Column = tuple[str, list[str]]


def section(
    run: Run, published: Published, figures: Sequence[Figure], plot_folder: str
) -> list[str]:
    """What there is to show of a family.

    Args:
        run: its committed run.
        published: the published figures.
        figures: its plots.
        plot_folder: where they are, from the page.

    Returns:
        Parts of Markdown. Every row of the run stands in one of them.
    """
    parts = [markdown.picture(figure.name, figure.title, plot_folder) for figure in figures]
    parts.append(_slower(run))
    parts += [remark.text for remark in run.remarks]
    for table in tables_of(run, published):
        parts += [f"### {table.title}", _published_table(run, table, published.peers)]
    last = None
    for title, rows in other_sets(run, published):
        parts += [f"### {title}"] if title != last else []
        parts.append(_row_table(run, rows))
        last = title
    return parts


def tables_of(run: Run, published: Published) -> list[PublishedTable]:
    """The published tables of a run's family."""
    return [table for table in published.tables if table.family == run.family]


def baseline_of(table: PublishedTable, rows: Sequence[Row]) -> str:
    """The baseline that does what the published one did.

    Args:
        table: the published table.
        rows: ours of the same cases.

    Returns:
        Its name in the rows.
    """
    name = "fla-published"
    return name if any(name in row.baselines for row in rows) else "fla"


def other_sets(run: Run, published: Published) -> list[tuple[str, list[Row]]]:
    """What stands in no published table.

    Args:
        run: the run.
        published: the published figures.

    Returns:
        (title, rows) per group and call, in the order of the groups.
    """
    lines = {(table.op, line.case) for table in tables_of(run, published) for line in table.rows}
    sets = []
    for group, title in {**run.groups, OTHER: "Others"}.items():
        rows = [r for r in run.rows if run.group(r) == group and (r.op, r.case) not in lines]
        for op in dict.fromkeys(row.op for row in rows):
            sets.append((title, [row for row in rows if row.op == op]))
    return sets


def spans(summary: Summary, show: Callable[[float], str] = tables.ratio) -> str:
    """A summary as "1.32x (1.17x to 1.41x)".

    Args:
        summary: the summary.
        show: how one of its values is shown.
    """
    least, greatest = show(summary.least), show(summary.greatest)
    return f"{show(summary.mean)} ({least} to {greatest})"


def ratios_and_shares(run: Run, rows: Sequence[Row], baseline: str) -> tuple[str, str]:
    """Summaries of rows.

    Args:
        run: theirs.
        rows: the rows.
        baseline: what the ratios are to.

    Returns:
        The ratios and the shares of the floor, each as ``spans`` shows them; "-" where there are
        none.
    """
    ratios = [x for row in rows if (x := run.ratio(row, baseline)) is not None]
    shares = [x for row in rows if (x := row.share()) is not None]
    return (
        spans(Summary.of(ratios)) if ratios else "-",
        spans(Summary.of(shares), tables.percent) if shares else "-",
    )


def _slower(run: Run) -> str:
    compared, slower = 0, []
    for row in run.rows:
        for name in row.baselines:
            if (ratio := run.ratio(row, name)) is None:
                continue
            compared += 1
            if ratio < 1:
                slower.append(f"{row.op} {row.case} ({tables.ratio(ratio)} {run.label(name)})")
    return f"Slower than a baseline, of {compared} comparisons: {'; '.join(slower) or 'none'}."


def _published_table(run: Run, table: PublishedTable, peers: Sequence[Peer]) -> str:
    """A published table, row by row; a row that the run lacks keeps its published ratio."""
    rows = [run.row(table.op, line.case) or Row(table.op, line.case) for line in table.rows]
    names = [[str(line.keys[key]) for line in table.rows] for key in table.rows[0].keys]
    columns = list(zip(table.rows[0].keys, names, strict=True))
    figures = _columns(run, rows)
    # before the floor: beside our ratios, where there are any
    place = next((i for i, (name, _) in enumerate(figures) if name == "floor ms"), len(figures))
    for variant in run.variants:
        others = [variant.row(table.op, line.case) for line in table.rows]
        name = baseline_of(table, [row for row in others if row is not None])
        cells = [tables.ratio(variant.ratio(row, name) if row else None) for row in others]
        figures.insert(place, (f"ratio to {variant.label(name)}, another run", cells))
        place += 1
    figures.insert(place, ("published", [tables.ratio(line.speedup) for line in table.rows]))
    notes = [table.note] if table.note else []
    for peer in peers:
        times = [peer.ms.get(row.case) for row in rows]
        if peer.op == table.op and any(x is not None for x in times):
            column = (f"{peer.name} ms", [tables.milliseconds(x) for x in times])
            figures.insert(place + 1, column)
            notes.append(f"{peer.name}: {peer.how}.")
    said = []
    for one in (run, *run.variants):
        covered = [row for row in one.rows if table.covers(row.op, row.case)]
        said.append(_row_summary(one, covered, baseline_of(table, covered)))
    said[1:] = [f"{summary}, in another run" for summary in said[1:]]
    said.append(f"Published: {spans(table.summary)} over {table.summary.count} cases")
    text = _markdown([*columns, *figures], left=len(columns))
    return "\n\n".join([text, "\n".join(f"- {line}." for line in said), *notes])


def _row_summary(run: Run, rows: Sequence[Row], baseline: str) -> str:
    ratios, shares = ratios_and_shares(run, rows, baseline)
    text = f"Mean (least to greatest) over {len(rows)} cases: {shares} of the floor"
    return text if ratios == "-" else f"{text}, {ratios} against {run.label(baseline)}"


def _row_table(run: Run, rows: Sequence[Row]) -> str:
    """One call's rows of a group."""
    cases = [row.case.split() for row in rows]
    shared = [word for word in cases[0] if all(word in case for case in cases)]
    corner = rows[0].op if len(rows) == 1 else " ".join([rows[0].op, *shared])
    own = [" ".join(word for word in case if word not in shared) for case in cases]
    if len(rows) == 1:
        own = [rows[0].case]
    text = _markdown([(corner, own), *_columns(run, rows)])
    if len(rows) <= _MANY_ROWS:
        return text
    text = markdown.folded(f"{corner}: all {len(rows)} rows", text)
    if (over := _two_words(own)) is not None:
        text = f"{_matrix(run, corner, rows, over)}\n\n{text}"
    return f"{_row_summary(run, rows, 'fla')}.\n\n{text}"


def _two_words(own: Sequence[str]) -> list[tuple[str, str]] | None:
    """The cases as pairs of words, where that is all they are: "B=1 H=4"."""
    words = [case.split() for case in own]
    if any(len(case) != 2 for case in words):
        return None
    return [(first, second) for first, second in words]


def _matrix(run: Run, corner: str, rows: Sequence[Row], over: list[tuple[str, str]]) -> str:
    """Share of the floor, and the ratio where there is one, over two figures."""
    cells = {}
    for row, pair in zip(rows, over, strict=True):
        ratio = run.ratio(row, "fla")
        share = tables.percent(row.share())
        cells[pair] = share if ratio is None else f"{share}, {tables.ratio(ratio)}"
    across = list(dict.fromkeys(second for _, second in over))
    down = list(dict.fromkeys(first for first, _ in over))
    body = [[line, *(cells.get((line, column), "-") for column in across)] for line in down]
    said = "of floor, ratio" if any("x" in cell for cell in cells.values()) else "of floor"
    return markdown.table([f"{corner}: {said}", *across], body)


def _columns(run: Run, rows: Sequence[Row]) -> list[Column]:
    """What was measured of the rows, a column each; what was measured of none has no column."""
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))

    def others(name: str) -> list[Measured]:
        return [row.baselines.get(name, Measured()) for row in rows]

    columns = [("cuLA ms", [tables.milliseconds(row.ours.ms) for row in rows])]
    for name in names:
        columns.append((f"{run.label(name)} ms", [tables.milliseconds(x.ms) for x in others(name)]))
        columns.append(("ratio", [tables.ratio(run.ratio(row, name)) for row in rows]))
    columns.append(("floor ms", [tables.milliseconds(row.floor_ms) for row in rows]))
    columns.append(("of floor", [tables.percent(row.share()) for row in rows]))
    columns.append(("host µs", [tables.microseconds(row.ours.host_us) for row in rows]))
    for name in names:
        hosts = [tables.microseconds(x.host_us) for x in others(name)]
        columns.append((f"{run.label(name)} host µs", hosts))
    columns.append(("error", [tables.error(row.ours.error) for row in rows]))
    for name in names:
        columns.append((f"{run.label(name)} error", [tables.error(x.error) for x in others(name)]))
    return [column for column in columns if any(cell != "-" for cell in column[1])]


def _markdown(columns: Sequence[Column], left: int = 1) -> str:
    body = list(zip(*(cells for _, cells in columns), strict=True))
    return markdown.table([name for name, _ in columns], body, left=left)
