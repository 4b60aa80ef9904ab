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
from cula.common.fla_adapter import Adapter, device_kind
from cula.common.fla_backend import Patch, Takeover
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


def _separate(call: Mapping[str, Any]) -> tuple:
    """What a call from states to new states works on: (out, final states in FLA's layout, and
    initial and final states V-first by shape)."""
    get = call.get
    q, v, initial, cu_seqlens = call["q"], call["v"], get("initial_state"), get("cu_seqlens")
    v_first = get("state_v_first") or get("transpose_state_layout")
    if cu_seqlens is None:
        out = new_output(v, v.dtype)
    else:  # zeros where there may be tokens of no sequence, as FLA's function returns them
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    result = final = None
    if get("output_final_state"):
        result = final = new_states(q, v, initial, cu_seqlens, bool(v_first))
    if initial is not None and initial.dtype != torch.float32:
        initial = initial.float()  # as final: a kernel has one dtype of states
    if not v_first:
        initial = initial if initial is None else to_v_first(initial)
        final = final if final is None else to_v_first(final)
    return out, result, initial, final


def _in_place(call: Mapping[str, Any]) -> tuple:
    """The same of a call that updates its states: (out, the states as given, V-first)."""
    get = call.get
    out, state = get("out"), call["initial_state"]
    if out is None and get("cu_seqlens") is None:
        out = new_output(call["v"], call["v"].dtype)
    elif out is None:
        out = torch.zeros_like(call["v"], memory_format=torch.contiguous_format)
    if get("state_v_first") or get("transpose_state_layout"):
        return out, state, state
    return out, state, to_v_first(state)


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


def _plan_kda(call: Mapping[str, Any], backend: str) -> Plan:
    _no_gradients(call, KDA)
    require(
        not (call.get("state_v_first") and call.get("transpose_state_layout")),
        "transpose_state_layout",
        True,
        "is the older name of state_v_first; FLA takes one of them",
    )
    indices, state = call.get("ssm_state_indices"), call.get("initial_state")
    if not call.get("inplace_final_state", True):
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
    return _kda_plan(call, backend)[0]


def _kda_plan(call: Mapping[str, Any], backend: str) -> tuple[Plan, KdaInputs, States, tuple]:
    """The plan, what it is of, and the call's results."""
    get, inputs = call.get, _kda_inputs(call)
    if get("inplace_final_state", True):
        name = "kda_decode"
        out, result, state = _in_place(call)
        accepted = get("num_accepted_tokens")
        states = States(state, True, None, get("ssm_state_indices"), accepted, get("cu_seqlens"))
    else:
        name = "fused_recurrent_kda"
        out, result, initial, final = _separate(call)
        states = States(initial, False, final, cu_seqlens=get("cu_seqlens"))
    plan = plan_kda(name, inputs, states, out, **_form(call), backend=backend)
    return plan, inputs, states, (out, result)


def _no_gradients(call: Mapping[str, Any], names: tuple[str, ...]) -> None:
    tensors = (call.get(name) for name in names)
    require(not needs_grad(*tensors), "gradients", "needed", "cuLA's decoding has none")


def _run_kda(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan, inputs, states, results = _kda_plan(call, "auto")
    run.run(plan, _kda_key(call), inputs, states, results[0])
    return results


def _kept_kda(call: Mapping[str, Any], _: Any) -> Launch | None:
    return run.kept(_kda_key(call))


def _kda_again(call: Mapping[str, Any], kept: Launch) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    launch, default_scale = kept
    if get("inplace_final_state", True):
        out, result, initial = _in_place(call)
        final = None
    else:
        out, result, initial, final = _separate(call)
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
    return _lightning_plan(call, backend)[0]


def _lightning_plan(
    call: Mapping[str, Any], backend: str
) -> tuple[Plan, LightningInputs, States, tuple]:
    """The plan, what it is of, and the call's results."""
    inputs = LightningInputs(*(call[name] for name in LIGHTNING))
    out, result, initial, final = _separate(call)
    states = States(initial, False, final, cu_seqlens=call.get("cu_seqlens"))
    plan = plan_lightning(
        "fused_recurrent_simple_gla",
        inputs,
        states,
        out,
        scale=call.get("scale"),
        backend=backend,
    )
    return plan, inputs, states, (out, result)


def _run_lightning(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan, inputs, states, results = _lightning_plan(call, "auto")
    run.run(plan, _lightning_key(call), inputs, states, results[0])
    return results


def _kept_lightning(call: Mapping[str, Any], _: Any) -> Launch | None:
    return run.kept(_lightning_key(call))


def _lightning_again(
    call: Mapping[str, Any], kept: Launch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    get = call.get
    launch, default_scale = kept
    out, result, initial, final = _separate(call)
    scale = get("scale")
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


# What FLA's function further out passes to `fused_recurrent_kda_fwd`, for whom it stands.
_OUTER = Adapter(
    "fla.ops.kda.fused_recurrent_kda",
    "kda",
    _kda_key,
    _plan_kda,
    _run_kda,
    _kept_kda,
    _kda_again,
    {"inplace_final_state": False},
)
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
    [_OUTER],
)
_takeover.register()
_takeover.warn()


def patch_fla(past_dispatch: bool = False) -> Patch:
    """Replace FLA's functions where the installed version has no hook for them (0.4.2, 0.5).

    Modules outside of FLA that have imported them by name already keep FLA's. Does nothing where
    there is a hook, unless asked to.

    Args:
        past_dispatch: replace the hooked functions too, and the whole `fused_recurrent_kda`.
            Calls that are ours then pay nothing for FLA's dispatch, several microseconds of the
            host's each; FLA's other backends are asked only about those that are not.

    Returns:
        The patch, in place already: ``with patch_fla(): ...`` takes it back at the end.
    """
    return Patch(_takeover, past_dispatch)


def unpatch_fla() -> None:
    """Put FLA's functions back where `patch_fla` replaced them."""
    _takeover.undo()


def report() -> dict[str, str]:
    """Say for each of FLA's functions how it is taken over: "hook", "patch" or "no"."""
    return _takeover.report()
