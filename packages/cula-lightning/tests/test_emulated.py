"""The compiled kernel, run on the CPU by a PTX emulator through the public calls.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There test_kernel_gpu.py runs the same kernel.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernel", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.testing import assert_close, poisoned, same_bits  # noqa: E402
from cula.common.varlen import FixedPlan, VarlenPlan, build_schedule  # noqa: E402
from cula.lightning import chunk_lightning_attn, launch, lightning_prefill, plan  # noqa: E402
from cula.lightning.cases import CASES, Case, kernel_plan_of, make_inputs  # noqa: E402
from cula.lightning.kernel_plan import KERNEL_DIMS  # noqa: E402
from cula.lightning.sm90.config import PrefixConfig  # noqa: E402

ARCH = "sm_90a"
SMALL_GPU = 3  # multiprocessors: blocks take several units each
O_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
STATE_TOLERANCE = 2.5e-3
kernels = {}


def compiled(config, arch=ARCH):
    """Each configuration compiled once for all tests."""
    if config not in kernels:
        kernels[config] = compile_kernel(config, arch)
    return kernels[config]


@pytest.fixture
def emulated(monkeypatch):
    """A context in which public calls on CPU tensors run the kernel.

    Without `device` every launch gets an emulated device of its own, and must be free of hazards.
    """
    ptxemu.install()

    @contextmanager
    def context(sms: int = SMALL_GPU, device=None):
        seen = SimpleNamespace(configs=[], launches=[])

        def get(config, arch):
            seen.configs.append(config)
            function = compiled(config, arch)

            def run(*args):
                if device is not None:
                    return function(*args)
                with ptxemu.device(mode="lazy") as each:
                    function(*args)
                seen.launches.extend(each.launches)
                assert not each.hazards, each.report()

            return run

        with monkeypatch.context() as patch:
            patch.setattr(plan, "choose_backend", lambda *args, **options: "cute")
            patch.setattr(plan, "sm_count", lambda device: sms)
            patch.setattr(launch.jit, "compiled", get)
            patch.setattr(launch, "_launches", {})
            yield seen

    return context


def check(emulated, inputs: dict, sms: int = SMALL_GPU, unit: float = 1.0):
    """Run `inputs` by the reference and by the kernel, from the same start, and compare."""
    twin = {n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    right = lightning_prefill(**twin)
    out = torch.full_like(inputs["v"], torch.nan)
    with emulated(sms) as seen:
        assert lightning_prefill(**inputs, out=out) is out
    assert_close("o", out / unit, right / unit, O_TOLERANCE[out.dtype])
    for name in ("state", "checkpoints"):
        if name in inputs:
            x, want = inputs[name], twin[name]
            tolerance = STATE_TOLERANCE if x.dtype == torch.float32 else 4e-3
            assert_close(name, x / unit, want / unit, tolerance)
    return seen


SUPPORTED = [name for name, case in CASES.items() if (case.K, case.V) in KERNEL_DIMS]


@pytest.mark.parametrize("name", SUPPORTED)
def test_kernel_equals_the_reference(emulated, name) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    before = inputs["state"].clone() if case.state else None
    seen = check(emulated, inputs, unit=case.magnitude)
    config = kernel_plan_of(case, SMALL_GPU).config
    assert seen.configs[-1] == config
    assert (config.segments is not None) == (case.segment_tokens is not None)
    plan = kernel_plan_of(case, SMALL_GPU)
    kernels = [x for x in (plan.first_pass, plan.prefix, plan.config) if x is not None]
    assert len(seen.launches) == len(seen.configs) == case.varlen + len(kernels)
    if case.state:
        named = set(inputs["state_indices"].tolist())
        for slot in set(range(len(before))) - named:
            assert same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("lengths", [(1,), (63,), (64,), (65,), (129,), (192,)])
@pytest.mark.parametrize("varlen", [False, True])
def test_lengths_around_chunks_in_half_heads(emulated, lengths, varlen) -> None:
    """Blocks of one warpgroup, which whole heads on a large GPU are cut for."""
    case = Case(lengths, H=1, HV=1, varlen=varlen)
    seen = check(emulated, make_inputs(case), sms=132)
    assert seen.configs[-1].warpgroups == 1


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 70, 0, 64), H=1, HV=1, varlen=True),
        Case((130,), H=1, HV=1),
        Case((64, 1), H=1, HV=1, varlen=True, checkpoint_interval=64),
        # more units than blocks, without tokens and of one chunk in a row
        Case((0, 0, 1, 64, 0, 130, 1, 1, 0, 63), H=1, HV=2, K=64, V=64, varlen=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("sms", [1, 132])
def test_no_order_of_execution_changes_the_results(case, sms) -> None:
    """Every mode of the emulator, random schedules: the same bits, no hazards."""
    ptxemu.install()
    inputs = make_inputs(case)
    config = kernel_plan_of(case, sms).config
    outputs, args = _launch_args(case, config, inputs, segment_chunks=0)
    with ptxemu.device() as device:
        assert device.check(lambda: compiled(config)(*args), outputs) == []
    assert not outputs[0].isnan().any()


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("varlen", [False, True])
def test_no_order_of_execution_changes_segments(varlen, warpgroups) -> None:
    """The same for the kernels of segments of one chunk, and what they write is right."""
    ptxemu.install()
    case = Case((215,), H=1, HV=1, varlen=varlen)
    inputs, twin = make_inputs(case), make_inputs(case)
    right = lightning_prefill(**twin)
    second = replace(kernel_plan_of(case, 1).config, segments="second", warpgroups=warpgroups)
    first = replace(second, segments="first", final=None)
    outputs, args = _launch_args(case, second, inputs, segment_chunks=1)
    without_final = (*args[:5], None, *args[6:])
    local, workspace = args[9:11]
    rows = 3 if varlen else 1
    between = (local, inputs["g_gamma"], workspace, rows, 4, 1)
    for config, given in (
        (first, without_final),
        (PrefixConfig(128, 128, varlen), between),
        (second, args),
    ):
        with ptxemu.device() as device:
            assert device.check(lambda: compiled(config)(*given), outputs) == []  # noqa: B023
    assert_close("o", outputs[0], right, 4e-3)
    assert_close("state", inputs["state"], twin["state"], STATE_TOLERANCE)


@pytest.mark.parametrize("lengths", [(3, 0, 20, 5, 1, 2, 4), (20,), (3, 3)], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_prefix_turns_what_segments_add_into_what_they_start_from(lengths, varlen) -> None:
    """Segments of one chunk; rows of sequences with fewer than three keep their bits."""
    if not varlen and len(set(lengths)) > 1:
        pytest.skip("equal lengths only")
    ptxemu.install()
    torch.manual_seed(0)
    heads, tokens = 2, 64 * sum(lengths)
    g_gamma = torch.tensor([-0.001, -0.02])
    if varlen:
        shape = VarlenPlan(len(lengths), tokens, 64, heads, segment_chunks=1, chunk_table=False)
        bounds = 64 * torch.tensor([0, *lengths]).cumsum(0)
        numbers = (build_schedule(shape, bounds).workspace, tokens // 64, 0, 1)
    else:
        shape = FixedPlan(len(lengths), 64 * lengths[0], 64, heads, segment_chunks=1)
        numbers = (None, len(lengths), lengths[0], 1)
    local = torch.randn(shape.max_segments, heads, 64, 64)
    right, place = local.clone(), 0
    for n in (max(1, length) for length in lengths):
        for row in range(place + 2, place + n):
            right[row] += right[row - 1] * (64 * g_gamma).exp()[:, None, None]
        place += n
    with ptxemu.device() as device:
        prefix = compiled(PrefixConfig(64, 64, varlen))
        assert device.check(lambda: prefix(local, g_gamma, *numbers), [local]) == []
    # as many sequences as there may be: a grid's other dimensions end at 65,535
    assert all(each["grid"][1:] == (1, 1) for each in device.launches)
    assert_close("states", local, right, 1e-6)
    unchanged = [i for i in range(len(local)) if same_bits(local[i], right[i])]
    place = 0
    for n in (max(1, length) for length in lengths):
        assert {*range(place, place + min(n, 2))} <= set(unchanged)
        place += n


def _launch_args(case, config, inputs: dict, segment_chunks: int) -> tuple[list, tuple]:
    """What a launch writes, and its arguments, for two blocks at most."""
    sizes = {"heads": case.HV, "parts": config.parts, "segment_chunks": segment_chunks}
    N, tokens = len(case.lengths), sum(case.lengths)
    workspace, local = None, None
    if case.varlen:
        shape = VarlenPlan(N, tokens, 64, **sizes, chunk_table=False)
        workspace = build_schedule(shape, inputs["cu_seqlens"]).workspace
    else:
        shape = FixedPlan(N, case.lengths[0], 64, **sizes)
    if segment_chunks:
        local = torch.full((shape.max_segments, case.HV, case.V, case.K), torch.nan)
    out = torch.full_like(inputs["v"], torch.nan)
    args = (
        *(inputs[name] for name in ("q", "k", "v", "g_gamma", "state", "state", "state_indices")),
        inputs["has_initial_state"].view(torch.uint8),
        inputs.get("checkpoints"),
        local,
        workspace,
        out,
        128**-0.5,
        64,
        shape.device_segment_chunks,
        shape.max_units,
        min(shape.max_units, 2),
    )
    written = (out, inputs["state"], inputs.get("checkpoints"), local, workspace)
    return [x for x in written if x is not None], args


def in_poison(inputs: dict) -> tuple[dict, list]:
    """The tensors as windows of NaN-filled buffers, and the buffers."""
    buffers = {}
    for name, x in inputs.items():
        if torch.is_tensor(x) and x.dtype != torch.bool:
            buffers[name] = poisoned(x.shape, x.dtype)
            buffers[name].tensor.copy_(x)
    return {**inputs, **{name: b.tensor for name, b in buffers.items()}}, list(buffers.values())


@pytest.mark.parametrize("sms", [1, 132])
def test_what_lies_past_a_sequence_never_shows(emulated, sms) -> None:
    """A sequence's neighbours are NaN; so is what surrounds the tensors."""
    inputs = make_inputs(Case((70, 40, 65), H=1, HV=1, varlen=True))
    inputs["has_initial_state"][:] = True
    alone = lightning_prefill(**{n: x.clone() for n, x in inputs.items()})
    for name in ("q", "k", "v"):
        inputs[name][:, 70:110] = torch.nan
    inputs, buffers = in_poison(inputs)
    out = poisoned(inputs["v"].shape, inputs["v"].dtype)
    with emulated(sms):
        lightning_prefill(**inputs, out=out.tensor)
    for part in (slice(0, 70), slice(110, 175)):
        assert_close("o", out.tensor[:, part], alone[:, part], 4e-3)
    assert all(b.untouched() for b in (*buffers, out))


