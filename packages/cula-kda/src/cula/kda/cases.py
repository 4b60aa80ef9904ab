"""Named shapes and inputs of KDA prefill: one list for tests, compile checks and benchmarks."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

from cula.common.dims import dims_of
from cula.common.gates import BetaForm, GateForm, KdaGate
from cula.common.kernel_args import States
from cula.common.varlen import schedule_configs
from cula.kda.kernel_plan import IO_DTYPES, KERNEL_ARCH, KERNEL_DIMS, KernelPlan, kernel_plan
from cula.kda.reference import KdaForm
from cula.kda.sm90.config import CHUNK, PrepConfig, ScanConfig


@dataclass(frozen=True)
class Case:
    """A call of `kda_prefill`.

    `lengths` are packed with cu_seqlens if `varlen`; otherwise they are equal and make a batch.
    `gate_mean` shifts the raw gates, so that decays reach from almost none to the lower bound, and
    `beta_mean` the logits of beta.
    `mask` sets the log decay of every so many tokens to -1000 (given gates only).
    `magnitude` scales v and the states.
    """

    lengths: tuple[int, ...]
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    varlen: bool = False
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    gate: GateForm = "bounded"
    bias: bool = True
    gate_mean: float = 0.0
    mask: int = 0
    beta: BetaForm = "given"
    beta_mean: float = 0.0
    l2norm: bool = True
    repeated_keys: bool = False
    state: torch.dtype | None = torch.float32
    index_dtype: torch.dtype = torch.int32
    magnitude: float = 1.0
    checkpoint_interval: int | None = None
    segment_tokens: int | None = None


CASES: dict[str, Case] = {
    "one chunk": Case((64,)),
    "one token": Case((1,)),
    "tail": Case((165,)),
    "batch": Case((100,) * 3, H=3, HV=3),
    "varlen": Case((65, 66, 71, 79), varlen=True),
    "varlen, empty ones": Case((0, 40, 0, 0, 130, 1, 0), varlen=True, index_dtype=torch.int64),
    "short before long": Case((3, 22, 200), varlen=True, gate_mean=30.0),
    "grouped heads": Case((90, 40), H=2, HV=8, varlen=True),
    "D = 64": Case((150,), K=64, V=64),
    "D = 60": Case((70,), K=60, V=60),
    "K = 100, V = 192": Case((70,), K=100, V=192),
    "softplus": Case((150,), gate="softplus", gate_dtype=torch.float32),
    "softplus, strong": Case((150,), gate="softplus", gate_mean=20.0),
    "sigmoid gate": Case((100,), gate="sigmoid", bias=False),
    "given gates": Case((130,), gate="given", gate_dtype=torch.float32),
    "masked": Case((150,), gate="given", gate_dtype=torch.float32, mask=23),
    "no decay": Case((100,), gate="given", gate_dtype=torch.float32, gate_mean=-1e9),
    "beta logits": Case((100,), beta="sigmoid"),
    "beta to 2": Case((100,), beta="sigmoid2"),
    "repeated keys": Case((130,), gate_mean=-8.0, repeated_keys=True),
    "repeated keys, beta 2": Case(
        (130,), gate_mean=-8.0, repeated_keys=True, beta="sigmoid2", beta_mean=20.0
    ),
    "unnormalised": Case((70,), l2norm=False, K=64, V=64),
    "float16": Case((100,), dtype=torch.float16, gate_dtype=torch.float16),
    "tiny values": Case((70,), magnitude=1e-6),
    "huge values": Case((70,), magnitude=1e5),
    "odd heads": Case((70,), H=3, HV=3, K=64, V=64),
    "bf16 pool": Case((100, 64), varlen=True, state=torch.bfloat16),
    "no state": Case((100,), state=None),
    "checkpoints": Case((128, 63, 200, 0, 64), varlen=True, checkpoint_interval=64),
    "segments": Case((300,), segment_tokens=128),
    "segments, batch": Case((200,) * 3, H=1, HV=1, segment_tokens=64, gate_mean=-8.0),
    "segments, packed": Case(
        (40, 290, 0, 129, 0, 64, 65),
        H=1,
        HV=2,
        varlen=True,
        checkpoint_interval=128,
        segment_tokens=64,
        gate_mean=-7.0,
    ),
    "segments, several lengths": Case(
        (300, 140, 500, 130, 0),
        H=1,
        HV=1,
        K=64,
        V=64,
        varlen=True,
        segment_tokens=128,
        gate_mean=-8.0,
    ),
    "segments, short ones": Case(
        (70, 60, 65), varlen=True, segment_tokens=64, state=torch.bfloat16
    ),
    "segments, D = 64": Case((260,), K=64, V=64, segment_tokens=64, gate_mean=-8.0),
    "segments, V = 64": Case((200,), V=64, H=1, HV=1, segment_tokens=64, gate_mean=-8.0),
    "segments, K = 64": Case((200,), K=64, H=1, HV=1, segment_tokens=64, gate_mean=-8.0),
    "segments, no decay": Case(
        (330,), gate="given", gate_dtype=torch.float32, gate_mean=-1e9, segment_tokens=64
    ),
    "segments, masked": Case(
        (200,), gate="given", gate_dtype=torch.float32, mask=23, segment_tokens=64
    ),
    "segments, repeated keys": Case(
        (256,), gate_mean=-8.0, repeated_keys=True, state=None, segment_tokens=64
    ),
    "segments, float16": Case(
        (192,), dtype=torch.float16, gate_dtype=torch.float16, beta="sigmoid2", segment_tokens=64
    ),
    "segments, tiny values": Case((192,), magnitude=1e-6, gate_mean=-8.0, segment_tokens=64),
    "segments, huge values": Case((192,), magnitude=1e5, gate_mean=-8.0, segment_tokens=64),
}


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, object]:
    """The keywords of `kda_prefill` for a case; the same numbers on every device.

    The pool has a slot for each sequence and one more, in shuffled order; the second sequence
    starts from zero.
    """
    torch.manual_seed(seed)
    N, tokens = len(case.lengths), sum(case.lengths)
    B, T = (1, tokens) if case.varlen else (N, case.lengths[0])
    q = torch.randn(B, T, case.H, case.K)
    k = torch.randn(B, T, case.H, case.K)
    if case.repeated_keys:
        k = k[:, :1].expand_as(k)
    if not case.l2norm:
        q, k = q / case.K**0.5, k / case.K**0.5
    x = torch.randn(B, T, case.HV, case.K) + case.gate_mean
    g = x if case.gate != "given" else -torch.nn.functional.softplus(x)
    if case.mask:
        g[:, case.mask - 1 :: case.mask] = -1000.0
    beta = torch.randn(B, T, case.HV) + case.beta_mean
    if case.beta == "given":
        beta = torch.sigmoid(beta)
    inputs: dict[str, object] = {
        "q": q.to(case.dtype),
        "k": k.to(case.dtype),
        "v": (torch.randn(B, T, case.HV, case.V) * case.magnitude).to(case.dtype),
        "g": g.to(case.gate_dtype),
        "beta": beta,
        "use_gate_in_kernel": case.gate != "given",
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_beta_sigmoid_in_kernel": case.beta != "given",
        "allow_neg_eigval": case.beta == "sigmoid2",
    }
    if case.gate in ("softplus", "bounded"):
        inputs["A_log"] = torch.linspace(-0.5, 0.5, case.HV)
    if case.gate in ("bounded", "sigmoid"):
        inputs["lower_bound"] = -5.0
    if case.bias and case.gate != "given":
        inputs["dt_bias"] = torch.randn(case.HV * case.K)
    if case.varlen:
        bounds = torch.tensor((0, *case.lengths)).cumsum(0)
        inputs["cu_seqlens"] = bounds.to(case.index_dtype)
    if case.state is not None:
        pool = torch.randn(N + 1, case.HV, case.V, case.K) * case.magnitude
        inputs["state"] = pool.to(case.state)
        inputs["state_indices"] = torch.randperm(N + 1)[:N].to(case.index_dtype)
        inputs["has_initial_state"] = torch.arange(N) != 1
    if case.checkpoint_interval:
        rows = B * T // case.checkpoint_interval
        inputs["checkpoints"] = torch.zeros(rows, case.HV, case.V, case.K)
        inputs["checkpoint_interval"] = case.checkpoint_interval
    if case.segment_tokens is not None:
        inputs["segment_tokens"] = case.segment_tokens
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def kernel_plan_of(case: Case, sms: int = 132) -> KernelPlan:
    """The kernels of a case's call, on a GPU of so many multiprocessors."""
    x: dict[str, Any] = make_inputs(case)
    bias = case.bias and case.gate != "given"
    form = KdaForm(KdaGate(case.gate, bias, -5.0), case.beta, case.l2norm, 1.0)
    return kernel_plan(
        x["q"],
        x["g"],
        x["beta"],
        form,
        dims_of(x["q"], x["k"], x["v"]),
        len(case.lengths),
        initial=x.get("state"),
        final=x.get("state"),
        state_indices=x.get("state_indices"),
        mask="has_initial_state" in x,
        checkpoints=x.get("checkpoints"),
        varlen=case.varlen,
        segment_tokens=case.segment_tokens,
        sms=sms,
    )


