"""Lightning Attention over whole batches in plain PyTorch: the truth, and the CPU path.

The mathematics is `cula.common.recurrence.lightning_steps`, one token at a time; here are batches
and the states kept along the way. Everything is differentiable. On a GPU it runs too, slowly, and
with `cu_seqlens` it waits for the GPU once, to read the lengths.
"""

from typing import NamedTuple

import torch

from cula.common.ragged import Scan, scan, sequences_of
from cula.common.recurrence import lightning_steps


class Inputs(NamedTuple):
    """The tensors of one call: q, k [B, T, H, K], v [B, T, HV, V], g_gamma [HV]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g_gamma: torch.Tensor


def forward(
    scale: float,
    inputs: Inputs,
    initial: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    every: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Scan:
    """Run a batch through the recurrence.

    Args:
        initial: K-first states [N, HV, K, V] to start from, or None for zero.
        every: keep the states after each `every` tokens of each sequence.
        dtype: the dtype of all arithmetic and of the results.

    Returns:
        o [B * T, HV, V], K-first final states [N, HV, K, V] and the states kept.
    """
    q, k, v, g_gamma = inputs
    sequences = sequences_of(*v.shape[:2], cu_seqlens, cu_seqlens_cpu)
    heads, value_dim = v.shape[2:]
    if initial is None:
        initial = v.new_zeros((len(sequences), heads, q.shape[-1], value_dim))
    with torch.autocast(v.device.type, enabled=False):
        return scan(
            sequences,
            lambda x, state: lightning_steps(*x, g_gamma, state, scale, dtype=dtype),
            [x.flatten(0, 1).to(dtype) for x in (q, k, v)],
            initial.to(dtype),
            o_shape=(heads, value_dim),
            every=every,
        )
