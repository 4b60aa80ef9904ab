"""FLA's recurrent functions, taken over: same arguments, same results, as the oracle has them."""

import importlib

import pytest
import torch

from cula.common.testing import assert_close
from cula.decode import fused_recurrent_kda, kda_decode, lightning_decode

N, T, H, K, V = 3, 2, 2, 16, 8


def tensors(seed=0, B=N, T=T, HV=H):
    torch.manual_seed(seed)
    q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
    v, g = torch.randn(B, T, HV, V), torch.randn(B, T, HV, K)
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.randn(B, T, HV)}


def gate(HV=H):
    return {
        "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV * K),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


@pytest.fixture
def taken(import_with_fla):
    module = import_with_fla("cula.decode.fla")
    assert set(module.report().values()) == {"hook"}
    return import_with_fla


def fla(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("HV", [H, 2 * H])
def test_fused_recurrent_kda(taken, state_v_first, HV):
    x, options = tensors(HV=HV), gate(HV)
    shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    initial = torch.randn(shape)
    options |= {"initial_state": initial.clone(), "state_v_first": state_v_first}
    options |= {"output_final_state": True, "lower_bound": -5.0}
    with torch.no_grad():
        o, final = fla("fla.ops.kda.fused_recurrent_kda")(**x, **options)
        want, state = fused_recurrent_kda(**x, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, state, 1e-6)
    assert final.dtype == torch.float32 and final.shape == shape and final.is_contiguous()
    assert torch.equal(options["initial_state"], initial)


def test_no_state_in_none_out(taken):
    x = tensors()
    with torch.no_grad():
        o, final = fla("fla.ops.kda.fused_recurrent_kda")(**x)
        assert_close("o", o, fused_recurrent_kda(**x)[0], 1e-6)
    assert final is None


def test_packed_sequences_with_an_empty_one(taken):
    x, options = tensors(B=1, T=7), gate()
    options |= {"cu_seqlens": torch.tensor([0, 3, 3, 7]), "output_final_state": True}
    options |= {"initial_state": torch.randn(N, H, K, V)}
    with torch.no_grad():
        o, final = fla("fla.ops.kda.fused_recurrent_kda")(**x, **options)
        want, state = fused_recurrent_kda(**x, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, state, 1e-6)
    assert torch.equal(final[1], options["initial_state"][1])


@pytest.mark.parametrize("v_first", [False, True])
def test_the_inner_function_updates_a_pool(taken, v_first):
    """A serving engine's call: slots by index, in place, no gather and no scatter."""
    x, options = tensors(T=1), gate()
    pool = torch.randn((9, H, V, K) if v_first else (9, H, K, V))
    slots = torch.tensor([7, 0, 3], dtype=torch.int32)
    twin, out = pool.clone(), torch.empty(N, 1, H, V)
    with torch.no_grad():
        o, state = fla("fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd")(
            **x,
            **options,
            initial_state=pool,
            ssm_state_indices=slots,
            state_v_first=v_first,
            out=out,
        )
        want = kda_decode(**x, **options, state=twin if v_first else twin.mT, state_indices=slots)
    assert o is out and state is pool
    assert_close("o", o, want, 1e-6)
    assert torch.equal(pool, twin)


def test_the_inner_function_speculates(taken):
    x, options = tensors(), gate()
    pool = torch.randn(9, H, V, K)
    given = {
        "cu_seqlens": None,
        "num_accepted_tokens": torch.tensor([1, 2, 1], dtype=torch.int32),
    }
    slots, twin = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32), pool.clone()
    with torch.no_grad():
        o, _ = fla("fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd")(
            **x, **options, **given, initial_state=pool, ssm_state_indices=slots, state_v_first=True
        )
        want = kda_decode(**x, **options, **given, state=twin, state_indices=slots)
    assert_close("o", o, want, 1e-6)
    assert torch.equal(pool, twin)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_recurrent_lightning(taken, packed, with_state):
    x = tensors(B=1, T=7) if packed else tensors()
    q, k, v = (x[n] for n in ("q", "k", "v"))
    options = {"output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 7])
    initial = torch.randn(N, H, K, V)
    if with_state:
        options["initial_state"] = initial
    with torch.no_grad():
        o, final = fla("fla.ops.lightning_attn.fused_recurrent_lightning_attn")(
            q, k, v, 1, 4, **options
        )
    g_gamma = -(8 / H * (1 - 1 / 4)) * torch.arange(H).float()
    pool = initial.mT.clone() if with_state else torch.zeros(N, H, V, K)
    want = lightning_decode(q, k, v, g_gamma, pool, cu_seqlens=options.get("cu_seqlens"))
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, pool.mT, 1e-6)
    assert final.is_contiguous() and torch.equal(options.get("initial_state", initial), initial)


def refused(taken, call, **options):
    """What FLA does with a call that we decline: with the stand-in, it says so."""
    if not taken.stand_in:
        pytest.skip("the installed FLA needs a GPU for what it runs itself")
    assert call(**options)[0] == "fla"


def test_declined_kda(taken):
    inner = fla("fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd")
    outer = fla("fla.ops.kda.fused_recurrent_kda")
    x, pool = tensors(), torch.randn(9, H, V, K)
    refused(taken, outer, **x, lower_bound=-9.0, use_gate_in_kernel=True)
    refused(taken, outer, **x, initial_state=torch.randn(N + 1, H, K, V))
    refused(taken, outer, **x, use_gate_in_kernel=True)  # neither A_log nor lower_bound
    refused(taken, inner, **x, initial_state=None)
    slots = torch.tensor([1, 2, 3])
    given = {"initial_state": pool, "state_v_first": True, "ssm_state_indices": slots}
    refused(taken, inner, **x, **given)  # two tokens a sequence, one index
    refused(taken, inner, **tensors(T=1), **given, inplace_final_state=False)
    x["q"].requires_grad_()
    refused(taken, outer, **x)


def test_declined_lightning(taken):
    function = fla("fla.ops.simple_gla.fused_recurrent_simple_gla")
    x = {n: y for n, y in tensors().items() if n in ("q", "k", "v")}
    refused(taken, function, **x)
    refused(taken, function, **x, g=torch.randn(N, T, H))
    refused(taken, function, **x, g_gamma=torch.zeros(H), reverse=True)
    refused(taken, function, **x, g_gamma=torch.zeros(H, dtype=torch.float64))
    refused(taken, function, **x, g_gamma=torch.zeros(H, requires_grad=True))


def test_environment(taken, monkeypatch):
    monkeypatch.setenv("CULA_BACKEND", "fla")
    refused(taken, fla("fla.ops.kda.fused_recurrent_kda"), **tensors())


def test_wrong_calls_raise(taken):
    """FLA's own checks come after its dispatch, so a call that is ours is checked by us."""
    x = tensors()
    with torch.no_grad():
        fla("fla.ops.kda.fused_recurrent_kda")(**x)
        x["g"] = x["g"][:, :1]  # of a kind that is known to be ours
        with pytest.raises(ValueError, match="g: shape"):
            fla("fla.ops.kda.fused_recurrent_kda")(**x)
