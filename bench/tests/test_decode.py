"""The decode cases, their inputs, their oracle and their checks. No GPU needed."""

import re

import pytest
import torch

from bench import baselines, decode, decode_calls
from bench.accuracy import AccuracyError, RelativeError
from bench.decode_cases import GROUPS, DecodeCase, decode_cases
from bench.results import Measured, Row
from bench.runner import Session
from bench.timing import CallTimes, Sample

CASES = decode_cases()
SMALL = [
    DecodeCase("kda_decode", "kernel", "kernel", B=3, T=2, H=2, HV=4, D=16),
    DecodeCase("lightning_decode", "kernel", "kernel", B=3, T=2, H=4, HV=4, D=16, pool=True),
]


def named(pattern: str) -> list[DecodeCase]:
    return [case for case in CASES if re.search(pattern, f"{case.op} {case.name}")]


def test_names_are_unique_and_groups_known():
    for heads in (64, 32):  # 32 is in the sweep over heads as well
        names = [(case.op, case.name) for case in decode_cases(heads)]
        assert len(set(names)) == len(names)
    assert {case.group for case in CASES} == set(GROUPS)


@pytest.mark.parametrize("op", ["kda_decode", "lightning_decode"])
def test_the_promised_cases_are_there(op):
    for mode in ("kernel", "rotated", "wrapper"):
        assert len(named(rf"^{op} {mode} B=(1|4|16|64|256) H=64 D=128$")) == 5
    assert len(named(rf"^{op} kernel B=(64|256) H=64 D=128 state=bf16$")) == 2
    assert len(named(rf"^{op} kernel B=\d+ H=(4|8|12|16|32|96) D=128$")) == 60
    assert len(named(rf"^{op} kernel B=64 T=[2348] H=64 D=128$")) == 4
    assert {case.HV // case.H for case in named(rf"^{op} kernel B=\d+ H=16 HV=64")} == {4}
    assert len(named(rf"^{op} first-call")) == 1


def test_the_floor_of_the_main_case_is_its_states_and_little_more():
    (case,) = named(r"^kda_decode kernel B=64 H=64 D=128$")
    assert case.state_bytes == 64 * 64 * 128 * 128 * 4
    # q, k, v, g, o in bf16 and beta in fp32
    assert case.floor_bytes == 2 * case.state_bytes + 64 * 64 * (5 * 256 + 4)


def test_a_bf16_state_is_half_the_bytes():
    fp32, bf16 = named(r"^lightning_decode kernel B=64 H=64 D=128( state=bf16)?$")
    assert 2 * bf16.state_bytes == fp32.state_bytes


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_the_oracle_agrees_with_itself_in_slices_and_checks_pass(case, monkeypatch):
    inputs = decode_calls.make_inputs(case, "cpu")
    o, state = decode_calls.oracle(inputs, slice(0, case.B))
    assert o.shape == (case.B, case.T, case.HV, case.D)
    assert o.dtype == state.dtype == torch.float64
    monkeypatch.setattr(decode_calls, "_ORACLE_ELEMENTS", 1)  # one sequence a slice
    found = decode_calls.errors(inputs, {"ours": (o.bfloat16(), state.float())})
    assert 1e-4 < found["ours"][0] < 3e-3
    assert found["ours"][1] < 1e-7
    assert found["rounded"] == found["ours"]
    decode_calls.check_ours(inputs, found)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_wrong_results_are_refused(case):
    inputs = decode_calls.make_inputs(case, "cpu")
    o, state = decode_calls.oracle(inputs, slice(0, case.B))
    for name, wrong in {
        "o": (torch.cat([o[:-1], o[:1]]), state),  # the last sequence got the first one's output
        "state": (o, inputs.sequence_states(inputs.state)),  # not updated
    }.items():
        with pytest.raises(AccuracyError, match=f"^{name}: error"):
            decode_calls.check_ours(inputs, decode_calls.errors(inputs, {"ours": wrong}))
    unwritten = torch.full_like(o, float("nan"))
    with pytest.raises(AccuracyError, match="o: error nan"):
        decode_calls.check_ours(inputs, decode_calls.errors(inputs, {"ours": (unwritten, state)}))


def test_a_bf16_state_may_round_but_not_twice_as_badly():
    case = DecodeCase("lightning_decode", "bf16", "kernel", B=2, H=2, HV=2, D=16, state="bf16")
    inputs = decode_calls.make_inputs(case, "cpu")
    o, state = decode_calls.oracle(inputs, slice(0, 2))
    rounded = decode_calls.errors(inputs, {"ours": (o, state.bfloat16())})
    decode_calls.check_ours(inputs, rounded)
    coarse = (state * (1 + 0.01 * torch.randn_like(state))).bfloat16()
    with pytest.raises(AccuracyError, match="state"):
        decode_calls.check_ours(inputs, decode_calls.errors(inputs, {"ours": (o, coarse)}))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_the_call_under_test_is_right_on_the_cpu(case):
    inputs = decode_calls.make_inputs(case, "cpu")
    state, out = inputs.state.clone(), torch.full_like(inputs.v, float("nan"))
    returned = decode_calls.our_call(inputs, state, out)()
    assert returned.data_ptr() == out.data_ptr()
    results = {"ours": (out, inputs.sequence_states(state))}
    decode_calls.check_ours(inputs, decode_calls.errors(inputs, results))


def test_relative_error_gathers_slices_like_one():
    torch.manual_seed(0)
    ref = torch.randn(6, 5, dtype=torch.float64)
    x = ref + 0.1 * torch.randn_like(ref)
    gathered = RelativeError()
    gathered.add(x[:4], ref[:4])
    gathered.add(x[4:], ref[4:])
    expected = (x - ref).square().mean().sqrt() / ref.square().mean().sqrt()
    assert gathered.value() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match="shape"):
        gathered.add(x[:1], ref)


