"""What a block of the scan, or of the first pass of segments, holds and reads."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cula.kda.sm90.config import CHUNK, PART


@dataclass(frozen=True)
class SharedMemory:
    """Barriers, the ring of units, decays, and the tiles (last mode: stage); None: not there.

    starts: addresses by name.
    """

    full: cute.Pointer
    empty: cute.Pointer
    unit_full: cute.Pointer
    unit_empty: cute.Pointer
    units: cute.Pointer
    decay: cute.Pointer
    kg: cute.Tensor
    qg: cute.Tensor | None
    kr: cute.Tensor
    t: cute.Tensor
    aqk: cute.Tensor | None
    v: cute.Tensor
    o: cute.Tensor | None
    starts: dict
    slices: cute.Tensor | None  # o, a warp's channels each
    o_start: cute.Pointer | None


@dataclass(frozen=True)
class StatesInMemory:
    """The tensors of states that a call has, and the rules of which sequence uses what."""

    initial: cute.Tensor | None  # (slots, HV, V, K), V-first or K-first
    final: cute.Tensor | None
    index: cute.Tensor | None  # (N)
    mask: cute.Tensor | None  # (N)
    marks: cute.Tensor | None  # (rows, HV, V, K)
    segments: cute.Tensor | None  # (segments, HV, V + K, K): segments.py
    interval: Int32


def shared_memory(storage, tiles, slices) -> SharedMemory:
    """tiles: their layouts, by name. slices: another layout of o."""
    found = {}
    starts = {"decay": Int32(storage.decay.data_ptr().toint())}
    for name, layout in tiles.items():
        place = getattr(storage, name, None)
        found[name] = None
        if place is not None:
            found[name] = place.get_tensor(layout.outer, swizzle=layout.inner)
            starts[name] = Int32(place.data_ptr().toint())
    return SharedMemory(
        full=storage.full.data_ptr(),
        empty=storage.empty.data_ptr(),
        unit_full=storage.unit_full.data_ptr(),
        unit_empty=storage.unit_empty.data_ptr(),
        units=storage.units.data_ptr(),
        decay=storage.decay.data_ptr(),
        **found,
        starts=starts,
        slices=storage.o.get_tensor(slices.outer, swizzle=slices.inner) if slices else None,
        o_start=storage.o.data_ptr() if slices else None,
    )


def columns_from(tensor, unit, channels: int = PART):
    """Chunks (channel, token, part, number) of the unit's tokens, so many channels a part."""
    tokens = cute.domain_offset((0, unit.first), tensor[None, None, unit.head, unit.b])
    return cute.local_tile(tokens, (channels, CHUNK), (None, None))


def segment_states(config, HV):
    """A stand-in for the workspace of segments."""
    shape = (cute.sym_int(), HV, config.V + config.K, config.K)
    strides = [cute.sym_int64(divisibility=8) for _ in range(2)]
    return make_fake_tensor(Float32, shape, (*strides, config.K, 1), assumed_align=16)
