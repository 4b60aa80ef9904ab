"""Result files: what was measured, on what, and only if it was right.

A file is ``bench/results/<gpu>/<family>.json``::

    {"env": {"gpu": ..., "driver": ..., "torch": ..., "cuda": ..., "dsl": ..., "baselines": {...},
             "commit": ..., "dirty": ..., "date": ..., "copy_tbps": ..., "clocks": {...}},
     "rows": [{"op": ..., "case": ..., "ms": ..., "floor_ms": ..., "error": ..., "host_us": ...,
               "baselines": {name: {"ms": ..., "host_us": ..., "error": ...}}}]}

``ms`` is GPU time. What was not measured is absent, never null.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.checkout import ROOT
from bench.environment import gpu_folder

RESULTS = ROOT / "bench" / "results"

_FIGURES = ("ms", "host_us", "error")
_ROW_KEYS = {"op", "case", "ms", "floor_ms", "error", "host_us", "baselines"}


@dataclass(frozen=True)
class Measured:
    """One implementation on one case. None: not measured.

    Attributes:
        ms: milliseconds per call on the GPU.
        host_us: microseconds of host time to enqueue a call.
        error: RMS(x - ref) / RMS(ref) of the output against a float64 reference.
    """

    ms: float | None = None
    host_us: float | None = None
    error: float | None = None

    def to_json(self) -> dict[str, float]:
        """Returns: the figures that were measured, to five significant digits."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {name: _five_digits(x) for name, x in figures.items() if x is not None}


@dataclass(frozen=True)
class Row:
    """One case: ours, the floor, and every baseline that could run it.

    Attributes:
        op: the call, such as "kda_decode".
        case: mode and shape, such as "kernel B=64 H=64 D=128".
        ours: what was measured of our call.
        floor_ms: the least time the case can take: its bytes at the copy rate of the same run.
        baselines: the same figures of others.
    """

    op: str
    case: str
    ours: Measured = Measured()
    floor_ms: float | None = None
    baselines: Mapping[str, Measured] = field(default_factory=dict)

    def ratio(self, baseline: str) -> float | None:
        """How many times faster ours is.

        Args:
            baseline: its name.

        Returns:
            Baseline time over ours, or None where either is missing.
        """
        other = self.baselines.get(baseline, Measured()).ms
        return None if other is None or self.ours.ms is None else other / self.ours.ms

    def share(self) -> float | None:
        """The share of the ceiling reached.

        Returns:
            Floor over measured time: 1 is the copy rate of the same run; above 1, data came from
            the cache. None where either is missing.
        """
        if self.floor_ms is None or self.ours.ms is None:
            return None
        return self.floor_ms / self.ours.ms

    def to_json(self) -> dict:
        """Returns: the row as it stands in the file."""
        row: dict = {"op": self.op, "case": self.case, **self.ours.to_json()}
        if self.floor_ms is not None:
            row["floor_ms"] = _five_digits(self.floor_ms)
        baselines = {name: measured.to_json() for name, measured in self.baselines.items()}
        return {**row, "baselines": baselines} if baselines else row

    @classmethod
    def from_json(cls, row: Mapping) -> "Row":
        """Read a row of a file.

        Args:
            row: the parsed object, as ``check_document`` accepts it.

        Returns:
            The row.
        """
        others = {name: Measured(**figures) for name, figures in row.get("baselines", {}).items()}
        ours = Measured(**{name: row[name] for name in _FIGURES if name in row})
        return cls(row["op"], row["case"], ours, row.get("floor_ms"), others)


def _five_digits(x: float) -> float:
    return float(f"{x:.5g}")


def check_document(document: Mapping) -> None:
    """Check that a document is a result file.

    Args:
        document: the parsed file.

    Raises:
        ValueError: naming what is wrong where.
    """
    if set(document) != {"env", "rows"}:
        raise ValueError(f"keys: {sorted(document)}; must be env and rows")
    for key in ("gpu", "date", "torch"):
        if key not in document["env"]:
            raise ValueError(f"env: has no {key}")
    if "commit" in document["env"] and "dirty" not in document["env"]:
        raise ValueError("env: a commit without dirty")
    seen = set()
    for row in document["rows"]:
        name = f"{row.get('op')} {row.get('case')}"
        if not row.get("op") or not row.get("case") or not set(row) <= _ROW_KEYS:
            raise ValueError(f"{name}: keys {sorted(row)}; must be among {sorted(_ROW_KEYS)}")
        if name in seen:
            raise ValueError(f"{name}: stands twice")
        seen.add(name)
        _check_figures(name, {key: row[key] for key in (*_FIGURES, "floor_ms") if key in row})
        for baseline, figures in row.get("baselines", {}).items():
            if not set(figures) <= set(_FIGURES):
                raise ValueError(f"{name}, {baseline}: keys {sorted(figures)}")
            _check_figures(f"{name}, {baseline}", figures)


def _check_figures(name: str, figures: Mapping[str, object]) -> None:
    for key, x in figures.items():
        if not isinstance(x, (int, float)) or not math.isfinite(x) or x < 0:
            raise ValueError(f"{name}: {key} = {x!r}; must be a finite number, not negative")


def result_path(env: Mapping, family: str, folder: Path | None = None, *, part: bool = False):
    """Where a family's results go.

    Args:
        env: the environment; its ``gpu`` names the folder.
        family: the family's name.
        folder: instead of ``bench/results``.
        part: a run that is not over.

    Returns:
        The path of the file.
    """
    name = f"{family}.part.json" if part else f"{family}.json"
    return (folder or RESULTS) / gpu_folder(env["gpu"]) / name


def write(path: Path, env: Mapping, rows: list[Row]) -> None:
    """Write a result file, whole or not at all.

    Args:
        path: the file; its folder is made.
        env: what it was measured on.
        rows: what was measured.

    Raises:
        ValueError: the document is not a result file.
    """
    document = {"env": dict(env), "rows": [row.to_json() for row in rows]}
    check_document(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(_one_row_a_line(document))
    scratch.replace(path)


def _one_row_a_line(document: Mapping) -> str:
    """A row a line: a later run's diff then shows which cases moved."""
    env = json.dumps(document["env"], indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    return f'{{"env": {env},\n "rows": [\n  {rows}\n ]}}\n'


def read(path: Path) -> tuple[dict, list[Row]]:
    """Read a result file.

    Args:
        path: the file.

    Returns:
        Its environment and its rows.

    Raises:
        ValueError: it is not a result file.
    """
    document = json.loads(path.read_text())
    check_document(document)
    return document["env"], [Row.from_json(row) for row in document["rows"]]


def with_floor(row: Row, nbytes: int, copy_tbps: float) -> Row:
    """Give a row its floor.

    Args:
        row: the row.
        nbytes: the fewest bytes that the case must read and write.
        copy_tbps: the copy rate of the run, TB/s.

    Returns:
        The row with ``floor_ms``.
    """
    return replace(row, floor_ms=nbytes / copy_tbps / 1e9)
