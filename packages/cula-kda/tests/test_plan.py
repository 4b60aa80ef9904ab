"""The plan of a call: what it says, what it refuses, and that it needs no GPU and no compiler."""

import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from cula.common.dims import Dims
from cula.common.varlen.twin import segment_rows
from cula.kda import fla_fallback, kda_prefill, kernel_plan
from cula.kda.cases import (
    CASES,
    Case,
    kernel_configs,
    kernel_configs_of,
    kernel_plan_of,
    make_inputs,
)
from cula.kda.kernel_plan import no_kernel
from cula.kda.plan import _backend as choose
from cula.kda.plan import plan_prefill
from cula.kda.segment_plan import predicted_time, suitable_segment
from cula.kda.sm90.config import ScanConfig


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
        "segment": ({"segment_tokens": 100}, ValueError, "segment_tokens: 100; must be.*64"),
        "text for a segment": ({"segment_tokens": "64"}, ValueError, "segment_tokens: 64; .*int"),
        "float for a segment": ({"segment_tokens": 64.0}, ValueError, "segment_tokens: 64.0"),
        "list for a segment": ({"segment_tokens": [64]}, ValueError, "segment_tokens: .64"),
        "text for a flag": ({"validate": "no"}, TypeError, "validate: str; must be True or False"),
        "rows": ({"checkpoints": state[:3], "checkpoint_interval": 64}, ValueError, "4 rows"),
        "out shape": ({"out": torch.zeros(1, 281, 2, 64)}, ValueError, "out: shape"),
        "out dtype": ({"out": torch.zeros(1, 281, 2, 128)}, ValueError, "out: dtype"),
        "out expanded": (
            {"out": torch.zeros(1, 1, 2, 128).bfloat16().expand(-1, 281, -1, -1)},
            ValueError,
            "out: strides",
        ),
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


def test_what_has_no_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "missing_compiler", lambda: None)
    dims = plan_of(CASES["one chunk"]).dims
    q = gpu_tensor(1, 64, 2, 128)
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_80")
    assert "sm_80" in no_kernel(q, dims, {})
    monkeypatch.setattr(kernel_plan, "arch_of", lambda device: "sm_90a")
    assert "float32" in no_kernel(gpu_tensor(1, 2, 2, 128, dtype=torch.float32), dims, {})
    assert "K = 100" in no_kernel(q, replace(dims, K=100), {})
    for state in (
        torch.zeros(2, 2, 128, 256)[..., ::2],
        torch.zeros(33000)[1:32769].view(1, 2, 128, 128),
    ):
        assert "state: strides" in no_kernel(q, dims, {"state": state})


