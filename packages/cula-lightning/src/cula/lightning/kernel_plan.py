"""Which kernel runs a call, if any: from shapes, strides and dtypes alone."""

from dataclasses import dataclass, replace

import torch

from cula.common.arch import arch_of, missing_compiler
from cula.common.dims import Dims
from cula.common.kernel_args import DTYPE_NAMES, dtype_name, refused_states, states_in_key
from cula.common.varlen import FixedPlan, VarlenPlan
from cula.common.varlen.plan import ceil_div
from cula.lightning.cut import best_cut, given_cut
from cula.lightning.sm90.config import CHUNK, PrefillConfig, PrefixConfig

KERNEL_ARCH = "sm_90a"
KERNEL_DIMS = ((128, 128), (64, 64))


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

    @property
    def prefix(self) -> PrefixConfig | None:
        """The kernel between the passes: none where no sequence can have a third segment."""
        c = self.config
        return PrefixConfig(c.K, c.V, c.varlen) if self._longest > 2 else None

    @property
    def prefix_args(self) -> tuple[int, int, int]:
        """Its rows, segments a sequence and chunks a segment."""
        shape = self.shape
        if isinstance(shape, FixedPlan):
            return shape.batch, shape.segments_each, shape.segment_chunks
        if not shape.segment_chunks:
            return 0, 0, 0
        # Each sequence's second segment stands for it. Where there is a third, the second has all
        # its chunks, and those rows come first; a chunk may be short, so chunks bound how many.
        full = shape.max_chunks // shape.segment_chunks
        return min(full, shape.max_segments), 0, shape.segment_chunks

    @property
    def _longest(self) -> int:
        """Bound of a sequence's segments."""
        shape = self.shape
        if not shape.segment_chunks:
            return 1
        if isinstance(shape, FixedPlan):
            return shape.segments_each
        return ceil_div(shape.tokens, shape.segment_chunks * shape.chunk)


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
    batch = (dims, sequences, varlen, sms)
    if segment_tokens is None:
        cut = best_cut(*batch)
    else:
        cut = given_cut(*batch, segment_tokens // CHUNK if segment_tokens < dims.T else 0)
    config = PrefillConfig(
        K=dims.K,
        V=dims.V,
        warpgroups=cut.warpgroups,
        io=DTYPE_NAMES[q.dtype],
        initial=states_in_key(initial),
        final=states_in_key(final),
        state_indices=dtype_name(state_indices),
        mask=mask,
        checkpoints=states_in_key(checkpoints),
        varlen=varlen,
        segments="second" if cut.segment_chunks else None,
    )
    sizes = {"heads": dims.HV, "parts": config.parts, "segment_chunks": cut.segment_chunks}
    if varlen:
        shape = VarlenPlan(sequences, dims.T, CHUNK, **sizes, chunk_table=False)
    else:
        shape = FixedPlan(dims.B, dims.T, CHUNK, **sizes)
    return KernelPlan(config, shape, min(shape.max_units, sms))


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
    return refused_states(states) or missing_compiler()
