"""Named shapes and inputs of the decode calls, for tests, compile checks and benchmarks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cula.common.gates import BetaForm, GateForm
from cula.common.layouts import state_shape, to_v_first
from cula.common.recurrence import lightning_log_decay
from cula.common.reference import KdaInputs, LightningInputs
from cula.decode import kernel_plan, plan
from cula.decode.call import States
from cula.decode.kernels.config import DecodeConfig

LOWER_BOUND = -5.0
BATCHES = tuple(2**i for i in range(14))  # through every tile that the plan chooses by size


@dataclass(frozen=True)
class Case:
    """One call.

    call: which. `lengths` are packed with cu_seqlens; without them it is B sequences of T tokens.
    gate_dtype, parameter_dtype: dtypes of g, and of A_log and dt_bias. bias: dt_bias is absent,
        [HV * K] or [HV, K].
    gate_mean, beta_mean shift the raw gates and the logits of beta; `mask` sets the log decay of
        every so many tokens to -1000 (given gates only).
    packed: q, k and v are views into one tensor. padding: elements between two slots.
    l2norm: whether the call normalises q and k, which are randn times qk_scale.
    magnitude scales v and the states.
    state: the pool's dtype; for `fused_recurrent_kda` None is no initial state.
    slots: which slots the sequences name. "mixed" has a negative index and one past the end;
        "per token" names one for every token, and `accepted` says which of them to start from.
    """

    call: Literal["kda_decode", "lightning_decode", "fused_recurrent_kda"]
    B: int = 3
    T: int = 1
    lengths: tuple[int, ...] | None = None
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    gate: GateForm = "bounded"
    gate_dtype: torch.dtype = torch.bfloat16
    parameter_dtype: torch.dtype = torch.float32
    bias: Literal["none", "flat", "2-D"] = "flat"
    gate_mean: float = 0.0
    mask: int = 0
    beta: BetaForm = "given"
    beta_dtype: torch.dtype = torch.float32
    beta_mean: float = 0.0
    l2norm: bool = True
    qk_scale: float = 1.0
    repeated_keys: bool = False
    magnitude: float = 1.0
    decay: float | None = None
    packed: bool = False
    state: torch.dtype | None = torch.float32
    v_first: bool = True
    padding: int = 0
    slots: Literal["own", "named", "mixed", "per token"] = "own"
    accepted: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    update_state: bool = True
    token_states: bool = False

    @property
    def kda(self) -> bool:
        return self.call != "lightning_decode"

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


def _named(call: Literal["kda_decode", "lightning_decode"]) -> dict[str, Case]:
    """The cases that both families have."""
    case = Case(call)
    several = replace(case, T=5)
    packed = replace(case, lengths=(3, 1, 6, 2))
    return {
        "one token": case,
        "named slots": replace(case, slots="named"),
        "no slots among them": replace(case, B=5, slots="mixed"),
        "no slots, int64": replace(case, B=5, slots="mixed", index_dtype=torch.int64),
        "bf16 state": replace(case, state=torch.bfloat16, slots="named"),
        "K-first": replace(case, v_first=False, slots="named"),
        "K-first, bf16 state": replace(case, v_first=False, state=torch.bfloat16),
        "packed qkv, padded slots": replace(case, packed=True, padding=96, slots="mixed", B=5),
        "verify one token": replace(case, update_state=False),
        "token states of one token": replace(case, token_states=True),
        "several tokens": several,
        "several tokens, named slots": replace(several, slots="mixed", index_dtype=torch.int64),
        "verify": replace(several, update_state=False, token_states=True, slots="named"),
        "verify, K-first": replace(several, update_state=False, token_states=True, v_first=False),
        "token states, bf16": replace(several, token_states=True, state=torch.bfloat16),
        "a slot a token": replace(several, slots="per token"),
        "speculative": replace(several, slots="per token", accepted=torch.int32),
        "speculative, int64": replace(
            several, slots="per token", accepted=torch.int64, index_dtype=torch.int64
        ),
        "speculative, packed": replace(packed, slots="per token", accepted=torch.int32),
        "speculative, not stored": replace(
            several, slots="per token", accepted=torch.int32, update_state=False
        ),
        "varlen": packed,
        "varlen, empty ones": replace(
            packed, lengths=(0, 4, 0, 0, 9, 1, 0), index_dtype=torch.int64
        ),
        "varlen, no slots among them": replace(packed, slots="mixed", state=torch.bfloat16),
        "grouped heads": replace(case, HV=8, slots="named"),
        "grouped heads, several tokens": replace(several, H=3, HV=6),
        "odd heads": replace(case, H=3, HV=3),
        "D = 64": replace(case, K=64, V=64, slots="named"),
        "D = 64, several tokens": replace(several, K=64, V=64),
        "D = 64, bf16 state": replace(case, K=64, V=64, state=torch.bfloat16),
        "D = 64, K-first": replace(several, K=64, V=64, v_first=False, state=torch.bfloat16),
        "K = 64, V = 128": replace(case, K=64),
        "K = 128, V = 64, K-first": replace(case, V=64, v_first=False),
        "float16": replace(case, dtype=torch.float16, gate_dtype=torch.float16),
        "float32": replace(case, dtype=torch.float32, gate_dtype=torch.float32),
        "float32, several tokens": replace(several, dtype=torch.float32, gate_dtype=torch.float32),
        "tiny values": replace(case, magnitude=1e-6),
        "huge values": replace(case, magnitude=1e5),
        # no kernel of ours: the fallbacks
        "D = 60": replace(case, K=60, V=60),
        "K = 100, V = 192": replace(several, K=100, V=192),
    }


def _kda_only() -> dict[str, Case]:
    case = Case("kda_decode")
    several = replace(case, T=6)
    given = replace(several, gate="given", bias="none", gate_dtype=torch.float32)
    recurrent = replace(several, call="fused_recurrent_kda", v_first=False)
    return {
        "softplus": replace(case, gate="softplus"),
        "softplus, strong": replace(several, gate="softplus", gate_mean=20.0),
        "softplus, weak": replace(several, gate="softplus", gate_mean=-12.0),
        "softplus, 2-D bias": replace(case, gate="softplus", bias="2-D", slots="named"),
        "sigmoid gate": replace(case, gate="sigmoid"),
        "sigmoid gate, no bias": replace(case, gate="sigmoid", bias="none"),
        "bounded, no bias": replace(several, bias="none"),
        "bounded, 2-D bf16 bias": replace(
            several, bias="2-D", parameter_dtype=torch.bfloat16, gate_dtype=torch.float32
        ),
        "float16 parameters": replace(several, bias="2-D", parameter_dtype=torch.float16),
        "at the lower bound": replace(several, gate_mean=60.0),
        "given gates": given,
        "given gates, one token": replace(given, T=1, gate_dtype=torch.bfloat16),
        "masked": replace(given, mask=2),
        "no decay": replace(given, gate_mean=-1e9),
        "beta logits": replace(case, beta="sigmoid", beta_dtype=torch.bfloat16),
        "beta logits, float32": replace(case, beta="sigmoid"),
        "beta to 2": replace(several, beta="sigmoid2", beta_dtype=torch.float16),
        "bf16 beta": replace(case, beta_dtype=torch.bfloat16),
        "unnormalised": replace(several, l2norm=False, qk_scale=128**-0.5),
        "unnormalised, long keys": replace(case, l2norm=False, gate="given", bias="none"),
        "tiny keys": replace(several, qk_scale=1e-4),  # what is added to the norms counts
        "repeated keys": replace(given, repeated_keys=True, gate_mean=-8.0),
        "repeated keys, beta 2": replace(
            given, repeated_keys=True, gate_mean=-8.0, beta="sigmoid2", beta_mean=20.0
        ),
        "recurrent": recurrent,
        "recurrent, V-first": replace(recurrent, v_first=True),
        "recurrent, no initial state": replace(recurrent, state=None),
        "recurrent, no initial state, V-first": replace(recurrent, state=None, v_first=True),
        "recurrent, varlen": replace(recurrent, lengths=(0, 5, 2, 0), gate="softplus"),
        "recurrent, one token": replace(recurrent, T=1, v_first=True),
        "recurrent, not kept": replace(recurrent, update_state=False),
        "recurrent, bf16 initial state": replace(recurrent, state=torch.bfloat16),
    }


CASES: dict[str, Case] = {
    **{f"kda: {name}": case for name, case in _named("kda_decode").items()},
    **{f"kda: {name}": case for name, case in _kda_only().items()},
    **{f"lightning: {name}": case for name, case in _named("lightning_decode").items()},
    "lightning: no decay": Case("lightning_decode", T=5, decay=0.0),
    "lightning: masking decay": Case("lightning_decode", T=5, decay=-1000.0),
}


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of a case's call; the same numbers on every device.

    A pool has two slots more than are named, in shuffled order. On the "meta" device there are
    shapes and no numbers.
    """
    draw = _Draw(torch.device(device), seed)
    B, T = (case.B, case.T) if case.lengths is None else (1, sum(case.lengths))
    inputs = _qkv(case, draw, B, T)
    if case.kda:
        inputs |= _gates(case, draw, B, T)
    elif case.decay is None:
        inputs["g_gamma"] = lightning_log_decay(case.HV, 12, 24, draw.device)
    else:
        inputs["g_gamma"] = torch.full((case.HV,), case.decay, device=draw.device)
    if case.lengths is not None:
        bounds = torch.tensor((0, *case.lengths)).cumsum(0)
        inputs["cu_seqlens"] = bounds.to(draw.device, case.index_dtype)
    if case.call == "fused_recurrent_kda":
        inputs |= {"output_final_state": case.update_state, "state_v_first": case.v_first}
        if case.state is not None:
            shape = state_shape(case.sequences, case.HV, case.K, case.V, case.v_first)
            inputs["initial_state"] = draw.randn(shape, case.state, case.magnitude)
    else:
        inputs |= _pool(case, draw, B, T)
    return inputs


