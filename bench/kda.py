"""``python -m bench kda``: Kimi Delta Attention prefill, against FLA and the memory.

Modes (the first word of a case):

* kernel: GPU time over the same buffers, by CUDA-graph replay.
* wrapper: whole calls with a preallocated output, back to back: time by events, host time to
  enqueue. Packed sequences are always measured so, since FLA's packed call waits for the GPU.

The floor counts q, k, v, g, beta and o, each once: what passes between our two kernels is not in
it.
"""

import statistics
import sys
from collections.abc import Sequence

from bench import cli, kda_calls, prefill, tables
from bench.kda_cases import GROUPS, KdaCase, kda_cases
from bench.results import Row
from bench.runner import Family, Session

COMMAND = "prefill: kda_prefill"
TITLE = "cuLA KDA prefill: kda_prefill (bf16 in and out, fp32 states, norms and gates inside)"


def measure(case: KdaCase, session: Session) -> Row:
    """Check one case against the float64 oracle, then time it; see ``prefill.measure``."""
    return prefill.measure(case, session, kda_calls)


def show(measured: Sequence[tuple[KdaCase, Row]]) -> str:
    """The run's tables, a group each, and the packed cases' ratios in short.

    Args:
        measured: cases with their rows.

    Returns:
        Lines of text.
    """
    parts = tables.by_group(GROUPS, measured)
    packed = [row.ratio("fla") for case, row in measured if case.packed]
    ratios = [ratio for ratio in packed if ratio is not None]
    if ratios:
        parts.append(
            f"Packed, vs FLA over {len(ratios)} cases: "
            f"mean {tables.ratio(statistics.mean(ratios))}, least {tables.ratio(min(ratios))}"
        )
    return "\n\n".join(parts) if parts else "Nothing was measured."


def family(heads: int = 64, head_dim: int = 128) -> Family[KdaCase]:
    """The family for the runner.

    Args:
        heads: H of the published shapes.
        head_dim: D of the published shapes.

    Returns:
        The family.
    """
    return Family("kda", TITLE, lambda: kda_cases(heads, head_dim), measure, show, GROUPS)


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
