"""FLA's chunk_kda, taken over: same arguments, same results, and what is declined."""

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch

from cula.common.testing import assert_close
from cula.kda import chunk_kda
from cula.kda.plan import plan_chunk

B, T, H, K, V = 2, 5, 2, 16, 8


def tensors(B=B, T=T, HV=H):
    torch.manual_seed(0)
    q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
    v, g = torch.randn(B, T, HV, V), torch.randn(B, T, HV, K)
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.randn(B, T, HV)}


def layer_options(HV=H):
    """What FLA's KDA layer passes."""
    return {
        "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV * K),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": False,
        "safe_gate": True,
        "lower_bound": -5.0,
        "state_v_first": True,
        "cu_seqlens": None,
    }


@pytest.fixture
def taken(import_with_fla):
    module = import_with_fla("cula.kda.fla")
    assert module.report() == {"fla.ops.kda.chunk_kda": "hook"}
    import_with_fla.module = module
    return import_with_fla


def fla_chunk_kda(*args, **options):
    return importlib.import_module("fla.ops.kda").chunk_kda(*args, **options)


@pytest.mark.parametrize("HV", [H, 2 * H])
@pytest.mark.parametrize("with_state", [False, True])
def test_a_layer_s_call(taken, HV, with_state):
    x, options = tensors(HV=HV), layer_options(HV)
    if with_state:
        options["initial_state"] = torch.randn(B, HV, V, K)
    with torch.no_grad():
        o, final = fla_chunk_kda(**x, **options)
        want, state = chunk_kda(**x, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, state, 1e-6)


def test_given_gates_positional_and_packed(taken):
    """As transformers' Kimi-Linear calls it: gates and beta computed before, K-first states."""
    x = tensors(B=1, T=9)
    x["g"], x["beta"] = -x["g"].abs(), x["beta"].sigmoid()
    options = {"initial_state": torch.randn(3, H, K, V), "use_qk_l2norm_in_kernel": True}
    options |= {"cu_seqlens": torch.tensor([0, 4, 4, 9]), "output_final_state": True}
    with torch.no_grad():
        o, final = fla_chunk_kda(*x.values(), 0.5, **options)
        want, state = chunk_kda(**x, scale=0.5, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, state, 1e-6)


def test_keywords_that_fla_ignores_are_ignored(taken):
    x = tensors()
    with torch.no_grad():
        o, _ = fla_chunk_kda(**x, chunk_indices=None, layer_idx=3)
        assert_close("o", o, chunk_kda(**x)[0], 1e-6)


def test_intermediate_states(taken):
    with torch.inference_mode():
        o, final, h = fla_chunk_kda(
            **tensors(T=70), return_intermediate_states=True, output_final_state=True
        )
    assert o.shape == (B, 70, H, V) and final.shape == (B, H, K, V) and h.shape == (B, 2, H, K, V)


def test_gradients_on_a_cpu_are_the_reference_s(taken):
    x = tensors()
    twin = {name: y.clone().requires_grad_() for name, y in x.items()}
    x = {name: y.requires_grad_() for name, y in x.items()}
    fla_chunk_kda(**x, use_beta_sigmoid_in_kernel=True)[0].sum().backward()
    chunk_kda(**twin, use_beta_sigmoid_in_kernel=True)[0].sum().backward()
    for name in x:
        assert_close(name, x[name].grad, twin[name].grad, 1e-6)


def refused(taken, caplog, reason, **options):
    if not taken.stand_in:
        pytest.skip("the installed FLA needs a GPU for what it runs itself")
    caplog.set_level(logging.INFO, logger="cula")
    assert fla_chunk_kda(**options)[0] == "fla"
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lower_bound": -9.0, "safe_gate": False}, "lower_bound: -9.0"),
        ({"chunk_size": 16}, "chunk_size: 16"),
        ({"use_graph": True}, "use_graph: given; needs FLA"),
        ({"cp_context": SimpleNamespace(cu_seqlens=None)}, "cp_context: given; needs FLA"),
        ({"initial_state": torch.zeros(1, H, V, K)}, "initial_state: shape"),
        ({"A_log": None, "lower_bound": None, "safe_gate": False}, "A_log: None"),
    ],
)
def test_declined(taken, caplog, options, reason):
    with torch.no_grad():
        refused(taken, caplog, reason, **tensors(), **(layer_options() | options))


def test_asked_for(taken, caplog, monkeypatch):
    monkeypatch.setenv("CULA_BACKEND", "fla")
    refused(taken, caplog, "FLA runs this", **tensors())


def test_on_a_gpu_what_has_no_kernel_or_needs_gradients_is_fla_s(taken, caplog, monkeypatch):
    """The plan is asked for our kernel; it names what is missing, and never falls back itself."""
    asked = []

    def as_on_a_gpu(*args, backend, **options):
        asked.append((backend, options["differentiable"]))
        # What choose_backend does with tensors on a GPU and no kernel for them.
        raise NotImplementedError(f"backend: {backend!r}; cannot run chunk_kda here: no kernel")

    adapter = taken.module._takeover.adapters[0]
    monkeypatch.setattr(taken.module, "plan_chunk", as_on_a_gpu)
    x = tensors()
    monkeypatch.setenv("CULA_BACKEND", "cute")
    assert "no kernel" in adapter.refusal(x)
    x["q"].requires_grad_()
    assert "no kernel" in adapter.refusal(x)
    assert asked == [("cute", False), ("cute", True)]


def test_the_plan_is_the_only_judge(taken, monkeypatch):
    """Whatever the plan takes, we take: today's missing kernel is no rule of the adapter's."""
    plans = []

    def counted(*args, **options):
        plans.append(plan_chunk(*args, **options))
        return plans[-1]

    monkeypatch.setattr(taken.module, "plan_chunk", counted)
    with torch.no_grad():
        for _ in range(3):
            fla_chunk_kda(**tensors())
    assert [plan.backend for plan in plans] == ["reference"]
