"""The adapters' cases, their calls and what is said without a GPU. No GPU and no FLA needed."""

import sys
import types
from contextlib import nullcontext

import pytest
import torch

from bench import adapter_calls, adapters, baselines
from bench.accuracy import AccuracyError
from bench.adapter_cases import GROUPS, AdapterCase, adapter_cases
from bench.results import Measured, Row
from bench.runner import Session

SESSION = Session(copy_tbps=4.0, l2_bytes=1 << 20, use_baselines=True)
SMALL = [
    AdapterCase("fused_recurrent_kda", "decode", "wrapper", 2, 1, H=2, D=16),
    AdapterCase("fused_recurrent_simple_gla", "decode", "wrapper", 2, 1, H=2, D=16),
    AdapterCase("chunk_kda", "prefill", "wrapper", 1, 40, H=2, D=16),
    AdapterCase("chunk_simple_gla", "prefill", "wrapper", 1, 40, H=2, D=16),
]


def test_names_are_unique_and_groups_known():
    cases = adapter_cases()
    assert len({(case.op, case.name) for case in cases}) == len(cases)
    assert {case.group for case in cases} == set(GROUPS)
    assert {case.op for case in cases} == {*adapter_calls.FUNCTIONS, "KimiDeltaAttention"}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapters.main([]) == 0
    assert "no CUDA GPU" in capsys.readouterr().out


def test_without_fla_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(baselines, "missing", lambda: "no FLA")
    assert adapters.main([]) == 0
    assert capsys.readouterr().out == "bench adapters: no FLA; nothing was measured.\n"


def test_without_fla_s_layers_their_cases_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(adapter_calls, "version", lambda name: None)
    assert adapters.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "the layer's cases are left out" in said and "KimiDeltaAttention" not in said
    monkeypatch.setattr(adapter_calls, "version", lambda name: "0.6.0")
    assert adapters.main(["--list"]) == 0
    assert "KimiDeltaAttention kernel B=64 T=1 H=16 D=128" in capsys.readouterr().out


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_the_direct_call_is_right_and_a_wrong_one_is_noticed(case):
    _, direct, check = adapter_calls._MAKERS[case.op](case, "cpu")
    with torch.no_grad():
        o, state = direct()
    errors = check({"ours": (o, state), "direct": (o, state)})
    assert errors["ours"] == errors["direct"] < 0.005
    with pytest.raises(AccuracyError, match=r"^o: error"):
        check({"ours": (o + 1, state)})


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_fla_gets_what_the_direct_call_gets(case, monkeypatch):
    """A stand-in for FLA's function, with the keywords of FLA 0.6."""
    from cula.common import fla

    given = []

    def stand_in(q, k, v, *, initial_state, output_final_state, state_v_first, **options):
        given.append(options)
        return v, initial_state

    monkeypatch.setattr(adapter_calls, "function_of", lambda path: stand_in)
    monkeypatch.setattr(fla, "fla_function", lambda path: stand_in)
    for package in ("decode", "kda"):
        module = types.ModuleType(f"cula.{package}.fla")
        module.patch_fla = lambda past_dispatch: nullcontext()
        monkeypatch.setitem(sys.modules, module.__name__, module)
    calls = adapter_calls.calls_of(case, "cpu").calls
    patched = [] if case.op == "chunk_simple_gla" else ["patched"]
    assert list(calls) == ["ours", "direct", "fla", *patched]
    calls["ours"]()
    calls["fla"]()
    assert given[0].keys() == given[1].keys()
    assert ("beta" in given[0]) == ("kda" in case.op)


class Layer(torch.nn.Module):
    """As FLA's layer, without what it computes; its answer tells whether we would have run."""

    def __init__(self, hidden_size, head_dim, num_heads, layer_idx, **gate):
        super().__init__()
        self.gate, self.layer_idx = gate, layer_idx

    def forward(self, x, past_key_values=None, use_cache=False):
        from cula.common.fla import inside_fla

        seen = 0
        if past_key_values is not None:
            if len(past_key_values) > self.layer_idx:
                seen = past_key_values[self.layer_idx]["offset"]
            past_key_values.update(layer_idx=self.layer_idx, offset=seen + x.shape[1])
        return x * (1 + inside_fla()) + seen, None, past_key_values


@pytest.fixture
def layer(monkeypatch):
    module = types.ModuleType("fla.layers.kda")
    module.KimiDeltaAttention = Layer
    for name in ("fla", "fla.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.layers.kda", module)


def test_a_layer_runs_by_us_and_by_fla_alone(layer):
    case = AdapterCase("KimiDeltaAttention", "layer", "wrapper", 1, 5, H=2, D=4)
    made = adapter_calls.layer_calls(case, "cpu")
    ours, theirs = (made.calls[name]()[0] for name in ("ours", "fla"))
    assert torch.equal(2 * ours, theirs)
    assert made.check({"ours": (ours, None), "fla": (ours * 1.01, None)}) == {}
    with pytest.raises(AccuracyError, match="against FLA's"):
        made.check({"ours": (ours, None), "fla": (theirs, None)})


def test_steps_go_on_from_a_cache_of_their_own(layer):
    case = AdapterCase("KimiDeltaAttention", "layer", "wrapper", 3, 1, H=2, D=4)
    calls = adapter_calls.layer_calls(case, "cpu").calls
    first = calls["ours"]()[0]
    second = calls["ours"]()[0]
    assert torch.equal(second, first + 1)
    assert calls["fla"]()[0].shape == (3, 1, 8)


def as_measured(monkeypatch, **calls):
    made = adapter_calls.Calls(calls, lambda results: dict.fromkeys(results, 0.001))
    monkeypatch.setattr(adapter_calls, "calls_of", lambda case, device: made)
    monkeypatch.setattr(adapter_calls, "ours_in_fla", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    figures = lambda mode, call, session, **options: {"ms": 1.0, "host_us": call()}  # noqa: E731
    monkeypatch.setattr(adapters.prefill, "timed", figures)


def test_a_row_has_them_all_and_the_difference_is_shown(monkeypatch):
    as_measured(monkeypatch, ours=lambda: 7.5, direct=lambda: 6.0, fla=lambda: 50.0)
    monkeypatch.setattr(adapter_calls, "took_over", lambda package: True)
    row = adapters.measure(SMALL[0], SESSION)
    assert (row.ours.host_us, row.ours.error) == (7.5, 0.001)
    assert list(row.baselines) == ["direct", "fla"]
    assert adapters.added_us(row) == 1.5
    shown = adapters.show([(SMALL[0], row)])
    assert GROUPS["decode"] in shown and "+1.5" in shown
    assert adapters.show([]) == "Nothing was measured."


def test_a_layer_adds_nothing_that_could_be_told_apart():
    ours = Measured(ms=1.0, host_us=90.0)
    row = Row("KimiDeltaAttention", "wrapper", ours, baselines={"fla": Measured(ms=2.0)})
    assert adapters.added_us(row) is None


def test_fla_s_own_kernel_is_not_timed_as_ours(monkeypatch):
    as_measured(monkeypatch, ours=lambda: 7.5, direct=lambda: 6.0, fla=lambda: 50.0)
    monkeypatch.setattr(adapter_calls, "took_over", lambda package: False)
    with pytest.raises(RuntimeError, match="did not come to our kernel"):
        adapters.measure(SMALL[0], SESSION)
