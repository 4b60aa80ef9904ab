"""Tables and progress lines."""

from bench import tables
from bench.results import Measured, Row

FAST = Row(
    "kda_decode",
    "kernel B=1",
    Measured(ms=0.004, error=1.7e-3),
    floor_ms=0.002,
    baselines={"fla": Measured(ms=0.0065, error=1.8e-3)},
)
ALONE = Row("kda_decode", "kernel B=256", Measured(ms=12.3456, error=1e-3), floor_ms=12.0)


def test_a_table_shows_ratio_share_and_errors():
    header, rule, first, second = tables.row_tables([FAST, ALONE]).splitlines()
    # what the cases share stands in the corner, what differs in the lines
    expected = "kda_decode kernel ms fla ratio of copy error fla err"
    assert header.split() == expected.split()
    assert set(rule) == {"-", " "}
    expected = "B=1  0.0040  0.0065  1.62x  50%  1.7e-03  1.8e-03"
    assert first.split() == expected.split()
    # no baseline here: said by a dash, in the same columns
    expected = "B=256  12.35  -  -  97%  1.0e-03  -"
    assert second.split() == expected.split()


def test_columns_that_nothing_was_measured_for_are_left_out():
    text = tables.row_tables([Row("op", "first-call B=1", Measured(host_us=210_000.0))])
    header, _, line = text.splitlines()
    assert header.split() == ["op", "host", "us"]
    assert line.split() == ["first-call", "B=1", "210000"]


def test_each_op_has_its_own_table():
    other = Row("lightning_decode", "kernel B=1", Measured(ms=0.003))
    first, second = tables.row_tables([FAST, other, ALONE]).split("\n\n")
    assert len(first.splitlines()) == 4 and first.startswith("kda_decode")
    assert len(second.splitlines()) == 3 and second.startswith("lightning_decode")


def test_numbers_line_up_on_the_right():
    lines = tables.grid(["name", "ms"], [["a", "1.0"], ["longer", "10.0"]]).splitlines()
    assert lines == ["name      ms", "------  ----", "a        1.0", "longer  10.0"]


def test_a_matrix_leaves_a_dash_for_what_is_missing():
    cells = {("B=1", "H=4"): "2.0x", ("B=2", "H=8"): "3.0x"}
    lines = [line.split() for line in tables.matrix("ratio", cells).splitlines()]
    assert lines[0] == ["ratio", "H=4", "H=8"]
    assert lines[2] == ["B=1", "2.0x", "-"]
    assert lines[3] == ["B=2", "-", "3.0x"]


def test_a_progress_line_holds_the_whole_row():
    line = tables.progress_line(FAST)
    expected = "kda_decode kernel B=1:  0.0040 ms  fla 0.0065 (1.62x)  copy 50%  err 1.7e-03"
    assert line == expected
