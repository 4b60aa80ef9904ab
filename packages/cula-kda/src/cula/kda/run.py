"""From a call's arguments to its backend: what the operators of this package run.

A call whose plan was our kernels leaves its launch behind under a short key, and the next such call
goes straight to it (launch.py).
"""

from dataclasses import replace

import torch

from cula.common.checks import require, require_flags
from cula.common.layouts import to_k_first, to_v_first
from cula.common.pool import pass_states_on, scan_over_pool
from cula.common.ragged import sequences_of
from cula.common.registry import register_op
from cula.kda import fla_fallback, launch, reference
from cula.kda.plan import Plan, plan_chunk, plan_prefill, starts_by_row
from cula.kda.reference import KdaInputs


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    checkpoints: torch.Tensor | None,
    checkpoint_interval: int | None,
    segment_tokens: int | None,
    out: torch.Tensor,
    backend: str,
    validate: bool,
) -> None:
    form = (lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel)
    inputs = KdaInputs(q, k, v, g, beta, A_log, dt_bias)
    pool = launch.Pool(state, state, state_indices, has_initial_state, checkpoints)
    options = (*form, allow_neg_eigval, checkpoint_interval, segment_tokens, backend)
    key = None if validate else _key("kda_prefill", inputs, pool, cu_seqlens, options)
    if _again(key, inputs, pool, cu_seqlens, out, scale):
        return
    plan = plan_prefill(
        q,
        k,
        v,
        g,
        beta,
        state=state,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        checkpoints=checkpoints,
        checkpoint_interval=checkpoint_interval,
        segment_tokens=segment_tokens,
        out=out,
        backend=backend,
        validate=validate,
    )
    if plan.kernels is not None and not plan.empty:
        launch.run(
            plan.kernels,
            key,
            with_numbers(inputs),
            pool,
            cu_seqlens,
            out,
            scale=plan.form.scale,
            interval=checkpoint_interval,
            lower_bound=lower_bound,
        )
        return
    forward = fla_fallback.forward if plan.backend == "fla" else reference.kda_forward
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


def _key(
    call: str,
    inputs: KdaInputs,
    pool: launch.Pool,
    cu_seqlens: torch.Tensor | None,
    options: tuple,
) -> tuple | None:
    """What selects the kernels of a call; None where an argument is no tensor of its rank."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    try:
        return (
            call,
            q.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            g.dtype,
            beta.dtype,
            q.get_device(),
            k.get_device(),
            v.get_device(),
            g.get_device(),
            beta.get_device(),
            _kind(A_log),
            _kind(dt_bias),
            _kind(pool.state_indices),
            _kind(pool.mask),
            _kind(cu_seqlens),
            _states_kind(pool.initial),
            _states_kind(pool.final),
            _states_kind(pool.checkpoints),
            options,
        )
    except (AttributeError, IndexError):
        return None


def _kind(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.dtype)


def _states_kind(x: torch.Tensor | None) -> tuple | None:
    # The strides say which layout it is, and that no slot lies on another.
    return None if x is None else (x.shape, x.dtype, x.stride())


def with_numbers(inputs: KdaInputs) -> KdaInputs:
    """The inputs with the gate's parameters as the kernels take them: float32, in one dimension.

    A model in bfloat16 has them in bfloat16: converted here, its calls need no plan each.
    """
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    if _ready(A_log) and _ready(dt_bias):
        return inputs
    return KdaInputs(*inputs[:5], *(x if _ready(x) else x.float().flatten() for x in inputs[5:]))


def _ready(x: torch.Tensor | None) -> bool:
    return x is None or (x.dtype == torch.float32 and x.dim() == 1)


def _again(
    key: tuple | None,
    inputs: KdaInputs,
    pool: launch.Pool,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    scale: float | None,
) -> bool:
    """Repeats an earlier call's launch; False if there was none, or it does not fit."""
    known = launch.kept(key)
    if known is None:
        return False
    factor = inputs.q.shape[3] ** -0.5 if scale is None else scale
    try:
        known(with_numbers(inputs), pool, cu_seqlens, out, factor)
    except (TypeError, ValueError):  # what a compiled function refuses is planned anew
        return False
    return True


prefill_op = register_op("kda_prefill", _prefill, mutates=("state", "checkpoints", "out"))


def chunk_pool(
    initial_state: torch.Tensor | None, final_state: torch.Tensor | None, state_v_first: bool
) -> launch.Pool:
    """The states of `chunk_kda`, V-first by shape."""
    if not state_v_first:
        initial_state = initial_state if initial_state is None else initial_state.mT
        final_state = final_state if final_state is None else final_state.mT
    return launch.Pool(initial_state, final_state)


