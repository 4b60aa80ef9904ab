"""Our kernels on a Hopper GPU, against the reference on the same inputs."""

import pytest
import torch

from cula.common.fla import fla_missing
from cula.common.testing import assert_close, poisoned, rel_error, same_bits
from cula.kda import chunk_kda, kda_prefill
from cula.kda.cases import CASES, Case, make_inputs
from cula.kda.kernel_plan import IO_DTYPES, KERNEL_DIMS

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper, reason="needs a Hopper GPU"),
]
needs_fla = pytest.mark.skipif(fla_missing() is not None, reason=str(fla_missing()))

TOLERANCE = 5e-3
NAMES = ("q", "k", "v", "g", "beta")
# Steps of 2 along one direction amplify every rounding (test_roundings.py has the bare algorithm).
AMPLIFYING = {"repeated keys, beta 2": 4e-2, "beta to 2": 1e-2, "repeated keys": 1e-2}
SUPPORTED = [
    name
    for name, case in CASES.items()
    if case.K in KERNEL_DIMS and case.V in KERNEL_DIMS and case.dtype in IO_DTYPES
]


def check(inputs: dict, tolerance: float = TOLERANCE, unit: float = 1.0) -> torch.Tensor:
    """Run `inputs` by both backends and compare what they write."""
    twin = {n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    right = kda_prefill(**twin, backend="reference")
    out = torch.full_like(inputs["v"], torch.nan)
    kda_prefill(**inputs, out=out, backend="cute")
    assert_close("o", out.double() / unit, right.double() / unit, tolerance)
    for name in ("state", "checkpoints"):
        if name in inputs:
            x, want = inputs[name].double() / unit, twin[name].double() / unit
            assert_close(name, x, want, tolerance)
    return out


@pytest.mark.parametrize("name", SUPPORTED)
def test_case(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, "cuda")
    before = inputs["state"].clone() if case.state else None
    check(inputs, AMPLIFYING.get(name, TOLERANCE), case.magnitude)
    if case.state:
        for slot in set(range(len(before))) - set(inputs["state_indices"].tolist()):
            assert same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("heads", [1, 70])
@pytest.mark.parametrize("varlen", [False, True])
def test_every_length(heads: int, varlen: bool) -> None:
    for tokens in range(1, 131):
        case = Case((tokens,), H=heads, HV=heads, varlen=varlen)
        check(make_inputs(case, "cuda", seed=tokens))


@pytest.mark.parametrize("gate_mean", [-12.0, -8.0, 0.0, 8.0, 30.0])
@pytest.mark.parametrize("gate", ["given", "softplus", "bounded", "sigmoid"])
def test_gates_slow_to_saturated(gate, gate_mean: float) -> None:
    check(make_inputs(Case((700,), H=3, HV=3, gate=gate, gate_mean=gate_mean), "cuda"))


@pytest.mark.parametrize("exponents", [(-17, 14), (14, -17), (-17, -17), (15, 15)])
def test_values_of_any_size(exponents) -> None:
    inputs = make_inputs(Case((128,), state=None, gate_mean=-9.0), "cuda")
    for i, exponent in enumerate(exponents):
        inputs["v"][:, 64 * i : 64 * (i + 1)] *= 2.0**exponent
    check(inputs, unit=2.0 ** max(exponents))


@pytest.mark.parametrize(
    "case",
    [
        Case((4096,), H=4, HV=4, gate_mean=-8.0),
        Case((8192,), H=8, HV=8),
        Case((5000, 0, 300, 2500, 65), H=4, HV=4, varlen=True, gate_mean=-7.0),
        Case((3000,), H=2, HV=2, gate="given", gate_dtype=torch.float32, gate_mean=-1e9),
        Case((3000,), H=2, HV=4, gate="given", gate_dtype=torch.float32, mask=700),
        Case((3000,), H=2, HV=2, beta="sigmoid2", gate_mean=-6.0),
    ],
    ids=lambda case: str(case.lengths),
)
@pytest.mark.parametrize("segment_tokens", [None, 0, 256])
def test_few_heads(case: Case, segment_tokens: int | None) -> None:
    """Sequences cut by the plan's choice, not at all, and finely."""
    check(make_inputs(case, "cuda") | {"segment_tokens": segment_tokens})


def test_segments_give_the_same_bits_every_time() -> None:
    case = Case((900, 70, 0, 2000), H=8, HV=8, varlen=True, segment_tokens=128, gate_mean=-7.0)
    first = None
    for _ in range(50):
        inputs = make_inputs(case, "cuda")
        again = (kda_prefill(**inputs, backend="cute"), inputs["state"])
        first = first or again
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_same_bits_every_time() -> None:
    case = Case((65, 66, 71, 79, 1000, 3), H=32, HV=32, varlen=True)
    first = None
    for _ in range(50):
        inputs = make_inputs(case, "cuda")
        out = kda_prefill(**inputs, backend="cute")
        again = (out, inputs["state"])
        first = first or again
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    both = make_inputs(Case((300, 500), H=4, HV=4, varlen=True, state=None), "cuda")
    whole = kda_prefill(**both, backend="cute")
    for part in (slice(0, 300), slice(300, 800)):
        one = {n: both[n][:, part] for n in ("q", "k", "v", "g", "beta")}
        alone = {n: x for n, x in both.items() if n != "cu_seqlens"} | one
        assert same_bits(kda_prefill(**alone, backend="cute"), whole[:, part])


def test_more_units_than_a_grid_dimension_holds() -> None:
    lengths = (1,) * 2050
    inputs = make_inputs(Case(lengths, H=32, HV=32, K=64, V=64, varlen=True, state=None), "cuda")
    check(inputs)


def test_offsets_past_two_to_the_31() -> None:
    """A window at the end of a buffer of more than 2^31 elements, by the batch's stride."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of free GPU memory")
    case = Case((100, 100), H=1, HV=1, state=None)
    inputs = make_inputs(case, "cuda")
    for name in ("q", "k", "v", "g"):
        far = torch.empty(2**31 + 2**16, dtype=torch.bfloat16, device="cuda")
        window = far.as_strided((2, 100, 1, 128), (2**31, 128, 128, 1))
        window.copy_(inputs[name])
        inputs[name] = window
    check(inputs)


@pytest.mark.parametrize("varlen", [False, True])
def test_surroundings_are_neither_read_nor_written(varlen: bool) -> None:
    inputs = make_inputs(Case((65, 40) if varlen else (65,), varlen=varlen), "cuda")
    windows = {}
    for name in ("q", "k", "v", "g", "state"):
        windows[name] = poisoned(tuple(inputs[name].shape), inputs[name].dtype, "cuda")
        windows[name].tensor.copy_(inputs[name])
        inputs[name] = windows[name].tensor
    check(inputs)
    assert all(window.untouched() for window in windows.values())


@pytest.mark.parametrize("segment", [False, True])
def test_states_at_the_start_of_chunks(segment: bool) -> None:
    """Also where few heads have their sequences cut."""
    heads = 1 if segment else 64
    given = make_inputs(Case((8192, 8129), H=heads, HV=heads, varlen=True), "cuda")
    inputs = {n: given[n] for n in (*NAMES, "cu_seqlens", "A_log", "dt_bias", "lower_bound")}
    results = {}
    with torch.inference_mode():
        for backend in ("cute", "reference"):
            results[backend] = chunk_kda(
                **inputs,
                use_gate_in_kernel=True,
                use_qk_l2norm_in_kernel=True,
                output_final_state=True,
                return_intermediate_states=True,
                backend=backend,
            )
    for name, ours, right in zip(("o", "final", "h"), *results.values(), strict=True):
        assert_close(name, ours, right, TOLERANCE)


@pytest.mark.parametrize("segment_tokens", [0, 64])
def test_graph_replays_with_other_bounds_and_slots(segment_tokens: int) -> None:
    case = Case((300, 28), H=2, HV=2, varlen=True, segment_tokens=segment_tokens)
    inputs = make_inputs(case, "cuda")
    out = torch.empty_like(inputs["v"])
    start = inputs["state"].clone()
    kda_prefill(**inputs, out=out, backend="cute")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda_prefill(**inputs, out=out, backend="cute")
    inputs["cu_seqlens"].copy_(torch.tensor([0, 103, 328]))
    inputs["state_indices"].copy_(inputs["state_indices"].flip(0))
    inputs["state"].copy_(start)
    twin = {n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    right = kda_prefill(**twin, backend="reference")
    graph.replay()
    assert_close("o", out, right, TOLERANCE)
    assert_close("state", inputs["state"], twin["state"], TOLERANCE)


def test_calls_back_to_back() -> None:
    """A kernel starts before the one ahead of it has ended, of this call or the last, and waits."""
    cases = [
        Case((640, 640), H=8, HV=8),
        Case((300, 28, 1), H=8, HV=8, varlen=True),
        Case((640, 500), H=8, HV=8, varlen=True, segment_tokens=128),
        Case((64,), H=8, HV=8),
    ]
    calls = [make_inputs(case, "cuda") for case in cases]

    def run(pause) -> list:
        """Every call reads what the one before it wrote: the state, and o as its v."""
        results = []
        for given in calls:
            inputs = given | {"state": given["state"].clone()}
            v, buffers = inputs.pop("v"), [torch.empty_like(given["v"]) for _ in range(2)]
            pause()
            for i in range(6):
                kda_prefill(v=v, **inputs, out=buffers[i % 2], backend="cute")
                v = buffers[i % 2]
                pause()
            results += [v, inputs["state"]]
        return results

    right = run(torch.cuda.synchronize)
    for _ in range(10):
        assert all(map(same_bits, run(lambda: None), right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
def test_checkpoints_with_gaps_between_them(v_first: bool, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case((200, 130, 64), H=3, HV=3, varlen=True), "cuda")
    plain = torch.empty(6, 3, 128, 128, dtype=dtype, device="cuda")
    kda_prefill(**inputs, checkpoints=plain, checkpoint_interval=64, backend="cute")
    room = torch.full((9, 5, 128, 128), 7.0, dtype=dtype, device="cuda")
    marks = room[1:7, 1:4]
    marks = marks if v_first else marks.mT
    again = make_inputs(Case((200, 130, 64), H=3, HV=3, varlen=True), "cuda")
    kda_prefill(**again, checkpoints=marks, checkpoint_interval=64, backend="cute")
    for row in range(6):
        assert same_bits(marks[row], plain[row])
    assert room[0].eq(7).all() and room[7:].eq(7).all()
    assert room[:, 0].eq(7).all() and room[:, 4].eq(7).all()


def test_compiled_layer_is_one_graph() -> None:
    inputs = make_inputs(Case((100,), state=None), "cuda")
    names = ("q", "k", "v", "g", "beta")

    def layer(q, k, v, g, beta):
        o, _ = chunk_kda(q, k, v, g, beta, backend="cute", use_qk_l2norm_in_kernel=True)
        return o * 2

    given = [inputs[name] for name in names]
    given[3] = -given[3].abs()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        assert same_bits(compiled(*given), layer(*given))


@needs_fla
@pytest.mark.parametrize("name", ["one chunk", "tail", "softplus", "masked", "no decay"])
def test_no_further_from_the_truth_than_fla(name: str) -> None:
    """At most 1.25 times FLA's own error, on the output and on the state."""
    case = CASES[name]
    errors = {}
    for backend in ("reference", "cute", "fla"):
        inputs = make_inputs(case, "cuda")
        o = kda_prefill(**inputs, backend=backend)
        if backend == "reference":
            right, state = o, inputs["state"]
        else:
            errors[backend] = (rel_error(o, right), rel_error(inputs["state"], state))
    for ours, theirs in zip(errors["cute"], errors["fla"], strict=True):
        assert ours <= 1.25 * theirs + 1e-5
