"""BENCHMARKS.md: the committed runs beside the published tables. Same runs, same bytes."""

from collections.abc import Callable, Mapping, Sequence

from bench import family_page, markdown, plots
from bench.family_page import baseline_of, ratios_and_shares, spans, tables_of
from bench.published import Published, PublishedTable
from bench.results import Row
from bench.runs import Run

_TITLES = {"decode": "Decode", "kda": "KDA", "lightning": "Lightning"}

_INTRO = """\
# Benchmarks

Made by `python -m bench report` from the committed runs in [{results}]({results}); a test compares
this page with them. Nothing here is written by hand.

- **ratio**: the baseline's time over ours, on the same inputs in the same run. Above 1 ours is
  faster.
- **published**: the ratio that [inclusionAI/cuLA]({project}) published for the same case on
  {gpu} ({date}; PyTorch {torch}, CUDA {cuda}, baseline {baseline}). Another GPU: compare
  the ratios, not the times. All of them: [bench/published.json](bench/published.json).
- **floor**: the least bytes that the case can move, each input read once and each output written
  once, at the rate of a device-to-device copy in the same run. **Of floor** is floor over time;
  above 100% data came from the cache.
- **host**: time to enqueue a call.
- **error**: RMS(o - reference) / RMS(reference) of the output, against a float64 recurrence from
  the rounded inputs. A case that is wrong is not timed, and a run with one is not written.
  FLA's decode, called as it was for the published tables, keeps o in float32: hence its error.

How each figure is measured: [bench/README.md](bench/README.md)."""


def page(runs: Mapping[str, Run], published: Published, results: str, plot_folder: str) -> str:
    """The whole page.

    Args:
        runs: the committed runs of one GPU, by family.
        published: the published figures.
        results: the folder of the runs, from the page.
        plot_folder: the folder of the plots, from the page.

    Returns:
        Markdown.
    """
    parts = [_INTRO.format(results=results, **published.source)]
    if runs:
        parts += ["## Environment", _environment(runs), "## Summary", _summary(runs, published)]
    for name, run in runs.items():
        figures = plots.figures({name: run}, published)
        parts += [
            f"## {_title(name)}",
            *family_page.section(run, published, figures, plot_folder),
        ]
    parts += [*_not_measured(runs, published), "## To reproduce", _reproduce(runs, published)]
    return "\n\n".join(parts) + "\n"


def _title(family: str) -> str:
    return _TITLES.get(family, family)


def _environment(runs: Mapping[str, Run]) -> str:
    lines: dict[str, Callable[[Mapping], str]] = {
        "GPU": lambda env: env["gpu"],
        "driver": lambda env: env.get("driver", "-"),
        "torch, CUDA": lambda env: f"{env['torch']}, {env.get('cuda', '-')}",
        "CuTe DSL": lambda env: env.get("dsl", "-"),
        "baselines": lambda env: _pairs(env.get("baselines", {})),
        "commit": _commit,
        "date": lambda env: env["date"],
        "device copy, read + written": _copy_rate,
        "clocks": _clocks,
        "interquartile range of repeats": _spread,
    }
    envs = {}
    for name, run in runs.items():
        envs[_title(name)] = run.env
        for variant in run.variants:
            envs[f"{_title(name)}, {variant.label('fla')}"] = variant.env
    rows = [[name, *map(show, envs.values())] for name, show in lines.items()]
    return markdown.table(["", *envs], rows, left=1 + len(envs))


def _pairs(values: Mapping) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "-"


def _commit(env: Mapping) -> str:
    if "commit" not in env:
        return "unknown"
    return f"`{env['commit'][:12]}`" + (", with changes" if env["dirty"] else "")


def _copy_rate(env: Mapping) -> str:
    return f"{env['copy_tbps']:.3f} TB/s" if "copy_tbps" in env else "-"


def _clocks(env: Mapping) -> str:
    clocks = env.get("clocks", {})
    parts = [f"{clocks[key]} MHz {name}" for name, key in _CLOCKS.items() if key in clocks]
    return ", ".join(parts) or "-"


_CLOCKS = {"SM": "sm_mhz", "memory": "memory_mhz"}


def _spread(env: Mapping) -> str:
    if "spread" not in env:
        return "-"
    return f"{env['spread']['median']:.1%} typical, {env['spread']['worst']:.1%} at worst"


def _summary(runs: Mapping[str, Run], published: Published) -> str:
    """A line per published table, then one per other group and call."""
    header = ["", "cases", "ratio to FLA", "published", "of floor"]
    lines = []
    for run in runs.values():
        for table in tables_of(run, published):
            rows = [row for row in run.rows if table.covers(row.op, row.case)]
            lines.append(_summary_line(run, table.title, rows, table))
        for title, rows in family_page.other_sets(run, published):
            if any(row.share() is not None for row in rows):
                # a group's title says after a colon how it is measured
                lines.append(_summary_line(run, f"{rows[0].op}: {title.split(':')[0]}", rows))
    notes = [remark.text for run in runs.values() for remark in run.remarks]
    text = markdown.table(header, lines)
    return "\n\n".join(["Mean (least to greatest) over the cases of each table.", text, *notes])


def _summary_line(
    run: Run, title: str, rows: Sequence[Row], table: PublishedTable | None = None
) -> list[str]:
    baseline = baseline_of(table, rows) if table else "fla"
    ratios, shares = ratios_and_shares(run, rows, baseline)
    return [title, str(len(rows)), ratios, spans(table.summary) if table else "-", shares]


def _not_measured(runs: Mapping[str, Run], published: Published) -> list[str]:
    """What is said of the published tables that no committed run stands beside."""
    rows = [
        [table.title, str(table.summary.count), spans(table.summary)]
        for table in published.tables
        if table.family not in runs
    ]
    if not rows:
        return []
    text = "No run of these is committed. Published, and to be measured:"
    return ["## Not measured yet", text, markdown.table(["", "cases", "published"], rows)]


def _reproduce(runs: Mapping[str, Run], published: Published) -> str:
    packages = [f"./packages/cula-{name}" for name in ("common", *runs)]
    commands = dict.fromkeys(
        table.command for run in runs.values() for table in tables_of(run, published)
    )
    lines = [
        "# from a clone at the commit of the run, with PyTorch for your GPU",
        " ".join(["pip install", *packages, "fla-core"]),
        *(f"python -m bench {family}" for family in runs),
        "# the published commands: the published cases alone, of which nothing is written",
        *(f"python bench/{command}" for command in commands),
        "# this page and its plots, from the committed runs (needs matplotlib)",
        "python -m bench report",
        "# a run of yours against the committed one, by ratios",
    ]
    for family in runs:
        lines += [f"python -m bench {family} --out /tmp/results"]
        lines += [f"python -m bench check /tmp/results/*/{family}.json"]
    return "```sh\n" + "\n".join(lines) + "\n```"
