"""The plan of a call: what it says, what it refuses, and that it needs no GPU and no compiler."""

import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from cula.kda import fla_fallback, kda_prefill, kernel_plan
from cula.kda.cases import CASES, Case, kernel_configs, kernel_configs_of, make_inputs
from cula.kda.kernel_plan import NOT_VERIFIED, no_kernel
from cula.kda.plan import _backend as choose
from cula.kda.plan import plan_prefill


def plan_of(case: Case, **changes):
    return plan_prefill(**(make_inputs(case) | changes))


def test_says_what_the_call_is() -> None:
    plan = plan_of(CASES["grouped heads"])
    dims = plan.dims
    assert (dims.B, dims.T, dims.H, dims.HV, dims.K, dims.V) == (1, 130, 2, 8, 128, 128)
    assert plan.sequences == 2 and plan.varlen and dims.group == 4
    assert plan.form.gate.form == "bounded" and plan.form.scale == pytest.approx(128**-0.5)
    assert plan.backend == "reference" and "cpu" in plan.reason
    assert not plan.empty and plan_of(Case((0,))).empty
    with pytest.raises(FrozenInstanceError):
        plan.backend = "cute"


def test_compile_key_is_short_and_free_of_sizes() -> None:
    base = Case((64,))
    key = plan_of(base).compile_key
    assert key.isprintable() and " " not in key and len(key) < 100
    for same in (Case((200,)), Case((64,) * 3), replace(base, H=4, HV=4)):
        assert plan_of(same).compile_key == key
    assert plan_of(base, scale=0.1).compile_key == key
    different = [
        replace(base, K=64),
        replace(base, V=64),
        replace(base, dtype=torch.float16),
        replace(base, gate_dtype=torch.float32),
        replace(base, gate="softplus"),
        replace(base, gate="sigmoid"),
        replace(base, bias=False),
        replace(base, beta="sigmoid2"),
        replace(base, l2norm=False),
        replace(base, state=None),
        replace(base, state=torch.bfloat16),
        replace(base, varlen=True),
        replace(base, lengths=(128,), checkpoint_interval=64),
    ]
    keys = {key, *(plan_of(case).compile_key for case in different)}
    assert len(keys) == 1 + len(different)


@pytest.mark.parametrize("scale", ["0.5", torch.tensor(0.5), True])
def test_scale_is_a_number(scale: object) -> None:
    with pytest.raises(TypeError, match=r"scale: .*; must be a number"):
        plan_of(Case((64,)), scale=scale)


def test_flags_are_true_or_false() -> None:
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel: str; must be True or False"):
        plan_of(Case((64,)), use_qk_l2norm_in_kernel="no")


