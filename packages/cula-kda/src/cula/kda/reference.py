"""Kimi Delta Attention in plain PyTorch: the truth, and the CPU path.

The recurrence over a batch is `cula.common.reference.kda_forward`, which the decode family is held
to as well. Here is what only the chunked calls return.
"""

import torch

from cula.common.ragged import Scan, Sequences
from cula.common.reference import KdaForm, KdaInputs, kda_forward

__all__ = ["KdaForm", "KdaInputs", "chunk_starts", "kda_forward"]


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
