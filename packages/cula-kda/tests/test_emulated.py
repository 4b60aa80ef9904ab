"""The compiled kernels, run on the CPU by a PTX emulator through the public calls.

Skipped without the emulator, and on a machine with a GPU: the emulator takes the process's CUDA
runtime over. There test_kernel_gpu.py runs the same kernels.
"""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.testing import assert_close, poisoned, same_bits  # noqa: E402
from cula.common.varlen import VarlenPlan, build_schedule  # noqa: E402
from cula.kda import chunk_kda, kda_prefill, launch, plan  # noqa: E402
from cula.kda.cases import CASES, Case, kernel_configs_of, make_inputs  # noqa: E402
from cula.kda.kernel_plan import IO_DTYPES, KERNEL_DIMS  # noqa: E402
from cula.kda.sm90.config import CHUNK  # noqa: E402

ARCH = "sm_90a"
TOLERANCE = 5e-3
# Steps of 2 along one direction amplify every rounding (test_roundings.py has the bare algorithm).
AMPLIFYING = {"repeated keys, beta 2": 4e-2, "beta to 2": 1e-2, "repeated keys": 1e-2}
kernels = {}


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
            patch.setattr(launch, "sm_count", lambda device: 1)  # blocks take several chunks
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


@pytest.mark.parametrize("kernel", ["prep", "scan"])
def test_no_order_of_the_hardware_shows(emulated, kernel) -> None:
    """The emulator's modes and random orders, on a batch with tails and checkpoints."""
    case = Case((130, 64), H=1, HV=1, varlen=True, checkpoint_interval=64, gate_mean=-4.0)
    inputs = make_inputs(case)
    prep, scan = kernel_configs_of(case)
    varlen = VarlenPlan(2, 194, CHUNK, 1, scan.parts)
    work = build_schedule(varlen, inputs["cu_seqlens"]).workspace
    chunks = varlen.max_chunks
    from cula.kda.sm90.config import Record

    records = torch.full((chunks * Record(128).bytes // 4,), -1, dtype=torch.int32)

    def prepare():
        compiled(prep)(
            *(inputs[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias")),
            work,
            records,
            128**-0.5,
            -5.0,
            varlen.chunks_at,
            chunks,
            2,  # blocks, so that one prepares two chunks
        )

    with ptxemu.device(mode="lazy"):
        prepare()
    if kernel == "prep":
        with ptxemu.device() as device:
            assert device.check(prepare, [records]) == []
        return
    out = torch.full_like(inputs["v"], torch.nan)
    outputs = [out, inputs["state"], inputs["checkpoints"]]

    def scanned():
        compiled(scan)(
            inputs["v"],
            records,
            inputs["state"],
            inputs["state"],
            inputs["state_indices"],
            inputs["has_initial_state"].view(torch.uint8),
            inputs["checkpoints"],
            work,
            out,
            64,
            varlen.max_units,
        )

    with ptxemu.device() as device:
        assert device.check(scanned, outputs) == []