def refused() -> dict[str, tuple[dict, type[Exception], str]]:
    """Changes to the case "varlen" (4 sequences, 281 tokens, 2 heads, K = V = 128)."""
    bounds = [0, 65, 131, 202, 281]
    state = torch.zeros(5, 2, 128, 128)
    return {
        "float cu": ({"cu_seqlens": torch.tensor(bounds).float()}, ValueError, "cu_seqlens: dtype"),
        "2-D cu": ({"cu_seqlens": torch.tensor([bounds])}, ValueError, "cu_seqlens: shape"),
        "list cu": ({"cu_seqlens": bounds}, TypeError, "cu_seqlens: list"),
        "not from 0": ({"cu_seqlens": torch.tensor([1, *bounds[1:]])}, ValueError, "start at 0"),
        "decreasing": ({"cu_seqlens": torch.tensor([0, 9, 5, 99, 281])}, ValueError, "decrease"),
        "short": ({"cu_seqlens": torch.tensor([0, 65, 131, 202, 280])}, ValueError, "281"),
        "no cu": ({"cu_seqlens": None}, ValueError, "state_indices: shape"),
        "q": ({"q": torch.zeros(281, 2, 128)}, ValueError, "q: shape"),
        "state shape": ({"state": torch.zeros(5, 2, 64, 256)}, ValueError, "state: shape"),
        "state dtype": ({"state": state.half()}, ValueError, "state: dtype"),
        "expanded": ({"state": state[:1].expand(5, -1, -1, -1)}, ValueError, "state: strides"),
        "gaps in a slot": (
            {"state": torch.zeros(5, 2, 128, 256)[..., ::2]},
            ValueError,
            "state: strides",
        ),
        "few slots": ({"state": state[:3], "state_indices": None}, ValueError, "state: .*slot"),
        "index dtype": ({"state_indices": torch.zeros(4)}, ValueError, "state_indices: dtype"),
        "index shape": ({"state_indices": torch.zeros(4, 2).int()}, ValueError, "state_indices"),
        "mask": ({"has_initial_state": torch.ones(4).int()}, ValueError, "has_initial_state"),
        "no pool": ({"state": None}, ValueError, "state_indices.*state is None"),
        "interval alone": ({"checkpoint_interval": 64}, ValueError, "checkpoint"),
        "buffer alone": ({"checkpoints": state}, ValueError, "checkpoint"),
        "interval": ({"checkpoints": state, "checkpoint_interval": 32}, ValueError, "32.*64"),
        "rows": ({"checkpoints": state[:3], "checkpoint_interval": 64}, ValueError, "4 rows"),
        "out shape": ({"out": torch.zeros(1, 281, 2, 64)}, ValueError, "out: shape"),
        "out dtype": ({"out": torch.zeros(1, 281, 2, 128)}, ValueError, "out: dtype"),
        "dt_bias": ({"dt_bias": torch.zeros(128)}, ValueError, "dt_bias: shape"),
        "fla": ({"backend": "fla"}, NotImplementedError, "fla"),
        "cute": ({"backend": "cute"}, NotImplementedError, "'cute'.*kda_prefill"),
    }


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    change, error, match = refused()[name]
    inputs = make_inputs(CASES["varlen"]) | change
    with pytest.raises(error, match=match):
        plan_prefill(**inputs)
    if "cu_seqlens" not in change or isinstance(change["cu_seqlens"], torch.Tensor | None):
        pool = inputs["state"]
        before = None if pool is None else pool.clone()
        with pytest.raises(error, match=match):
            kda_prefill(**inputs)
        assert before is None or torch.equal(pool, before)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_no_device_value_is_needed() -> None:
    """Everything that a GPU would hold may be a meta tensor: the plan reads shapes alone."""
    x = meta(1, 500, 2, 64)
    plan = plan_prefill(
        x,
        x,
        x,
        x,
        meta(1, 500, 2),
        A_log=meta(2, dtype=torch.float32),
        cu_seqlens=meta(9, dtype=torch.int32),
        state=meta(100, 2, 64, 64, dtype=torch.float32),
        state_indices=meta(8, dtype=torch.int64),
        has_initial_state=meta(8, dtype=torch.bool),
        checkpoints=meta(3, 2, 64, 64),
        checkpoint_interval=128,
    )
    assert plan.sequences == 8 and plan.backend == "reference"


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU: what the plan looks at."""

    @property
    def device(self):
        return torch.device("cuda")


def gpu_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("missing", [None, "FLA is not there"])
def test_backend_on_a_gpu(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """What a CUDA device would get, with and without FLA, and why it is not our kernel."""
    monkeypatch.setattr(fla_fallback, "fla_missing", lambda: missing)
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    dims = plan_of(CASES["one chunk"]).dims
    gpu, call = torch.device("cuda"), f"chunk_kda of this test, {missing}"
    with pytest.warns(UserWarning, match="gradients are needed"):
        backend, reason = choose(call, "auto", gpu, dims, 1, "gradients are needed")
    assert backend == ("reference" if missing else "fla")
    for part in ("gradients are needed", missing or ""):
        assert part in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(call, "auto", gpu, dims, 1, "gradients are needed")[0] == backend
    with pytest.raises(NotImplementedError, match="gradients are needed"):
        choose(call, "cute", gpu, dims, 1, "gradients are needed")
    assert choose(call, "cute", gpu, dims, 1, None) == ("cute", "")
    assert choose(call, "reference", gpu, dims, 1, None)[0] == "reference"


def test_kernels_run_for_those_who_insist(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU has verified them, so nobody gets them unasked."""
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(kernel_plan, "missing_compiler", lambda: None)
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    dims = plan_of(CASES["one chunk"]).dims
    q = gpu_tensor(1, 64, 2, 128)
    assert no_kernel("cute", q, dims, {}) is None
    assert no_kernel("auto", q, dims, {}) == NOT_VERIFIED
    monkeypatch.setenv("CULA_BACKEND", "cute")
    assert no_kernel("auto", q, dims, {}) is None


