"""A call like one before is not planned again: the public calls, upstream's names, and FLA's."""

import importlib

import pytest
import torch

from cula.lightning import chunk_lightning_attn, lightning_prefill, upstream
from cula.lightning.cases import CASES, make_inputs
from cula.lightning.kernel_plan import KERNEL_DIMS

HAS_KERNEL = [n for n, c in CASES.items() if (c.K, c.V) in KERNEL_DIMS]
N, T, H, D = 2, 70, 2, 64


def tokens(packed=False):
    lead = (1, N * T) if packed else (N, T)
    x = {name: torch.randn(*lead, H, D).bfloat16() for name in ("q", "k", "v")}
    if packed:
        x["cu_seqlens"] = torch.tensor([0, 20, N * T])
    return x


@pytest.fixture
def check(not_planned_again):
    return not_planned_again("lightning")


@pytest.mark.parametrize("name", HAS_KERNEL)
def test_prefill(check, name):
    x = make_inputs(CASES[name])
    check(lambda: lightning_prefill(**x))


@pytest.mark.parametrize("name", ["state", "checkpoints"])
def test_slots_on_one_another_are_refused_then_too(check, name):
    x = make_inputs(CASES["checkpoints"])
    check(lambda: lightning_prefill(**x))
    x[name] = x[name][:1].expand_as(x[name])
    with pytest.raises(ValueError, match=f"{name}: strides"):
        lightning_prefill(**x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
def test_chunk(check, packed, v_first, state):
    x = tokens(packed) | {"state_v_first": v_first, "output_final_state": True}
    x |= {"layer_idx": 1, "num_layers": 4}
    if state is not None:
        x["initial_state"] = torch.randn(N, H, D, D).to(state)
    for _, final in check(lambda: chunk_lightning_attn(**x)):
        assert final.dtype == torch.float32 and final.shape == (N, H, D, D)


def test_lengths_on_the_host_are_no_reason_to_plan(check):
    x = tokens(packed=True) | {"layer_idx": 1, "num_layers": 4}
    x["cu_seqlens_cpu"] = x["cu_seqlens"].clone()
    check(lambda: chunk_lightning_attn(**x))


@pytest.mark.parametrize("with_state", [False, True])
def test_upstream(check, with_state):
    q, k, v = tokens().values()
    initial = torch.randn(N, H, D, D) if with_state else None
    check(
        lambda: upstream.lightning_attn_fwd(
            q, k, v, torch.rand(H), initial_state=initial, output_final_state=True
        )
    )


@pytest.mark.parametrize("with_pool", [False, True])
def test_upstream_packed(check, with_pool):
    q, k, v, cu_seqlens = tokens(packed=True).values()
    pool = torch.randn(5, H, D, D) if with_pool else None
    slots = torch.tensor([3, 1], dtype=torch.int32) if with_pool else None
    check(
        lambda: upstream.lightning_attn_fwd_varlen(
            q, k, v, torch.rand(H), cu_seqlens, state_pool=pool, initial_state_indices=slots
        )
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [None, torch.float32])
def test_fla_s_chunk_simple_gla(import_with_fla, not_planned_again, packed, v_first, state):
    module = import_with_fla("cula.lightning.fla")
    check = not_planned_again("lightning")
    x = tokens(packed) | {"g_gamma": -torch.rand(H), "output_final_state": True}
    x["state_v_first"] = v_first
    if state is not None:
        x["initial_state"] = torch.randn(N, H, D, D).to(state)
    with module.patch_fla(), torch.no_grad():
        function = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        for o, final in check(lambda: function(**x)):
            assert o.shape == x["v"].shape
            assert final.dtype == torch.float32 and final.shape == (N, H, D, D)
    (launch,) = module._takeover.adapters[0].accepted.values()
    assert callable(launch)