def chunk_key(
    inputs: KdaInputs,
    pool: launch.Pool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    form: tuple,
    state_v_first: bool,
    chunk_size: int,
    backend: str,
) -> tuple | None:
    """What selects the launch of `chunk_kda`.

    Args:
        form: (lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, safe_gate).
    """
    try:
        host = _kind(cu_seqlens_cpu)
    except AttributeError:  # no tensor
        return None
    options = (*form, host, state_v_first, chunk_size, backend)
    return _key("chunk_kda", inputs, pool, cu_seqlens, options)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    safe_gate: bool,
    state_v_first: bool,
    chunk_size: int,
    backend: str,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
    h: torch.Tensor | None,
) -> None:
    inputs = KdaInputs(q, k, v, g, beta, A_log, dt_bias)
    pool, key = chunk_pool(initial_state, final_state, state_v_first), None
    if h is None:
        form = (lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel)
        form = (*form, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate)
        key = chunk_key(
            inputs, pool, cu_seqlens, cu_seqlens_cpu, form, state_v_first, chunk_size, backend
        )
        if _again(key, inputs, pool, cu_seqlens, out, scale):
            return
    plan = plan_chunk(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        final_state=final_state,
        starts=h,
        backend=backend,
    )
    if plan.kernels is not None and not plan.empty:
        if h is not None:
            pool = replace(pool, checkpoints=starts_by_row(h, state_v_first))
        launch.run(
            plan.kernels,
            key,
            with_numbers(inputs),
            pool,
            cu_seqlens,
            out,
            scale=plan.form.scale,
            interval=None,
            lower_bound=lower_bound,
        )
        return
    with torch.no_grad():
        if plan.empty:
            pass_states_on(out, final_state, initial_state)
            return
        results = _run_chunk(
            plan,
            inputs,
            initial_state,
            output_final_state=final_state is not None,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=chunk_size,
            safe_gate=safe_gate,
            intermediate_states=h is not None,
        )
        for target, result in zip((out, final_state, h), results, strict=True):
            if target is not None and result is not None:
                target.copy_(result)


chunk_op = register_op("chunk_kda", _chunk, mutates=("out", "final_state", "h"))


def _run_chunk(
    plan: Plan,
    inputs: KdaInputs,
    initial_state: torch.Tensor | None,
    *,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    chunk_size: int,
    safe_gate: bool,
    intermediate_states: bool,
    **fla_options: object,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run `chunk_kda` by FLA or the reference, differentiably: (o, final state, h).

    `fla_options` are keywords of FLA's that mean nothing to the reference.
    """
    initial, final, h = initial_state, None, None
    if initial is not None:
        initial = (to_k_first(initial) if state_v_first else initial).float()
    if plan.backend == "fla" and not plan.empty:
        o, final, *more = fla_fallback.chunk(
            plan.form,
            inputs,
            initial,
            safe_gate=safe_gate,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_size=None if chunk_size == 64 else chunk_size,
            return_intermediate_states=intermediate_states or None,
            **fla_options,
        )
        h = more[0] if more else None
    else:
        result = reference.kda_forward(
            plan.form,
            inputs,
            initial,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            every=chunk_size if intermediate_states else None,
        )
        o = result.o.view(inputs.v.shape).to(inputs.q.dtype)
        final = result.final if output_final_state else None
        if intermediate_states:
            sequences = sequences_of(plan.dims.B, plan.dims.T, cu_seqlens, cu_seqlens_cpu)
            starts = reference.chunk_starts(result, sequences, initial, chunk_size)
            rows = 0 if plan.dims.B == 0 else starts.shape[0] // plan.dims.B
            h = starts.to(inputs.k.dtype).unflatten(0, (plan.dims.B, rows))
    if state_v_first:
        final, h = (None if x is None else to_v_first(x).contiguous() for x in (final, h))
    return o, final, h


@torch.compiler.disable
def chunk_by_fallback(
    inputs: KdaInputs,
    initial_state: torch.Tensor | None,
    form: dict,
    *,
    differentiable: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    chunk_size: int,
    safe_gate: bool,
    intermediate_states: bool,
    disable_recompute: bool,
    cp_context: object | None,
    use_graph: bool,
    max_num_seqs: int | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What is not ours: gradients, context parallelism, FLA's capture mode."""
    for arg, flag in (("disable_recompute", disable_recompute), ("use_graph", use_graph)):
        if flag:
            require_flags(**{arg: flag})
    only_fla = None
    if cp_context is not None:
        only_fla = "cp_context"
        require(initial_state is None, "initial_state", "given", "must be None with cp_context")
        require(not output_final_state, "output_final_state", True, "must be False with cp_context")
        cu_seqlens = getattr(cp_context, "cu_seqlens", None)
        require(cu_seqlens is not None, "cp_context", "without cu_seqlens", "must have cu_seqlens")
        cu_seqlens_cpu = getattr(cp_context, "cu_seqlens_cpu", None)
    if use_graph:
        # The reference needs no capture mode on a CPU, and cannot be captured on a GPU.
        only_fla = only_fla or ("use_graph" if inputs.q.is_cuda else None)
        require(not disable_recompute, "disable_recompute", True, "must be False with use_graph")
        sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        require(
            None in (sequences, max_num_seqs) or sequences == max_num_seqs,
            "cu_seqlens",
            f"{sequences} sequences",
            f"must be padded to max_num_seqs = {max_num_seqs} with use_graph",
        )
    plan = plan_chunk(
        *inputs[:5],
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
        **form,
        initial_state=initial_state,
        safe_gate=safe_gate,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        only_fla=only_fla,
        differentiable=differentiable,
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
        safe_gate=safe_gate,
        intermediate_states=intermediate_states,
        # None keeps a keyword from FLA versions that do not have it.
        disable_recompute=disable_recompute or None,
        cp_context=cp_context,
        use_graph=use_graph or None,
        max_num_seqs=max_num_seqs if use_graph else None,
    )
