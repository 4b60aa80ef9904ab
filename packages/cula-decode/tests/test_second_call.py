"""A call like one before is not planned again: the public calls, upstream's names, and FLA's."""

import importlib
from dataclasses import replace

import pytest
import torch

import cula.decode
from cula.decode import upstream
from cula.decode.cases import CASES, make_inputs
from cula.decode.kernel_plan import KERNEL_DIMS

HAS_KERNEL = [n for n, c in CASES.items() if c.K in KERNEL_DIMS and c.V in KERNEL_DIMS]
N, H, D = 3, 2, 64


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


@pytest.fixture
def check(not_planned_again):
    return not_planned_again("decode")


@pytest.mark.parametrize("name", HAS_KERNEL)
def test_public_calls(check, name):
    x = make_inputs(CASES[name])
    check(lambda: getattr(cula.decode, CASES[name].call)(**x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("keep", [False, True])
def test_fused_recurrent_kda_by_the_state_it_gets(check, dtype, keep):
    """Another dtype of the initial state, and whether a final one is wanted, are other kinds."""
    case = replace(CASES["kda: recurrent"], T=1)
    x = make_inputs(case)
    x["initial_state"] = x["initial_state"].to(dtype)
    first, second = check(
        lambda: cula.decode.fused_recurrent_kda(**{**x, "output_final_state": keep})
    )
    for _, final in (first, second):
        assert final is None if not keep else final.dtype == torch.float32


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["vk", "kv", None])
def test_upstream_kda(check, packed, layout):
    lead = (1, N) if packed else (N, 1)
    q, k, v, a = (randn(*lead, H, D) for _ in range(4))
    pool = None if layout is None else torch.randn(5, H, D, D)
    for call in (upstream.kda_decode, upstream.fused_sigmoid_gating_delta_rule_update):
        given = {
            "A_log": torch.randn(H),
            "dt_bias": torch.randn(H, D),
            "q": q,
            "k": k,
            "v": v,
            "a": a,
            "b": randn(*lead, H),
            "initial_state_source": pool,
            "initial_state_indices": torch.tensor([3, 0, 1], dtype=torch.int32),
            "state_layout": layout or "vk",
        }
        if call is upstream.fused_sigmoid_gating_delta_rule_update:
            given |= {"is_kda": True, "softplus_beta": 1.0, "softplus_threshold": 20.0}
        check(lambda call=call, given=given: call(**given))


def test_upstream_lightning(check):
    q, k, v, out = (randn(N, H, D) for _ in range(4))
    pool, slots = torch.randn(5 * H, D, D), torch.tensor([3, 0, 1], dtype=torch.int32)
    check(
        lambda: upstream.linear_attention_decode(
            q, k, v, pool, out, 0.1, 0, 0, 0, 0, 0, slots, torch.rand(H), D, D, D
        )
    )


# --- through FLA ----------------------------------------------------------------------------------

GATE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
}


@pytest.fixture
def taken(import_with_fla, not_planned_again):
    import_with_fla("cula.decode.fla")
    return not_planned_again("decode")


def fla(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def tokens(T=1, lead=N):
    x = {name: randn(lead, T, H, D) for name in ("q", "k", "v", "g")}
    parameters = {"A_log": torch.randn(H), "dt_bias": torch.randn(H * D)}
    return {**x, "beta": randn(lead, T, H), **parameters, **GATE}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("final", [False, True])
def test_fla_s_fused_recurrent_kda(taken, v_first, initial, final):
    x = tokens() | {"state_v_first": v_first, "output_final_state": final}
    if initial is not None:
        x["initial_state"] = torch.randn(N, H, D, D).to(initial)
    with torch.no_grad():
        for o, state in taken(lambda: fla("fla.ops.kda.fused_recurrent_kda")(**x)):
            assert o.shape == x["v"].shape and o.is_contiguous()
            assert (state is not None) == final
            assert state is None or (state.dtype == torch.float32 and state.is_contiguous())


def test_fla_s_packed_sequences(taken):
    x = tokens(7, 1) | {"cu_seqlens": torch.tensor([0, 3, 3, 7]), "output_final_state": True}
    with torch.no_grad():
        for o, state in taken(lambda: fla("fla.ops.kda.fused_recurrent_kda")(**x)):
            assert state.shape == (3, H, D, D)
            assert not o.any()  # nothing ran; rows of no sequence are zero


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("out", [False, True])
def test_fla_s_pool(taken, v_first, out):
    x, pool = tokens(), torch.randn(9, H, D, D)
    x |= {"initial_state": pool, "state_v_first": v_first}
    x |= {"ssm_state_indices": torch.tensor([7, 0, 3], dtype=torch.int32)}
    if out:
        x["out"] = torch.empty_like(x["v"])
    inner = fla("fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd")
    with torch.no_grad():
        for o, state in taken(lambda: inner(**x)):
            assert state is pool and (not out or o is x["out"])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_fla_s_lightning(taken, v_first, initial):
    x = {name: randn(N, 1, H, D) for name in ("q", "k", "v")}
    x |= {"g_gamma": -torch.rand(H), "state_v_first": v_first, "output_final_state": True}
    if initial:
        x["initial_state"] = torch.randn(N, H, D, D)
    with torch.no_grad():
        taken(lambda: fla("fla.ops.simple_gla.fused_recurrent_simple_gla")(**x))


@pytest.mark.parametrize("initial", [False, True])
def test_past_fla_s_dispatch(taken, initial):
    x = tokens() | {"output_final_state": True, "scale": 0.5}
    if initial:
        x["initial_state"] = torch.randn(N, H, D, D)
    with torch.no_grad(), taken.module("fla").patch_fla(past_dispatch=True):
        for o, state in taken(lambda: fla("fla.ops.kda.fused_recurrent_kda")(**x)):
            assert o.shape == x["v"].shape and state.shape == (N, H, D, D)
    outer = taken.module("fla")._OUTER
    assert len(outer.accepted) == 1 and "launch" not in taken.module("fla").report().values()


def test_what_the_launch_refuses_is_planned_anew(taken):
    x, adapter = tokens(), taken.module("fla")._takeover.adapters[0]
    call = fla("fla.ops.kda.fused_recurrent_kda")

    def refuse(*args):
        raise ValueError("strides")

    with torch.no_grad():
        call(**x)
        (key,) = adapter.accepted
        adapter.accepted[key] = (refuse, 1.0)
        taken.launched.clear()
        call(**x)
    assert len(taken.launched) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"lower_bound": -2.0},
        {"lower_bound": None},
        {"use_beta_sigmoid_in_kernel": False},
        {"dt_bias": None},
        {"A_log": torch.randn(H).bfloat16()},
        {"dt_bias": torch.randn(H, D)},
        {"output_final_state": True},
        {"initial_state": torch.randn(N, H, D, D)},
        {"g": torch.randn(N, 1, H, D)},
    ],
    ids=str,
)
def test_another_kind_of_call_is_planned(taken, changes):
    call, adapter = fla("fla.ops.kda.fused_recurrent_kda"), None
    adapter = taken.module("fla")._takeover.adapters[0]
    x = tokens()
    with torch.no_grad():
        call(**x)
        call(**{**x, **changes})
    assert len(adapter.accepted) == 2
