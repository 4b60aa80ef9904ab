"""How the calls behave under torch.compile, autocast, inference mode and fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula.common.recurrence import lightning_log_decay
from cula.common.testing import same_bits
from cula.lightning import chunk_lightning_attn, lightning_prefill
from cula.lightning.cases import CASES, Case, make_inputs
from cula.lightning.upstream import lightning_attn_fwd

CASE = Case((20, 0, 31), varlen=True, K=32, V=16, H=2, HV=4)


class Layer(torch.nn.Module):
    """A layer that projects, attends by `attend`, and projects back."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = torch.nn.Linear(24, 3 * 2 * 16, dtype=torch.bfloat16)
        self.back = torch.nn.Linear(2 * 16, 24, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        return self.back(self.attend(q, k, v, state).flatten(-2))


def prefill(q, k, v, state):
    return lightning_prefill(q, k, v, lightning_log_decay(2, 1, 4), state=state)


def chunk(q, k, v, state):
    o, final = chunk_lightning_attn(
        q, k, v, 1, 4, initial_state=state, output_final_state=True, state_v_first=True
    )
    return o + final.mean().to(o.dtype)


def upstream_forward(q, k, v, state):
    o, final = lightning_attn_fwd(
        q, k, v, -lightning_log_decay(2, 1, 4), initial_state=state, output_final_state=True
    )
    return o + final.mean().to(o.dtype)


@pytest.mark.parametrize("attend", [prefill, chunk, upstream_forward])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(attend, dynamic: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    layer = Layer(attend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (12, 30):
        x = torch.randn(2, tokens, 24, dtype=torch.bfloat16)
        state = torch.randn(2, 2, 16, 16)
        eager_state, compiled_state = state.clone(), state.clone()
        with torch.no_grad():
            right = layer(x, eager_state)
            assert same_bits(compiled(x, compiled_state), right)
        assert same_bits(compiled_state, eager_state)
        assert same_bits(state, eager_state) == (attend is not prefill)


def test_compiles_packed_with_everything() -> None:
    torch.compiler.reset()
    case = Case((70, 0, 64), varlen=True, K=32, V=16, checkpoint_interval=64)
    inputs, twin = make_inputs(case), make_inputs(case)
    compiled = torch.compile(
        lambda inputs: lightning_prefill(**inputs), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(compiled(inputs), lightning_prefill(**twin))
    assert same_bits(inputs["state"], twin["state"])
    assert same_bits(inputs["checkpoints"], twin["checkpoints"])


def test_serving_call_records_no_gradient() -> None:
    inputs = make_inputs(CASE)
    for name in ("q", "k", "v"):
        inputs[name].requires_grad_()
    o = lightning_prefill(**inputs)
    assert not o.requires_grad and o.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    case = Case((40,), K=32, V=16, dtype=dtype)
    inputs, twin = make_inputs(case), make_inputs(case)
    right = lightning_prefill(**twin)
    qkv = [inputs[n] for n in ("q", "k", "v")]
    right_chunk = chunk_lightning_attn(*qkv, 1, 4, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = lightning_prefill(**inputs)
        o_chunk = chunk_lightning_attn(*qkv, 1, 4, output_final_state=True)
        qkv[0].requires_grad_()
        o_grad, _ = chunk_lightning_attn(*qkv, 1, 4)
    assert same_bits(o, right) and same_bits(inputs["state"], twin["state"])
    for given, expected in zip(o_chunk, right_chunk, strict=True):
        assert same_bits(given, expected)
    assert same_bits(o_grad.detach(), right_chunk[0])


def test_inference_mode() -> None:
    inputs, twin = make_inputs(CASE), make_inputs(CASE)
    with torch.inference_mode():
        o = lightning_prefill(**inputs)
    assert same_bits(o, lightning_prefill(**twin)) and same_bits(inputs["state"], twin["state"])


def test_fake_tensors() -> None:
    inputs = make_inputs(CASES["varlen"])
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()
        }
        o = lightning_prefill(**fakes)
        names = ("q", "k", "v", "cu_seqlens")
        o_chunk, final = chunk_lightning_attn(
            **{n: fakes[n] for n in names}, layer_idx=0, num_layers=2, output_final_state=True
        )
    assert o.shape == o_chunk.shape == inputs["v"].shape and o.dtype == torch.bfloat16
    assert final.shape == (4, 2, 128, 128) and final.dtype == torch.float32


def test_operators_are_what_they_claim() -> None:
    """PyTorch's own check of schemas, fakes and what is written."""
    torch.manual_seed(0)
    x = torch.randn(1, 9, 1, 8)
    state, out = torch.randn(1, 1, 8, 8), torch.empty_like(x)
    args = (x, x, x, torch.tensor([-0.1]), state, None, None, None, None, None, None, None, out)
    torch.library.opcheck(torch.ops.cula.lightning_prefill, (*args, "reference", False))
