"""The plan of a call: what it says, what it refuses, and that it needs no GPU and no compiler."""

import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from cula.common.dims import dims_of
from cula.common.varlen import SegmentRow, build_schedule
from cula.lightning import fla_fallback, lightning_prefill
from cula.lightning import kernel_plan as kernels
from cula.lightning.cases import CASES, Case, make_inputs
from cula.lightning.kernel_plan import kernel_plan, no_kernel
from cula.lightning.plan import _backend as choose
from cula.lightning.plan import plan_prefill
from cula.lightning.sm90.config import PrefixConfig


def plan_of(case: Case, **changes):
    return plan_prefill(**(make_inputs(case) | changes))


def test_says_what_the_call_is() -> None:
    plan = plan_of(CASES["grouped heads"])
    dims = plan.dims
    assert (dims.B, dims.T, dims.H, dims.HV, dims.K, dims.V) == (1, 130, 2, 8, 128, 128)
    assert plan.sequences == 2 and plan.varlen and dims.group == 4
    assert plan.form.scale == pytest.approx(128**-0.5)
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
        "segment": ({"segment_tokens": 100}, ValueError, "segment_tokens: 100; must be.*64"),
        "text for a segment": ({"segment_tokens": "64"}, ValueError, "segment_tokens: 64; .*int"),
        "float for a segment": ({"segment_tokens": 64.0}, ValueError, "segment_tokens: 64.0"),
        "text for a flag": ({"validate": "no"}, TypeError, "validate: str; must be True or False"),
        "list for a segment": ({"segment_tokens": [64]}, ValueError, "segment_tokens: .64"),
        "out expanded": (
            {"out": torch.zeros(1, 281, 1, 1).bfloat16().expand(-1, -1, 2, 128)},
            ValueError,
            "out: strides",
        ),
        "out shape": ({"out": torch.zeros(1, 281, 2, 64)}, ValueError, "out: shape"),
        "out dtype": ({"out": torch.zeros(1, 281, 2, 128)}, ValueError, "out: dtype"),
        "decay shape": ({"g_gamma": torch.zeros(1)}, ValueError, "g_gamma: shape"),
        "decay dtype": ({"g_gamma": torch.zeros(2).bfloat16()}, ValueError, "g_gamma: dtype"),
        "growth": ({"g_gamma": torch.tensor([-1.0, 0.5])}, ValueError, "g_gamma: largest.*0.5"),
        "nan decay": ({"g_gamma": torch.tensor([-1.0, torch.nan])}, ValueError, "g_gamma"),
        "fla": ({"backend": "fla"}, NotImplementedError, "fla"),
        "cute": ({"backend": "cute"}, NotImplementedError, "'cute'.*lightning_prefill"),
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
            lightning_prefill(**inputs)
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
        meta(2, dtype=torch.float32),
        cu_seqlens=meta(9, dtype=torch.int32),
        state=meta(100, 2, 64, 64, dtype=torch.float32),
        state_indices=meta(8, dtype=torch.int64),
        has_initial_state=meta(8, dtype=torch.bool),
        checkpoints=meta(3, 2, 64, 64),
        checkpoint_interval=128,
    )
    assert plan.sequences == 8 and plan.backend == "reference"


