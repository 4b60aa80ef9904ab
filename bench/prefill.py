"""What the benchmarks of prefill families share: a case checked, then timed, ours and FLA's."""

import dataclasses
import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bench import accuracy, timing
from bench.results import Measured, Row, with_floor
from bench.runner import Session

LONG_CALLS = 16  # between two waits: a call of prefill is long, and up to five launches

Result = tuple[torch.Tensor, torch.Tensor | None]  # o, and the final states V-first


def measure(case: Any, session: Session, calls: ModuleType) -> Row:
    """Check one case against the float64 oracle, then time it.

    Args:
        case: the case.
        session: the run's.
        calls: the family's module: ``make_inputs``, ``final_states``, ``our_call``, ``fla_call``,
            ``oracle`` and ``check_ours``.

    Returns:
        Its row.

    Raises:
        AccuracyError: ours is further off than allowed; nothing is timed then.
    """
    gc.collect()  # what the last case left in cycles holds memory of the GPU
    try:
        inputs = calls.make_inputs(case, "cuda")
        found = _checked_errors(inputs, session, calls)
        ours = Measured(
            error=found.pop("ours"),
            **timed(case.mode, _ours(inputs, calls), session, brief=case.packed),
        )
        others = {}
        for name, error in found.items():
            with session.excused(name):
                call = calls.fla_call(inputs)
                figures = timed(case.mode, call, session, brief=case.packed)
                others[name] = Measured(error=error, **figures)
        row = Row(case.op, case.name, ours, baselines=others)
        return with_floor(row, case.floor_bytes, session.copy_tbps)
    finally:
        inputs = None  # so that the next case finds the memory free
        torch.cuda.empty_cache()


def _ours(inputs: Any, calls: ModuleType) -> Callable[[], object]:
    # A final state that becomes the next initial one does not grow: states decay, and KDA's keys
    # are normalised.
    return calls.our_call(inputs, torch.empty_like(inputs.v), calls.final_states(inputs))


def _checked_errors(inputs: Any, session: Session, calls: ModuleType) -> dict[str, float]:
    """Errors on o of ours and of the baseline if it runs, from the same inputs.

    Found once for cases that differ in how they are timed: seconds of the oracle's where T is long.
    """
    key = (calls.__name__, dataclasses.replace(inputs.case, group="", mode="kernel", quick=False))
    if key not in session.errors:
        session.errors[key] = _found_errors(inputs, session, calls)
    return dict(session.errors[key])


def _found_errors(inputs: Any, session: Session, calls: ModuleType) -> dict[str, float]:
    state = calls.final_states(inputs)
    out = torch.full_like(inputs.v, float("nan"))  # an element that is not written shows
    calls.our_call(inputs, out, state)()
    results = {"ours": (out, state)}
    if session.use_baselines:
        with session.excused("fla"):
            results["fla"] = calls.fla_call(inputs)()
            torch.cuda.synchronize()
    found = errors(inputs, results, calls.oracle)
    calls.check_ours(found)
    return {name: found[name][0] for name in results}


def errors(
    inputs: Any, results: dict[str, Result], oracle: Callable[[Any, int], Result]
) -> dict[str, tuple[float, float]]:
    """Errors of output and final states of several implementations, against one oracle.

    Args:
        inputs: what they all started from.
        results: per name, o [B, T, HV, D] and the states V-first [N, HV, D, D] or None.
        oracle: the exact result of the n-th sequence, its state V-first.

    Returns:
        Per name, the two errors.
    """
    lengths = inputs.case.lengths
    found = {name: (accuracy.RelativeError(), accuracy.RelativeError()) for name in results}
    for n, length in enumerate(lengths):
        o, state = oracle(inputs, n)
        row, start = (0, sum(lengths[:n])) if inputs.case.packed else (n, 0)
        for name, (their_o, their_states) in results.items():
            found[name][0].add(their_o[row, start : start + length], o)
            if their_states is not None and state is not None:
                found[name][1].add(their_states[n], state)
    return {name: (for_o.value(), for_state.value()) for name, (for_o, for_state) in found.items()}


def timed(
    mode: str,
    call: Callable[[], object],
    session: Session,
    *,
    brief: bool = False,
    batch: int = LONG_CALLS,
    most_calls: int = 256,
) -> dict[str, float]:
    """The figures of a row: GPU time in mode "kernel", else time and host time of whole calls.

    Args:
        mode: of the case.
        call: what is timed.
        session: gets the spread.
        brief: few repeats of whole calls.
        batch: whole calls between two waits, where they are not brief.
        most_calls: limit on the calls in a graph.

    Returns:
        Keywords of ``Measured``.
    """
    if mode == "kernel":
        sample = timing.graph_time([call], most_calls=most_calls)
        session.spreads.append(sample.spread)
        return {"ms": sample.value}
    times = timing.brief_call_times(call) if brief else timing.call_times(call, batch=batch)
    session.spreads.append(times.ms.spread)
    return {"ms": times.ms.value, "host_us": times.host_us.value}
