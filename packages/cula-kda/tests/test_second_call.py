"""A call like one before is not planned again: the public calls, upstream's names, and FLA's."""

import importlib

import pytest
import torch

from cula.kda import chunk_kda, kda_prefill, upstream
from cula.kda.cases import CASES, make_inputs
from cula.kda.kernel_plan import KERNEL_DIMS

HAS_KERNEL = [n for n, c in CASES.items() if c.K in KERNEL_DIMS and c.V in KERNEL_DIMS]
N, T, H, D = 2, 70, 2, 64
FORM = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -5.0}


def tokens(packed=False):
    lead = (1, N * T) if packed else (N, T)
    x = {name: torch.randn(*lead, H, D).bfloat16() for name in ("q", "k", "v", "g")}
    x |= {"beta": torch.rand(*lead, H), "A_log": torch.randn(H), "dt_bias": torch.randn(H * D)}
    if packed:
        x["cu_seqlens"] = torch.tensor([0, 20, N * T])
    return {**x, **FORM}


@pytest.fixture
def check(not_planned_again):
    return not_planned_again("kda")


@pytest.mark.parametrize("name", HAS_KERNEL)
def test_prefill(check, name):
    x = make_inputs(CASES[name])
    check(lambda: kda_prefill(**x))


@pytest.mark.parametrize("name", ["state", "checkpoints"])
def test_slots_on_one_another_are_refused_then_too(check, name):
    x = make_inputs(CASES["checkpoints"])
    check(lambda: kda_prefill(**x))
    x[name] = x[name][:1].expand_as(x[name])
    with pytest.raises(ValueError, match=f"{name}: strides"):
        kda_prefill(**x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
def test_chunk(check, packed, v_first, state):
    x = tokens(packed) | {"state_v_first": v_first, "output_final_state": True}
    if state is not None:
        x["initial_state"] = torch.randn(N, H, D, D).to(state)
    for _, final in check(lambda: chunk_kda(**x)):
        assert final.dtype == torch.float32 and final.shape == (N, H, D, D)


def test_lengths_on_the_host_are_no_reason_to_plan(check):
    x = tokens(packed=True)
    x["cu_seqlens_cpu"] = x["cu_seqlens"].clone()
    check(lambda: chunk_kda(**x))


@pytest.mark.parametrize("call", [chunk_kda, kda_prefill])
def test_parameters_of_a_bf16_model_are_no_reason_to_plan(check, call):
    """The kernels take float32 vectors; what is something else is converted, each time."""
    x = tokens()
    x["A_log"], x["dt_bias"] = x["A_log"].bfloat16(), x["dt_bias"].bfloat16().view(H, D)
    check(lambda: call(**x))
    prep = check.launched[0][1]
    assert ((H,), (1,), torch.float32) in prep and ((H * D,), (1,), torch.float32) in prep


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["chunk_kda", "kda_prefill_hopper", "flash_kda_prefill"])
def test_upstream(check, name, packed):
    x = tokens(packed) | {"output_final_state": True, "safe_gate": True}
    check(lambda: getattr(upstream, name)(**x))


@pytest.fixture
def taken(import_with_fla, not_planned_again):
    """FLA's function, ours where the plan says so."""
    module = import_with_fla("cula.kda.fla")
    check = not_planned_again("kda")
    check.adapter = module._takeover.adapters[0]
    return check


def fla_chunk_kda(**options):
    return importlib.import_module("fla.ops.kda").chunk_kda(**options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fla_s_chunk_kda(taken, packed, v_first, state, dtype):
    x = tokens(packed) | {"state_v_first": v_first, "output_final_state": True, "safe_gate": True}
    x["A_log"] = x["A_log"].to(dtype)
    if state is not None:
        x["initial_state"] = torch.randn(N, H, D, D).to(state)
    with torch.no_grad():
        for o, final in taken(lambda: fla_chunk_kda(**x)):
            assert o.shape == x["v"].shape and o.dtype == x["q"].dtype
            assert final.dtype == torch.float32 and final.shape == (N, H, D, D)
    (launch,) = taken.adapter.accepted.values()
    assert callable(launch)


def test_no_final_state_and_older_names(taken):
    x = tokens() | {"transpose_state_layout": True, "cu_seqlens": None, "layer_idx": 3}
    with torch.no_grad():
        for _, final in taken(lambda: fla_chunk_kda(**x)):
            assert final is None
