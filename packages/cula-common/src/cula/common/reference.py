"""The two families over whole batches in plain PyTorch: the truth, and the CPU path.

The mathematics is `cula.common.recurrence`, one token at a time; here are gates, norms, batches and
the states kept along the way. Everything is differentiable. On a GPU it runs too, slowly, and with
`cu_seqlens` it waits for the GPU once, to read the lengths.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cula.common.gates import BetaForm, KdaGate, apply_beta
from cula.common.ragged import Scan, scan, sequences_of
from cula.common.recurrence import kda_steps, l2_normalise, lightning_steps


@dataclass(frozen=True)
class KdaForm:
    """How a KDA call's raw inputs become those of the recurrence."""

    gate: KdaGate
    beta: BetaForm
    l2norm: bool
    scale: float


class KdaInputs(NamedTuple):
    """The tensors of one call: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K],
    beta [B, T, HV] or [B, T, HV, V], A_log [HV], dt_bias [HV * K] or [HV, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class LightningForm:
    """A Lightning call's only number."""

    scale: float


class LightningInputs(NamedTuple):
    """The tensors of one call: q, k [B, T, H, K], v [B, T, HV, V], g_gamma [HV]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g_gamma: torch.Tensor


def kda_forward(
    form: KdaForm,
    inputs: KdaInputs,
    initial: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    every: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Scan:
    """Run a batch through the recurrence of Kimi Delta Attention.

    Args:
        initial: K-first states [N, HV, K, V] to start from, or None for zero.
        every: keep the states after each `every` tokens of each sequence.
        dtype: the dtype of all arithmetic and of the results.

    Returns:
        o [B * T, HV, V], K-first final states [N, HV, K, V] and the states kept.
    """
    v = inputs.v
    sequences = sequences_of(*v.shape[:2], cu_seqlens, cu_seqlens_cpu)
    heads, value_dim = v.shape[2:]
    with torch.autocast(v.device.type, enabled=False):
        q, k = inputs.q.to(dtype), inputs.k.to(dtype)
        if form.l2norm:
            q, k = l2_normalise(q, dtype=dtype), l2_normalise(k, dtype=dtype)
        g = form.gate.log_decay(inputs.g, inputs.A_log, inputs.dt_bias, dtype=dtype)
        beta = apply_beta(form.beta, inputs.beta, dtype=dtype)
        if initial is None:
            initial = q.new_zeros((len(sequences), heads, q.shape[-1], value_dim))
        return scan(
            sequences,
            lambda x, state: kda_steps(*x, state, form.scale, dtype=dtype),
            [x.flatten(0, 1) for x in (q, k, v.to(dtype), g, beta)],
            initial.to(dtype),
            o_shape=(heads, value_dim),
            every=every,
        )


def lightning_forward(
    form: LightningForm,
    inputs: LightningInputs,
    initial: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    every: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Scan:
    """Run a batch through the recurrence of Lightning Attention; as `kda_forward`."""
    q, k, v, g_gamma = inputs
    sequences = sequences_of(*v.shape[:2], cu_seqlens, cu_seqlens_cpu)
    heads, value_dim = v.shape[2:]
    if initial is None:
        initial = v.new_zeros((len(sequences), heads, q.shape[-1], value_dim))
    with torch.autocast(v.device.type, enabled=False):
        return scan(
            sequences,
            lambda x, state: lightning_steps(*x, g_gamma, state, form.scale, dtype=dtype),
            [x.flatten(0, 1).to(dtype) for x in (q, k, v)],
            initial.to(dtype),
            o_shape=(heads, value_dim),
            every=every,
        )