@pytest.mark.parametrize("missing", [None, "FLA is not there"])
def test_backend_on_a_gpu(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """What a CUDA device would get, with and without FLA, and why it is not our kernel."""
    monkeypatch.setattr(fla_fallback, "fla_missing", lambda: missing)
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    dims = plan_of(CASES["one chunk"]).dims
    gpu, call = torch.device("cuda"), f"chunk_lightning_attn of this test, {missing}"
    with pytest.warns(UserWarning, match="gradients are needed"):
        backend, reason = choose(call, "auto", gpu, dims, 1, "gradients are needed")
    assert backend == ("reference" if missing else "fla")
    for part in ("gradients are needed", missing or ""):
        assert part in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(call, "auto", gpu, dims, 1, "gradients are needed")[0] == backend
        assert choose(call, "auto", gpu, dims, 1, None) == ("cute", "")
    with pytest.raises(NotImplementedError, match="gradients are needed"):
        choose(call, "cute", gpu, dims, 1, "gradients are needed")
    assert choose(call, "reference", gpu, dims, 1, None)[0] == "reference"


def kernel_of(B=1, T=8192, H=64, HV=None, D=128, N=None, sms=132, **options):
    """The kernel of a call of these sizes (N packed sequences), on a GPU of so many SMs."""
    q = meta(B, T, H, D)
    dims = dims_of(q, q, meta(B, T, HV or H, D))
    options = {"initial": None, "final": None, "varlen": N is not None, **options}
    return kernel_plan(q, dims, N or B, sms=sms, **options)


def test_a_head_is_halved_where_whole_ones_leave_half_of_the_gpu_idle() -> None:
    for sizes, warpgroups, blocks in (
        ({"B": 1}, 1, 128),
        ({"B": 2}, 2, 128),
        ({"B": 4}, 2, 132),
        ({"H": 66}, 1, 132),
        ({"H": 67, "segment_tokens": 0}, 2, 67),
        ({"N": 5}, 2, 132),
        ({"D": 64}, 1, 64),
        ({"H": 16, "HV": 64}, 1, 128),
    ):
        kernel = kernel_of(**sizes)
        assert kernel.config.segments is None and kernel.first_pass is None
        assert (kernel.config.warpgroups, kernel.blocks) == (warpgroups, blocks), sizes
        assert kernel.config.parts * kernel.config.warpgroups == kernel.config.V // 64


def test_few_heads_are_cut_along_time() -> None:
    kernel = kernel_of(T=32768, H=8)
    assert kernel.config.segments == "second" and kernel.config.warpgroups == 2
    assert kernel.shape.segment_chunks == 32 and kernel.shape.max_segments == 16
    assert kernel.blocks == 8 * 16
    assert kernel.first_pass == replace(kernel.config, segments="first")
    assert kernel.prefix == PrefixConfig(128, 128) and kernel.prefix_args == (1, 16, 32)
    packed = kernel_of(T=32768, H=8, N=2)
    chunks = packed.shape.segment_chunks
    assert packed.config.segments == "second"
    assert packed.prefix == PrefixConfig(128, 128, varlen=True)
    assert packed.prefix_args == ((2 + 32766 // 64) // chunks, 0, chunks)
    assert kernel_of(T=32768, H=8, D=64).config.segments == "second"
    assert kernel_of(T=1000, H=1).config.segments is None


@pytest.mark.parametrize(
    "lengths, chunks",
    [
        ((65,) * 20 + (192,), 1),  # chunks of one token, all before the long sequence's
        ((193,) * 40 + (600,), 4),
        ((1, 0, 63, 129) * 5 + (1000, 0), 2),
        ((300,), 1),
        ((129,) * 30, 1),
    ],
    ids=str,
)
def test_prefix_looks_at_every_sequence_that_has_a_third_segment(lengths, chunks) -> None:
    packed = kernel_of(T=sum(lengths), H=1, N=len(lengths), segment_tokens=64 * chunks)
    schedule = build_schedule(packed.shape, torch.tensor((0, *lengths)).cumsum(0))
    rows = [SegmentRow(*row) for row in schedule.segments.tolist()]
    standing = [i for i, row in enumerate(rows) if row.segment == 1 and row.segments > 2]
    assert len(standing) == sum(-(-n // 64) > 2 * chunks for n in lengths)
    assert max(standing) < packed.prefix_args[0] <= len(rows)


def test_the_cut_can_be_fixed() -> None:
    assert kernel_of(T=32768, H=8, segment_tokens=0).config.segments is None
    kernel = kernel_of(B=3, T=1000, segment_tokens=128)
    assert kernel.shape.segment_chunks == 2 and kernel.config.segments == "second"
    assert kernel_of(T=128, segment_tokens=128).config.segments is None


@pytest.mark.parametrize("N", [None, 1, 3])
def test_no_prefix_where_no_sequence_has_a_third_segment(N: int | None) -> None:
    kernel = kernel_of(T=256, segment_tokens=128, N=N)
    assert kernel.first_pass is not None and kernel.prefix is None
    assert kernel_of(T=257, segment_tokens=128, N=N).prefix is not None
    assert kernel_of(T=256, segment_tokens=0, N=N).prefix is None


def test_what_no_kernel_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "missing_compiler", lambda: None)
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90a")

    def why(K=128, V=128, dtype=torch.bfloat16, **states):
        dims = replace(plan_of(CASES["one chunk"]).dims, K=K, V=V)
        q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
        return no_kernel(q, dims, states)

    assert why() is None and why(64, 64, torch.float16) is None
    assert "K = 60, V = 60" in why(60, 60)
    assert "K = 128, V = 64" in why(128, 64)
    assert "torch.float32" in why(dtype=torch.float32)
    pool = torch.zeros(3, 2, 128, 128)
    assert why(state=pool) is None and why(state=pool.mT) is None
    odd = torch.zeros(3, 2 * 128 * 128 + 1)[:, :-1].view(3, 2, 128, 128)
    assert "state: strides" in why(state=odd)
    assert "state: strides" in why(state=torch.zeros(3 * 2 * 128 * 128 + 1)[1:].view(pool.shape))
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_100a")
    assert "sm_100a" in why()


def test_fla_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_fallback, "fla_missing", lambda: None)
    dims = plan_of(CASES["one chunk"]).dims
    assert fla_fallback.missing(dims, 1) is None
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
import torch, cula.lightning, cula.lightning.upstream, cula.lightning.cases
x = torch.randn(1, 5, 1, 8)
assert cula.lightning.chunk_lightning_attn(x, x, x, 0, 4)[0].isfinite().all()
assert not torch.cuda.is_initialized()

class NoDecode:
    def find_spec(self, name, path=None, target=None):
        if name == "cula.decode":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoDecode())
for name in ("lightning_decode", "linear_attention_decode"):
    try:
        getattr(cula.lightning, name)
    except ImportError as error:
        assert "pip install cula-decode" in str(error), error
    else:
        raise SystemExit("no ImportError")
assert not hasattr(cula.lightning, "no_such_name")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
