"""The KDA prefill cases, their inputs and their oracle. No GPU needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import kda, kda_calls, prefill
from bench.accuracy import AccuracyError
from bench.kda_cases import GROUPS, KdaCase, kda_cases
from bench.results import Measured, Row

CASES = kda_cases()
SMALL = [
    KdaCase("kernel", "kernel", "fixed", 2, 50, H=2, HV=4, D=16, initial=True),
    KdaCase("varlen", "wrapper", "skewed", 3, 90, H=2, HV=2, D=16, gate="softplus"),
]


def named(pattern: str) -> list[KdaCase]:
    return [case for case in CASES if re.search(pattern, case.name)]


def test_names_are_unique_and_groups_known() -> None:
    for cases in (CASES, kda_cases(16, 64)):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
    assert {case.group for case in CASES} == set(GROUPS)


def test_the_promised_cases_are_there() -> None:
    for mode in ("kernel", "wrapper"):
        assert len(named(rf"^{mode} B=(1|2) T=(512|1024|4096|8192|16384) H=64 D=128$")) == 10
    assert len(named(r"^wrapper (uniform|random|skewed) N=(10|20) T=\d+ H=64 D=128$")) == 18
    assert len(named(r"^kernel B=1 T=8192 H=(4|8|16) D=128$")) == 3
    assert len(named(r"^kernel B=1 T=32768 H=8 D=128$")) == 1
    assert len(named(r"^kernel B=1 T=8192 H=64 D=128 (softplus|h0|checkpoints)$")) == 3


def test_the_floor_of_the_main_case() -> None:
    (case,) = named(r"^kernel B=1 T=8192 H=64 D=128$")
    assert case.floor_bytes == 8192 * 64 * 1284  # q, k, v, g, o in bf16 and beta in fp32
    (kept,) = named(r"checkpoints$")
    assert kept.floor_bytes - case.floor_bytes == 128 * 64 * 128 * 128 * 4


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.layout)
def test_the_oracle_is_the_reference(case: KdaCase) -> None:
    """In float64, against the recurrence in float32 through the public call."""
    from cula.kda import kda_prefill

    inputs = kda_calls.make_inputs(case, "cpu")
    call = kda_calls.our_call(inputs, torch.empty_like(inputs.v), kda_calls.final_states(inputs))
    state, out = call.keywords["state"], call.keywords["out"]
    kda_prefill(*call.args, **{**call.keywords, "backend": "reference"})
    ((o_error, state_error),) = prefill.errors(
        inputs, {"ours": (out, state)}, kda_calls.oracle
    ).values()
    assert o_error < 3e-3 and state_error < 1e-5
    kda_calls.check_ours({"ours": (o_error, state_error)})


def test_a_wrong_result_is_refused() -> None:
    with pytest.raises(AccuracyError, match="state"):
        kda_calls.check_ours({"ours": (0.001, 0.006)})
    with pytest.raises(AccuracyError, match="o"):
        kda_calls.check_ours({"ours": (0.002, 0.001), "fla": (0.001, 0.001)})
    with pytest.raises(AccuracyError):
        kda_calls.check_ours({"ours": (float("nan"), 0.0)})


def test_ours_is_never_a_fallback() -> None:
    inputs = kda_calls.make_inputs(SMALL[0], "cpu")
    call = kda_calls.our_call(inputs, torch.empty_like(inputs.v), kda_calls.final_states(inputs))
    with pytest.raises(NotImplementedError, match="GPU"):
        call()


def test_tables_name_the_extremes_of_the_packed_cases() -> None:
    cases = named(r"^wrapper uniform N=10")
    rows = [
        (case, Row(case.op, case.name, Measured(ms=1.0), baselines={"fla": Measured(ms=x)}))
        for case, x in zip(cases, (2.0, 3.0, 7.0), strict=True)
    ]
    text = kda.show(rows)
    assert "mean 4.00x, least 2.00x" in text and GROUPS["varlen"] in text
    assert kda.show([]) == "Nothing was measured."


@pytest.mark.parametrize(
    "mode, count", [("both", 38), ("fixed", 20), ("varlen", 18)], ids=("both", "fixed", "varlen")
)
def test_the_published_command_lists_the_published_cases(mode: str, count: int) -> None:
    script = Path(kda.__file__).with_name("bench_kda.py")
    command = [sys.executable, str(script), "--mode", mode, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == count
