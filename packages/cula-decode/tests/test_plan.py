"""The plan: which backend and why, and what a kernel is compiled for."""

import dataclasses
import os
import subprocess
import sys
import warnings

import pytest
import torch

from cula.common.reference import KdaInputs, LightningInputs
from cula.decode import kda_decode, kernel_plan, plan
from cula.decode.cases import CASES, Case, kernel_config, make_inputs
from cula.decode.plan import States, plan_kda, plan_lightning

CUDA = torch.device("cuda", 0)
KDA_KEYWORDS = (
    "lower_bound",
    "use_gate_in_kernel",
    "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)


def set_arch(monkeypatch, arch):
    for module in (plan, kernel_plan):
        monkeypatch.setattr(module, "arch_of", lambda device: arch)


@pytest.fixture
def on_gpu(monkeypatch):
    """Plans of tensors without memory as if they lay on an H200, FLA not installed.

    The device is asked for in a few places only; there, this one says "cuda".
    """

    class Fake(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @property
        def device(self):
            return CUDA

        def data_ptr(self):
            return getattr(self, "address", 0)

    def build(case, address=0, backend="auto", scale=None, **changes):
        given = make_inputs(dataclasses.replace(case, **changes), "meta")
        given["out"] = torch.empty_like(given["v"])
        given = {
            name: x.as_subclass(Fake) if torch.is_tensor(x) else x for name, x in given.items()
        }
        given["state"].address = address
        out = given["out"]
        states = States(
            given["state"],
            given["update_state"],
            indices=given.get("state_indices"),
            accepted=given.get("num_accepted_tokens"),
            cu_seqlens=given.get("cu_seqlens"),
            tokens=given.get("token_states"),
        )
        if case.kda:
            inputs = KdaInputs(*(given.get(name) for name in KdaInputs._fields))
            keywords = {name: given.get(name) for name in KDA_KEYWORDS}
            return plan_kda(
                "kda_decode", inputs, states, out, scale=scale, backend=backend, **keywords
            )
        inputs = LightningInputs(*(given[name] for name in LightningInputs._fields))
        return plan_lightning("lightning_decode", inputs, states, out, scale=scale, backend=backend)

    monkeypatch.delenv("CULA_BACKEND", raising=False)
    set_arch(monkeypatch, "sm_90a")
    monkeypatch.setattr(kernel_plan, "missing_compiler", lambda: None)
    monkeypatch.setattr(plan.fla_fallback, "fla_missing", lambda: "FLA is not installed")
    return build


@pytest.mark.parametrize("name", [n for n in CASES if "recurrent" not in n])
def test_cases_run_where_there_is_a_kernel(on_gpu, name):
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = on_gpu(case)
    config = kernel_config(case)
    if config is None:
        assert made.backend == "reference" and "each must be 64 or 128" in made.reason
        assert made.config is None and made.compile_key == ""
    else:
        assert made.backend == "cute" and made.reason == ""
        assert made.config == config and made.arch == "sm_90a"
        assert made.compile_key == repr(config)


@pytest.mark.parametrize("call", ["kda_decode", "lightning_decode"])
def test_sizes_and_scale_are_no_part_of_the_key(on_gpu, call):
    """Nor are heads, pool and padding; at most the tile follows the batch."""
    case = Case(call, T=3, slots="named")
    key = on_gpu(case).compile_key
    for changes in ({"B": 7}, {"T": 8}, {"H": 3, "HV": 6}, {"padding": 64}, {"packed": True}):
        assert on_gpu(case, **changes).compile_key == key
    assert on_gpu(case, scale=3.0).compile_key == key
    one = dataclasses.replace(case, T=1)
    tiles = {on_gpu(one, B=2**i).compile_key for i in range(12)}
    assert len(tiles) <= 3
    without_tile = {
        dataclasses.replace(on_gpu(one, B=2**i).config, warps=0, v_per_thread=0, lanes=0)
        for i in range(12)
    }
    assert len(without_tile) == 1


def test_lower_bounds_are_no_part_of_the_key(on_gpu, monkeypatch):
    from cula.decode import cases

    keys = set()
    for bound in (-5.0, -0.5):
        monkeypatch.setattr(cases, "LOWER_BOUND", bound)
        made = on_gpu(Case("kda_decode"))
        assert made.form.gate.lower_bound == bound
        keys.add(made.compile_key)
    assert len(keys) == 1


def refused(on_gpu, reason, **changes):
    case = Case("kda_decode")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = on_gpu(case, **changes)
    assert made.backend == "reference"
    assert reason in made.reason
    assert all(reason in str(w.message) for w in said)
    with pytest.raises(NotImplementedError, match="backend: 'cute'; cannot run kda_decode here"):
        on_gpu(case, backend="cute", **changes)


def test_reasons_against_our_kernel(on_gpu, monkeypatch):
    refused(on_gpu, "no kernel for K = 96, V = 128; each must be 64 or 128", K=96)
    refused(on_gpu, "no kernel for K = 128, V = 256; each must be 64 or 128", V=256)
    refused(on_gpu, "state: its matrices must start at multiples of 16 bytes", address=8)
    refused(on_gpu, "state: its matrices must start at multiples of 16 bytes", padding=2)
    monkeypatch.setattr(
        kernel_plan, "missing_compiler", lambda: "nvidia-cutlass-dsl is not installed"
    )
    refused(on_gpu, "nvidia-cutlass-dsl is not installed")
    set_arch(monkeypatch, "sm_75")
    refused(on_gpu, "no kernel for the architecture sm_75; there are sm_80, sm_90a")


def test_a_fallback_is_announced_once(on_gpu):
    case = Case("lightning_decode", K=72)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            on_gpu(case)
    (warning,) = said
    assert "lightning_decode: the slow reference runs this" in str(warning.message)
    assert "K = 72" in str(warning.message) and "FLA is not installed" in str(warning.message)


def test_fla_stands_in_where_it_can(on_gpu, monkeypatch):
    monkeypatch.setattr(plan.fla_fallback, "fla_missing", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case("kda_decode", K=80)
        assert on_gpu(case).backend == "fla"
        for changes in (
            {"T": 2, "slots": "per token"},
            {"token_states": True},
            {"lengths": (2, 1), "slots": "named"},
            {"K": 320},
            {"B": 2050, "H": 32, "HV": 32},
        ):
            assert on_gpu(case, **changes).backend == "reference", changes


def test_a_backend_can_be_forced(on_gpu, monkeypatch):
    case = Case("kda_decode")
    made = on_gpu(case, backend="reference")
    assert made.backend == "reference" and made.reason == "backend 'reference' was asked for"
    monkeypatch.setenv("CULA_BACKEND", "reference")
    assert on_gpu(case).backend == "reference"
    assert on_gpu(case, backend="cute").backend == "cute"
    monkeypatch.setenv("CULA_BACKEND", "fla")
    with pytest.raises(NotImplementedError, match="CULA_BACKEND: 'fla'; cannot run kda_decode"):
        on_gpu(case)


def test_tensors_on_the_cpu_run_the_reference_silently():
    x = make_inputs(dataclasses.replace(CASES["kda: one token"], K=16, V=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kda_decode(**x)


def test_pool_dtypes_and_layouts_pick_the_kernel(on_gpu):
    case = Case("kda_decode")
    assert on_gpu(case).config.state == "fp32"
    assert on_gpu(case, state=torch.bfloat16).config.state == "bf16"
    assert on_gpu(case).config.v_first and not on_gpu(case, v_first=False).config.v_first


def test_programmatic_launch_needs_hopper(on_gpu, monkeypatch):
    assert on_gpu(Case("kda_decode")).config.pdl
    set_arch(monkeypatch, "sm_80")
    assert not on_gpu(Case("kda_decode")).config.pdl


WITHOUT_COMPILER = """
import sys, torch

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "tvm_ffi", "cuda", "fla", "triton"):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from cula.decode import lightning_decode

q, k, v = torch.randn(3, 2, 1, 4, 16)
state = torch.zeros(2, 4, 16, 16)
o = lightning_decode(q, k, v, -torch.rand(4), state)
assert o.isfinite().all() and (state != 0).any()
for backend in ("cute", "fla"):
    try:
        lightning_decode(q, k, v, -torch.rand(4), state, backend=backend)
    except NotImplementedError as error:
        print(error)
"""


def test_a_machine_without_gpu_and_compiler():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"backend: {name!r}; cannot run lightning_decode here: "
        "it needs tensors on a GPU, not on cpu"
        for name in ("cute", "fla")
    ]
