"""The public calls: one to a few tokens a step, straight from and into a state pool.

KDA: Kimi Team, "Kimi Linear" (2025). Lightning: Qin et al., "Lightning Attention-2" (2024).
"""

import torch

from cula.common.checks import require_tensor
from cula.common.layouts import new_output
from cula.decode.run import kda_decode_op, lightning_decode_op


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    update_state: bool = True,
    token_states: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_gate_in_kernel: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Advance Kimi Delta Attention by one token a sequence, or by a few (speculative steps).

    Per token and value head, with the state S (K x V): ``S <- diag(e^g) S``, then
    ``S <- S + beta k (v - S^T k)^T`` and ``o = scale * S^T q``. No gradients are recorded.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype; value head i reads key head ``i // (HV / H)``.
        g: ``[B, T, HV, K]``, any of these dtypes: raw gates, or with ``use_gate_in_kernel=False``
            the log decay itself (natural logarithm, at most 0).
        beta: ``[B, T, HV]``, any of these dtypes: step sizes, or their logits.
        state: the pool ``[slots, HV, V, K]`` (V-first), float32 or bfloat16; updated in place.
            Slots may lie apart. A K-first pool is passed as its transposed view.
        state_indices: the slots, int32 or int64. ``[N]``: the step of sequence n starts from, and
            leaves its final state in, slot ``state_indices[n]``. ``[N, tokens]``: the state after
            token i goes to slot ``state_indices[n, i]``, and the step starts from slot
            ``state_indices[n, num_accepted_tokens[n] - 1]``. An index that is negative or not below
            ``slots`` names no slot; a sequence that starts from no slot gets zeros as its output,
            and nothing is read or written for it. Sequences that name one slot race for it.
            None: sequence n has slot n.
        cu_seqlens: ``[N + 1]``, int32 or int64, on the device: sequences packed into B = 1.
            Without it N = B. Values on a GPU are not looked at: where they are out of range or
            decrease they are clamped, and rows of ``out`` of no sequence are not written.
        num_accepted_tokens: ``[N]``, int32 or int64, from 1; other values start from no slot.
            Only with ``state_indices`` of shape ``[N, tokens]``; 1 by default.
        update_state: False leaves ``state`` as it is (verification of drafts).
        token_states: ``[B, T, HV, V, K]`` of state's dtype and layout: gets the state after every
            token.
        A_log, dt_bias: ``[HV]``, and ``[HV * K]`` or ``[HV, K]``. With x = g + dt_bias the log
            decay is ``-e^A_log softplus(x)``; with lower_bound
            ``lower_bound * sigmoid(e^A_log x)``, or without A_log ``lower_bound * sigmoid(x)``.
        lower_bound: the smallest log decay a token, in [-5, 0).
        scale: the factor on the output, ``K ** -0.5`` by default.
        use_qk_l2norm_in_kernel: divide q and k by their norms, ``sqrt(sum of squares + 1e-6)``.
        use_beta_sigmoid_in_kernel: beta holds logits. ``allow_neg_eigval`` doubles the sigmoid.
        out: ``[B, T, HV, V]`` of v's dtype, in any strides, to write into. As ``state`` and
            ``token_states``, it must not share memory with anything else that the call is given.
        backend: "auto", or "cute", "fla", "reference" to insist. "auto" and the environment
            variable CULA_BACKEND are looked at when a kind of call is first seen.

    Returns:
        o, ``[B, T, HV, V]`` in v's dtype: ``out`` if given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: the backend insisted on cannot run this.
    """
    if out is None:
        out = _new_output(v)
    kda_decode_op(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        state,
        state_indices,
        num_accepted_tokens,
        cu_seqlens,
        token_states,
        out,
        update_state,
        lower_bound,
        scale,
        use_gate_in_kernel,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        backend,
    )
    return out


def lightning_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    state: torch.Tensor,
    *,
    state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    update_state: bool = True,
    token_states: torch.Tensor | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Advance Lightning Attention by one token a sequence, or by a few (speculative steps).

    Per token and head, with the state S (K x V): ``S <- e^g S + k v^T``, ``o = scale * S^T q``. No
    gradients are recorded.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32.
        v: ``[B, T, HV, V]`` of q's dtype; value head i reads key head ``i // (HV / H)``.
        g_gamma: ``[HV]``, float32: log decay per value head (natural logarithm, at most 0; values
            on a GPU are not looked at).
            `cula.common.recurrence.lightning_log_decay` computes a model layer's.
        state, state_indices, cu_seqlens, num_accepted_tokens, update_state, token_states, scale,
            out, backend: as for `kda_decode`.

    Returns:
        o, ``[B, T, HV, V]`` in v's dtype: ``out`` if given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, device or value.
        NotImplementedError: the backend insisted on cannot run this.
    """
    if out is None:
        out = _new_output(v)
    lightning_decode_op(
        q,
        k,
        v,
        g_gamma,
        state,
        state_indices,
        num_accepted_tokens,
        cu_seqlens,
        token_states,
        out,
        update_state,
        scale,
        backend,
    )
    return out


def _new_output(v: torch.Tensor) -> torch.Tensor:
    require_tensor("v", v)
    return new_output(v, v.dtype)