class _Draw:
    """Random tensors: drawn on the CPU, so that every device gets the same."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def randn(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scale: float = 1.0,
        mean: float = 0.0,
        map: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        x = torch.randn(shape, generator=self.generator) * scale + mean
        return (x if map is None else map(x)).to(self.device, dtype)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)


def _qkv(case: Case, draw: _Draw, B: int, T: int) -> dict[str, torch.Tensor]:
    rows = (B, T)
    if case.packed:  # [B, T, q's channels and k's and v's]
        key, value = case.H * case.K, case.HV * case.V
        together = draw.randn((*rows, 2 * key + value), case.dtype, case.magnitude)
        q, k, v = together.split((key, key, value), dim=-1)
        q, k = q.unflatten(-1, (case.H, case.K)), k.unflatten(-1, (case.H, case.K))
        return {"q": q, "k": k, "v": v.unflatten(-1, (case.HV, case.V))}
    q = draw.randn((*rows, case.H, case.K), case.dtype, case.qk_scale)
    k = draw.randn((*rows, case.H, case.K), case.dtype, case.qk_scale)
    if case.repeated_keys:
        k = k[:, :1].expand(k.shape)
    return {"q": q, "k": k, "v": draw.randn((*rows, case.HV, case.V), case.dtype, case.magnitude)}


def _gates(case: Case, draw: _Draw, B: int, T: int) -> dict[str, Any]:
    def log_decay(x: torch.Tensor) -> torch.Tensor:
        x = -torch.nn.functional.softplus(x)
        if case.mask:
            x[:, case.mask - 1 :: case.mask] = -1000.0
        return x

    given = case.gate == "given"
    g = draw.randn(
        (B, T, case.HV, case.K),
        case.gate_dtype,
        mean=case.gate_mean,
        map=log_decay if given else None,
    )
    beta = draw.randn(
        (B, T, case.HV),
        case.beta_dtype,
        mean=case.beta_mean,
        map=torch.sigmoid if case.beta == "given" else None,
    )
    inputs: dict[str, Any] = {
        "g": g,
        "beta": beta,
        "use_gate_in_kernel": not given,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_beta_sigmoid_in_kernel": case.beta != "given",
        "allow_neg_eigval": case.beta == "sigmoid2",
    }
    if case.gate in ("softplus", "bounded"):
        inputs["A_log"] = draw.randn((case.HV,), case.parameter_dtype, 0.5)
    if case.gate in ("bounded", "sigmoid"):
        inputs["lower_bound"] = LOWER_BOUND
    if case.bias != "none":
        shape = (case.HV, case.K) if case.bias == "2-D" else (case.HV * case.K,)
        inputs["dt_bias"] = draw.randn(shape, case.parameter_dtype)
    return inputs


def _pool(case: Case, draw: _Draw, B: int, T: int) -> dict[str, Any]:
    """The state pool and everything that says what to do with it."""
    if case.state is None:
        raise ValueError("state: None; only fused_recurrent_kda starts without a state")
    N, matrix = case.sequences, (case.V, case.K)
    columns = max(case.lengths or (T,)) if case.slots == "per token" else 1
    named = N * columns
    slots = N if case.slots == "own" else named + 2
    memory = matrix if case.v_first else matrix[::-1]
    # padding: the slots of a buffer with more elements a slot
    size = case.HV * case.V * case.K
    rows = draw.randn((slots, size + case.padding), case.state, case.magnitude)
    state = rows[:, :size].unflatten(1, (case.HV, *memory))
    inputs: dict[str, Any] = {
        "state": state if case.v_first else to_v_first(state),
        "update_state": case.update_state,
    }
    if case.slots != "own":
        indices = draw.permutation(slots)[:named]
        if case.slots == "per token":
            indices = indices.view(N, columns)
            if N > 1:
                indices[0, -1] = -1  # the state after this token is not wanted
        if case.slots == "mixed":
            indices[0], indices[-1] = -1, slots
        inputs["state_indices"] = indices.to(draw.device, case.index_dtype)
    if case.accepted is not None:
        accepted = torch.arange(N) % columns + 1
        inputs["num_accepted_tokens"] = accepted.to(draw.device, case.accepted)
    if case.token_states:
        shape = (B, T, case.HV, *memory)
        states = torch.zeros(shape, dtype=case.state, device=draw.device)
        inputs["token_states"] = states if case.v_first else to_v_first(states)
    return inputs


# --- what is compiled ahead of time ---------------------------------------------------------------


def kernel_config(case: Case, arch: str = "sm_90a") -> DecodeConfig | None:
    """What the kernel of a case is compiled for; None if there is no kernel for its sizes."""
    if case.K not in kernel_plan.KERNEL_DIMS or case.V not in kernel_plan.KERNEL_DIMS:
        return None
    given = make_inputs(case, "meta")
    out = torch.empty_like(given["v"])
    recurrent = case.call == "fused_recurrent_kda"
    if recurrent:
        states = _recurrent_states(case, given)
    else:
        states = States(
            given["state"],
            case.update_state,
            indices=given.get("state_indices"),
            accepted=given.get("num_accepted_tokens"),
            cu_seqlens=given.get("cu_seqlens"),
            tokens=given.get("token_states"),
        )
    if case.kda:
        inputs = KdaInputs._make(given.get(name) for name in KdaInputs._fields)
        flags = {name: given[name] for name in given if name.startswith(("use_", "allow_"))}
        made = plan.plan_kda(
            case.call,
            inputs,
            states,
            out,
            lower_bound=given.get("lower_bound"),
            scale=None,
            **flags,
            backend="reference",
        )
    else:
        inputs = LightningInputs(*(given[name] for name in LightningInputs._fields))
        made = plan.plan_lightning(case.call, inputs, states, out, scale=None, backend="reference")
    return kernel_plan.kernel_config(made.dims, made.sequences, made.form, inputs, states, arch)


def _recurrent_states(case: Case, given: dict[str, Any]) -> States:
    """As `fused_recurrent_kda` makes them: float32, V-first by shape."""
    shape = state_shape(case.sequences, case.HV, case.K, case.V, case.v_first)
    final = None
    if case.update_state:
        final = torch.empty(shape, dtype=torch.float32, device="meta")
    pair = (given.get("initial_state"), final)
    initial, final = (
        x if x is None or case.v_first else to_v_first(x)
        for x in (x if x is None else x.float() for x in pair)
    )
    return States(initial, False, final, cu_seqlens=given.get("cu_seqlens"))


def serving_cases() -> Iterator[Case]:
    """What serving models needs: head dimension 128, bfloat16 tokens, V-first pools."""
    kda = Case("kda_decode", B=1)
    forms = [Case("lightning_decode", B=1)]
    for gate in ("bounded", "softplus"):
        forms.append(replace(kda, gate=gate, beta="given", beta_dtype=torch.float32))
        forms.append(replace(kda, gate=gate, beta="sigmoid", beta_dtype=torch.bfloat16))
    for form in forms:
        for state in (torch.float32, torch.bfloat16):
            case = replace(form, state=state)
            for B in BATCHES:
                yield replace(case, B=B)
                yield replace(case, B=B, slots="named")
            named = replace(case, T=4, slots="named")
            yield replace(named, lengths=(4,))
            yield replace(named, update_state=False)
            yield replace(named, slots="per token", accepted=torch.int32)


def kernel_configs(
    which: Literal["common", "all"] = "all", arch: str = "sm_90a"
) -> tuple[DecodeConfig, ...]:
    """What to compile for a GPU, each configuration once.

    "common" is what `serving_cases` need: what to fill a cache with ahead of time. "all" adds
    every code path of the kernels: what a compile check goes through.
    """
    if which not in ("common", "all"):
        raise ValueError(f"which: {which!r}; must be 'common' or 'all'")
    cases = list(serving_cases())
    if which == "all":
        for case in CASES.values():
            batches = (case.B, *BATCHES) if case.lengths is None else (case.B,)
            cases += [replace(case, B=B) for B in batches]
    configs = (kernel_config(case, arch) for case in cases)
    return tuple(dict.fromkeys(config for config in configs if config is not None))
