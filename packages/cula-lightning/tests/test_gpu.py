"""On a GPU: the calls through the reference and through FLA, where it is installed."""

import pytest
import torch

from cula.common.fla import fla_missing
from cula.common.testing import assert_close, rel_error, same_bits
from cula.lightning import chunk_lightning_attn, lightning_prefill
from cula.lightning.cases import CASES, Case, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_fla = pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))


def on(device: str, case: Case, **changes) -> tuple[torch.Tensor, dict]:
    inputs = make_inputs(case, device)
    return lightning_prefill(**inputs, **changes), inputs


@pytest.mark.parametrize("name", ["tail", "varlen, empty ones", "grouped heads", "checkpoints"])
def test_reference_is_that_of_the_cpu(name: str) -> None:
    case = CASES[name]
    o, inputs = on("cuda", case, backend="reference")
    right, twin = on("cpu", case)
    assert_close("o", o, right, 2e-3)
    for written in ("state", "checkpoints"):
        if written in inputs:
            assert_close(written, inputs[written], twin[written], 1e-5)


@needs_fla
@pytest.mark.parametrize("name", CASES)
def test_fla_is_near_the_reference(name: str) -> None:
    """FLA's own roundings are its own: within what it promises, and nothing in the wrong place."""
    case = CASES[name]
    o, inputs = on("cuda", case, backend="fla")
    right, twin = on("cuda", case, backend="reference")
    unit = case.magnitude
    assert_close("o", o / unit, right / unit, 0.01)
    if "state" in inputs:
        assert_close("state", inputs["state"] / unit, twin["state"] / unit, 0.01)
        untouched = set(range(len(case.lengths) + 1)) - set(inputs["state_indices"].tolist())
        for slot in untouched:
            assert same_bits(inputs["state"][slot], make_inputs(case, "cuda")["state"][slot])
    if "checkpoints" in inputs:
        assert_close("checkpoints", inputs["checkpoints"], twin["checkpoints"], 0.01)


@needs_fla
def test_slots_that_are_none_through_fla() -> None:
    case = Case((20, 40, 10, 30), varlen=True)
    inputs = make_inputs(case, "cuda")
    inputs["state_indices"] = torch.tensor([-1, 3, 0, 99], device="cuda")
    before = inputs["state"].clone()
    lightning_prefill(**inputs, backend="fla")
    for slot in (1, 2, 4):
        assert same_bits(inputs["state"][slot], before[slot])
    assert not same_bits(inputs["state"][3], before[3])


@needs_fla
def test_gradients_through_fla() -> None:
    given = make_inputs(CASES["tail"], "cuda")
    grads = {}
    for backend in ("fla", "reference"):
        q, k, v = (given[n].clone().requires_grad_() for n in ("q", "k", "v"))
        o, final = chunk_lightning_attn(q, k, v, 1, 4, output_final_state=True, backend=backend)
        (o.float().square().sum() + final.square().sum()).backward()
        grads[backend] = (q.grad, k.grad, v.grad)
    for given_grad, right in zip(*grads.values(), strict=True):
        assert_close("gradient", given_grad, right, 0.02)


@needs_fla
def test_compiles_on_a_gpu() -> None:
    torch.compiler.reset()
    case = CASES["batch"]
    inputs, twin = make_inputs(case, "cuda"), make_inputs(case, "cuda")
    compiled = torch.compile(lambda i: lightning_prefill(**i), fullgraph=True, backend="aot_eager")
    assert rel_error(compiled(inputs), lightning_prefill(**twin)) == 0.0
    assert same_bits(inputs["state"], twin["state"])


def test_values_on_the_gpu_are_clamped_and_validated() -> None:
    case = Case((30, 34), varlen=True, H=1, HV=1, K=16, V=16)
    inputs = make_inputs(case, "cuda")
    bad = inputs | {"cu_seqlens": torch.tensor([-3, 40, 900], device="cuda")}
    with pytest.raises(ValueError, match="cu_seqlens: first entry -3"):
        lightning_prefill(**bad, validate=True)
    with pytest.raises(ValueError, match="g_gamma: largest value"):
        lightning_prefill(**(inputs | {"g_gamma": torch.ones(1, device="cuda")}), validate=True)
    twin = make_inputs(case, "cuda") | {"cu_seqlens": torch.tensor([0, 40, 64], device="cuda")}
    o = lightning_prefill(**bad, backend="reference")
    assert same_bits(o, lightning_prefill(**twin, backend="reference"))
