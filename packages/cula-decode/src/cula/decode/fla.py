"""``import cula.decode.fla``: flash-linear-attention's models decode by `cula.decode`'s kernels.

FLA 0.6 asks us, call by call, for the function under its `fused_recurrent_kda`, and for
`fused_recurrent_simple_gla` where the decay is fixed per head (``g_gamma``: recurrent Lightning
Attention, retention). What our plan has no kernel for stays FLA's, with the reason logged
(``logging.getLogger("cula")``, level INFO). FLA 0.4.2 and 0.5 have no hooks there: only `patch_fla`
takes the functions over.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cula.common.checks import needs_grad, require
from cula.common.fla_backend import Adapter, Patch, Takeover, device_kind
from cula.common.layouts import new_output, new_states, to_v_first
from cula.common.reference import KdaInputs, LightningInputs
from cula.decode import run
from cula.decode.call import Plan, States
from cula.decode.plan import plan_kda, plan_lightning

__all__ = ["patch_fla", "report", "unpatch_fla"]

KDA = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
LIGHTNING = ("q", "k", "v", "g_gamma")
RECORDED = (*LIGHTNING, "initial_state")

# The function of a kept launch, and the default scale.
Launch = tuple[Callable[..., None], float]


def _kda_key(call: Mapping[str, Any]) -> tuple:
    get = call.get
    q, beta, state = call["q"], call["beta"], get("initial_state")
    A_log, dt_bias, cu_seqlens = get("A_log"), get("dt_bias"), get("cu_seqlens")
    indices, accepted = get("ssm_state_indices"), get("num_accepted_tokens")
    return (
        "fused_recurrent_kda_fwd",
        q.shape,
        call["v"].shape,
        beta.dim(),
        q.dtype,
        call["g"].dtype,
        beta.dtype,
        device_kind(call, KDA),
        state if state is None else (state.dtype, state.shape, state.stride()),
        A_log if A_log is None else A_log.dtype,
        dt_bias if dt_bias is None else (dt_bias.dtype, dt_bias.shape),
        cu_seqlens if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape),
        indices if indices is None else (indices.dtype, indices.shape),
        accepted if accepted is None else accepted.dtype,
        get("inplace_final_state", True),
        get("output_final_state"),
        get("use_gate_in_kernel"),
        get("use_qk_l2norm_in_kernel"),
        get("use_beta_sigmoid_in_kernel"),
        get("allow_neg_eigval"),
        get("lower_bound"),
        get("state_v_first"),
        get("transpose_state_layout"),
        get("out") is None,
    )


def _v_first(call: Mapping[str, Any]) -> bool:
    return bool(call.get("state_v_first") or call.get("transpose_state_layout"))


def _as_v_first(call: Mapping[str, Any], state: torch.Tensor) -> torch.Tensor:
    """States of the call's layout, V-first by shape."""
    return state if _v_first(call) else to_v_first(state)


def _new_states(call: Mapping[str, Any]) -> torch.Tensor | None:
    """Where the final states go, in FLA's layout."""
    if not call.get("output_final_state"):
        return None
    get = call.get
    return new_states(call["q"], call["v"], get("initial_state"), get("cu_seqlens"), _v_first(call))


def _separate(call: Mapping[str, Any], final: torch.Tensor | None) -> tuple:
    """(initial states, final states), V-first by shape."""
    initial = call.get("initial_state")
    if initial is not None and initial.dtype != torch.float32:
        initial = initial.float()  # as final: a kernel has one dtype of states
    if _v_first(call):
        return initial, final
    return tuple(x if x is None else to_v_first(x) for x in (initial, final))


def _separate_states(call: Mapping[str, Any], final: torch.Tensor | None) -> States:
    initial, final = _separate(call, final)
    return States(initial, False, final, cu_seqlens=call.get("cu_seqlens"))


def _new_output(call: Mapping[str, Any]) -> torch.Tensor:
    """Zeros where there may be tokens of no sequence, as FLA's function returns them."""
    v = call["v"]
    if call.get("cu_seqlens") is None:
        return new_output(v, v.dtype)
    return torch.zeros_like(v, memory_format=torch.contiguous_format)


