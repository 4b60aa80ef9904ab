"""Which kernel runs a call, if any: from shapes, strides and dtypes alone."""

from dataclasses import dataclass, replace

import torch

from cula.common.arch import arch_of, missing_compiler
from cula.common.dims import Dims
from cula.common.layouts import has_dense_slots, to_k_first
from cula.common.varlen import FixedPlan, VarlenPlan, choose_segment_chunks
from cula.lightning.sm90.config import CHUNK, PART, PrefillConfig, States

KERNEL_ARCH = "sm_90a"
KERNEL_DIMS = ((128, 128), (64, 64))
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}


MIN_SEGMENT = 16
"""Chunks of the shortest segment: what one saves there pays for its state's way through memory."""


CUT_UNASKED = False
"""Whether sequences are cut without `segment_tokens`: not before that has run on a GPU."""


@dataclass(frozen=True)
class KernelPlan:
    """The kernel of a call, and how its work is shared out.

    shape: bounds of the units, from shapes alone. blocks: of each launch.
    """

    config: PrefillConfig
    shape: FixedPlan | VarlenPlan
    blocks: int

    @property
    def first_pass(self) -> PrefillConfig | None:
        """The kernel that goes before where sequences are cut along time."""
        if self.config.segments is None:
            return None
        return replace(self.config, segments="first", final=None, checkpoints=None)


def kernel_plan(
    q: torch.Tensor,
    dims: Dims,
    sequences: int,
    *,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    state_indices: torch.Tensor | None = None,
    mask: bool = False,
    checkpoints: torch.Tensor | None = None,
    varlen: bool,
    segment_tokens: int | None = None,
    sms: int,
) -> KernelPlan:
    """What the kernel of such a call is compiled for, and how many blocks share what.

    Looks at shapes, strides and dtypes alone.

    Args:
        initial, final, checkpoints: V-first by shape, whatever their layout in memory.
        segment_tokens: as `lightning_prefill` takes it.
        sms: multiprocessors of the GPU.
    """
    heads = sequences * dims.HV
    if segment_tokens is None:
        segment_chunks = suitable_segment(dims, sequences, varlen, sms) if CUT_UNASKED else 0
    else:
        segment_chunks = segment_tokens // CHUNK if segment_tokens < dims.T else 0
    # A block with two warpgroups loads a head's q and k once; with one, twice as many blocks share
    # the work. Half a head a block is for when whole heads leave half of the GPU idle, and for
    # segments: fewer of them, then, and fewer states to add up before each.
    warpgroups = 1 if dims.V == 64 or 2 * heads <= sms or segment_chunks else 2
    config = PrefillConfig(
        K=dims.K,
        V=dims.V,
        warpgroups=warpgroups,
        io=NAMES[q.dtype],
        initial=_states(initial),
        final=_states(final),
        state_indices=None if state_indices is None else NAMES[state_indices.dtype],
        mask=mask,
        checkpoints=_states(checkpoints),
        varlen=varlen,
        segments="second" if segment_chunks else None,
    )
    sizes = {"heads": dims.HV, "parts": config.parts, "segment_chunks": segment_chunks}
    if varlen:
        shape = VarlenPlan(sequences, dims.T, CHUNK, **sizes, chunk_table=False)
    else:
        shape = FixedPlan(dims.B, dims.T, CHUNK, **sizes)
    return KernelPlan(config, shape, min(shape.max_units, sms))


def suitable_segment(dims: Dims, sequences: int, varlen: bool, sms: int) -> int:
    """Chunks a segment that suit a call; 0: sequences had better stay whole.

    Two passes read k and v twice, so they pay where one would use a third of the GPU or less.
    """
    parts = dims.V // PART
    if 3 * parts * sequences * dims.HV > sms:
        return 0
    if varlen:
        return choose_segment_chunks(
            tokens=dims.T,
            chunk=CHUNK,
            heads=dims.HV,
            parts=parts,
            slots=sms,
            min_chunks=MIN_SEGMENT,
        )
    chunks = -(-dims.T // CHUNK)
    segments = min(sms // (sequences * dims.HV * parts), chunks // MIN_SEGMENT)
    return -(-chunks // segments) if segments > 1 else 0


def _states(x: torch.Tensor | None) -> States | None:
    return None if x is None else States(NAMES[x.dtype], x.stride(-1) == 1)


def loadable_states(x: torch.Tensor) -> bool:
    """Whether the kernel reads and writes states [slots, HV, V, K] where they lie."""
    dense = has_dense_slots(x) or has_dense_slots(to_k_first(x))
    return dense and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:2])


def no_kernel(q: torch.Tensor, dims: Dims, states: dict[str, torch.Tensor | None]) -> str | None:
    """Why our kernel cannot run this, or None."""
    if q.device.type != "cuda":
        return None
    arch = arch_of(q.device)
    if arch != KERNEL_ARCH:
        return (
            f"no kernel of chunked Lightning Attention for {arch}; there is one for {KERNEL_ARCH}"
        )
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"no kernel for q of {q.dtype}; it must be bfloat16 or float16"
    if (dims.K, dims.V) not in KERNEL_DIMS:
        return f"no kernel for K = {dims.K}, V = {dims.V}; both must be 64 or both 128"
    for arg, x in states.items():
        if x is not None and not loadable_states(x):
            return (
                f"{arg}: strides {list(x.stride())}; slots and heads must start at multiples of 8 "
                "elements and the whole at one of 16 bytes"
            )
    return missing_compiler()
