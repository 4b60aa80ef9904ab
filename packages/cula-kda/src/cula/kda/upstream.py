"""The calls of upstream cuLA's `cula.kda` (inclusionAI/cuLA), as thin adapters.

For code written against that package: same arguments, same state layouts, on this package's calls.
What differs, and why:

- Any GPU or CPU, any head dimensions, grouped value heads, and the gate forms of
  `cula.kda.chunk_kda`; upstream serves K = V = 128 on one architecture a call.
- `safe_gate=False` is accepted everywhere; upstream's `chunk_kda` defaults to it and then fails.
- `output_final_state=False` returns None; upstream's Hopper call returned a state regardless.
- The layouts of states are those that upstream really has in memory, and their shapes are checked.
- Sequences without tokens, and shorter than a chunk, are right; upstream hangs or leaks there.
- `chunk_indices` is accepted and not needed. Other unknown keywords raise TypeError.
"""

from typing import Any

import torch

from cula.common.checks import needs_grad, require
from cula.kda import op


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    cp_context: object | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Upstream's differentiable `chunk_kda`: states are K-first ``[N, HV, K, V]``, float32.

    Arguments, results and errors are those of `cula.kda.chunk_kda`; the positional order is
    upstream's.
    """
    return op.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        A_log=A_log,
        dt_bias=dt_bias,
    )


def kda_prefill_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Upstream's Hopper prefill: states are V-first ``[N, HV, V, K]``, float32, and not written to.

    Upstream documents them as K-first, but its kernel and its tests have V-first.

    Returns:
        o ``[B, T, HV, V]`` and the final state, or None without ``output_final_state``.

    Raises:
        NotImplementedError: gradients are needed; this call has none, upstream's neither.
        TypeError, ValueError: as `cula.kda.chunk_kda`.
    """
    _require_inference("kda_prefill_hopper", q, k, v, g, beta, initial_state, A_log, dt_bias)
    o, final_state = op.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return o, final_state


def flash_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Upstream's Blackwell prefill: states are K-first ``[N, HV, K, V]``, as it documents them.

    Otherwise as `kda_prefill_hopper`.
    """
    _require_inference("flash_kda_prefill", q, k, v, g, beta, initial_state, A_log, dt_bias)
    o, final_state = op.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return o, final_state


def _require_inference(call: str, *tensors: torch.Tensor | None) -> None:
    require(
        not needs_grad(*tensors),
        call,
        "an input requires a gradient",
        "has no backward pass; use chunk_kda, or torch.no_grad()",
        NotImplementedError,
    )
