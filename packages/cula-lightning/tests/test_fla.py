"""FLA's chunked Lightning Attention, taken over when asked for, and given back."""

import importlib
import logging

import pytest
import torch

from cula.common.testing import assert_close
from cula.lightning import chunk_lightning_attn

B, T, H, K, V = 2, 5, 2, 16, 8


def tensors(B=B, T=T):
    torch.manual_seed(0)
    return [torch.randn(B, T, H, D) for D in (K, K, V)]


@pytest.fixture
def ready(import_with_fla):
    module = import_with_fla("cula.lightning.fla")
    assert set(module.report().values()) == {"no"}
    import_with_fla.module = module
    yield import_with_fla
    module.unpatch_fla()


def fla(name):
    return getattr(importlib.import_module("fla.ops.lightning_attn"), name)


def simple_gla():
    return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla


@pytest.mark.parametrize("packed", [False, True])
def test_chunk_lightning_attn(ready, packed):
    q, k, v = tensors(1, 9) if packed else tensors()
    options = {"output_final_state": True}
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, 4, 4, 9])}
        options |= {"initial_state": torch.randn(3, H, K, V)}
    with ready.module.patch_fla(), torch.no_grad():
        o, final = fla("chunk_lightning_attn")(q, k, v, 1, 4, **options)
    want, state = chunk_lightning_attn(q, k, v, 1, 4, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("final", final, state, 1e-6)


def test_simple_gla_with_a_decay_per_head(ready):
    """The level that is patched; retention layers call it so."""
    q, k, v = tensors()
    with ready.module.patch_fla(), torch.no_grad():
        o, final = simple_gla()(
            q, k, v, g_gamma=-torch.rand(H), scale=1.0, state_v_first=True, output_final_state=True
        )
    assert o.shape == v.shape and final.shape == (B, H, V, K)


def test_gradients_on_a_cpu(ready):
    q, k, v = (x.requires_grad_() for x in tensors())
    with ready.module.patch_fla():
        fla("chunk_lightning_attn")(q, k, v, 1, 4)[0].sum().backward()
    x, y, z = (x.requires_grad_() for x in tensors())
    chunk_lightning_attn(x, y, z, 1, 4)[0].sum().backward()
    for name, a, b in (("q", q, x), ("k", k, y), ("v", v, z)):
        assert_close(name, a.grad, b.grad, 1e-6)


def test_importing_alone_changes_nothing_and_undoing_leaves_nothing(ready):
    before = {
        name: dict(vars(module))
        for name, module in list(importlib.sys.modules.items())
        if name.split(".")[0] == "fla"
    }
    original = simple_gla()
    ready.module.patch_fla()
    assert simple_gla() is not original
    assert set(ready.module.report().values()) == {"patch"}
    ready.module.unpatch_fla()
    for name, members in before.items():
        now = vars(importlib.sys.modules[name])
        assert all(now[n] is value for n, value in members.items()), name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "g_gamma: None"),
        ({"g": torch.zeros(B, T, H)}, "g: given"),
        ({"g_gamma": torch.zeros(H), "chunk_size": 48}, "chunk_size: 48"),
        ({"g_gamma": torch.zeros(H + 1)}, "g_gamma: shape"),
        ({"g_gamma": torch.zeros(H), "initial_state": torch.zeros(1, H, K, V)}, "initial_state"),
        ({"g_gamma": torch.zeros(H, requires_grad=True)}, "g_gamma: requires a gradient"),
    ],
)
def test_declined(ready, caplog, options, reason):
    if not ready.stand_in:
        pytest.skip("the installed FLA needs a GPU for what it runs itself")
    caplog.set_level(logging.INFO, logger="cula")
    with ready.module.patch_fla():
        assert simple_gla()(*tensors(), **options)[0] == "fla"
    assert reason in caplog.text


def test_a_plan_without_a_kernel_declines(ready, caplog, monkeypatch):
    """On a GPU the plan is asked for our kernel only; so a fallback of its own is never taken."""
    adapter = ready.module._takeover.adapters[0]
    monkeypatch.setenv("CULA_BACKEND", "cute")
    q, k, v = tensors()
    reason = adapter.refusal({"q": q, "k": k, "v": v, "g_gamma": torch.zeros(H)})
    assert reason is not None and "'cute'" in reason
