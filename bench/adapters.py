"""``python -m bench adapters``: what it costs and brings to come to us through FLA.

Of each of FLA's functions: a call through FLA's dispatch (or our patch, where FLA has none) to our
kernel, the call of our own function with the same tensors, one past the dispatch, and FLA's own.
And FLA's KDA layer, with our kernels and with FLA's: a prefill of 8,192 tokens, and a step of 64
sequences with a cache.

Modes: kernel (GPU time, by CUDA-graph replay) and wrapper (whole calls back to back: time by
events, host time to enqueue).
"""

import sys
from collections.abc import Mapping, Sequence

import torch

from bench import adapter_calls, baselines, cli, prefill, tables, timing
from bench.adapter_calls import FUNCTIONS, Calls
from bench.adapter_cases import GROUPS, AdapterCase, adapter_cases
from bench.results import Measured, Row
from bench.runner import Family, Session

COMMAND = "FLA's functions and its KDA layer on our kernels: the way through FLA"
TITLE = "cuLA through FLA: host time of a call, and FLA's KDA layer end to end"


def measure(case: AdapterCase, session: Session) -> Row:
    """Check one case, then time it.

    Args:
        case: the case.
        session: the run's.

    Returns:
        Its row: ours is the call through FLA; the baselines are "direct", "patched" (ours in front
        of FLA's dispatch) and "fla".

    Raises:
        AccuracyError: ours is further off than allowed; nothing is timed then.
        RuntimeError: FLA's call did not come to our kernel.
    """
    try:
        with torch.no_grad(), adapter_calls.ours_in_fla():
            if case.group == "layer":
                if (missing := adapter_calls.layers_missing()) is not None:
                    raise RuntimeError(missing)
                made = adapter_calls.layer_calls(case, "cuda")
                package = "decode" if case.T == 1 else "kda"
            else:
                made, package = adapter_calls.calls_of(case, "cuda"), FUNCTIONS[case.op][1]
            return _measured(case, made, package, session)
    finally:
        made = None  # so that the next case finds the memory free
        torch.cuda.empty_cache()


def _measured(case: AdapterCase, made: Calls, package: str, session: Session) -> Row:
    results, calls = {"ours": made.calls["ours"]()}, {"ours": made.calls["ours"]}
    if not adapter_calls.took_over(package):
        raise RuntimeError("FLA's call did not come to our kernel; see the log of 'cula'")
    for name in ("direct", "patched", "fla"):
        if name in made.calls and (name != "fla" or session.use_baselines):
            with session.excused(name):
                results[name], calls[name] = made.calls[name](), made.calls[name]
    torch.cuda.synchronize()
    errors = made.check(results) if "fla" in results or case.group != "layer" else {}
    figures = {}
    for name, call in calls.items():
        times = prefill.timed(case.mode, call, session, batch=timing.QUEUE, most_calls=16)
        figures[name] = Measured(error=errors.get(name), **times)
    ours = figures.pop("ours")
    return Row(case.op, case.name, ours, baselines=figures)


def show(measured: Sequence[tuple[AdapterCase, Row]]) -> str:
    """The run's tables, a group each, and what the way through FLA adds.

    Args:
        measured: cases with their rows.

    Returns:
        Lines of text.
    """
    parts = tables.by_group(GROUPS, measured)
    added = [(row, us) for _, row in measured if (us := added_us(row)) is not None]
    if added:
        lines = [[f"{row.op} {row.case}", f"{us:+.1f}"] for row, us in added]
        parts.append(f"Host time that FLA's way adds\n{tables.grid(['call', 'us'], lines)}")
    return "\n\n".join(parts) if parts else "Nothing was measured."


def added_us(row: Row) -> float | None:
    """Host time of the call through FLA less that of the direct one, or None."""
    figures: Mapping[str, Measured] = row.baselines
    direct = figures.get("direct", Measured()).host_us
    return None if direct is None or row.ours.host_us is None else row.ours.host_us - direct


def family() -> Family[AdapterCase]:
    """The family for the runner; without the layer where FLA's layers are not installed."""

    def cases() -> list[AdapterCase]:
        found = adapter_cases()
        if adapter_calls.layers_missing() is None:
            return found
        return [case for case in found if case.group != "layer"]

    return Family("adapters", TITLE, cases, measure, show, GROUPS)


def main(argv: list[str]) -> int:
    """The command.

    Args:
        argv: its options.

    Returns:
        The exit code.
    """
    if torch.cuda.is_available() and (missing := baselines.missing()) is not None:
        print(f"bench adapters: {missing}; nothing was measured.")
        return 0
    if (missing := adapter_calls.layers_missing()) is not None:
        print(f"bench adapters: {missing}: the layer's cases are left out.")
    return cli.main(family(), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