@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_a_decay_that_keeps_nothing(emulated, segment_tokens) -> None:
    """e^-inf = 0, and the distance 0 must not make it nan."""
    case = Case((300,), H=1, HV=1, K=64, V=64, decay=-torch.inf, segment_tokens=segment_tokens)
    check(emulated, make_inputs(case))


@pytest.mark.parametrize("varlen", [False, True])
def test_a_decay_that_is_no_number_spoils_its_head_alone(emulated, monkeypatch, varlen) -> None:
    """On a GPU nobody looks at the decays; whatever they are, the call must end."""
    monkeypatch.setattr(plan, "_require_decay", lambda *_: None)
    inputs = make_inputs(Case((450,), H=2, HV=2, K=64, V=64, varlen=varlen, segment_tokens=192))
    right = lightning_prefill(
        **{n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    )
    inputs["g_gamma"] = torch.tensor([inputs["g_gamma"][0], torch.nan])
    with emulated():
        o = lightning_prefill(**inputs)
    assert_close("o", o[:, :, 0], right[:, :, 0], 4e-3)


def test_slots_that_are_none(emulated) -> None:
    inputs = make_inputs(Case((20, 66, 10, 30), H=1, HV=1, varlen=True))
    inputs["state_indices"] = torch.tensor([-1, 3, 0, 99], dtype=torch.int32)
    before = inputs["state"].clone()
    check(emulated, inputs)
    for slot in (1, 2, 4):
        assert same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_out_of_range_are_clamped(emulated, monkeypatch, dtype) -> None:
    """On a GPU the values of cu_seqlens are not looked at."""
    monkeypatch.setattr(plan, "require_cu_seqlens", lambda bounds, **_: bounds.numel() - 1)
    far = 2**31 - 1 if dtype == torch.int32 else 2**40 + 3
    inputs = make_inputs(Case((30, 34, 6), H=1, HV=1, varlen=True))
    twin = {n: x.clone() for n, x in inputs.items()}
    twin["cu_seqlens"] = torch.tensor([0, 64, 64, 70], dtype=dtype)
    right = lightning_prefill(**twin)
    inputs["cu_seqlens"] = torch.tensor([-5, 64, 50, far], dtype=dtype)
    with emulated():
        o = lightning_prefill(**inputs)
    assert_close("o", o, right, 4e-3)
    assert_close("state", inputs["state"], twin["state"], STATE_TOLERANCE)


def test_strided_tensors_are_read_as_they_lie(emulated) -> None:
    """q, k, v in one packed tensor, slots with padding, a K-first pool."""
    inputs = make_inputs(Case((70,), H=1, HV=1))
    packed = torch.full((1, 70, 3, 128), torch.nan, dtype=torch.bfloat16)
    for i, name in enumerate(("q", "k", "v")):
        packed[:, :, i : i + 1] = inputs[name]
        inputs[name] = packed[:, :, i : i + 1]
    wide = torch.zeros(2, 1, 128 * 128 + 64)
    pool = wide[..., : 128 * 128].view(2, 1, 128, 128).mT
    pool.copy_(inputs["state"])
    inputs["state"] = pool
    twin = {**inputs, "state": pool.contiguous()}
    right = lightning_prefill(**twin)
    with emulated() as seen:
        o = lightning_prefill(**inputs)
        assert len(launch._launches) == 1  # kept only if nothing was copied
    assert not seen.configs[-1].final.v_first
    assert_close("o", o, right, 4e-3)
    assert_close("state", pool, twin["state"], STATE_TOLERANCE)
    assert (wide[..., 128 * 128 :] == 0).all()


def test_tensors_that_tma_cannot_read_are_copied(emulated) -> None:
    inputs = make_inputs(Case((20,), H=1, HV=1, state=None))
    right = lightning_prefill(**inputs)
    inputs["q"] = inputs["q"].repeat_interleave(2, dim=-1)[..., ::2]
    odd = torch.empty(20 * 128 + 1, dtype=torch.bfloat16)[1:].view(1, 20, 1, 128)
    inputs["k"] = odd.copy_(inputs["k"])
    out = torch.empty(1, 20, 1, 129, dtype=torch.bfloat16)[..., :128]
    with emulated():
        assert lightning_prefill(**inputs, out=out) is out
        assert not launch._launches
    assert_close("o", out, right, 4e-3)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16])