def _kda_inputs(call: Mapping[str, Any]) -> KdaInputs:
    get = call.get
    gated = get("use_gate_in_kernel")
    return KdaInputs(
        call["q"],
        call["k"],
        call["v"],
        call["g"],
        call["beta"],
        get("A_log") if gated else None,
        get("dt_bias") if gated else None,
    )


def _form(call: Mapping[str, Any]) -> dict[str, Any]:
    get = call.get
    return {
        "use_gate_in_kernel": bool(get("use_gate_in_kernel")),
        "use_qk_l2norm_in_kernel": bool(get("use_qk_l2norm_in_kernel")),
        "use_beta_sigmoid_in_kernel": bool(get("use_beta_sigmoid_in_kernel")),
        "allow_neg_eigval": bool(get("allow_neg_eigval")),
        "lower_bound": get("lower_bound"),
        "scale": get("scale"),
    }


def _in_place(call: Mapping[str, Any]) -> bool:
    return call.get("inplace_final_state", True)


def _plan_kda(call: Mapping[str, Any], backend: str) -> Plan:
    _no_gradients(call, KDA)
    indices, state = call.get("ssm_state_indices"), call.get("initial_state")
    if not _in_place(call):
        for name in ("ssm_state_indices", "num_accepted_tokens", "out"):
            require(call.get(name) is None, name, "given", "cuLA has it with in-place states only")
        if state is not None:
            N = call["q"].shape[0]
            if call.get("cu_seqlens") is not None:
                N = call["cu_seqlens"].numel() - 1
            require(state.shape[0] == N, "initial_state", tuple(state.shape), f"must be {N} states")
    else:
        require(state is not None, "initial_state", None, "must be given to be updated in place")
        if indices is not None and indices.dim() == 1:
            # FLA reads the index of token i of sequence n at [n + i].
            tokens = call["q"].shape[0] * call["q"].shape[1]
            require(
                tokens == indices.numel(),
                "ssm_state_indices",
                f"{indices.numel()} for {tokens} tokens",
                "cuLA takes one for each token, or [N, tokens]",
            )
    out = call["v"] if call.get("out") is None else call["out"]  # v: for its shape
    states = _kda_states(call, None if _in_place(call) else _new_states(call))
    return _kda_plan(call, states, out, backend)


def _kda_states(call: Mapping[str, Any], final: torch.Tensor | None) -> States:
    if not _in_place(call):
        return _separate_states(call, final)
    return States(
        _as_v_first(call, call["initial_state"]),
        True,
        None,
        call.get("ssm_state_indices"),
        call.get("num_accepted_tokens"),
        call.get("cu_seqlens"),
    )


def _kda_plan(call: Mapping[str, Any], states: States, out: torch.Tensor, backend: str) -> Plan:
    name = "kda_decode" if _in_place(call) else "fused_recurrent_kda"
    return plan_kda(name, _kda_inputs(call), states, out, **_form(call), backend=backend)


def _no_gradients(call: Mapping[str, Any], names: tuple[str, ...]) -> None:
    tensors = (call.get(name) for name in names)
    require(not needs_grad(*tensors), "gradients", "needed", "cuLA's decoding has none")


