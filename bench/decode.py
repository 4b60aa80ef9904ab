"""``python -m bench decode``: single-token decode of both families, against FLA and the memory.

Modes (the first word of a case):

* kernel: GPU time over the same buffers, by CUDA-graph replay.
* rotated: the same over sets of buffers that together exceed the L2 cache, so that small batches
  show what a decode step inside a whole model costs.
* wrapper: whole calls with a preallocated output, back to back: time by events, host time to
  enqueue.
* first-call: import and first call in a new process whose compile cache is filled (host time).
"""

import sys
from collections.abc import Callable, Sequence

import torch

from bench import baselines, cli, decode_calls, first_call, tables, timing
from bench.decode_calls import DecodeInputs
from bench.decode_cases import GROUPS, DecodeCase, decode_cases
from bench.results import Measured, Row, with_floor
from bench.runner import Family, Session

COMMAND = "one to a few tokens a step: kda_decode, lightning_decode"
TITLE = "cuLA decode: kda_decode, lightning_decode (bf16 in and out)"


def measure(case: DecodeCase, session: Session) -> Row:
    """Check one case against the float64 oracle, then time it.

    Args:
        case: the case.
        session: the run's.

    Returns:
        Its row.

    Raises:
        AccuracyError: ours is further off than allowed; nothing is timed then.
    """
    if case.mode == "first-call":
        return Row(case.op, case.name, Measured(host_us=first_call.measure(case.op)))
    try:
        inputs = decode_calls.make_inputs(case, "cuda")
        errors = _checked_errors(inputs, session)
        time = _TIMERS[case.mode]
        ours = Measured(error=errors.pop("ours"), **time(inputs, "ours", session))
        others = {}
        for name, error in errors.items():
            with session.excused(name):
                others[name] = Measured(error=error, **time(inputs, name, session))
        row = Row(case.op, case.name, ours, baselines=others)
        return with_floor(row, case.floor_bytes, session.copy_tbps)
    finally:
        inputs = None  # so that the next case finds the memory free
        torch.cuda.empty_cache()


def _checked_errors(inputs: DecodeInputs, session: Session) -> dict[str, float]:
    """Errors on o of ours and of the baselines that run, from the same inputs."""
    state = inputs.state.clone()
    out = torch.full_like(inputs.v, float("nan"))  # an element that is not written shows
    # cute: a fallback would be timed as if it were ours
    decode_calls.our_call(inputs, state, out, backend="cute")()
    results = {"ours": (out, inputs.sequence_states(state))}
    if session.use_baselines:
        with session.excused("fla"):
            baselines.let_fla_tune(inputs.case.op, inputs.case.D)
        for name, build in baselines.decode_baselines(inputs.case).items():
            with session.excused(name):
                results[name] = build(inputs)()
                torch.cuda.synchronize()
    found = decode_calls.errors(inputs, results)
    decode_calls.check_ours(inputs, found)
    return {name: found[name][0] for name in results}


def _call(inputs: DecodeInputs, name: str) -> Callable[[], object]:
    """A call of ours or of a baseline, over state and output of its own."""
    if name != "ours":
        return baselines.decode_baselines(inputs.case)[name](inputs)
    return decode_calls.our_call(inputs, inputs.state.clone(), torch.empty_like(inputs.v))


def _time_kernel(inputs: DecodeInputs, name: str, session: Session) -> dict[str, float]:
    sample = timing.graph_time([_call(inputs, name)])
    session.spreads.append(sample.spread)
    return {"ms": sample.value}


def _time_rotated(inputs: DecodeInputs, name: str, session: Session) -> dict[str, float]:
    case = inputs.case
    sets = timing.sets_beyond_cache(case.state_bytes, session.l2_bytes)
    calls = [_call(decode_calls.make_inputs(case, "cuda", seed), name) for seed in range(sets)]
    sample = timing.graph_time(calls)
    session.spreads.append(sample.spread)
    return {"ms": sample.value}


def _time_wrapper(inputs: DecodeInputs, name: str, session: Session) -> dict[str, float]:
    times = timing.call_times(_call(inputs, name))
    session.spreads.append(times.ms.spread)
    return {"ms": times.ms.value, "host_us": times.host_us.value}


_TIMERS = {"kernel": _time_kernel, "rotated": _time_rotated, "wrapper": _time_wrapper}


def show(measured: Sequence[tuple[DecodeCase, Row]]) -> str:
    """The run's tables, a group each, and what was slower than the baseline.

    Args:
        measured: cases with their rows.

    Returns:
        Lines of text.
    """
    parts = tables.by_group(GROUPS, measured, heads=_heads_matrices)
    slower = [
        f"{row.op} {row.case} ({tables.ratio(row.ratio('fla'))})"
        for _, row in measured
        if (row.ratio("fla") or 1.0) < 1.0
    ]
    if any(row.ratio("fla") is not None for _, row in measured):
        parts.append("Slower than FLA: " + ("; ".join(slower) if slower else "none"))
    return "\n\n".join(parts) if parts else "Nothing was measured."


def _heads_matrices(pairs: Sequence[tuple[DecodeCase, Row]]) -> str:
    """Ratio to FLA and share of the copy rate over B and H: 120 rows would say it less clearly."""
    texts = []
    for op in dict.fromkeys(case.op for case, _ in pairs):
        cells = {
            (f"B={case.B}", f"H={case.H}"): _cell(row)
            for case, row in sorted(pairs, key=lambda pair: (pair[0].B, pair[0].H))
            if case.op == op
        }
        texts.append(tables.matrix(f"{op}: vs FLA, of copy", cells))
    return "\n\n".join(texts)


def _cell(row: Row) -> str:
    return f"{tables.ratio(row.ratio('fla'))} {tables.percent(row.share()):>4}"


def family(heads: int = 64, head_dim: int = 128) -> Family[DecodeCase]:
    """The family for the runner.

    Args:
        heads: H of the published batch sizes.
        head_dim: D of every case.

    Returns:
        The family.
    """
    return Family("decode", TITLE, lambda: decode_cases(heads, head_dim), measure, show, GROUPS)


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
