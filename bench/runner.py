"""Runs a family's cases: filters them, isolates their failures, shows progress.

A family module (``decode.py``) builds a ``Family`` and hands it to ``cli.main``. Adding a family
changes nothing here.
"""

import re
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from bench import tables
from bench.accuracy import AccuracyError
from bench.results import Row


class Case(Protocol):
    """What the runner needs to know of a case; the rest is between the family's own functions."""

    @property
    def op(self) -> str:
        """The call under test."""
        ...

    @property
    def group(self) -> str:
        """The table it is shown in."""
        ...

    @property
    def quick(self) -> bool:
        """Whether it is part of the short run."""
        ...

    @property
    def name(self) -> str:
        """Mode and shape: unique within an op."""
        ...


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Family(Generic[C]):
    """One family of calls.

    Attributes:
        name: of the command and of the result file.
        title: for people.
        cases: everything that can be measured, in order.
        measure: one case to its row; raises ``AccuracyError`` before timing anything wrong.
        show: the rows of a run as text; gets (case, row) pairs in order.
        groups: title per group, in the order in which a report shows them.
    """

    name: str
    title: str
    cases: Callable[[], Sequence[C]]
    measure: Callable[[C, "Session"], Row]
    show: Callable[[Sequence[tuple[C, Row]]], str]
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Session:
    """What the cases of one run share.

    Attributes:
        copy_tbps: the device-copy rate of this run, TB/s.
        l2_bytes: the device's cache.
        use_baselines: measure baselines too.
        spreads: of every timing so far, relative.
        errors: found so far, by whatever tells apart what they are of.
    """

    copy_tbps: float
    l2_bytes: int
    use_baselines: bool
    spreads: list[float] = field(default_factory=list)
    errors: dict[Hashable, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def excused(self, baseline: str) -> Iterator[None]:
        """A baseline that fails is left out of the case, said so, and costs ours nothing.

        Args:
            baseline: its name.
        """
        try:
            yield
        except Exception as error:
            print(f"    {baseline} left out. {_last_words(error)}", flush=True)


@dataclass
class Outcome(Generic[C]):
    """What became of the cases of a run.

    Attributes:
        measured: the cases that were right, with their rows.
        inaccurate: names of those that were not.
        failed: names of those that raised.
        stopped: the run was interrupted.
    """

    measured: list[tuple[C, Row]] = field(default_factory=list)
    inaccurate: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def rows(self) -> list[Row]:
        """The rows alone."""
        return [row for _, row in self.measured]


def select(cases: Sequence[C], *, quick: bool, pattern: str | None) -> list[C]:
    """Filter cases.

    Args:
        cases: all of them.
        quick: only those of the short run.
        pattern: a regular expression, searched for in "op case".

    Returns:
        The chosen ones, in order.
    """
    wanted = re.compile(pattern or "")
    return [
        case
        for case in cases
        if (case.quick or not quick) and wanted.search(f"{case.op} {case.name}")
    ]


def _device_works() -> bool:
    """An illegal access loses the process' CUDA context: every later call would fail as well."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run_cases(
    family: Family[C],
    cases: Sequence[C],
    session: Session,
    after_each: Callable[[list[Row]], None],
    clock: Callable[[], float] = time.monotonic,
    device_works: Callable[[], bool] = _device_works,
) -> Outcome[C]:
    """Measure cases one by one; one that fails costs only itself.

    Args:
        family: whose cases they are.
        cases: what to measure.
        session: shared by them.
        after_each: gets the rows so far, after each case that was measured.
        clock: seconds.
        device_works: asked after a failure, since some leave nothing to go on with.

    Returns:
        What became of them. Ctrl-C ends the run and keeps what there is.
    """
    outcome: Outcome[C] = Outcome()
    began = clock()
    for i, case in enumerate(cases, 1):
        name = f"{case.op} {case.name}"
        where = f"[{i:>{len(str(len(cases)))}}/{len(cases)} {clock() - began:4.0f}s]"
        try:
            row = family.measure(case, session)
        except KeyboardInterrupt:
            outcome.stopped = True
            print(f"{where} {name}: stopped", flush=True)
            break
        except AccuracyError as error:
            outcome.inaccurate.append(name)
            print(f"{where} {name}: WRONG, not timed. {error}", flush=True)
        except Exception as error:  # one case must not lose the others
            outcome.failed.append(name)
            print(f"{where} {name}: FAILED. {_last_words(error)}", flush=True)
            if not device_works():
                outcome.stopped = True
                print(f"The GPU answers no more: {len(cases) - i} cases were not run.", flush=True)
                break
        else:
            outcome.measured.append((case, row))
            print(f"{where} {tables.progress_line(row)}", flush=True)
            after_each(outcome.rows)
    return outcome


def _last_words(error: Exception) -> str:
    """The error and the innermost line that raised it, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{place}"