def _run_kda(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = call.get("out")
    if out is None:
        out = _new_output(call)
    final = None if _in_place(call) else _new_states(call)
    states = _kda_states(call, final)
    plan = _kda_plan(call, states, out, "auto")
    run.run(plan, _kda_key(call), _kda_inputs(call), states, out)
    return out, call["initial_state"] if _in_place(call) else final


def _kept_kda(call: Mapping[str, Any], _: Any) -> Launch | None:
    return run.kept(_kda_key(call))


def _kda_again(call: Mapping[str, Any], kept: Launch) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    launch, default_scale = kept
    out = get("out")
    if out is None:
        out = _new_output(call)
    if get("inplace_final_state", True):
        result = call["initial_state"]
        initial, final = _as_v_first(call, result), None
    else:
        result = _new_states(call)
        initial, final = _separate(call, result)
    gated, scale, lower_bound = get("use_gate_in_kernel"), get("scale"), get("lower_bound")
    launch(
        call["q"],
        call["k"],
        call["v"],
        call["g"],
        call["beta"],
        get("A_log") if gated else None,
        get("dt_bias") if gated else None,
        initial,
        final,
        get("ssm_state_indices"),
        get("num_accepted_tokens"),
        get("cu_seqlens"),
        None,
        out,
        default_scale if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
    )
    return out, result


def _lightning_key(call: Mapping[str, Any]) -> tuple:
    get = call.get
    q, state, cu_seqlens, g_gamma = (
        call["q"],
        get("initial_state"),
        get("cu_seqlens"),
        get("g_gamma"),
    )
    return (
        "fused_recurrent_simple_gla",
        q.shape,
        call["v"].shape,
        q.dtype,
        device_kind(call, RECORDED),
        state if state is None else (state.dtype, state.shape, state.stride()),
        g_gamma if g_gamma is None else g_gamma.dtype,
        cu_seqlens if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape),
        get("g") is None,
        get("reverse"),
        get("output_final_state"),
        get("state_v_first"),
        get("transpose_state_layout"),
    )


def _plan_lightning(call: Mapping[str, Any], backend: str) -> Plan:
    require(call.get("g") is None, "g", "given", "cuLA has a fixed decay per head only")
    require(call.get("g_gamma") is not None, "g_gamma", None, "cuLA needs a decay per head")
    require(not call.get("reverse"), "reverse", True, "cuLA runs forwards only")
    _no_gradients(call, RECORDED)
    return _lightning_plan(call, _separate_states(call, _new_states(call)), call["v"], backend)


def _lightning_plan(
    call: Mapping[str, Any], states: States, out: torch.Tensor, backend: str
) -> Plan:
    inputs = LightningInputs(*(call[name] for name in LIGHTNING))
    return plan_lightning(
        "fused_recurrent_simple_gla",
        inputs,
        states,
        out,
        scale=call.get("scale"),
        backend=backend,
    )


def _run_lightning(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, final = _new_output(call), _new_states(call)
    inputs = LightningInputs(*(call[name] for name in LIGHTNING))
    states = _separate_states(call, final)
    plan = _lightning_plan(call, states, out, "auto")
    run.run(plan, _lightning_key(call), inputs, states, out)
    return out, final


def _kept_lightning(call: Mapping[str, Any], _: Any) -> Launch | None:
    return run.kept(_lightning_key(call))


def _lightning_again(
    call: Mapping[str, Any], kept: Launch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    launch, default_scale = kept
    out, result, scale = _new_output(call), _new_states(call), get("scale")
    initial, final = _separate(call, result)
    launch(
        call["q"],
        call["k"],
        call["v"],
        call["g_gamma"],
        None,
        None,
        None,
        initial,
        final,
        None,
        None,
        get("cu_seqlens"),
        None,
        out,
        default_scale if scale is None else scale,
        0.0,
    )
    return out, result


_takeover = Takeover(
    "cula.decode",
    [
        Adapter(
            "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd",
            "kda",
            _kda_key,
            _plan_kda,
            _run_kda,
            _kept_kda,
            _kda_again,
        ),
        Adapter(
            "fla.ops.simple_gla.fused_recurrent_simple_gla",
            "simple_gla",
            _lightning_key,
            _plan_lightning,
            _run_lightning,
            _kept_lightning,
            _lightning_again,
        ),
    ],
)
_takeover.register()
_takeover.warn()


def patch_fla() -> Patch:
    """Replace FLA's functions where the installed version has no hook for them (0.4.2, 0.5).

    Modules outside of FLA that have imported them by name already keep FLA's. Does nothing where
    there is a hook.

    Returns:
        The patch, in place already: ``with patch_fla(): ...`` takes it back at the end.
    """
    return Patch(_takeover)


def unpatch_fla() -> None:
    """Put FLA's functions back where `patch_fla` replaced them."""
    _takeover.undo()


def report() -> dict[str, str]:
    """Say for each of FLA's functions how it is taken over: "hook", "patch" or "no"."""
    return _takeover.report()
