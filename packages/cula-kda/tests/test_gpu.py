"""On a GPU: the calls through the reference and through FLA, where it is installed."""

import warnings

import pytest
import torch

from cula.common.fla import fla_missing
from cula.common.testing import assert_close, rel_error, same_bits
from cula.kda import chunk_kda, kda_prefill
from cula.kda.cases import CASES, Case, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_fla = pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))
NAMES = ("q", "k", "v", "g", "beta")


def on(device: str, case: Case, **changes) -> tuple[torch.Tensor, dict]:
    inputs = make_inputs(case, device)
    return kda_prefill(**inputs, **changes), inputs


@pytest.mark.parametrize("name", ["tail", "varlen, empty ones", "softplus", "checkpoints"])
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
    # Correlated keys amplify FLA's roundings; with steps up to 2, to 0.11 on o.
    tol = {"repeated keys": 0.06, "repeated keys, beta 2": 0.2}.get(name, 0.02)
    assert_close("o", o / unit, right / unit, tol)
    if "state" in inputs:
        assert_close("state", inputs["state"] / unit, twin["state"] / unit, tol)
        untouched = set(range(len(case.lengths) + 1)) - set(inputs["state_indices"].tolist())
        for slot in untouched:
            assert same_bits(inputs["state"][slot], make_inputs(case, "cuda")["state"][slot])
    if "checkpoints" in inputs:
        assert_close("checkpoints", inputs["checkpoints"], twin["checkpoints"], 0.02)


@needs_fla
def test_auto_takes_fla_and_says_so_once() -> None:
    case = CASES["one chunk"]
    inputs = {n: x for n, x in make_inputs(case, "cuda").items() if n in NAMES}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        auto = [chunk_kda(**inputs)[0] for _ in range(2)]
    assert len([w for w in said if "chunk_kda: FLA runs this" in str(w.message)]) <= 1
    assert same_bits(auto[0], chunk_kda(**inputs, backend="fla")[0])


@needs_fla
def test_slots_that_are_none_through_fla() -> None:
    case = Case((20, 40, 10, 30), varlen=True)
    inputs = make_inputs(case, "cuda")
    inputs["state_indices"] = torch.tensor([-1, 3, 0, 99], device="cuda")
    before = inputs["state"].clone()
    kda_prefill(**inputs, backend="fla")
    for slot in (1, 2, 4):
        assert same_bits(inputs["state"][slot], before[slot])
    assert not same_bits(inputs["state"][3], before[3])
    inputs["state_indices"] = torch.tensor([-1, -1, -5, 99], device="cuda")
    before = inputs["state"].clone()
    kda_prefill(**inputs, backend="fla")
    assert same_bits(inputs["state"], before)


@needs_fla
@pytest.mark.parametrize("form", ["given", "in kernel"])
def test_gradients_through_fla(form: str) -> None:
    case = CASES["softplus" if form == "in kernel" else "given gates"]
    given = make_inputs(case, "cuda")
    flags = {n: given[n] for n in ("use_gate_in_kernel", "use_qk_l2norm_in_kernel")}
    grads = {}
    for backend in ("fla", "reference"):
        inputs = {n: given[n].clone().requires_grad_() for n in NAMES}
        if form == "in kernel":
            inputs |= {n: given[n].clone().requires_grad_() for n in ("A_log", "dt_bias")}
        o, final = chunk_kda(**inputs, **flags, output_final_state=True, backend=backend)
        (o.float().square().sum() + final.square().sum()).backward()
        grads[backend] = {n: x.grad for n, x in inputs.items()}
    for name, grad in grads["fla"].items():
        assert grad.dtype == given[name].dtype
        # A_log's is a sum over all tokens and channels that nearly cancels.
        assert_close(name, grad, grads["reference"][name], 0.1 if name == "A_log" else 0.03)


@needs_fla
def test_fla_states_along_the_way() -> None:
    case = CASES["varlen"]
    given = make_inputs(case, "cuda")
    inputs = {n: given[n] for n in (*NAMES, "cu_seqlens", "A_log", "dt_bias", "lower_bound")}
    results = {}
    with torch.inference_mode():
        for backend in ("fla", "cute", "reference"):
            results[backend] = chunk_kda(
                **inputs,
                use_gate_in_kernel=True,
                use_qk_l2norm_in_kernel=True,
                safe_gate=True,
                output_final_state=True,
                return_intermediate_states=True,
                state_v_first=True,
                backend=backend,
            )
    for fla, ours, right in zip(*results.values(), strict=True):
        assert ours.shape == fla.shape == right.shape and ours.dtype == fla.dtype == right.dtype
        assert_close("FLA", fla, right, 0.02)
        assert_close("ours", ours, right, 5e-3)


@needs_fla
def test_compiles_on_a_gpu() -> None:
    torch.compiler.reset()
    case = CASES["batch"]
    inputs, twin = make_inputs(case, "cuda"), make_inputs(case, "cuda")
    compiled = torch.compile(lambda i: kda_prefill(**i), fullgraph=True, backend="aot_eager")
    assert rel_error(compiled(inputs), kda_prefill(**twin)) == 0.0
    assert same_bits(inputs["state"], twin["state"])


def test_values_on_the_gpu_are_clamped_and_validated() -> None:
    case = Case((30, 34), varlen=True, H=1, HV=1, K=16, V=16)
    inputs = make_inputs(case, "cuda")
    inputs["cu_seqlens"] = torch.tensor([-3, 40, 900], device="cuda")
    with pytest.raises(ValueError, match="cu_seqlens: first entry -3"):
        kda_prefill(**inputs, validate=True)
    twin = make_inputs(case, "cuda") | {"cu_seqlens": torch.tensor([0, 40, 64], device="cuda")}
    o = kda_prefill(**inputs, backend="reference")
    assert same_bits(o, kda_prefill(**twin, backend="reference"))
