"""The Lightning cases, their inputs and their oracle. No GPU needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import lightning, lightning_calls, prefill
from bench.accuracy import AccuracyError
from bench.lightning_cases import GROUPS, LightningCase, lightning_cases, shared_out
from bench.results import Measured, Row

CASES = lightning_cases()
SMALL = [
    LightningCase("kernel", "kernel", "fixed", 2, 150, H=2, HV=4, D=16, states=True, segment=64),
    LightningCase("varlen", "wrapper", "skewed", 4, 300, H=2, HV=2, D=16),
]


def named(pattern: str) -> list[LightningCase]:
    return [case for case in CASES if re.search(pattern, case.name)]


def test_names_are_unique_and_groups_known() -> None:
    for cases in (CASES, lightning_cases(16, 64)):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
    assert {case.group for case in CASES} == set(GROUPS)


def test_the_promised_cases_are_there() -> None:
    assert len(named(r"^kernel B=(1|2) T=(1024|4096|8192|16384) H=64 D=128$")) == 8
    assert len(named(r"^wrapper B=(1|2) T=\d+ H=64 D=128$")) == 8
    assert len(named(r"^kernel B=(1|2) T=\d+ H=64 D=128 h0_ht$")) == 8
    assert len(named(r"^kernel B=1 T=32768 H=(4|8|16) D=128$")) == 3
    assert len(named(r"segment=0$")) == 1
    assert len(named(r"^wrapper (uniform|skewed|random) N=\d+ T=\d+ H=64 D=128$")) == 126
    assert {case.HV // case.H for case in named(r"HV=64")} == {4}
    assert named(r"H=64 D=64$")


@pytest.mark.parametrize("layout", ["uniform", "skewed", "random"])
def test_lengths_are_shared_out(layout: str) -> None:
    for sequences in (5, 25):
        for tokens in (1024, 32768):
            lengths = shared_out(layout, sequences, tokens)
            assert len(lengths) == sequences and min(lengths) >= 1
            left = tokens % sequences if layout == "uniform" else 0
            assert sum(lengths) == tokens - left
            assert lengths == shared_out(layout, sequences, tokens)
    assert shared_out("skewed", 5, 1024) == [512, 128, 128, 128, 128]


def test_the_floor_counts_q_k_v_and_o() -> None:
    (case,) = named(r"^kernel B=1 T=8192 H=64 D=128$")
    assert case.floor_bytes == 8192 * 64 * 1024
    (case,) = named(r"^kernel B=1 T=8192 H=16 HV=64")
    assert case.floor_bytes == 8192 * 256 * (2 * 16 + 2 * 64)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.layout)
def test_our_call_agrees_with_the_oracle(case: LightningCase) -> None:
    inputs = lightning_calls.make_inputs(case, "cpu")
    out, state = torch.full_like(inputs.v, torch.nan), lightning_calls.final_states(inputs)
    call = lightning_calls.our_call(inputs, out, state)
    call.func(*call.args, **{**call.keywords, "backend": "reference"})
    found = prefill.errors(inputs, {"ours": (out, state)}, lightning_calls.oracle)
    lightning_calls.check_ours(found)
    assert 0 < found["ours"][1] < 1e-5
    out[:, 37] += 0.1 * out.abs().max()
    with pytest.raises(AccuracyError, match="o: error"):
        lightning_calls.check_ours(
            prefill.errors(inputs, {"ours": (out, state)}, lightning_calls.oracle)
        )


def test_tables_say_ratio_and_share() -> None:
    pairs = []
    for case in (*named(r"^kernel B=1 T=4096 H=64 D=128$"), *named(r"N=10 T=8192")):
        ours, theirs = Measured(ms=0.1, error=1e-3), Measured(ms=0.25, error=1e-3)
        row = Row(case.op, case.name, ours, floor_ms=0.08, baselines={"fla": theirs})
        pairs.append((case, row))
    text = lightning.show(pairs)
    assert "2.50x" in text and "80%" in text and "over 3 cases: mean 2.50x, least 2.50x" in text


def test_the_published_command_selects_its_cases() -> None:
    script = Path(lightning.__file__).with_name("bench_lightning_attn.py")

    def listed(*options: str) -> list[str]:
        command = [sys.executable, str(script), "--list", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert len(listed("--modes", "varlen")) == 126
    assert len(listed("--modes", "no_state", "h0_ht")) == 24
    assert len(listed("--modes", "no_state", "--heads", "32")) == 16
    assert len(listed()) == 150
