"""``python -m bench check NEW``: is a new run slower than the committed one?

Times of two runs are not compared: machines, clocks and neighbours differ. Compared are what each
run measured beside them, the share of its own copy rate and the ratio to its own baselines. A case
is slower if its share fell by more than the margin, unless every baseline slowed alike.

The margin is 2% and ten times the typical spread of repeats, of the noisier run. Where the host
decides how long a call takes, it is the worst spread of the noisier run, but within 10% and 50%.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import results, tables
from bench.results import Row

COMMAND = "compare a new run with the committed one, by ratios; fails where it is slower"

_LEAST_MARGIN, _SPREADS = 0.02, 10
_LEAST_HOST_MARGIN, _GREATEST_HOST_MARGIN = 0.10, 0.50
# a call whose host time is at least this share of its time on the stream waits for the host
_HOST_BOUND = 0.8


@dataclass(frozen=True)
class Margins:
    """How much less is noise, as a share.

    Attributes:
        gpu: where the GPU decides.
        host: where the host decides.
    """

    gpu: float
    host: float

    @classmethod
    def of(cls, *envs: Mapping) -> "Margins":
        """The margins of a comparison.

        Args:
            envs: of the runs; one without a spread counts as one without noise.

        Returns:
            The margins that the noisier run asks for.
        """
        typical = max(env.get("spread", {}).get("median", 0.0) for env in envs)
        worst = max(env.get("spread", {}).get("worst", 0.0) for env in envs)
        host = min(max(worst, _LEAST_HOST_MARGIN), _GREATEST_HOST_MARGIN)
        return cls(_LEAST_MARGIN + _SPREADS * typical, host)


@dataclass(frozen=True)
class Change:
    """One case, then and now.

    Attributes:
        then: the committed row.
        now: the new one.
        margin: what counts as noise.
    """

    then: Row
    now: Row
    margin: float

    @property
    def share(self) -> float | None:
        """Share of the copy rate, now over then. None where either run has none."""
        return _quotient(self.now.share(), self.then.share())

    @property
    def ratios(self) -> dict[str, float]:
        """Ratio to each baseline that both runs have, now over then."""
        changes = {
            name: _quotient(self.now.ratio(name), self.then.ratio(name))
            for name in self.then.baselines
        }
        return {name: change for name, change in changes.items() if change is not None}

    @property
    def factor(self) -> float | None:
        """What the case is judged by: the share, or else the least ratio. Above 1: faster."""
        return self.share if self.share is not None else min(self.ratios.values(), default=None)

    @property
    def verdict(self) -> str:
        """ "slower", "faster", "all slowed alike", "" for as before, "-" for not comparable."""
        if self.factor is None:
            return "-"
        floor = 1 - self.margin
        if self.factor < floor:
            kept = [change >= floor for change in self.ratios.values()]
            return "all slowed alike" if kept and all(kept) else "slower"
        return "faster" if self.factor > 1 / floor else ""


def _quotient(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then


def compare(
    then: Sequence[Row], now: Sequence[Row], margins: Margins
) -> tuple[list[Change], list[Row]]:
    """Pair the rows of two runs.

    Args:
        then: the committed rows.
        now: the new ones.
        margins: what counts as noise.

    Returns:
        The changes in the committed order, and the committed rows that the new run lacks.
    """
    new = {(row.op, row.case): row for row in now}
    changes, missing = [], []
    for row in then:
        other = new.get((row.op, row.case))
        if other is None:
            missing.append(row)
        else:
            host = _waits_for_host(row) or _waits_for_host(other)
            changes.append(Change(row, other, margins.host if host else margins.gpu))
    return changes, missing


def _waits_for_host(row: Row) -> bool:
    host_us, ms = row.ours.host_us, row.ours.ms
    return host_us is not None and ms is not None and host_us >= _HOST_BOUND * 1000 * ms


def show(changes: Sequence[Change]) -> str:
    """The rows as a table: then and now.

    Args:
        changes: what to show, at least one.

    Returns:
        Lines of text.
    """
    header = ["case", "ms then", "now", "of copy then", "now", "ratio then", "now", "change", ""]
    lines = []
    for change in changes:
        then, now = change.then, change.now
        name = next(iter(change.ratios), "")
        factor = change.factor
        lines.append(
            [
                f"{now.op} {now.case}",
                tables.milliseconds(then.ours.ms),
                tables.milliseconds(now.ours.ms),
                tables.percent(then.share()),
                tables.percent(now.share()),
                tables.ratio(then.ratio(name)),
                tables.ratio(now.ratio(name)),
                "-" if factor is None else f"{factor - 1:+.1%}",
                change.verdict,
            ]
        )
    return tables.grid(header, lines)


def main(argv: list[str]) -> int:
    """The command.

    Args:
        argv: its options.

    Returns:
        0 if nothing is slower, 1 if something is or nothing could be compared.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("new", type=Path, metavar="NEW", help="a result file")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="COMMITTED",
        help="another result file than the committed one of the same GPU and family",
    )
    options = parser.parse_args(argv)
    try:
        env, rows = results.read(options.new)
        family = options.new.stem.removesuffix(".part")
        committed = options.against or results.result_path(env, family)
        old_env, old_rows = results.read(committed)
    except (OSError, ValueError) as error:
        print(f"bench check: {error}", file=sys.stderr)
        return 1
    if env["gpu"] != old_env["gpu"]:
        print(f"bench check: {env['gpu']} against {old_env['gpu']}: no ratio carries over")
        return 1
    margins = Margins.of(old_env, env)
    changes, missing = compare(old_rows, rows, margins)
    judged = [change for change in changes if change.factor is not None]
    if not judged:
        print(f"bench check: {options.new} and {committed} have no case in common")
        return 1
    print(f"{show(changes)}\n")
    _conclude(judged, missing, margins)
    return 1 if any(change.verdict == "slower" for change in judged) else 0


def _conclude(judged: Sequence[Change], missing: Sequence[Row], margins: Margins) -> None:
    factors = [factor for change in judged if (factor := change.factor) is not None]
    mean = statistics.geometric_mean(factors)
    print(
        f"{len(judged)} cases compared, {mean - 1:+.1%} in the geometric mean; less than "
        f"{margins.gpu:.1%} is noise, {margins.host:.1%} where the host decides."
    )
    if missing:
        print(f"{len(missing)} committed cases are not in the new run.")
    for verdict in ("slower", "all slowed alike", "faster"):
        found = [change for change in judged if change.verdict == verdict]
        if found:
            print(f"\n{len(found)} {verdict}:\n{show(found)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
