"""The compiled kernels, run on the CPU by a PTX emulator through the public calls.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There test_kernel_gpu.py runs the same kernels.
"""

import os
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.kernel_args import states_in_key  # noqa: E402
from cula.common.testing import assert_close, poisoned, same_bits  # noqa: E402
from cula.common.varlen import build_schedule  # noqa: E402
from cula.kda import chunk_kda, kda_prefill, launch, plan  # noqa: E402
from cula.kda.cases import CASES, Case, kernel_configs_of, kernel_plan_of, make_inputs  # noqa: E402
from cula.kda.kernel_plan import IO_DTYPES, KERNEL_DIMS, KernelPlan  # noqa: E402

ARCH = "sm_90a"
TOLERANCE = 5e-3
# Steps of 2 along one direction amplify every rounding (test_roundings.py has the bare algorithm).
AMPLIFYING = {"repeated keys, beta 2": 4e-2, "beta to 2": 1e-2, "repeated keys": 1e-2}
kernels = {}


def scan_blocks(plan) -> int:
    """Two blocks that walk several units, or where sequences are cut one a unit, as on a GPU."""
    units = plan.shape.max_units
    return units if plan.scan.segments else min(2, units)


def compiled(config, arch=ARCH):
    """Each configuration compiled once for all tests."""
    if config not in kernels:
        kernels[config] = compile_kernel(config, arch)
    return kernels[config]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    # a folder of its own: kernels are dumped by their names, which other processes use too
    os.environ["CUTE_DSL_DUMP_DIR"] = str(tmp_path_factory.mktemp("dump"))
    ptxemu.install()


@pytest.fixture
def emulated(monkeypatch):
    """A context in which public calls on CPU tensors run the kernels.

    Without `device` every launch gets an emulated device of its own, and must be free of hazards.
    """

    @contextmanager
    def context(device=None, mode="lazy"):
        seen = SimpleNamespace(configs=[], launches=[])

        def get(config, arch):
            seen.configs.append(config)
            function = compiled(config, arch)

            def run(*args):
                if device is not None:
                    return function(*args)
                with ptxemu.device(mode=mode) as each:
                    function(*args)
                seen.launches.extend(each.launches)
                assert not each.hazards, each.report()

            return run

        with monkeypatch.context() as patch:
            patch.setattr(plan, "choose_backend", lambda *args, **options: "cute")
            patch.setattr(plan, "sm_count", lambda device: 132)
            patch.setattr(launch.jit, "compiled", get)
            patch.setattr(KernelPlan, "prep_blocks", 3)  # that take several chunks
            patch.setattr(KernelPlan, "scan_blocks", property(scan_blocks))
            patch.setattr(launch, "_launches", {})
            yield seen

    return context


def check(emulated, inputs: dict, tolerance=TOLERANCE, unit: float = 1.0, **options):
    """Run `inputs` by the reference and by the kernels, from the same start, and compare."""
    twin = {n: x.clone() if torch.is_tensor(x) else x for n, x in inputs.items()}
    right = kda_prefill(**twin)
    out = torch.full_like(inputs["v"], torch.nan)
    with emulated(**options) as seen:
        assert kda_prefill(**inputs, out=out) is out
    assert_close("o", out.double() / unit, right.double() / unit, tolerance)
    for name in ("state", "checkpoints"):
        if name in inputs:
            x, want = inputs[name].double() / unit, twin[name].double() / unit
            assert_close(name, x, want, tolerance)
    return seen


SUPPORTED = [
    name
    for name, case in CASES.items()
    if case.K in KERNEL_DIMS and case.V in KERNEL_DIMS and case.dtype in IO_DTYPES
]


@pytest.mark.parametrize("name", SUPPORTED)
def test_kernels_equal_the_reference(emulated, name) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    before = inputs["state"].clone() if case.state else None
    seen = check(emulated, inputs, AMPLIFYING.get(name, TOLERANCE), case.magnitude)
    configs = kernel_configs_of(case)
    assert tuple(seen.configs[-len(configs) :]) == configs
    assert len(seen.launches) == len(configs) + case.varlen
    if case.state:
        named = set(inputs["state_indices"].tolist())
        for slot in set(range(len(before))) - named:
            assert same_bits(inputs["state"][slot], before[slot])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("varlen", [False, True])
