"""What a block of the prefill kernel works with: shared memory, states in memory, tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cula.lightning.sm90.config import CHUNK, PART


@dataclass(frozen=True)
class SharedMemory:
    """Barriers, the ring of units, the powers, and the tiles (last mode: stage or buffer)."""

    full: cute.Pointer
    empty: cute.Pointer
    unit_full: cute.Pointer
    unit_empty: cute.Pointer
    units: cute.Pointer
    powers: cute.Pointer
    q: cute.Tensor
    k: cute.Tensor
    k_columns: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    o: cute.Tensor
    k_start: cute.Pointer
    v_start: cute.Pointer
    o_start: cute.Pointer


@dataclass(frozen=True)
class StatesInMemory:
    initial: cute.Tensor | None
    final: cute.Tensor | None
    index: cute.Tensor | None
    mask: cute.Tensor | None
    marks: cute.Tensor | None
    local: cute.Tensor | None
    interval: Int32


def rows_from(tensor, b, first, head, channels: int):
    """Chunks (token, channel, number) of a head's tokens from `first` on."""
    tokens = cute.domain_offset((first, 0), tensor[None, None, head, b])
    return cute.local_tile(tokens, (CHUNK, channels), (None, 0))


def columns_from(tensor, b, first, head):
    """Chunks (channel, token, part, number) of a head's tokens from `first` on."""
    tokens = cute.domain_offset((0, first), tensor[None, None, head, b])
    return cute.local_tile(tokens, (PART, CHUNK), (None, None))