def test_workspace_is_bounded_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.5 KB a token and value head, and what the plan says is what is taken."""
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **options: "cute")
    monkeypatch.setattr("cula.kda.plan.sm_count", lambda device: 132)
    for varlen in (False, True):
        case = Case((1024, 1000), varlen=True) if varlen else Case((1024, 1024))
        plan = plan_of(case, segment_tokens=0)
        tokens = plan.dims.B * plan.dims.T
        assert 936 * tokens * 2 <= plan.workspace_bytes <= 1536 * tokens * 2
    cut = plan_of(Case((1024, 1024)), segment_tokens=512)
    states = 4 * 2 * 256 * 128 * 4
    whole = plan_of(Case((1024, 1024)), segment_tokens=0)
    assert cut.workspace_bytes == whole.workspace_bytes + states
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **options: "reference")
    assert plan_of(CASES["one chunk"]).workspace_bytes == 0


def segment_of(B=1, T=8192, H=8, D=128, N=None) -> int:
    return suitable_segment(Dims(B, T, H, H, D, D), N or B, N is not None, 132)


@pytest.mark.parametrize(
    ("shape", "segments"),
    [
        ({"H": 1}, 16),
        ({"H": 4}, 12),
        ({"H": 8}, 8),
        ({"H": 16}, 4),
        ({"H": 8, "T": 32768}, 8),
        ({"H": 4, "B": 2}, 8),
        ({"H": 8, "D": 64}, 11),
    ],
)
def test_few_sequences_and_heads_are_cut(shape: dict, segments: int) -> None:
    """Into segments that gain by prediction, and whose states fit beside the records."""
    chunks, D = shape.get("T", 8192) // 64, shape.get("D", 128)
    segment = segment_of(**shape)
    assert -(-chunks // segment) == segments
    scan, batch = ScanConfig(D, D, "bf16"), shape.get("B", 1)
    whole, cut = (
        predicted_time(scan, chunks, size, batch, shape["H"], 132) for size in (0, segment)
    )
    assert cut <= 0.85 * whole


@pytest.mark.parametrize(
    "shape", [{"H": 64}, {"H": 32, "B": 2}, {"T": 512}, {"T": 1000, "H": 1}, {"T": 0}, {"B": 0}]
)
def test_what_fills_the_gpu_or_is_short_stays_whole(shape: dict) -> None:
    assert segment_of(**shape) == 0


def test_packed_sequences_are_cut_where_they_are_long() -> None:
    assert segment_of(N=1) == segment_of()
    assert segment_of(N=10) >= 8192 // 64 // 10, "even ones stay whole"
    assert segment_of(N=1000) == 0, "their states would take more than the records"
    assert segment_of(N=4, H=64) == 0


def test_the_cut_can_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **options: "cute")
    monkeypatch.setattr("cula.kda.plan.sm_count", lambda device: 132)
    long = Case((8192,), H=1, HV=1, state=None)

    def kernels_of(case: Case, **options):
        return plan_of(case, **options).kernels

    assert kernels_of(long).scan.segments == "second"
    whole = kernels_of(long, segment_tokens=0)
    assert whole.configs == (whole.prep, whole.scan) and whole.scan.segments is None
    assert whole.scan_blocks == 2
    busy = kernels_of(Case((100,) * 40, varlen=True), segment_tokens=0)
    assert busy.shape.max_units == 160 and busy.scan_blocks == 132
    cut = kernels_of(Case((1000,) * 3), segment_tokens=128)
    assert cut.configs == (cut.prep, cut.scan.first_pass, cut.scan.combine, cut.scan)
    assert cut.shape.segments_each == 8 and cut.segment_states == (24, 2, 256, 128)
    assert cut.scan_blocks == cut.shape.max_units
    assert cut.first_units == 3 * 7 * 2 * 2 and cut.combine_args == (8, 3)
    pair = kernels_of(Case((1000,) * 3), segment_tokens=512)
    assert pair.combine is None and pair.first is not None
    assert kernels_of(Case((128,)), segment_tokens=128).first is None
    packed = kernels_of(CASES["varlen"], segment_tokens=64)
    assert packed.combine is not None and packed.first_units == packed.shape.max_segments * 4
    many = kernels_of(Case((100,) * 40, varlen=True), segment_tokens=512)
    assert many.followed == 4000 // 449 and many.combine_args == (8, 4)
    assert many.first_units == 8 * 2 * 2
    alone = kernels_of(Case((100,) * 9, varlen=True), segment_tokens=512)
    assert alone.followed == 2 and alone.combine is not None
    assert kernels_of(Case((100,) * 8, varlen=True), segment_tokens=512).combine is None


@pytest.mark.parametrize("segment_tokens", [64, 128, 320])
def test_followed_segments_lead_the_schedule(segment_tokens: int) -> None:
    """The first pass's rows hold every segment that others follow, and each pair of them at most
    one second segment: what `combine` finds sequences by."""
    random = torch.Generator().manual_seed(segment_tokens)
    for _ in range(60):
        n = int(torch.randint(1, 12, (1,), generator=random))
        lengths = torch.randint(0, 1200, (n,), generator=random)
        lengths *= torch.randint(0, 2, (n,), generator=random)
        bounds = [0, *lengths.cumsum(0).tolist()]
        if bounds[-1] <= segment_tokens:
            continue
        case = Case(tuple(lengths.tolist()), K=64, V=64, varlen=True, state=None)
        plan = kernel_plan_of(replace(case, segment_tokens=segment_tokens))
        rows = segment_rows(plan.shape, bounds)
        followed = [i for i, row in enumerate(rows) if row.segment + 1 < row.segments]
        assert max(followed, default=-1) < plan.followed
        walked, pairs = [], plan.combine_args[1] if plan.combine else 0
        for pair in range(pairs):
            two = {2 * pair, min(2 * pair + 1, plan.followed - 1)}
            seconds = [rows[i] for i in two if i < len(rows) and rows[i].segment == 1]
            found = [row.sequence for row in seconds if row.segments > 2]
            assert len(found) <= 1
            walked += found
        assert sorted(walked) == sorted({row.sequence for row in rows if row.segments > 2})


def test_configurations_to_compile() -> None:
    """All for the one architecture; each case's own among them, each once."""
    every = kernel_configs("all")
    assert len(set(every)) == len(every) and set(kernel_configs("common")) <= set(every)
    for name in ("one chunk", "segments", "segments, packed"):
        assert set(kernel_configs_of(CASES[name])) <= set(every)
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
