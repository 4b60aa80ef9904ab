"""The recurrences in plain PyTorch, one token at a time: the truth that everything is held to.

Row vectors per token t and value head; the state S is K x V (K-first); gates are natural
logarithms of the decay, at most 0:

* Lightning (Qin et al., "Lightning Attention-2", 2024):
  ``S <- e^g S + k_t v_t^T``, ``o_t = scale * S^T q_t``
* KDA (Kimi Team, "Kimi Linear", 2025): ``S <- diag(e^{g_t}) S``, then
  ``S <- S + beta_t k_t (v_t - S^T k_t)^T``, ``o_t = scale * S^T q_t``

Everything is differentiable and runs on any device, in float32 unless ``dtype=torch.float64`` asks
for the oracle. Inputs may have any floating dtype; they are converted, never rounded.
"""

from collections.abc import Iterator

import torch

from cula.common.checks import needs_grad, require, require_number


def kda_log_decay(
    g: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Turn raw gates into KDA's log decay, with ``x = g + dt_bias``.

    =========== =========== ========================================
    lower_bound A_log       log decay
    =========== =========== ========================================
    None        given       ``-e^{A_log} softplus(x)``, unbounded
    given       given       ``lower_bound * sigmoid(e^{A_log} x)``
    given       None        ``lower_bound * sigmoid(x)``
    =========== =========== ========================================

    Args:
        g: raw gates [..., HV, K].
        A_log: [HV].
        dt_bias: [HV, K] or [HV * K].
        lower_bound: the smallest log decay, below 0.
        dtype: the dtype to compute in and return.

    Returns:
        The natural logarithm of the decay, [..., HV, K].

    Raises:
        ValueError: neither ``A_log`` nor ``lower_bound`` is given.
    """
    require(
        A_log is not None or lower_bound is not None,
        "A_log",
        None,
        "must be given unless lower_bound is",
    )
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.to(dtype).exp().unsqueeze(-1)
    if lower_bound is None:
        # log(e^x + e^0) is softplus without the cut-off to a line that F.softplus makes.
        return -rate * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(rate * x)


def kda_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Kimi Delta Attention over T tokens.

    A leading batch dimension B on every argument is allowed (sequences of one length).

    Args:
        q: queries [T, H, K], normalised already if they are to be.
        k: keys [T, H, K], likewise.
        v: values [T, HV, V]; HV is a multiple of H, and value head i reads key head i // (HV / H).
        g: log decay [T, HV, K], natural logarithm, at most 0.
        beta: step sizes [T, HV], or one per channel [T, HV, V]; final (after any sigmoid).
        state: K-first initial state [HV, K, V], or None for zero.
        scale: the factor on the output.
        dtype: the dtype to compute in and return.

    Returns:
        o [T, HV, V] and the final state [HV, K, V], both new tensors of ``dtype``.
    """
    HV, in_place = v.shape[-2], not needs_grad(q, k, v, g, beta, state)
    q, k = _per_value_head(q.to(dtype), HV), _per_value_head(k.to(dtype), HV)
    v, decay, beta = v.to(dtype), g.to(dtype).exp(), beta.to(dtype)
    if beta.dim() < v.dim():
        beta = beta.unsqueeze(-1)
    S = _start(state, k, v)
    outputs = []
    for q_t, k_t, v_t, decay_t, beta_t in _tokens(q, k, v, decay, beta):
        S = _decayed(S, decay_t, in_place)
        S = _plus_outer(S, k_t, beta_t * (v_t - _read(S, k_t)), in_place)
        outputs.append(scale * _read(S, q_t))
    return _join(outputs, v), S


def lightning_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_gamma: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Lightning Attention over T tokens.

    A leading batch dimension B on q, k, v and state is allowed (sequences of one length).

    Args:
        q: queries [T, H, K].
        k: keys [T, H, K].
        v: values [T, H, V].
        g_gamma: log decay per head [H], natural logarithm, at most 0.
        state: K-first initial state [H, K, V], or None for zero.
        scale: the factor on the output.
        dtype: the dtype to compute in and return.

    Returns:
        o [T, H, V] and the final state [H, K, V], both new tensors of ``dtype``.
    """
    HV, in_place = v.shape[-2], not needs_grad(q, k, v, g_gamma, state)
    q, k = _per_value_head(q.to(dtype), HV), _per_value_head(k.to(dtype), HV)
    v, decay = v.to(dtype), g_gamma.to(dtype).exp().unsqueeze(-1)
    S = _start(state, k, v)
    outputs = []
    for q_t, k_t, v_t in _tokens(q, k, v):
        S = _plus_outer(_decayed(S, decay, in_place), k_t, v_t, in_place)
        outputs.append(scale * _read(S, q_t))
    return _join(outputs, v), S


def l2_normalise(
    x: torch.Tensor, eps: float = 1e-6, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Divide by the L2 norm over the last dimension, ``eps`` added to the sum of squares."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def lightning_log_decay(
    heads: int, layer_idx: int, num_layers: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return Lightning Attention's log decay per head for one layer of a model.

    ``g_h = -(8 / H) (1 - layer_idx / num_layers) h`` for h = 0 .. H - 1: head 0 keeps everything,
    later heads and earlier layers forget faster.

    Args:
        heads: the number of heads H.
        layer_idx: the layer, from 0 to ``num_layers - 1``.
        num_layers: the number of layers.
        device: where to put the result.

    Returns:
        float32 [H], natural logarithm.

    Raises:
        TypeError: something that is no number.
        ValueError: a number out of range.
    """
    for arg, x in (("heads", heads), ("layer_idx", layer_idx), ("num_layers", num_layers)):
        require_number(arg, x)
    require(heads > 0, "heads", heads, "must be positive")
    require(num_layers > 0, "num_layers", num_layers, "must be positive")
    require(0 <= layer_idx < num_layers, "layer_idx", layer_idx, f"must be in [0, {num_layers})")
    slope = 8.0 / heads * (1.0 - layer_idx / num_layers)
    return torch.arange(heads, dtype=torch.float32, device=device) * -slope


def _per_value_head(x: torch.Tensor, HV: int) -> torch.Tensor:
    H = x.shape[-2]
    return x if H == HV else x.repeat_interleave(HV // H, dim=-2)


def _tokens(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Go over the tokens of tensors [..., T, heads, channels]."""
    return zip(*(x.unbind(-3) for x in tensors), strict=True)


def _start(state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shape = (*v.shape[:-3], v.shape[-2], k.shape[-1], v.shape[-1])
    if state is None:
        return v.new_zeros(shape)
    # Cloned even if no token follows: the steps work in place, and results never alias inputs.
    return state.to(v.dtype).expand(shape).clone()


# The three operations on a state [..., K, V]. They are elementwise products and sums, never a
# matrix product, whose precision autocast and TF32 settings may lower. In place, because
# allocating the state anew for every token would take most of the time.


def _decayed(S: torch.Tensor, decay: torch.Tensor, in_place: bool) -> torch.Tensor:
    decay = decay.unsqueeze(-1)
    return S.mul_(decay) if in_place else S * decay


def _plus_outer(S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, in_place: bool) -> torch.Tensor:
    k, v = k.unsqueeze(-1), v.unsqueeze(-2)
    return S.addcmul_(k, v) if in_place else torch.addcmul(S, k, v)


def _read(S: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x.unsqueeze(-1) * S).sum(-2)


def _join(outputs: list[torch.Tensor], v: torch.Tensor) -> torch.Tensor:
    return torch.stack(outputs, dim=-3) if outputs else torch.zeros_like(v)