def test_what_has_no_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "missing_compiler", lambda: None)
    dims = plan_of(CASES["one chunk"]).dims
    q = gpu_tensor(1, 64, 2, 128)
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_80")
    assert "sm_80" in no_kernel("cute", q, dims, {})
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_90a")
    assert "float32" in no_kernel("cute", gpu_tensor(1, 2, 2, 128, dtype=torch.float32), dims, {})
    assert "K = 100" in no_kernel("cute", q, replace(dims, K=100), {})
    for state in (
        torch.zeros(2, 2, 128, 256)[..., ::2],
        torch.zeros(33000)[1:32769].view(1, 2, 128, 128),
    ):
        assert "state: strides" in no_kernel("cute", q, dims, {"state": state})


def test_workspace_is_bounded_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.5 KB a token and value head, and what the plan says is what is taken."""
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **options: "cute")
    for varlen in (False, True):
        plan = plan_of(Case((1024, 1000), varlen=varlen) if varlen else Case((1024, 1024)))
        tokens = plan.dims.B * plan.dims.T
        assert 1032 * tokens * 2 <= plan.workspace_bytes <= 1536 * tokens * 2
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **options: "reference")
    assert plan_of(CASES["one chunk"]).workspace_bytes == 0


def test_configurations_to_compile() -> None:
    """All for the one architecture; each case's own among them, each once."""
    every = kernel_configs("all")
    assert len(set(every)) == len(every) and set(kernel_configs("common")) <= set(every)
    assert set(kernel_configs_of(CASES["one chunk"])) <= set(every)
    assert kernel_configs("all", "sm_80") == ()
    with pytest.raises(ValueError, match="which"):
        kernel_configs("some")


def test_fla_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_fallback, "fla_missing", lambda: None)
    dims = plan_of(CASES["one chunk"]).dims
    assert fla_fallback.missing(dims, 1) is None
    assert "256" in fla_fallback.missing(replace(dims, K=300), 1)
    assert "65535" in fla_fallback.missing(replace(dims, HV=64), 1024)


def test_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_BACKEND", "cute")
    with pytest.raises(NotImplementedError, match="CULA_BACKEND"):
        plan_of(CASES["one chunk"])
    assert plan_of(CASES["one chunk"], backend="reference").backend == "reference"


def test_imports_without_compiler_fla_or_gpu() -> None:
    code = """
import sys
for name in ("cutlass", "fla", "triton", "tvm_ffi"):
    sys.modules[name] = None
import torch, cula.kda, cula.kda.upstream, cula.kda.cases
x = torch.randn(1, 5, 1, 8)
assert cula.kda.chunk_kda(x, x, x, -x.abs(), x[..., 0])[0].isfinite().all()
assert not torch.cuda.is_initialized()

class NoDecode:
    def find_spec(self, name, path=None, target=None):
        if name == "cula.decode":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoDecode())
for name in ("kda_decode", "fused_recurrent_kda"):
    try:
        getattr(cula.kda, name)
    except ImportError as error:
        assert "pip install cula-decode" in str(error), error
    else:
        raise SystemExit("no ImportError")
assert not hasattr(cula.kda, "no_such_name")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
