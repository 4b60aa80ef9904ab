"""A family's command line: options, the run, the tables, the result file."""

import argparse
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import baselines, results, timing
from bench.environment import environment
from bench.results import Row
from bench.runner import C, Family, Outcome, Session, run_cases, select


def main(family: Family[C], argv: list[str]) -> int:
    """A family's command line.

    Args:
        family: the family.
        argv: the options.

    Returns:
        0 if everything asked for was measured and right, or there is no GPU; else 1.
    """
    options = _parse(family, argv)
    cases = select(family.cases(), quick=options.quick, pattern=options.cases)
    if options.list:
        print("\n".join(f"{case.op} {case.name}" for case in cases))
        return 0
    if not torch.cuda.is_available():
        print(f"bench {family.name}: there is no CUDA GPU here; nothing was measured.")
        return 0
    if os.environ.get("CULA_BACKEND"):
        print("bench: CULA_BACKEND is set; unset it, so that ours is timed", file=sys.stderr)
        return 1
    if not cases:
        print(f"bench {family.name}: no case matches {options.cases!r}", file=sys.stderr)
        return 1
    return _measure(family, cases, options)


def _parse(family: Family, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {family.name}", description=family.title
    )
    parser.add_argument("--quick", action="store_true", help="a short run of the main cases")
    parser.add_argument("--cases", metavar="REGEX", help="only cases whose 'op name' matches")
    parser.add_argument("--list", action="store_true", help="list the cases, measure nothing")
    parser.add_argument(
        "--baseline", choices=("fla", "none"), default="fla", help="what to compare with"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/<gpu>/<family>.json instead of bench/results; a partial run is only "
        "written so",
    )
    parser.add_argument(
        "--commit",
        metavar="DESCRIBE",
        help='where the sources are a copy without their git history: what "git describe --always '
        "--dirty --abbrev=40 --exclude '*'\" says where they came from",
    )
    options = parser.parse_args(argv)
    try:
        re.compile(options.cases or "")
    except re.error as error:
        parser.error(f"--cases: {options.cases!r}; not a regular expression: {error}")
    return options


def _measure(family: Family[C], cases: Sequence[C], options: argparse.Namespace) -> int:
    copy = timing.copy_rate()
    no_baseline = baselines.missing() if options.baseline == "fla" else "not asked for"
    env = environment(
        copy_tbps=copy.value,
        baselines={} if no_baseline else baselines.versions(),
        commit=options.commit,
    )
    session = Session(
        copy_tbps=copy.value,
        l2_bytes=torch.cuda.get_device_properties(0).L2_cache_size,
        use_baselines=no_baseline is None,
    )
    print(_heading(family, env, no_baseline), flush=True)

    # A partial run would replace a whole one, so it is written only where one asks for it.
    partial = options.quick or options.cases or options.baseline == "none"
    writes = options.out is not None or not partial
    part = results.result_path(env, family.name, options.out, part=True)

    def keep(rows: list[Row]) -> None:
        if writes:
            results.write(part, env, rows)

    outcome = run_cases(family, cases, session, keep)
    print(f"\n{family.show(outcome.measured)}\n")
    if session.spreads:
        typical, worst = statistics.median(session.spreads), max(session.spreads)
        env["spread"] = {"median": round(typical, 4), "worst": round(worst, 4)}
        print(f"interquartile range of repeats: {typical:.1%} typical, {worst:.1%} at worst")
    if not writes:
        print("Not written: a partial run is only written with --out DIR.")
    elif outcome.rows:
        _conclude(outcome, part, results.result_path(env, family.name, options.out), env)
    for word, names in (("wrong", outcome.inaccurate), ("failed", outcome.failed)):
        if names:
            print(f"{len(names)} {word}: {'; '.join(names[:8])}{' ...' if names[8:] else ''}")
    return 1 if outcome.inaccurate or outcome.failed or outcome.stopped else 0


def _conclude(outcome: Outcome, part: Path, final: Path, env: dict) -> None:
    """Turn the partial file into the result, unless something was wrong."""
    results.write(part, env, outcome.rows)
    if outcome.inaccurate or outcome.stopped:
        why = "an accuracy check failed" if outcome.inaccurate else "the run was stopped"
        print(f"No result written: {why}. The rows that were right are in {part}")
        return
    part.replace(final)
    print(f"Written: {final} ({len(outcome.rows)} rows)")


def _heading(family: Family, env: dict, no_baseline: str | None) -> str:
    lines = [
        family.title,
        f"{env['gpu']}, driver {env.get('driver', '?')}, torch {env['torch']}, CUDA {env['cuda']}, "
        f"CuTe DSL {env.get('dsl', 'not installed')}",
        f"device copy: {env['copy_tbps']:.3f} TB/s read + written"
        + (f", clocks {env['clocks']}" if "clocks" in env else ""),
    ]
    if "commit" not in env:
        lines.append("commit: unknown (no git history here; say it with --commit)")
    else:
        dirty = ", DIRTY: not the committed code" if env["dirty"] else ""
        lines.append(f"commit: {env['commit'][:12]}{dirty}")
    named = " ".join(f"{name} {known}" for name, known in env["baselines"].items())
    lines.append(f"baseline: {named if no_baseline is None else 'none: ' + no_baseline}")
    return "\n".join([*lines, ""])
