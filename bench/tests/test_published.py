"""The published figures: copied right, and findable among ours."""

import importlib
import importlib.util

import pytest

from bench import published, results, runs
from bench.published import Summary

PUBLISHED = published.load()
TABLES = {table.name: table for table in PUBLISHED.tables}
COMMITTED = [(folder, name) for folder in ("h200",) for name in runs.load(results.RESULTS / folder)]


def half_a_digit(x: float) -> float:
    digits = len(f"{x}".partition(".")[2])
    return 0.5 * 10 ** -max(digits, 3)


@pytest.mark.parametrize("table", PUBLISHED.tables, ids=lambda table: table.name)
def test_a_published_ratio_is_that_of_its_times(table):
    for row in table.rows:
        ours, fla = row.cula_ms, row.fla_ms
        least = (fla - half_a_digit(fla)) / (ours + half_a_digit(ours)) - 0.005
        greatest = (fla + half_a_digit(fla)) / (ours - half_a_digit(ours)) + 0.005
        assert least <= row.speedup <= greatest, row


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("kda-fixed", 10),
        ("kda-varlen", 18),
        ("lightning-fixed", 8),
        ("lightning-varlen", 42),
        ("lightning-decode-kernel", 5),
        ("lightning-decode-wrapper", 5),
    ],
)
def test_no_published_row_is_missing_or_there_twice(name, rows):
    assert len({row.case for row in TABLES[name].rows}) == len(TABLES[name].rows) == rows


@pytest.mark.parametrize("name", ["kda-fixed", "kda-varlen"])
def test_a_published_summary_is_that_of_its_rows(name):
    summary = Summary.of([row.speedup for row in TABLES[name].rows])
    said = TABLES[name].summary
    assert (summary.count, summary.least, summary.greatest) == (
        said.count,
        said.least,
        said.greatest,
    )
    assert round(summary.mean, 2) == said.mean


def test_the_summary_of_lightning_covers_all_three_kinds_of_lengths():
    table = TABLES["lightning-varlen"]
    assert table.summary.count == 126
    for lengths in ("uniform", "skewed", "random"):
        assert table.covers(table.op, f"wrapper {lengths} N=5 T=1024 H=64 D=128")
    assert not table.covers(table.op, "wrapper B=1 T=1024 H=64 D=128")
    assert not table.covers("kda_prefill", "wrapper random N=5 T=1024 H=64 D=128")
    assert all(table.covers(table.op, row.case) for row in table.rows)


def test_a_peer_has_times_of_published_cases():
    for peer in PUBLISHED.peers:
        known = {
            row.case for table in PUBLISHED.tables if table.op == peer.op for row in table.rows
        }
        assert peer.ms and set(peer.ms) <= known


@pytest.mark.parametrize("name", sorted({table.family for table in PUBLISHED.tables}))
def test_every_published_case_is_one_that_we_measure(name):
    if importlib.util.find_spec(f"bench.{name}") is None:
        pytest.skip(f"there is no bench {name} yet")
    ours = {
        (case.op, case.name) for case in importlib.import_module(f"bench.{name}").family().cases()
    }
    tables = [table for table in PUBLISHED.tables if table.family == name]
    assert not {(t.op, row.case) for t in tables for row in t.rows} - ours
    for table in tables:
        assert sum(table.covers(*case) for case in ours) == table.summary.count


@pytest.mark.parametrize(("gpu", "family"), COMMITTED)
def test_every_published_case_of_a_committed_family_is_in_its_run(gpu, family):
    run = runs.load(results.RESULTS / gpu)[family]
    lacking = [
        f"{table.op} {line.case}"
        for table in PUBLISHED.tables
        if table.family == family
        for line in table.rows
        if run.row(table.op, line.case) is None
    ]
    assert not lacking