def kernel_configs_of(case: Case) -> tuple:
    """What the kernels of a case's call are compiled for, in the order of their launches."""
    return kernel_plan_of(case).configs


def kernel_configs(which: Literal["common", "all"] = "all", arch: str = KERNEL_ARCH) -> tuple:
    """What to compile for a GPU.

    "common": bfloat16, D = 128, float32 states: what serving engines and the FLA-named call use.
    "all": also what the cases use.
    """
    if which not in ("common", "all"):
        raise ValueError(f"which: {which!r}; must be 'common' or 'all'")
    if arch != KERNEL_ARCH:
        return ()
    v_first, k_first = States("fp32", True), States("fp32", False)
    forms: list[dict] = [
        {},
        {"final": k_first},
        {"initial": k_first, "final": k_first},
        {"initial": v_first, "final": v_first},
        {"initial": v_first, "final": v_first, "state_indices": "int32"},
        {"initial": v_first, "final": v_first, "state_indices": "int32", "mask": True},
        {"final": k_first, "checkpoints": States("bf16", False), "starts": True},
        {
            "initial": v_first,
            "final": v_first,
            "state_indices": "int32",
            "mask": True,
            "checkpoints": v_first,
        },
    ]
    gates = (("bounded", "bf16", True), ("softplus", "bf16", True), ("given", "fp32", False))
    betas = (("given", "fp32"), ("sigmoid", "bf16"))
    configs: dict = {}
    for varlen in (False, True):
        for (gate, gate_dtype, bias), (beta, beta_dtype) in product(gates, betas):
            prep = PrepConfig(128, "bf16", gate, gate_dtype, bias, beta, beta_dtype, True, varlen)
            configs[prep] = None
        for form in forms:
            whole = ScanConfig(128, 128, "bf16", varlen=varlen, **form)
            cut = replace(whole, segments="second")
            configs.update(dict.fromkeys((whole, cut.first_pass, cut.combine, cut)))
    configs.update(dict.fromkeys(schedule_configs(CHUNK, early_release=True)))
    if which == "all":
        for case in CASES.values():
            if {case.K, case.V} <= set(KERNEL_DIMS) and case.dtype in IO_DTYPES:
                configs.update(dict.fromkeys(kernel_configs_of(case)))
    return tuple(configs)
