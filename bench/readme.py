"""The figures in the READMEs: blocks between two marks, written from the committed runs."""

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import markdown, published, tables
from bench.results import Row
from bench.runs import Run

# <!-- figures: NAME --> ... <!-- end of figures -->
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_DECODE_OPS = {"KDA": "kda_decode", "Lightning": "lightning_decode"}


def filled(text: str, runs: Mapping[str, Run]) -> str:
    """A document with its blocks as they should be.

    Args:
        text: the document; without a block it comes back as it is.
        runs: the committed runs of one GPU, by family.

    Returns:
        The document.

    Raises:
        ValueError: a block of a name that nothing is known of, or of a family without a run.
    """

    def block(match: re.Match) -> str:
        name = match[2]
        if name not in _BLOCKS:
            raise ValueError(f"figures: {name}; must be one of {', '.join(_BLOCKS)}")
        if name not in runs:
            raise ValueError(f"figures: {name}; there is no committed run of that family")
        return f"{match[1]}{_BLOCKS[name](runs[name])}\n{match[3]}"

    return _BLOCK.sub(block, text)


def documents(root: Path) -> list[Path]:
    """The documents that have such blocks.

    Args:
        root: the checkout.

    Returns:
        READMEs, whether or not they have one.
    """
    return [root / "README.md", *sorted(root.glob("packages/*/README.md"))]


def _decode(run: Run) -> str:
    """One token a step over B, from memory; then whole calls at B = 1."""
    found = {
        name: {
            int(match[1]): row
            for row in run.rows
            if row.op == op and (match := re.fullmatch(r"rotated B=(\d+) H=64 D=128", row.case))
        }
        for name, op in _DECODE_OPS.items()
    }
    batches = sorted(set().union(*found.values()))
    columns = [("sequences", [str(B) for B in batches])]
    for name, rows in found.items():
        columns += _decode_columns(run, name, [rows[B] for B in batches])
    body = list(zip(*(cells for _, cells in columns), strict=True))
    env = run.env
    said = (
        f"One token a step, {env['gpu']}, H = 64, D = 128, float32 states, bfloat16 in and out: "
        f"GPU time, with every state read from memory, and its share of a device copy's rate in "
        f"the same run ({env['copy_tbps']:.2f} TB/s). "
        f"{_which_run(run)}"
    )
    table = markdown.table([name for name, _ in columns], body)
    return "\n\n".join([_wrapped(said), table, _wrapped(_whole_calls(run))])


def _decode_columns(run: Run, name: str, rows: list[Row]) -> list[tuple[str, list[str]]]:
    """Ours, and FLA where a ratio to it may be claimed."""
    columns = [
        (f"{name}, µs", [_us(row.ours.ms) for row in rows]),
        ("of copy", [tables.percent(row.share()) for row in rows]),
    ]
    ratios = [run.ratio(row, "fla") for row in rows]
    if any(ratio is not None for ratio in ratios):
        others = [_us(row.baselines["fla"].ms if "fla" in row.baselines else None) for row in rows]
        columns.append((f"{run.label('fla')}, µs", others))
        columns.append(("ratio", [tables.ratio(ratio) for ratio in ratios]))
    return columns


def _whole_calls(run: Run) -> str:
    parts = []
    for name, op in _DECODE_OPS.items():
        row = run.row(op, "wrapper B=1 H=64 D=128")
        if row is None:
            continue
        text = f"{name} {_us(row.ours.ms)} µs"
        if run.ratio(row, "fla") is not None:
            text += f" ({run.label('fla')}: {_us(row.baselines['fla'].ms)})"
        parts.append(text)
    return f"A whole call for one sequence, Python and launch included: {', '.join(parts)}."


def _prefill(run: Run) -> str:
    """The published fixed lengths: GPU time, where it was measured, else whole calls."""
    (table,) = [t for t in published.load().tables if t.name == f"{run.family}-fixed"]
    pairs = [
        (line, row) for line in table.rows if (row := run.gpu_row(table.op, line.case)) is not None
    ]
    rows = [row for _, row in pairs]
    ratios = [tables.ratio(run.ratio(row, "fla")) for row in rows]
    columns = [
        *((key, [str(line.keys[key]) for line, _ in pairs]) for key in ("B", "T")),
        ("cuLA, ms", [tables.milliseconds(row.ours.ms) for row in rows]),
        ("of floor", [tables.percent(row.share()) for row in rows]),
        (f"ratio to {run.label('fla')}", ratios),
        ("published ratio", [tables.ratio(line.speedup) for line, _ in pairs]),
    ]
    columns = [column for column in columns if any(cell != "-" for cell in column[1])]
    body = list(zip(*(cells for _, cells in columns), strict=True))
    whole = any(row.case.startswith("wrapper ") for row in rows)
    env = run.env
    said = (
        f"Prefill of B sequences of T tokens, {env['gpu']}, H = 64, D = 128, bfloat16 in and out: "
        f"{'whole calls' if whole else 'GPU time'}; the floor is what the inputs and outputs alone "
        f"take at a device copy's rate in the same run ({env['copy_tbps']:.2f} TB/s); published is "
        f"upstream cuLA's ratio on another GPU. {_which_run(run)}"
    )
    return "\n\n".join(
        [_wrapped(said), markdown.table([name for name, _ in columns], body, left=2)]
    )


def _which_run(run: Run) -> str:
    return f"Run of {run.env['date']} at commit {run.env['commit'][:7]}."


def _us(ms: float | None) -> str:
    """Microseconds to three digits or the point."""
    if ms is None:
        return "-"
    us = 1000 * ms
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False)


_BLOCKS: dict[str, Callable[[Run], str]] = {
    "decode": _decode,
    "kda": _prefill,
    "lightning": _prefill,
}
