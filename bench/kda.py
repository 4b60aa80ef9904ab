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
from collections.abc import Callable, Sequence

import torch

from bench import cli, kda_calls, tables, timing
from bench.kda_calls import KdaInputs
from bench.kda_cases import GROUPS, KdaCase, kda_cases
from bench.results import Measured, Row, with_floor
from bench.runner import Family, Session

COMMAND = "prefill: kda_prefill"
TITLE = "cuLA KDA prefill: kda_prefill (bf16 in and out, fp32 states, norms and gates inside)"


def measure(case: KdaCase, session: Session) -> Row:
    """Check one case against the float64 oracle, then time it.

    Args:
        case: the case.
        session: the run's.

    Returns:
        Its row.

    Raises:
        AccuracyError: ours is further off than allowed; nothing is timed then.
    """
    try:
        inputs = kda_calls.make_inputs(case, "cuda")
        errors = _checked_errors(inputs, session)
        ours = Measured(error=errors.pop("ours"), **_time(case, _ours(inputs), session))
        others = {}
        for name, error in errors.items():
            with session.excused(name):
                figures = _time(case, kda_calls.fla_call(inputs), session)
                others[name] = Measured(error=error, **figures)
        row = Row(case.op, case.name, ours, baselines=others)
        return with_floor(row, case.floor_bytes, session.copy_tbps)
    finally:
        inputs = None  # so that the next case finds the memory free
        torch.cuda.empty_cache()


def _ours(inputs: KdaInputs) -> Callable[[], object]:
    # a final state that becomes the next initial one would grow from call to call: keys are
    # normalised and gates decay, so it does not
    return kda_calls.our_call(inputs, torch.empty_like(inputs.v), kda_calls.states_of(inputs))


def _checked_errors(inputs: KdaInputs, session: Session) -> dict[str, float]:
    """Errors on o of ours and of the baseline if it runs, from the same inputs."""
    state = kda_calls.states_of(inputs)
    out = torch.full_like(inputs.v, float("nan"))  # an element that is not written shows
    kda_calls.our_call(inputs, out, state)()
    results = {"ours": (out, state)}
    if session.use_baselines:
        with session.excused("fla"):
            results["fla"] = kda_calls.fla_call(inputs)()
            torch.cuda.synchronize()
    found = kda_calls.errors(inputs, results)
    kda_calls.check_ours(found)
    return {name: found[name][0] for name in results}


def _time(case: KdaCase, call: Callable[[], object], session: Session) -> dict[str, float]:
    if case.mode == "kernel":
        sample = timing.graph_time([call])
        session.spreads.append(sample.spread)
        return {"ms": sample.value}
    times = (timing.brief_call_times if case.packed else timing.call_times)(call)
    session.spreads.append(times.ms.spread)
    return {"ms": times.ms.value, "host_us": times.host_us.value}


def show(measured: Sequence[tuple[KdaCase, Row]]) -> str:
    """The run's tables, a group each, and the packed cases' ratios in short.

    Args:
        measured: cases with their rows.

    Returns:
        Lines of text.
    """
    parts = []
    for group, title in GROUPS.items():
        rows = [row for case, row in measured if case.group == group]
        if rows:
            parts.append(f"{title}\n{tables.row_tables(rows)}")
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