def test_tables_show_groups_the_sweep_as_a_matrix_and_what_was_slower():
    def row(case: DecodeCase, ms: float) -> tuple[DecodeCase, Row]:
        others = {"fla": Measured(ms=0.1)}
        return case, Row(case.op, case.name, Measured(ms=ms), floor_ms=0.04, baselines=others)

    (single,) = named(r"^kda_decode kernel B=64 H=64 D=128$")
    sweep = named(r"^kda_decode kernel B=(1|2) H=(4|8) D=128$")
    text = decode.show([row(single, 0.05), *(row(case, 0.2) for case in sweep)])
    assert GROUPS["kernel"] in text and GROUPS["heads"] in text and GROUPS["gva"] not in text
    assert re.search(r"^B=2 +0.50x +20% +0.50x +20%$", text, re.M)
    slower = text.splitlines()[-1]
    assert slower.startswith("Slower than FLA: kda_decode kernel B=1 H=4") and "B=64" not in slower


class FakeRun:
    """``decode.measure`` on the CPU: everything but the GPU's clock and kernels."""

    def __init__(self, monkeypatch, ours, theirs) -> None:
        self.timed: list[object] = []
        make_inputs = decode_calls.make_inputs
        monkeypatch.setattr(
            decode_calls,
            "make_inputs",
            lambda case, device, seed=42: make_inputs(case, "cpu", seed),
        )
        monkeypatch.setattr(decode_calls, "our_call", ours)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(decode.baselines, "decode_baselines", lambda case: {"fla": theirs})
        monkeypatch.setattr(decode.timing, "graph_time", self.graph_time)
        monkeypatch.setattr(decode.timing, "call_times", self.call_times)

    def graph_time(self, calls) -> Sample:
        self.timed.append(calls)
        return Sample(float(len(calls)), 0.01)

    def call_times(self, call) -> CallTimes:
        self.timed.append(call)
        return CallTimes(Sample(0.2, 0.01), Sample(9.0, 0.02))

    def session(self) -> Session:
        return Session(copy_tbps=4.0, l2_bytes=1 << 14, use_baselines=True)


def exact_call(inputs, state, out, **options):
    def call():
        o, after = decode_calls.oracle(inputs, slice(0, inputs.case.B))
        state.copy_(after)
        return out.copy_(o)

    return call


def exact_baseline(inputs):
    return lambda: decode_calls.oracle(inputs, slice(0, inputs.case.B))


@pytest.mark.parametrize(
    ("mode", "figures"),
    [
        ("kernel", {"ms": 1.0}),
        ("rotated", {"ms": 6.0}),  # six sets of 8 KB states beyond a 16 KB cache, three times
        ("wrapper", {"ms": 0.2, "host_us": 9.0}),
    ],
)
def test_a_case_is_checked_timed_and_given_its_floor(monkeypatch, mode, figures):
    run = FakeRun(monkeypatch, exact_call, exact_baseline)
    case = DecodeCase("kda_decode", "kernel", mode, B=2, H=4, HV=4, D=16)
    row = decode.measure(case, run.session()).to_json()
    assert row["op"] == "kda_decode" and row["case"] == f"{mode} B=2 H=4 D=16"
    assert row["floor_ms"] == pytest.approx(case.floor_bytes / 4e9, rel=1e-4)
    assert {name: row[name] for name in figures} == figures
    assert row["baselines"]["fla"] == {**figures, "error": 0.0}
    assert 1e-4 < row["error"] < 4e-3
    assert len(run.timed) == 2


def test_nothing_wrong_is_timed(monkeypatch):
    def forgets_the_state(inputs, state, out, **options):
        return exact_call(inputs, torch.empty_like(state), out)

    run = FakeRun(monkeypatch, forgets_the_state, exact_baseline)
    with pytest.raises(AccuracyError, match="state"):
        decode.measure(
            DecodeCase("kda_decode", "kernel", "kernel", B=2, H=2, HV=2, D=16), run.session()
        )
    assert run.timed == []


def test_a_baseline_that_cannot_run_leaves_ours(monkeypatch, capsys):
    def failing(inputs):
        raise RuntimeError("no triton kernel")

    run = FakeRun(monkeypatch, exact_call, failing)
    case = DecodeCase("lightning_decode", "kernel", "kernel", B=2, H=2, HV=2, D=16)
    row = decode.measure(case, run.session())
    assert row.ours.ms == 1.0 and not row.baselines
    assert "fla left out. RuntimeError: no triton kernel" in capsys.readouterr().out


def test_ours_is_checked_as_our_kernel_and_never_as_a_fallback(monkeypatch):
    seen = []

    def ours(inputs, state, out, **options):
        seen.append(options)
        return exact_call(inputs, state, out)

    run = FakeRun(monkeypatch, ours, exact_baseline)
    decode.measure(
        DecodeCase("kda_decode", "kernel", "kernel", B=1, H=2, HV=2, D=16), run.session()
    )
    # checked by force, so that it raises where there is no kernel; timed as a user calls it
    assert seen == [{"backend": "cute"}, {}]


def test_fla_gets_no_case_that_is_not_the_same_work():
    bf16 = named(r"state=bf16")
    assert bf16 and not any(baselines.decode_baselines(case) for case in bf16)
    published = named(r"^lightning_decode (kernel|wrapper) B=64 H=64 D=128$")
    for case in published:
        assert set(baselines.decode_baselines(case)) == {"fla", "fla-published"}
    (kda,) = named(r"^kda_decode kernel B=64 H=64 D=128$")
    assert set(baselines.decode_baselines(kda)) == {"fla"}
