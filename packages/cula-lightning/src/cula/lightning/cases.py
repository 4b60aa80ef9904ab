"""Named shapes and inputs of Lightning prefill: one list for tests, compile checks, benchmarks."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cula.common.dims import dims_of
from cula.common.kernel_args import States
from cula.common.recurrence import lightning_log_decay
from cula.common.varlen import schedule_configs
from cula.lightning.kernel_plan import KERNEL_ARCH, KERNEL_DIMS, KernelPlan, kernel_plan
from cula.lightning.sm90.config import CHUNK, PrefillConfig, PrefixConfig


@dataclass(frozen=True)
class Case:
    """A call of `lightning_prefill`.

    `lengths` are packed with cu_seqlens if `varlen`; otherwise they are equal and make a batch.
    `decay` is the log decay of every head, or None for the layer formula (layer 12 of 24).
    """

    lengths: tuple[int, ...]
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    varlen: bool = False
    dtype: torch.dtype = torch.bfloat16
    decay: float | None = None
    magnitude: float = 1.0
    state: torch.dtype | None = torch.float32
    index_dtype: torch.dtype = torch.int32
    checkpoint_interval: int | None = None
    segment_tokens: int | None = None


CASES: dict[str, Case] = {
    "one chunk": Case((64,)),
    "one token": Case((1,)),
    "tail": Case((165,)),
    "batch": Case((100,) * 3, H=3, HV=3),
    "varlen": Case((65, 66, 71, 79), varlen=True),
    "varlen, empty ones": Case((0, 40, 0, 0, 130, 1, 0), varlen=True, index_dtype=torch.int64),
    "short before long": Case((3, 22, 200), varlen=True, decay=-5.0),
    "grouped heads": Case((90, 40), H=2, HV=8, varlen=True),
    "D = 64": Case((150,), K=64, V=64),
    "D = 60": Case((70,), K=60, V=60),
    "K = 100, V = 192": Case((70,), K=100, V=192),
    "no decay": Case((150,), decay=0.0),
    "strong decay": Case((150,), decay=-40.0),
    "masking decay": Case((70,), decay=-1000.0),
    "float16": Case((100,), dtype=torch.float16),
    "odd heads": Case((70,), H=3, HV=3, K=64, V=64),
    "tiny values": Case((70,), magnitude=1e-6),
    "huge values": Case((70,), magnitude=1e5),
    "bf16 pool": Case((100, 64), varlen=True, state=torch.bfloat16),
    "no state": Case((100,), state=None),
    "segments": Case((300,), H=1, HV=1, segment_tokens=128),
    "segments, varlen": Case(
        (40, 290, 0, 129), H=1, HV=2, varlen=True, checkpoint_interval=64, segment_tokens=128
    ),
    "segments, short ones": Case((70, 60, 65), H=2, HV=2, varlen=True, segment_tokens=64),
    "segments, a long one last": Case(
        (65,) * 4 + (200,), H=1, HV=1, K=64, V=64, varlen=True, segment_tokens=64
    ),
    "segments, two": Case((150,), dtype=torch.float16, segment_tokens=128),
    "segments, many": Case((1240,), H=1, HV=1, K=64, V=64, segment_tokens=64),
    "segments out of reach": Case((450,), H=1, HV=1, decay=-1.0, segment_tokens=192),
    "checkpoints": Case((128, 63, 200, 0, 64), varlen=True, checkpoint_interval=64),
}


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, object]:
    """The keywords of `lightning_prefill` for a case; the same numbers on every device.

    The pool has a slot for each sequence and one more, in shuffled order; the second sequence
    starts from zero. `magnitude` scales v and the states.
    """
    torch.manual_seed(seed)
    N, tokens = len(case.lengths), sum(case.lengths)
    B, T = (1, tokens) if case.varlen else (N, case.lengths[0])
    g_gamma = lightning_log_decay(case.HV, 12, 24)
    if case.decay is not None:
        g_gamma = torch.full_like(g_gamma, case.decay)
    inputs: dict[str, object] = {
        "q": torch.randn(B, T, case.H, case.K).to(case.dtype),
        "k": torch.randn(B, T, case.H, case.K).to(case.dtype),
        "v": (torch.randn(B, T, case.HV, case.V) * case.magnitude).to(case.dtype),
        "g_gamma": g_gamma,
    }
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
    return kernel_plan(
        x["q"],
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
    forms = [
        {},
        {"final": k_first},
        {"initial": k_first, "final": k_first},
        {"initial": v_first, "final": v_first},
        {"initial": v_first, "final": v_first, "state_indices": "int32"},
        {"initial": v_first, "final": v_first, "state_indices": "int32", "mask": True},
    ]
    configs: dict[Any, None] = {
        PrefillConfig(K=128, V=128, warpgroups=groups, io="bf16", varlen=varlen, **form): None
        for varlen in (False, True)
        for groups in (1, 2)
        for form in forms
    }
    for config in list(configs):
        second = replace(config, segments="second")
        configs[second] = configs[replace(second, segments="first", final=None)] = None
    configs.update(dict.fromkeys(PrefixConfig(128, 128, varlen) for varlen in (False, True)))
    configs.update(dict.fromkeys(schedule_configs(CHUNK, early_release=True)))
    if which == "all":
        for case in CASES.values():
            if (case.K, case.V) in KERNEL_DIMS and case.dtype != torch.float32:
                for sms in (1, 132):
                    plan = kernel_plan_of(case, sms)
                    kernels = (plan.config, plan.first_pass, plan.prefix)
                    configs.update(dict.fromkeys(x for x in kernels if x is not None))
    return tuple(configs)
