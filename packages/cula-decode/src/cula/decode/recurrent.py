"""Calls whose final states are new tensors, as FLA's recurrent functions return them.

As in run.py, a call whose plan was our kernel leaves its launch behind, and the next such call goes
straight to it.
"""

from typing import Any

import torch

from cula.common.reference import KdaInputs, LightningInputs
from cula.decode import run
from cula.decode.call import States
from cula.decode.plan import plan_kda, plan_lightning


def recurrent_kda(
    inputs: KdaInputs,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    **form: Any,
) -> None:
    """Run KDA from states `initial`, if any, into `out` and `final`, if any.

    Args:
        inputs: A_log and dt_bias are None unless the gate is computed in the kernel.
        initial, final: `[N, HV, V, K]` by shape, float32; a K-first one is the transposed view.
        cu_seqlens: `[N + 1]`, or None.
        out: `[B, T, HV, V]`.
        form: `plan_kda`'s gate, norm and scale keywords, all of them.
    """
    A_log, dt_bias, beta = inputs.A_log, inputs.dt_bias, inputs.beta
    lower_bound = form["lower_bound"]
    key = (
        *_kind(inputs, initial, final, cu_seqlens),
        inputs.g.dtype,
        beta.dtype,
        beta.shape,
        None if A_log is None else A_log.dtype,
        None if dt_bias is None else (dt_bias.dtype, dt_bias.shape),
        lower_bound,
        form["use_gate_in_kernel"],
        form["use_qk_l2norm_in_kernel"],
        form["use_beta_sigmoid_in_kernel"],
        form["allow_neg_eigval"],
    )
    if _known(key, inputs, initial, final, cu_seqlens, out, form["scale"], lower_bound):
        return
    states = States(initial, False, final, cu_seqlens=cu_seqlens)
    plan = plan_kda("fused_recurrent_kda", inputs, states, out, **form, backend="auto")
    run._run(plan, key, inputs, states, out)


def recurrent_lightning(
    inputs: LightningInputs,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float | None,
) -> None:
    """Run Lightning Attention from `initial` into `out` and `final`, as `recurrent_kda` does."""
    key = _kind(inputs, initial, final, cu_seqlens)
    tensors = (*inputs, None, None, None)
    if _known(key, tensors, initial, final, cu_seqlens, out, scale, None):
        return
    states = States(initial, False, final, cu_seqlens=cu_seqlens)
    plan = plan_lightning(
        "fused_recurrent_simple_gla", inputs, states, out, scale=scale, backend="auto"
    )
    run._run(plan, key, inputs, states, out)


def _kind(
    inputs: KdaInputs | LightningInputs,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple:
    """What selects a kernel, apart from KDA's gates; the compiled function checks the rest."""
    q = inputs[0]
    return (
        type(inputs),
        q.shape,
        inputs[2].shape,
        q.dtype,
        q.get_device(),
        None if initial is None else (initial.dtype, initial.shape, initial.stride()),
        None if final is None else (final.dtype, final.shape, final.stride()),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape),
    )


def _known(
    key: tuple,
    tensors: tuple,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    scale: float | None,
    lower_bound: float | None,
) -> bool:
    """Go the short way, if this kind of call has one."""
    known = run._launches.get(key)
    if known is None:
        return False
    launch, default_scale = known
    try:
        launch(
            *tensors,
            initial,
            final,
            None,
            None,
            cu_seqlens,
            None,
            out,
            default_scale if scale is None else scale,
            0.0 if lower_bound is None else lower_bound,
        )
    except (TypeError, ValueError):  # what the compiled function refuses is planned anew
        return False
    return True