def test_chunk_lightning_attn(emulated, v_first, initial) -> None:
    inputs = make_inputs(Case((66,), H=1, HV=2))
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    start = None if initial is None else torch.randn(1, 2, 128, 128).to(initial)
    options = {"initial_state": start, "output_final_state": True, "state_v_first": v_first}
    o, final = chunk_lightning_attn(q, k, v, 3, 8, **options)
    with emulated():
        for _ in range(2):  # the second call goes past the plan
            got, state = chunk_lightning_attn(q, k, v, 3, 8, **options)
            assert_close("o", got, o, 4e-3)
            assert state.dtype == torch.float32 and state.is_contiguous()
            assert_close("final state", state, final, STATE_TOLERANCE)


def test_few_heads_are_cut_unasked(emulated) -> None:
    seen = check(emulated, make_inputs(Case((3000, 1000), H=1, HV=1, varlen=True)), sms=132)
    assert seen.configs[-1].segments == "second"
    inputs = make_inputs(Case((2048,), H=1, HV=2))
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    options = {"initial_state": torch.randn(1, 2, 128, 128), "output_final_state": True}
    right, right_state = chunk_lightning_attn(q, k, v, 3, 8, **options)
    with emulated(132) as seen:
        o, state = chunk_lightning_attn(q, k, v, 3, 8, **options)
    assert seen.configs[-1].segments == "second"
    assert_close("o", o, right, 4e-3)
    assert_close("state", state, right_state, STATE_TOLERANCE)


