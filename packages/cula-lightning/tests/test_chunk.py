"""`chunk_lightning_attn` on a CPU: FLA's meaning, checks and gradients, against the oracle."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula.common.testing import assert_close, same_bits
from cula.lightning import chunk_lightning_attn, op

LAYER = {"layer_idx": 3, "num_layers": 12}


def make(dtype=torch.float32, batch=2, tokens=45, H=3, HV=3) -> dict:
    torch.manual_seed(0)
    return {
        "q": torch.randn(batch, tokens, H, 16).to(dtype),
        "k": torch.randn(batch, tokens, H, 16).to(dtype),
        "v": torch.randn(batch, tokens, HV, 8).to(dtype),
    }


def log_decay(HV: int) -> torch.Tensor:
    """The paper's formula for layer 3 of 12."""
    return torch.tensor([-8 / HV * (1 - 3 / 12) * h for h in range(HV)])


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("H, HV", [(3, 3), (1, 4)])
def test_matches_the_oracle(oracle, dtype: torch.dtype, tol: float, H: int, HV: int) -> None:
    inputs = make(dtype, H=H, HV=HV)
    right = oracle(**inputs, g_gamma=log_decay(HV))
    o, final = chunk_lightning_attn(**inputs, **LAYER, output_final_state=True)
    assert o.dtype == dtype and final.dtype == torch.float32
    assert_close("o", o, right.o, tol)
    assert_close("final", final, right.final, 2e-6)
    o_again, none = chunk_lightning_attn(**inputs, **LAYER)
    assert none is None and same_bits(o_again, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_state_in_both_layouts(oracle, dtype: torch.dtype) -> None:
    inputs = make() | LAYER
    initial = torch.randn(2, 3, 16, 8).to(dtype)
    before = initial.clone()
    right = oracle(**make(), g_gamma=log_decay(3), initial=initial, scale=0.5)
    options = {"scale": 0.5, "output_final_state": True}
    o, final = chunk_lightning_attn(**inputs, **options, initial_state=initial)
    assert_close("o", o, right.o, 2e-6)
    assert_close("final", final, right.final, 2e-6)
    v_first = initial.mT.contiguous()
    o_v, final_v = chunk_lightning_attn(
        **inputs, **options, initial_state=v_first, state_v_first=True
    )
    assert same_bits(o_v, o) and same_bits(final_v, final.mT.contiguous())
    assert same_bits(initial, before) and same_bits(v_first, before.mT.contiguous())


def test_packed_sequences(oracle) -> None:
    lengths = [0, 10, 33, 0, 1]
    inputs = make(batch=1, tokens=44)
    initial = torch.randn(5, 3, 16, 8)
    right = oracle(**inputs, g_gamma=log_decay(3), initial=initial, lengths=lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    for cpu in (None, cu_seqlens.clone()):
        o, final = chunk_lightning_attn(
            **inputs,
            **LAYER,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=cu_seqlens.int(),
            cu_seqlens_cpu=cpu,
        )
        assert_close("o", o, right.o, 2e-6)
        assert_close("final", final, right.final, 2e-6)
    assert same_bits(final[0], initial[0])


def test_gradients(oracle) -> None:
    """Those of the reference against autograd through the float64 quadratic form."""
    inputs = make(tokens=20) | {"initial": torch.randn(2, 3, 16, 8)}
    floats = {name: x.requires_grad_() for name, x in inputs.items()}
    weight, weight_final = torch.randn(2, 20, 3, 8), torch.randn(2, 3, 16, 8)
    q, k, v, initial = floats.values()
    o, final = chunk_lightning_attn(
        q, k, v, **LAYER, initial_state=initial, output_final_state=True
    )
    grads = torch.autograd.grad((o * weight).sum() + (final * weight_final).sum(), floats.values())
    twins = {name: x.detach().double().requires_grad_() for name, x in floats.items()}
    right = oracle(**twins, g_gamma=log_decay(3))
    loss = (right.o * weight).sum() + (right.final * weight_final).sum()
    true = torch.autograd.grad(loss, twins.values())
    for name, grad, expected in zip(floats, grads, true, strict=True):
        assert_close(name, grad, expected, 1e-5)


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    inputs = {name: x.requires_grad_() for name, x in make().items()} | LAYER
    with torch.no_grad():
        o, final = chunk_lightning_attn(**inputs, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad
    with torch.inference_mode():
        assert chunk_lightning_attn(**inputs)[0].grad_fn is None
    assert chunk_lightning_attn(**inputs)[0].grad_fn is not None


def test_keywords_of_every_version() -> None:
    inputs = make() | LAYER
    right, _ = chunk_lightning_attn(**inputs)
    for keywords in ({"head_first": False}, {"chunk_size": 16}):
        assert same_bits(chunk_lightning_attn(**inputs, **keywords)[0], right)
    given, _ = chunk_lightning_attn(*inputs.values(), None, None, False, None, False)
    assert same_bits(given, right)


def refused() -> dict[str, tuple[dict, type[Exception], str]]:
    state, wrong = torch.zeros(2, 3, 16, 8), torch.zeros(2, 3, 8, 16)
    cu = torch.tensor([0, 20, 45])
    one = {name: x[:1] for name, x in make().items()}
    return {
        "unknown keyword": ({"reverse": True}, TypeError, "reverse"),
        "batch with cu_seqlens": ({"cu_seqlens": cu}, ValueError, "cu_seqlens.*batch"),
        "list": ({"cu_seqlens": [0, 45]}, TypeError, "cu_seqlens: list"),
        "number of states": (one | {"initial_state": state}, ValueError, "initial_state"),
        "layout": ({"initial_state": wrong}, ValueError, "initial_state"),
        "other layout": ({"initial_state": state, "state_v_first": True}, ValueError, "initial"),
        "dtype of state": ({"initial_state": state.double()}, ValueError, "initial_state.*dtype"),
        "head_first": ({"head_first": True}, ValueError, "head_first"),
        "chunk_size": ({"chunk_size": 48}, ValueError, "chunk_size: 48"),
        "text for chunk_size": ({"chunk_size": "64"}, ValueError, "chunk_size: 64"),
        "text for a flag": ({"state_v_first": "False"}, TypeError, "state_v_first: str"),
        "layer": ({"layer_idx": 12}, ValueError, "layer_idx: 12"),
        "text for a layer": ({"layer_idx": "3"}, TypeError, "layer_idx: str"),
        "no number of layers": ({"num_layers": None}, TypeError, "num_layers: NoneType"),
        "k": ({"k": torch.zeros(2, 45, 3, 8)}, ValueError, "k: shape"),
        "v heads": ({"v": torch.zeros(2, 45, 4, 8)}, ValueError, "v: .*multiple"),
        "v dtype": ({"v": torch.zeros(2, 45, 3, 8).half()}, ValueError, "v: dtype"),
        "host's cu_seqlens alone": ({"cu_seqlens_cpu": cu}, ValueError, "cu_seqlens_cpu: given"),
        "text for output_final_state": (
            {"output_final_state": "False"},
            TypeError,
            "output_final_state: str",
        ),
        "backend": ({"backend": "cute"}, NotImplementedError, "cute.*chunk_lightning_attn"),
    }


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    change, error, match = refused()[name]
    with pytest.raises(error, match=match):
        chunk_lightning_attn(**(make() | LAYER | change))


def test_decays_are_kept_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream's launches have yet to write, another must not read."""
    current = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(op, "lightning_log_decay", lambda *sizes, device: torch.zeros(1))
    monkeypatch.setattr(op, "_log_decays", {})
    gpu = torch.device("cuda", 0)
    first = op._log_decay(4, 1, 8, gpu)
    assert op._log_decay(4, 1, 8, gpu) is first
    current.cuda_stream = 2
    assert op._log_decay(4, 1, 8, gpu) is not first
    with FakeTensorMode():  # what is made while tracing holds no values
        op._log_decay(4, 2, 8, gpu)
    assert len(op._log_decays) == 2
