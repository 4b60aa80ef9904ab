"""The committed runs of one GPU, as a report reads them: rows, groups, remarks.

``<family>.json`` is a family's run. ``<family>.<variant>.json`` beside it is one with other
baselines, such as ``decode.fla-0.4.2.json``: its ratios are shown beside those of the run.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import results
from bench.results import Row
from bench.runner import Family

OTHER = "other"


@dataclass(frozen=True)
class Remark:
    """What a reader has to know about a baseline of one run.

    Attributes:
        family: the run's.
        commit: the run's; a later run has no such remark.
        op: whose baselines.
        baselines: their names.
        text: a sentence or two.
    """

    family: str
    commit: str
    op: str
    baselines: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Run:
    """A family's committed result.

    Attributes:
        family: its name.
        env: what it was measured on.
        rows: what was measured, in order.
        groups: title per group, in order.
        group_of: the group of each (op, case).
        remarks: what has to be said of it.
        variants: runs of the same cases with other baselines.
    """

    family: str
    env: Mapping
    rows: Sequence[Row]
    groups: Mapping[str, str] = field(default_factory=dict)
    group_of: Mapping[tuple[str, str], str] = field(default_factory=dict)
    remarks: Sequence[Remark] = ()
    variants: Sequence["Run"] = ()

    def ratio(self, row: Row, baseline: str) -> float | None:
        """How many times faster ours is, where that may be claimed.

        Args:
            row: one of the run's.
            baseline: its name.

        Returns:
            The row's ratio, or None where it is missing or a remark is about that baseline.
        """
        for remark in self.remarks:
            if remark.op == row.op and baseline in remark.baselines:
                return None
        return row.ratio(baseline)

    def row(self, op: str, case: str) -> Row | None:
        """The row of a case, or None.

        Args:
            op: the call.
            case: the case's name.
        """
        return next((row for row in self.rows if (row.op, row.case) == (op, case)), None)

    def gpu_row(self, op: str, case: str) -> Row | None:
        """The row that says a case's GPU time, else that of its whole calls, or None.

        Args:
            op: the call.
            case: the name of the whole calls' case, "wrapper ...".
        """
        return self.row(op, case.replace("wrapper ", "kernel ", 1)) or self.row(op, case)

    def group(self, row: Row) -> str:
        """The group of a row: ``OTHER`` for a case that the family has no more."""
        return self.group_of.get((row.op, row.case), OTHER)

    def label(self, baseline: str) -> str:
        """A baseline's name for people, with the version that ran.

        Args:
            baseline: its name in the rows, such as "fla" or "fla-published".
        """
        name, _, how = baseline.partition("-")
        known = self.env.get("baselines", {}).get(name)
        shown = f"{name.upper()} {known}" if known and name == "fla" else name
        return f"{shown} (as {how})" if how else shown


def load(folder: Path) -> dict[str, Run]:
    """Read the committed runs of one GPU.

    Args:
        folder: such as ``bench/results/h200``.

    Returns:
        The runs by family, in alphabetical order.

    Raises:
        ValueError: a file is no result, or a variant has no run to stand beside.
    """
    runs: dict[str, Run] = {}
    variants: dict[str, list[Run]] = {}
    remarks = read_remarks(folder.parent / "remarks.json")
    for path in sorted(folder.glob("*.json")):
        family, _, variant = path.stem.partition(".")
        if variant == "part":
            continue
        env, rows = results.read(path)
        groups, group_of = _groups(family)
        said = [r for r in remarks if (r.family, r.commit) == (family, env.get("commit"))]
        run = Run(family, env, rows, groups, group_of, said)
        if variant:
            variants.setdefault(family, []).append(run)
        else:
            runs[family] = run
    for family, others in variants.items():
        if family not in runs:
            raise ValueError(f"{folder}: a variant of {family}; must stand beside {family}.json")
        runs[family] = replace(runs[family], variants=others)
    return runs


def _groups(name: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """A family's groups and who is in them; nothing for a result without a module of its name."""
    if importlib.util.find_spec(f"bench.{name}") is None:
        return {}, {}
    module = importlib.import_module(f"bench.{name}")
    if not hasattr(module, "family"):
        return {}, {}
    family: Family = module.family()
    cases = family.cases()
    titles = {case.group: family.groups.get(case.group, case.group) for case in cases}
    # the order in which the groups are shown, not that of the cases
    order = [*(group for group in family.groups if group in titles), *titles]
    return (
        {group: titles[group] for group in order},
        {(case.op, case.name): case.group for case in cases},
    )


def read_remarks(path: Path) -> list[Remark]:
    """Read the remarks.

    Args:
        path: a JSON list; it may be missing.

    Returns:
        The remarks.
    """
    if not path.exists():
        return []
    return [
        Remark(**{**remark, "baselines": tuple(remark["baselines"])})
        for remark in json.loads(path.read_text())
    ]
