"""How the calls behave under torch.compile, autocast, inference mode and fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula.common.testing import assert_close, same_bits
from cula.kda import chunk_kda, kda_prefill
from cula.kda.cases import CASES, Case, make_inputs

CASE = Case((20, 0, 31), varlen=True, K=32, V=16, H=2, HV=4)


class Layer(torch.nn.Module):
    """A layer that projects, attends by `attend`, and projects back."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = torch.nn.Linear(24, 3 * 2 * 16, dtype=torch.bfloat16)
        self.gate = torch.nn.Linear(24, 2 * 16, dtype=torch.bfloat16)
        self.back = torch.nn.Linear(2 * 16, 24, dtype=torch.bfloat16)
        self.A_log = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, **states) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        g = self.gate(x).unflatten(-1, (2, 16))
        beta = x[..., :2].float().sigmoid()
        return self.back(self.attend(q, k, v, g, beta, self.A_log, **states).flatten(-2))


def prefill(q, k, v, g, beta, A_log, state):
    return kda_prefill(q, k, v, g, beta, A_log=A_log, state=state)


def chunk(q, k, v, g, beta, A_log, state):
    o, final = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        use_gate_in_kernel=True,
        initial_state=state,
        output_final_state=True,
    )
    return o + final.mean().to(o.dtype)


@pytest.mark.parametrize("attend", [prefill, chunk])
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
            right = layer(x, state=eager_state)
            assert same_bits(compiled(x, state=compiled_state), right)
        assert same_bits(compiled_state, eager_state)
        assert same_bits(state, eager_state) == (attend is chunk)


def test_compiles_packed_with_everything() -> None:
    torch.compiler.reset()
    case = Case((70, 0, 64), varlen=True, K=32, V=16, checkpoint_interval=64)
    inputs = make_inputs(case)
    twin = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    compiled = torch.compile(
        lambda inputs: kda_prefill(**inputs), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(compiled(inputs), kda_prefill(**twin))
    assert same_bits(inputs["state"], twin["state"])
    assert same_bits(inputs["checkpoints"], twin["checkpoints"])


def test_compiled_intermediate_states() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 70, 1, 16)
    args = (x, x, x, -x.abs(), x[..., 0].sigmoid())

    def call(*args):
        return chunk_kda(*args, output_final_state=True, return_intermediate_states=True)

    with torch.inference_mode():
        for given, right in zip(
            torch.compile(call, fullgraph=True, backend="aot_eager")(*args),
            call(*args),
            strict=True,
        ):
            assert same_bits(given, right)


def test_serving_call_records_no_gradient() -> None:
    inputs = make_inputs(CASE)
    for name in ("q", "k", "v", "g", "beta", "A_log"):
        inputs[name].requires_grad_()
    o = kda_prefill(**inputs)
    assert not o.requires_grad and o.grad_fn is None
    compiled = torch.compile(
        lambda inputs: kda_prefill(**inputs), fullgraph=True, backend="aot_eager"
    )
    o = compiled(make_inputs(CASE) | {"A_log": inputs["A_log"]})
    assert not o.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    case = Case((40,), K=32, V=16, dtype=dtype, gate_dtype=torch.float32)
    inputs, twin = make_inputs(case), make_inputs(case)
    right = kda_prefill(**twin)
    chunked = {n: x for n, x in inputs.items() if n in ("q", "k", "v", "g", "beta")}
    right_chunk = chunk_kda(**chunked, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = kda_prefill(**inputs)
        o_chunk = chunk_kda(**chunked, output_final_state=True)
        chunked["q"].requires_grad_()
        o_grad, _ = chunk_kda(**chunked)
    assert same_bits(o, right) and same_bits(inputs["state"], twin["state"])
    for given, expected in zip(o_chunk, right_chunk, strict=True):
        assert same_bits(given, expected)
    assert same_bits(o_grad.detach(), right_chunk[0])


def test_inference_mode() -> None:
    inputs, twin = make_inputs(CASE), make_inputs(CASE)
    with torch.inference_mode():
        o = kda_prefill(**inputs)
    assert same_bits(o, kda_prefill(**twin)) and same_bits(inputs["state"], twin["state"])


def test_fake_tensors() -> None:
    inputs = make_inputs(CASES["varlen"])
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()
        }
        o = kda_prefill(**fakes)
        names = ("q", "k", "v", "g", "beta", "cu_seqlens")
        o_chunk, final = chunk_kda(**{n: fakes[n] for n in names}, output_final_state=True)
    assert o.shape == o_chunk.shape == inputs["v"].shape and o.dtype == torch.bfloat16
    assert final.shape == (4, 2, 128, 128) and final.dtype == torch.float32


def test_operators_are_what_they_claim() -> None:
    """PyTorch's own check of schemas, fakes and what is written."""
    torch.manual_seed(0)
    x = torch.randn(1, 9, 1, 8)
    state, out = torch.randn(1, 1, 8, 8), torch.empty_like(x)
    args = (x, x, x, -x.abs(), x[..., 0].sigmoid(), state, None, None, None, None, None, None)
    tail = (None, False, True, False, False, None, None, None, out, "reference", False)
    torch.library.opcheck(torch.ops.cula.kda_prefill, args + tail)


def test_seeded_calls_repeat() -> None:
    inputs = make_inputs(CASE)
    state = inputs["state"].clone()
    first = kda_prefill(**inputs)
    for _ in range(5):
        again = inputs | {"state": state.clone()}
        assert same_bits(kda_prefill(**again), first)
        assert_close("state", again["state"], inputs["state"], 0.0)