def test_a_second_call_goes_past_the_plan(emulated, monkeypatch) -> None:
    case = Case((40, 30), H=1, HV=1, varlen=True)
    with emulated() as seen:
        lightning_prefill(**make_inputs(case))
        assert len(launch._launches) == 1
        inputs, twin = make_inputs(case, seed=5), make_inputs(case, seed=5)
        o = lightning_prefill(**inputs, scale=0.5)
        assert len(seen.configs) == 2  # the kernel and the schedule, once
        wrong = make_inputs(case) | {"k": inputs["k"].half()}
        with pytest.raises((TypeError, ValueError), match="k: dtype"):
            lightning_prefill(**wrong)
    assert_close("o", o, lightning_prefill(**twin, scale=0.5), 4e-3)
    assert_close("state", inputs["state"], twin["state"], STATE_TOLERANCE)


def test_inputs_that_could_have_gradients(emulated) -> None:
    inputs = make_inputs(Case((20,), H=1, HV=1))
    twin = {n: x.clone() for n, x in inputs.items()}
    right = lightning_prefill(**twin)
    for name in ("q", "k", "v", "g_gamma"):
        inputs[name].requires_grad_()
    with emulated(), torch.no_grad():
        o = lightning_prefill(**inputs)
    assert_close("o", o, right, 4e-3)
    assert not o.requires_grad
