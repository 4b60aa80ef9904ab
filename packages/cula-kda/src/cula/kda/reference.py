"""Kimi Delta Attention over whole batches in plain PyTorch: the truth, and the CPU path.

The mathematics is `cula.common.recurrence.kda_steps`, one token at a time; here are gates, norms,
batches and the states kept along the way. Everything is differentiable. On a GPU it runs too,
slowly, and with `cu_seqlens` it waits for the GPU once, to read the lengths.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cula.common.gates import BetaForm, KdaGate, apply_beta
from cula.common.ragged import Scan, Sequences, scan, sequences_of
from cula.common.recurrence import kda_steps, l2_normalise


@dataclass(frozen=True)
class Form:
    """How a call's raw inputs become those of the recurrence."""

    gate: KdaGate
    beta: BetaForm
    l2norm: bool
    scale: float


class Inputs(NamedTuple):
    """The tensors of one call: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K],
    beta [B, T, HV], A_log [HV], dt_bias [HV * K] or [HV, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None


def forward(
    form: Form,
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


def chunk_starts(
    result: Scan, sequences: Sequences, initial: torch.Tensor | None, chunk: int
) -> torch.Tensor:
    """The states [chunks, HV, K, V] with which chunks start, sequence by sequence.

    `result` is that of a scan with `every=chunk`; L tokens have ceil(L / chunk) chunks.
    """
    counts = [-(-length // chunk) for length in sequences.lengths]
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    states = result.final.new_zeros((sum(counts), *result.final.shape[1:]))
    if initial is not None:
        begun = [n for n, count in enumerate(counts) if count]
        states[[firsts[n] for n in begun]] = initial[begun].to(states.dtype)
    for mark in result.marks:
        # A state after a sequence's last token starts no chunk.
        inside = [i for i, n in enumerate(mark.numbers) if mark.count < counts[n]]
        states[[firsts[mark.numbers[i]] + mark.count for i in inside]] = mark.states[inside]
    return states
