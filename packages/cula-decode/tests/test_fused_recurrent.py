"""FLA's recurrent call: its signature and defaults, layouts, gradients."""

import dataclasses
import inspect

import pytest
import torch

from cula.common.testing import assert_close, same_bits
from cula.decode import fused_recurrent_kda
from cula.decode.cases import CASES, make_inputs

# As flash-linear-attention 0.6 documents it.
FLA_PARAMETERS = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "g": inspect.Parameter.empty,
    "beta": inspect.Parameter.empty,
    "A_log": None,
    "dt_bias": None,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "lower_bound": None,
    "state_v_first": False,
    "cu_seqlens": None,
}


def inputs_of(name="recurrent", **changes):
    case = dataclasses.replace(CASES[f"kda: {name}"], K=16, V=8, dtype=torch.float32, **changes)
    return make_inputs(case)


def test_signature_and_defaults_are_those_of_fla():
    parameters = inspect.signature(fused_recurrent_kda).parameters
    positional = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert positional == FLA_PARAMETERS
    assert list(positional) == list(FLA_PARAMETERS)


def test_defaults_mean_given_gates_and_no_norm(oracle):
    x = inputs_of("given gates", gate_dtype=torch.float32)
    plain = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    plain["k"] = torch.nn.functional.normalize(plain["k"], dim=-1)
    oracle.recurrent(plain)
    o, final = fused_recurrent_kda(*plain.values())
    assert final is None and o.shape == x["v"].shape


@pytest.mark.parametrize(
    "name", ["safe_gate", "chunk_size", "chunk_indices", "disable_recompute", "cu_seqlens_cpu"]
)
def test_keywords_of_other_versions_change_nothing(name):
    x = inputs_of()
    want = fused_recurrent_kda(**x)
    found = fused_recurrent_kda(**x, **{name: 1})
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", ["state_indices", "g_gamma", "reverse", "use_l2norm"])
def test_other_keywords_are_refused(name):
    with pytest.raises(TypeError, match=rf"^{name}: True; fused_recurrent_kda\(\) has no such"):
        fused_recurrent_kda(**inputs_of(), **{name: True})


@pytest.mark.parametrize("name", ["output_final_state", "state_v_first"])
def test_flags_are_true_or_false(name):
    x = inputs_of() | {name: "False"}
    with pytest.raises(TypeError, match=f"{name}: str; must be True or False"):
        fused_recurrent_kda(**x)


def test_the_older_name_of_the_layout(oracle):
    x = inputs_of("recurrent, V-first")
    want = fused_recurrent_kda(**x)
    del x["state_v_first"]
    found = fused_recurrent_kda(**x, transpose_state_layout=True)
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))
    with pytest.raises(ValueError, match="transpose_state_layout"):
        fused_recurrent_kda(**x, state_v_first=True, transpose_state_layout=True)


def test_layouts_hold_the_same_states():
    x = inputs_of()
    o, final = fused_recurrent_kda(**x)
    x |= {"state_v_first": True, "initial_state": x["initial_state"].mT.contiguous()}
    other, v_first = fused_recurrent_kda(**x)
    assert same_bits(o, other) and same_bits(final, v_first.mT.contiguous())
    assert final.is_contiguous() and v_first.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_initial_states_of_any_dtype(oracle, dtype):
    x = inputs_of()
    x["initial_state"] = x["initial_state"].to(dtype)
    oracle.recurrent(x)


def test_a_step_size_for_every_channel(oracle):
    x = inputs_of()
    x["beta"] = torch.rand(x["v"].shape)
    oracle.recurrent(x)


def test_a_sequence_without_tokens_passes_its_state_on():
    x = inputs_of("recurrent, varlen")
    _, final = fused_recurrent_kda(**x)
    assert same_bits(final[0], x["initial_state"][0])
    assert same_bits(final[3], x["initial_state"][3])
    x["initial_state"] = None
    _, final = fused_recurrent_kda(**x)
    assert (final[0] == 0).all() and (final[1] != 0).any()


def test_no_tokens_and_no_sequences():
    x = inputs_of(T=0)
    o, final = fused_recurrent_kda(**x)
    assert o.shape == (3, 0, 2, 8) and same_bits(final, x["initial_state"])
    o, final = fused_recurrent_kda(**inputs_of(B=0))
    assert o.shape == (0, 6, 2, 8) and final.shape == (0, 2, 16, 8)


def test_gradients_are_those_of_finite_differences():
    x = inputs_of("recurrent", B=1, T=3, H=1, HV=2)
    leaves = {
        n: x[n].float().requires_grad_()
        for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    }

    def loss(**changed):
        o, final = fused_recurrent_kda(**{**x, **leaves, **changed})
        return o.double().square().sum() + final.double().sum()

    loss().backward()
    torch.manual_seed(1)  # other numbers than the inputs: along q itself its norm hides a change
    for name, leaf in leaves.items():
        direction = torch.randn_like(leaf)
        step = 1e-2 * direction
        with torch.no_grad():
            slope = (loss(**{name: leaf + step}) - loss(**{name: leaf - step})) / 2e-2
        assert_close(name, (leaf.grad * direction).sum(), slope, 5e-3)


def test_results_are_the_same_with_gradients():
    x = inputs_of()
    want = fused_recurrent_kda(**x)
    x["v"].requires_grad_()
    found = fused_recurrent_kda(**x)
    assert found[0].requires_grad and found[1].requires_grad
    assert_close("o", found[0], want[0], 1e-6)
    assert_close("final state", found[1], want[1], 1e-6)
    with torch.no_grad():
        assert not fused_recurrent_kda(**x)[0].requires_grad
