"""Our kernel on a Hopper GPU, against the reference on the same inputs."""

import pytest
import torch

from cula.common.testing import assert_close, poisoned, same_bits
from cula.lightning import chunk_lightning_attn, launch, lightning_prefill
from cula.lightning.cases import CASES, Case, make_inputs
from cula.lightning.kernel_plan import KERNEL_DIMS

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper, reason="needs a Hopper GPU"),
]

O_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
STATE_TOLERANCE = 2.5e-3
SUPPORTED = [name for name, case in CASES.items() if (case.K, case.V) in KERNEL_DIMS]


def check(inputs: dict, unit: float = 1.0) -> torch.Tensor:
    """Run `inputs` by both backends and compare what they write."""
    twin = {n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    right = lightning_prefill(**twin, backend="reference")
    out = torch.full_like(inputs["v"], torch.nan)
    lightning_prefill(**inputs, out=out, backend="cute")
    assert_close("o", out / unit, right / unit, O_TOLERANCE[out.dtype])
    for name in ("state", "checkpoints"):
        if name in inputs:
            tolerance = STATE_TOLERANCE if inputs[name].dtype == torch.float32 else 4e-3
            assert_close(name, inputs[name] / unit, twin[name] / unit, tolerance)
    return out


@pytest.mark.parametrize("name", SUPPORTED)
def test_case(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, "cuda")
    before = inputs["state"].clone() if case.state else None
    check(inputs, case.magnitude)
    if case.state:
        for slot in set(range(len(before))) - set(inputs["state_indices"].tolist()):
            assert same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("heads", [1, 70])
@pytest.mark.parametrize("varlen", [False, True])
def test_every_length(heads: int, varlen: bool) -> None:
    """Every number of tokens in the last chunk, with few heads and with many."""
    for tokens in range(1, 131):
        case = Case((tokens,), H=heads, HV=heads, varlen=varlen)
        check(make_inputs(case, "cuda", seed=tokens))


def test_same_bits_every_time() -> None:
    case = Case((65, 66, 71, 79), H=32, HV=32, varlen=True)
    first = None
    for _ in range(50):
        inputs = make_inputs(case, "cuda")
        found = lightning_prefill(**inputs, backend="cute"), inputs["state"]
        first = first or found
        assert all(same_bits(x, y) for x, y in zip(found, first, strict=True))


def test_a_sequence_does_not_depend_on_the_others() -> None:
    case = Case((65, 130, 71, 300), H=40, HV=40, varlen=True)
    inputs = make_inputs(case, "cuda")
    o = lightning_prefill(**inputs, backend="cute")
    twin = make_inputs(case, "cuda")
    part = slice(195, 266)
    alone = {name: twin[name][:, part] for name in ("q", "k", "v")}
    alone["g_gamma"] = twin["g_gamma"]
    slot = int(twin["state_indices"][2])
    alone["state"] = twin["state"][slot : slot + 1]
    assert same_bits(lightning_prefill(**alone, backend="cute"), o[:, part])
    assert same_bits(alone["state"][0], inputs["state"][slot])


def test_what_lies_past_a_sequence_never_shows() -> None:
    inputs = make_inputs(Case((70, 40, 65), H=40, HV=40, varlen=True), "cuda")
    alone = lightning_prefill(**{n: x.clone() for n, x in inputs.items()}, backend="reference")
    buffers = []
    for name in ("q", "k", "v"):
        inputs[name][:, 70:110] = torch.nan
        buffers.append(poisoned(inputs[name].shape, torch.bfloat16, "cuda"))
        buffers[-1].tensor.copy_(inputs[name])
        inputs[name] = buffers[-1].tensor
    out = poisoned(inputs["v"].shape, torch.bfloat16, "cuda")
    lightning_prefill(**inputs, out=out.tensor, backend="cute")
    for part in (slice(0, 70), slice(110, 175)):
        assert_close("o", out.tensor[:, part], alone[:, part], 4e-3)
    assert all(b.untouched() for b in (*buffers, out))


def test_nothing_before_a_token_depends_on_it() -> None:
    for tokens, changed in ((22, 21), (130, 63), (130, 64), (130, 65)):
        inputs = make_inputs(Case((tokens,), state=None), "cuda")
        before = lightning_prefill(**inputs, backend="cute")
        for name in ("k", "v"):
            inputs[name][:, changed] += 1
        after = lightning_prefill(**inputs, backend="cute")
        assert same_bits(before[:, :changed], after[:, :changed])
        assert not same_bits(before[:, changed:], after[:, changed:])


def test_many_units() -> None:
    """Sequences x heads beyond 65,535, most sequences empty or short."""
    lengths = tuple(i % 5 for i in range(2050))
    inputs = make_inputs(Case(lengths, H=32, HV=32, state=None, varlen=True), "cuda")
    o = lightning_prefill(**inputs, backend="cute")
    right = lightning_prefill(**inputs, backend="reference")
    assert_close("o", o, right, 4e-3)


def test_offsets_beyond_int32() -> None:
    """Batch rows and pool slots whose elements lie past 2^31."""
    T, H = 100, 2
    wide = torch.empty(2, 2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    inputs = make_inputs(Case((T, T), H=H, HV=H), "cuda")
    for name in ("q", "k", "v"):
        view = wide[:, : T * H * 128].view(2, T, H, 128)
        view.copy_(inputs[name])
        inputs[name] = view.clone() if name != "q" else view
    pool = torch.empty(3, 2**30 + 64, device="cuda")[:, : H * 128 * 128].view(3, H, 128, 128)
    pool.copy_(inputs["state"])
    inputs["state"] = pool
    inputs["state_indices"] = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    check(inputs)


def test_captured_and_replayed_with_other_values() -> None:
    first, second = (65, 66, 71, 79), (200, 0, 1, 80)
    inputs = make_inputs(Case(first, H=8, HV=8, varlen=True), "cuda")
    out = torch.empty_like(inputs["v"])
    state = inputs["state"].clone()
    lightning_prefill(**inputs, out=out, backend="cute")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lightning_prefill(**inputs, out=out, backend="cute")
    bounds = torch.tensor((0, *second), device="cuda").cumsum(0)
    inputs["cu_seqlens"].copy_(bounds)
    inputs["state_indices"].copy_(inputs["state_indices"].flip(0))
    inputs["state"].copy_(state)
    twin = {n: x.clone() for n, x in inputs.items()}
    right = lightning_prefill(**twin, backend="reference")
    graph.replay()
    assert_close("o", out, right, 4e-3)
    assert_close("state", inputs["state"], twin["state"], STATE_TOLERANCE)


def test_two_streams() -> None:
    case = Case((500, 300), H=16, HV=16, varlen=True)
    given = [make_inputs(case, "cuda", seed) for seed in range(2)]
    right = [
        lightning_prefill(**{n: x.clone() for n, x in inputs.items()}, backend="reference")
        for inputs in given
    ]
    torch.cuda.synchronize()
    outputs = []
    for inputs in given:
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs.append(lightning_prefill(**inputs, backend="cute"))
    torch.cuda.synchronize()
    for o, want in zip(outputs, right, strict=True):
        assert_close("o", o, want, 4e-3)


def test_the_public_calls_take_the_kernel() -> None:
    inputs = make_inputs(CASES["tail"], "cuda")
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    launch._launches.clear()
    o, final = chunk_lightning_attn(q, k, v, 3, 8, output_final_state=True)
    assert len(launch._launches) == 1
    want, state = chunk_lightning_attn(q, k, v, 3, 8, output_final_state=True, backend="reference")
    assert_close("o", o, want, 4e-3)
    assert_close("final state", final, state, STATE_TOLERANCE)
    with torch.inference_mode():
        assert same_bits(chunk_lightning_attn(q, k, v, 3, 8)[0], o)
