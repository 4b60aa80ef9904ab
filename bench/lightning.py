"""``python -m bench lightning``: Lightning Attention prefill, against FLA and the memory.

Modes (the first word of a case):

* kernel: GPU time over the same buffers, by CUDA-graph replay.
* wrapper: whole calls with a preallocated output, back to back: time by events, host time to
  enqueue. Packed sequences are always measured so, since FLA's packed call waits for the GPU.

The floor counts q, k, v and o; states come on top where a case has them.
"""

import statistics
import sys
from collections.abc import Sequence

from bench import cli, lightning_calls, prefill, tables
from bench.lightning_cases import GROUPS, LightningCase, lightning_cases
from bench.results import Row
from bench.runner import Family, Session

COMMAND = "prefill: lightning_prefill"
TITLE = "cuLA Lightning prefill: lightning_prefill (bf16 in and out, fp32 states)"


def measure(case: LightningCase, session: Session) -> Row:
    """Check one case against the float64 oracle, then time it; see ``prefill.measure``."""
    return prefill.measure(case, session, lightning_calls)


def show(measured: Sequence[tuple[LightningCase, Row]]) -> str:
    """The run's tables, a group each, and a summary of the packed cases.

    Args:
        measured: cases with their rows.

    Returns:
        Lines of text.
    """
    parts = tables.by_group(GROUPS, measured, varlen=_packed_matrices)
    return "\n\n".join(parts) if parts else "Nothing was measured."


def _packed_matrices(pairs: Sequence[tuple[LightningCase, Row]]) -> str:
    """Ratio to FLA and share of the copy rate over N and T, a table a layout, and the extremes."""
    texts = []
    for layout in dict.fromkeys(case.layout for case, _ in pairs):
        cells = {
            (f"N={case.B}", f"T={case.T}"): _cell(row)
            for case, row in pairs
            if case.layout == layout
        }
        texts.append(tables.matrix(f"{layout}: vs FLA, of copy", cells))
    ratios = [ratio for _, row in pairs if (ratio := row.ratio("fla")) is not None]
    if ratios:
        texts.append(
            f"vs FLA over {len(ratios)} cases: mean {tables.ratio(statistics.mean(ratios))}, "
            f"least {tables.ratio(min(ratios))}"
        )
    return "\n\n".join(texts)


def _cell(row: Row) -> str:
    return f"{tables.ratio(row.ratio('fla'))} {tables.percent(row.share()):>4}"


def family(heads: int = 64, head_dim: int = 128) -> Family[LightningCase]:
    """The family for the runner.

    Args:
        heads: H of the published shapes.
        head_dim: D of the published shapes.

    Returns:
        The family.
    """
    return Family(
        "lightning", TITLE, lambda: lightning_cases(heads, head_dim), measure, show, GROUPS
    )


def main(argv: list[str]) -> int:
    """The command.

    Args:
        argv: its options.

    Returns:
        The exit code.
    """
    return cli.main(family(), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