def test_lengths_around_blocks_and_chunks(emulated, length, varlen) -> None:
    check(emulated, make_inputs(Case((length,), H=1, HV=1, K=64, V=64, varlen=varlen)))


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded", "sigmoid"])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gates(emulated, gate, gate_dtype) -> None:
    case = Case((70,), H=1, HV=1, K=64, V=64, gate=gate, gate_dtype=gate_dtype)
    check(emulated, make_inputs(case))


@pytest.mark.parametrize("gate_mean", [-12.0, -8.0, 8.0, 30.0])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_slow_and_saturated_gates(emulated, gate, gate_mean) -> None:
    case = Case((150,), H=1, HV=1, K=64, V=64, gate=gate, gate_mean=gate_mean)
    check(emulated, make_inputs(case))


@pytest.mark.parametrize("A_log", [-200.0, -90.0, 100.0])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_rates_out_of_range(emulated, gate, A_log) -> None:
    """e^A_log of 0 or infinity, and a tail, whose tokens decay nothing."""
    inputs = make_inputs(Case((20,), H=1, HV=1, gate=gate))
    inputs["A_log"].fill_(A_log)
    check(emulated, inputs)


@pytest.mark.parametrize("beta", ["given", "sigmoid", "sigmoid2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_betas(emulated, beta, dtype) -> None:
    inputs = make_inputs(Case((70,), H=1, HV=2, K=64, V=64, beta=beta))
    inputs["beta"] = inputs["beta"].to(dtype)
    check(emulated, inputs)


@pytest.mark.parametrize("exponents", [(-17, 14), (14, -17), (-17, -17), (15, 15)])
def test_values_of_any_size(emulated, exponents) -> None:
    """Chunks of tiny and of huge values, in either order: neither range of float16 is left."""
    inputs = make_inputs(Case((128,), H=1, HV=1, K=64, V=64, state=None, gate_mean=-9.0))
    for i, exponent in enumerate(exponents):
        inputs["v"][:, 64 * i : 64 * (i + 1)] *= 2.0**exponent
    check(emulated, inputs, unit=2.0 ** max(exponents))


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_of_either_layout(emulated, state, v_first) -> None:
    case = Case((70, 64), H=1, HV=2, K=128, V=64, varlen=True, state=state)
    inputs = make_inputs(case)
    if not v_first:
        inputs["state"] = inputs["state"].mT.contiguous().mT
    check(emulated, inputs)


def test_slots_out_of_range(emulated) -> None:
    inputs = make_inputs(Case((3, 70, 5, 9), H=1, HV=1, K=64, V=64, varlen=True))
    inputs["state_indices"] = torch.tensor([-1, 3, 99, 0], dtype=torch.int32)
    before = inputs["state"].clone()
    check(emulated, inputs)
    for slot in (1, 2, 4):
        assert same_bits(inputs["state"][slot], before[slot])


def test_strided_inputs_and_poisoned_surroundings(emulated) -> None:
    """Views into a packed qkv, a pool with gaps; NaN behind every tensor stays there."""
    inputs = make_inputs(Case((65, 40), H=2, HV=2, K=64, V=64, varlen=True))
    packed = torch.full((1, 110, 2, 3 * 64), torch.nan, dtype=torch.bfloat16)
    for i, name in enumerate(("q", "k", "v")):
        packed[:, :105, :, 64 * i : 64 * (i + 1)] = inputs[name]
        inputs[name] = packed[:, :105, :, 64 * i : 64 * (i + 1)]
    slots = torch.full((3, 3, 64, 64), torch.nan)
    slots[:, :2] = inputs["state"]
    inputs["state"] = slots[:, :2]
    wide = torch.full((1, 105, 2, 5), torch.nan)
    wide[..., 3] = inputs["beta"]
    inputs["beta"] = wide[..., 3]
    gates = poisoned(tuple(inputs["g"].shape), torch.bfloat16)
    gates.tensor.copy_(inputs["g"])
    inputs["g"] = gates.tensor
    check(emulated, inputs)
    assert gates.untouched()
    assert slots[:, 2].isnan().all()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_fla_named_call(emulated, v_first, initial) -> None:
    inputs = make_inputs(Case((70, 1), H=1, HV=2, K=64, V=64, varlen=True, gate="given"))
    names = ("q", "k", "v", "g", "beta", "cu_seqlens")
    given = {name: inputs[name] for name in names} | {"output_final_state": True}
    given |= {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
    if initial:
        given["initial_state"] = torch.randn(2, 2, 64, 64)
    right = chunk_kda(**given)
    with emulated() as seen:
        o, final = chunk_kda(**given)
        again = chunk_kda(**given)
    assert len(seen.configs) == 3 and len(seen.launches) == 6, "the second call plans nothing"
    assert_close("o", o, right[0], TOLERANCE)
    assert_close("final state", final, right[1], TOLERANCE)
    assert same_bits(o, again[0]) and same_bits(final, again[1])


def test_earlier_outputs_do_not_see_later_tokens(emulated) -> None:
    case = Case((130,), H=1, HV=1, K=64, V=64, state=None)
    first, other = make_inputs(case), make_inputs(case)
    for name in ("k", "v", "g", "beta"):
        other[name][:, 63:] += 0.5
    with emulated():
        a, b = kda_prefill(**first), kda_prefill(**other)
    assert same_bits(a[:, :63], b[:, :63])
    assert not same_bits(a[:, 63:], b[:, 63:])


def test_sequences_depend_on_nothing_but_the_cut(emulated) -> None:
    """A sequence's bits in a batch and alone, for one length of segments; whole ones' too."""
    case = Case((200, 64), H=1, HV=1, K=64, V=64, varlen=True, state=None, gate_mean=-8.0)
    both, results = make_inputs(case), {}
    one = both | {n: both[n][:, :200] for n in ("q", "k", "v", "g", "beta")}
    del one["cu_seqlens"]
    for tokens in (0, 64, 128):
        with emulated():
            results[tokens] = kda_prefill(**both, segment_tokens=tokens)
            alone = kda_prefill(**one, segment_tokens=tokens)
        assert same_bits(alone, results[tokens][:, :200])
    assert not same_bits(results[0], results[64])
    assert same_bits(results[0][:, 200:], results[64][:, 200:])


def test_a_small_call_of_few_heads_is_cut_unasked(emulated, monkeypatch) -> None:
    """The plan's own choice, of both calls."""
    monkeypatch.setattr("cula.kda.segment_plan.PASS_TIME", 0.01)
    monkeypatch.setattr("cula.kda.segment_plan.MIN_SEGMENT", 1)
    monkeypatch.setattr("cula.kda.segment_plan.COMBINE_TIME", 0.01)
    inputs = make_inputs(Case((500,), H=1, HV=1, state=None, gate="given"))
    seen = check(emulated, inputs)
    assert [config.segments for config in seen.configs[1::2]] == ["first", "second"]
    given = {name: inputs[name] for name in ("q", "k", "v", "g", "beta")}
    right = chunk_kda(**given, use_qk_l2norm_in_kernel=True, output_final_state=True)
    with emulated() as seen:
        found = chunk_kda(**given, use_qk_l2norm_in_kernel=True, output_final_state=True)
    assert len(seen.launches) == 4
    for x, want in zip(found, right, strict=True):
        assert_close("result", x, want, TOLERANCE)


PASSES = {"whole": ("prep", "scan"), "cut": ("prep", "first", "combine", "scan")}


@pytest.mark.parametrize(
    ("form", "kernel"), [(form, kernel) for form, names in PASSES.items() for kernel in names]
)
@pytest.mark.parametrize("varlen", [False, True])
def test_no_order_of_the_hardware_shows(emulated, form, kernel, varlen) -> None:
    """The emulator's modes and random orders, on a batch with tails and checkpoints.

    Where sequences are cut, the pool is both read and written, as in a call.
    """
    cut = form == "cut"
    lengths = ((250, 64, 0) if cut else (130, 64)) if varlen else ((200,) if cut else (130,))
    case = Case(
        lengths,
        H=1,
        HV=1,
        varlen=varlen,
        checkpoint_interval=64,
        gate_mean=-4.0,
        segment_tokens=64 if cut else 0,
    )
    inputs = make_inputs(case)
    run = Passes(case, inputs)
    order = PASSES[form]
    with ptxemu.device(mode="lazy"):
        for name in order[: order.index(kernel)]:
            getattr(run, name)()
    written = {"prep": [run.records], "first": [run.segments], "combine": [run.segments]}
    outputs = written.get(kernel, [run.out, inputs["state"], inputs["checkpoints"]])
    if varlen and kernel == "scan":
        outputs.append(run.work)  # tickets: a call makes them anew
    with ptxemu.device() as device:
        assert device.check(getattr(run, kernel), outputs) == []


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_warps_without_tokens(emulated, gate, gate_dtype) -> None:
    """Chunks of which one, two or three warps of prep have none, amid chunks of which all have."""
    lengths = (1, 64, 12, 80, 17, 97, 33, 48, 63)
    case = Case(lengths, H=1, HV=1, K=64, V=64, varlen=True, gate=gate, gate_dtype=gate_dtype)
    check(emulated, make_inputs(case))
    if gate == "bounded":
        run = Passes(case, make_inputs(case))
        with ptxemu.device() as device:
            assert device.check(run.prep, [run.records]) == []


@pytest.mark.parametrize("varlen", [False, True])
def test_a_block_walks_many_units(emulated, varlen) -> None:
    """Stages, barriers and the output's buffer carry on from unit to unit, whatever the lengths."""
    lengths = (0, 130, 1, 64, 0, 63, 200, 1, 65, 1, 0) if varlen else (130,) * 3
    case = Case(lengths, H=1, HV=2, K=64, V=64, varlen=varlen, checkpoint_interval=64)
    check(emulated, make_inputs(case))
    inputs = make_inputs(case)
    run = Passes(case, inputs)
    with ptxemu.device(mode="lazy"):
        run.prep()
    outputs = [run.out, inputs["state"], inputs["checkpoints"]] + ([run.work] if varlen else [])
    with ptxemu.device() as device:
        assert device.check(run.scan, outputs) == []


LAYOUTS = {  # of states and checkpoints: dtype, V-first
    "V-first": ((torch.float32, True), None),
    "K-first": ((torch.bfloat16, False), None),
    "K-first, checkpoints V-first": ((torch.float32, False), (torch.bfloat16, True)),
    "V-first, checkpoints K-first": ((torch.bfloat16, True), (torch.float32, False)),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("varlen", [False, True])
def test_states_leave_in_any_order_of_the_hardware(emulated, layouts, varlen) -> None:
    """By stages that the next chunk's loads take over, of a unit's middle, end and next unit."""
    lengths = (0, 130, 1, 64, 0, 63) if varlen else (130,) * 3
    state, marks = LAYOUTS[layouts]
    interval = None if marks is None else 64
    case = Case(lengths, H=1, HV=1, K=64, V=64, varlen=varlen, checkpoint_interval=interval)

    def laid_out() -> dict:
        inputs = make_inputs(case)
        for name, form in (("state", state), ("checkpoints", marks)):
            if form is not None:
                x = inputs[name].to(form[0])
                inputs[name] = x if form[1] else x.mT.contiguous().mT
        return inputs

    check(emulated, laid_out())
    run = Passes(case, laid_out())
    with ptxemu.device(mode="lazy"):
        run.prep()
    outputs = [run.out, run.inputs["state"], run.inputs.get("checkpoints"), run.work]
    with ptxemu.device() as device:
        assert device.check(run.scan, [x for x in outputs if x is not None]) == []


@pytest.mark.parametrize("segment_tokens", [0, 64])
def test_what_is_no_number_stays_in_its_sequence(emulated, segment_tokens) -> None:
    """Nor does it stay in shared memory: the others' outputs and states have the same bits."""
    lengths = (130, 70, 5, 200, 65, 17, 33, 49, 1)
    case = Case(lengths, H=1, HV=1, K=64, V=64, varlen=True, segment_tokens=segment_tokens)
    clean, spoilt, results = make_inputs(case), make_inputs(case), []
    parts = [slice(*ends) for ends in pairwise(clean["cu_seqlens"].tolist())]
    slots = clean["state_indices"].tolist()
    for n in range(1, len(lengths), 2):
        for name in ("q", "k", "v", "g", "beta"):
            spoilt[name][:, parts[n]] = torch.nan
        spoilt["state"][slots[n]] = torch.nan
    for inputs in (clean, spoilt):
        with emulated():
            results.append(kda_prefill(**inputs))
    for n in range(0, len(lengths), 2):
        assert same_bits(results[1][:, parts[n]], results[0][:, parts[n]])
        assert same_bits(spoilt["state"][slots[n]], clean["state"][slots[n]])


class Passes:
    """The launches of a call one by one, as launch.py makes them."""

    def __init__(self, case: Case, inputs: dict):
        plan = kernel_plan_of(case)
        shape = self.shape = plan.shape
        states, marks = (states_in_key(inputs.get(name)) for name in ("state", "checkpoints"))
        scan = replace(plan.scan, initial=states, final=states, checkpoints=marks)
        self.plan, self.inputs = replace(plan, scan=scan), inputs
        self.work = None
        if case.varlen:
            self.work = build_schedule(shape, inputs["cu_seqlens"]).workspace
        self.records = torch.full((plan.record_words,), -1, dtype=torch.int32)
        self.segments = None
        if plan.first:
            self.segments = torch.full(plan.segment_states, torch.nan)
        self.out = torch.full_like(inputs["v"], torch.nan)

    def prep(self) -> None:
        names = ("q", "k", "g", "beta", "A_log", "dt_bias")
        chunks_at = self.shape.chunks_at if self.work is not None else 0
        compiled(self.plan.prep)(
            *(self.inputs.get(name) for name in names),
            self.work,
            self.records,
            128**-0.5,
            -5.0,
            chunks_at,
            self.shape.max_chunks,
            2,  # blocks, so that one prepares several chunks
        )

    def first(self) -> None:
        units = self.plan.first_units
        self._walk(self.plan.first, None, None, units, units)

    def combine(self) -> None:
        compiled(self.plan.combine)(self.segments, self.work, *self.plan.combine_args)

    def scan(self) -> None:
        marks = self.inputs.get("checkpoints")
        units, blocks = self.shape.max_units, scan_blocks(self.plan)
        self._walk(self.plan.scan, self.inputs["state"], marks, units, blocks)

    def _walk(self, config, final, marks, units, blocks) -> None:
        inputs = self.inputs
        compiled(config)(
            inputs["v"],
            self.records,
            inputs["state"],
            final,
            inputs["state_indices"],
            inputs["has_initial_state"].view(torch.uint8),
            marks,
            self.segments,
            self.work,
            self.out,
            inputs.get("checkpoint_interval", 1),
            self.shape.device_segment_chunks,
            units,
            blocks,
        )


def test_no_state_is_kept_past_the_rows_that_the_host_counted(emulated) -> None:
    """Its copy of cu_seqlens may say another number, and so may a graph's replay."""
    inputs = make_inputs(Case((1, 1, 126), H=1, HV=1, K=64, V=64, varlen=True, state=None))
    host = torch.tensor([0, 64, 128, 128])  # two chunks; there are four
    options = {"cu_seqlens_cpu": host, "return_intermediate_states": True}
    with torch.inference_mode():
        right = chunk_kda(**inputs, return_intermediate_states=True)
        with emulated():  # which sees a write past the end
            o, _, h = chunk_kda(**inputs, **options)
    assert h.shape[1] == 2
    assert_close("o", o, right[0], TOLERANCE)
    assert_close("h", h, right[2][:, :2], TOLERANCE)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_states_at_the_start_of_chunks(emulated, monkeypatch, varlen, v_first, cut) -> None:
    if cut:
        monkeypatch.setattr("cula.kda.kernel_plan.suitable_segment", lambda *_: 1)
    lengths = (130, 0, 64, 5) if varlen else (130, 130)
    given = make_inputs(Case(lengths, H=1, HV=1, K=64, V=64, varlen=varlen))
    inputs = {n: x for n, x in given.items() if n not in ("state", "state_indices")}
    del inputs["has_initial_state"]
    options = {"state_v_first": v_first, "output_final_state": True}
    options["initial_state"] = torch.randn(len(lengths), 1, 64, 64)
    options["return_intermediate_states"] = True
    with torch.inference_mode():
        right = chunk_kda(**inputs, **options)
        with emulated() as seen:
            results = chunk_kda(**inputs, **options)
    assert (seen.configs[-1].segments == "second") == cut
    for name, x, want in zip(("o", "final", "h"), results, right, strict=True):
        assert x.shape == want.shape and x.dtype == want.dtype
        assert_close(name, x, want, TOLERANCE)
