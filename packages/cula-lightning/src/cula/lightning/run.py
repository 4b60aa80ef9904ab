"""From a call's arguments to its backend: what the operators of this package run.

A call whose plan was our kernel leaves its launch behind under a short key, and the next such call
goes straight to it (launch.py).
"""

import torch

from cula.common.layouts import to_k_first, to_v_first
from cula.common.pool import pass_states_on, scan_over_pool
from cula.common.registry import register_op
from cula.lightning import fla_fallback, launch, reference
from cula.lightning.call import Plan
from cula.lightning.plan import plan_chunk, plan_prefill
from cula.lightning.reference import LightningInputs


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    state: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
    checkpoints: torch.Tensor | None,
    checkpoint_interval: int | None,
    segment_tokens: int | None,
    out: torch.Tensor,
    backend: str,
    validate: bool,
) -> None:
    key = None
    if not validate:
        try:
            key = (
                q.shape,
                v.shape,
                q.dtype,
                q.get_device(),
                None if state is None else (state.shape, state.dtype, state.stride()),
                _kind(state_indices),
                _kind(has_initial_state),
                _kind(cu_seqlens),
                None
                if checkpoints is None
                else (checkpoints.shape, checkpoints.dtype, checkpoints.stride()),
                checkpoint_interval,
                segment_tokens,
                backend,
            )
        except (AttributeError, IndexError):  # something is no tensor, or has too few dimensions
            key = None
    known = launch.kept(key)
    if known is not None:
        try:
            known(
                q,
                k,
                v,
                g_gamma,
                state,
                state,
                state_indices,
                has_initial_state,
                checkpoints,
                cu_seqlens,
                out,
                q.shape[3] ** -0.5 if scale is None else scale,
            )
            return
        except (TypeError, ValueError):  # what the compiled function refuses is planned anew
            pass
    plan = plan_prefill(
        q,
        k,
        v,
        g_gamma,
        state=state,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        scale=scale,
        checkpoints=checkpoints,
        checkpoint_interval=checkpoint_interval,
        segment_tokens=segment_tokens,
        out=out,
        backend=backend,
        validate=validate,
    )
    if plan.backend == "cute" and not plan.empty:
        launch.run(
            plan,
            key,
            q,
            k,
            v,
            g_gamma,
            state,
            state,
            state_indices,
            has_initial_state,
            checkpoints,
            cu_seqlens,
            out,
        )
        return
    forward = fla_fallback.forward if plan.backend == "fla" else reference.lightning_forward
    inputs = LightningInputs(q, k, v, g_gamma)
    with torch.no_grad():
        scan_over_pool(
            lambda initial: forward(
                plan.form, inputs, initial, cu_seqlens=cu_seqlens, every=checkpoint_interval
            ),
            out,
            state,
            state_indices,
            has_initial_state,
            checkpoints,
            checkpoint_interval,
            sequences=plan.sequences,
            empty=plan.empty,
        )


def _kind(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.dtype)


prefill_op = register_op("lightning_prefill", _prefill, mutates=("state", "checkpoints", "out"))


def chunk_key(
    q: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    state_v_first: bool,
    chunk_size: int,
    backend: str,
) -> tuple | None:
    """What selects the launch of `chunk_lightning_attn`; None where an argument is no tensor."""
    try:
        return (
            q.shape,
            v.shape,
            q.dtype,
            q.get_device(),
            _kind(initial_state),
            final_state is None,
            _kind(cu_seqlens),
            _kind(cu_seqlens_cpu),
            state_v_first,
            chunk_size,
            backend,
        )
    except AttributeError:
        return None


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float | None,
    state_v_first: bool,
    chunk_size: int,
    backend: str,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> None:
    states = (initial_state, final_state)  # V-first by shape
    if not state_v_first:
        states = tuple(x if x is None else x.mT for x in states)
    key = chunk_key(
        q,
        v,
        initial_state,
        final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        state_v_first,
        chunk_size,
        backend,
    )
    known = launch.kept(key)
    if known is not None:
        try:
            factor = q.shape[3] ** -0.5 if scale is None else scale
            known(q, k, v, g_gamma, *states, None, None, None, cu_seqlens, out, factor)
            return
        except (TypeError, ValueError):  # what the compiled function refuses is planned anew
            pass
    plan = plan_chunk(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        final_state=final_state,
        backend=backend,
    )
    if plan.backend == "cute" and not plan.empty:
        launch.run(plan, key, q, k, v, g_gamma, *states, None, None, None, cu_seqlens, out)
        return
    with torch.no_grad():
        if plan.empty:
            pass_states_on(out, final_state, initial_state)
            return
        results = _run_chunk(
            plan,
            LightningInputs(q, k, v, g_gamma),
            initial_state,
            output_final_state=final_state is not None,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=chunk_size,
        )
        for target, result in zip((out, final_state), results, strict=True):
            if target is not None and result is not None:
                target.copy_(result)


chunk_op = register_op("chunk_lightning_attn", _chunk, mutates=("out", "final_state"))


def _run_chunk(
    plan: Plan,
    inputs: LightningInputs,
    initial_state: torch.Tensor | None,
    *,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `chunk_lightning_attn` by FLA or the reference, differentiably: (o, final state)."""
    initial = initial_state
    if initial is not None:
        initial = (to_k_first(initial) if state_v_first else initial).float()
    if plan.backend == "fla" and not plan.empty:
        o, final = fla_fallback.chunk(
            plan.form,
            inputs,
            initial,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=chunk_size,
        )
    else:
        result = reference.lightning_forward(
            plan.form, inputs, initial, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu
        )
        o = result.o.view(inputs.v.shape).to(inputs.q.dtype)
        final = result.final if output_final_state else None
    if state_v_first and final is not None:
        final = to_v_first(final).contiguous()
    return o, final


@torch.compiler.disable
def chunk_by_fallback(
    inputs: LightningInputs,
    initial_state: torch.Tensor | None,
    *,
    scale: float | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    chunk_size: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is not ours: gradients."""
    plan = plan_chunk(
        *inputs[:3],
        scale=scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        differentiable=True,
        backend=backend,
    )
    return _run_chunk(
        plan,
        inputs,
        initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
    )
