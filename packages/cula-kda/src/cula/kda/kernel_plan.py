"""Which kernels run a call, if any: from shapes, strides and dtypes alone."""

import math
from dataclasses import dataclass

import torch

from cula.common.arch import arch_of, missing_compiler
from cula.common.dims import Dims
from cula.common.kernel_args import DTYPE_NAMES, dtype_name, refused_states, states_in_key
from cula.common.varlen import FixedPlan, VarlenPlan
from cula.kda.reference import KdaForm
from cula.kda.segment_plan import suitable_segment
from cula.kda.sm90.config import (
    CHUNK,
    PREP_BLOCKS_PER_SM,
    CombineConfig,
    PrepConfig,
    Record,
    ScanConfig,
)

KERNEL_ARCH = "sm_90a"
KERNEL_DIMS = (64, 128)
IO_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelPlan:
    """What a call's kernels are compiled for, and the sizes of their launches.

    shape: bounds of chunks, segments and units, from shapes alone. sms: multiprocessors.
    """

    prep: PrepConfig
    scan: ScanConfig
    shape: FixedPlan | VarlenPlan
    sms: int

    @property
    def prep_blocks(self) -> int:
        """As many as run at once; they share the chunks."""
        return min(self.shape.max_chunks * self.shape.heads, PREP_BLOCKS_PER_SM * self.sms)

    @property
    def scan_blocks(self) -> int:
        """One an SM, each for several units; where sequences are cut, one a unit."""
        units = self.shape.max_units
        return units if self.scan.segments else min(units, self.sms)

    @property
    def schedule(self) -> VarlenPlan | None:
        """Of packed sequences; None for a batch of equal lengths."""
        return self.shape if isinstance(self.shape, VarlenPlan) else None

    @property
    def first(self) -> ScanConfig | None:
        """The pass before the scan where sequences are cut along time."""
        return self.scan.first_pass if self.scan.segments else None

    @property
    def followed(self) -> int:
        """Rows of the schedule that may be segments which others follow; they are its first.

        They have as many chunks as a segment can. Of equal lengths it is all but the last ones.
        """
        shape = self.shape
        if isinstance(shape, FixedPlan):
            return shape.max_segments - shape.batch
        return min(shape.max_segments, shape.tokens // ((shape.segment_chunks - 1) * CHUNK + 1))

    @property
    def first_units(self) -> int:
        """Blocks of the first pass."""
        return self.followed * self.shape.heads * self.scan.pairs

    @property
    def combine(self) -> CombineConfig | None:
        """The pass between the two; where no sequence has three segments nothing is to combine."""
        if self.first is None or self.combine_args[0] < (3 if self.schedule is None else 2):
            return None
        return self.scan.combine

    @property
    def combine_args(self) -> tuple[int, int]:
        """How many segments, and how many walks: see combine.py."""
        if isinstance(self.shape, FixedPlan):
            return self.shape.segments_each, self.shape.batch
        return self.followed, -(-self.followed // 2)

    @property
    def configs(self) -> tuple:
        """Everything to compile but the schedule, in the order of the launches."""
        every = (self.prep, self.first, self.combine, self.scan)
        return tuple(config for config in every if config is not None)

    @property
    def record_words(self) -> int:
        """Length of the int32 workspace between the kernels."""
        return self.shape.max_chunks * self.shape.heads * Record(self.prep.K).bytes // 4

    @property
    def segment_states(self) -> tuple[int, int, int, int]:
        """Shape of the float32 workspace of segments; empty where sequences stay whole."""
        scan, places = self.scan, self.shape.max_segments
        return places if scan.segments else 0, self.shape.heads, scan.V + scan.K, scan.K

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a call takes for its own use."""
        words = self.record_words + (self.schedule.workspace_words if self.schedule else 0)
        return 4 * (words + math.prod(self.segment_states))


def kernel_plan(
    q: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    form: KdaForm,
    dims: Dims,
    sequences: int,
    *,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    state_indices: torch.Tensor | None = None,
    mask: bool = False,
    checkpoints: torch.Tensor | None = None,
    starts: bool = False,
    varlen: bool,
    segment_tokens: int | None = None,
    sms: int,
) -> KernelPlan:
    """The kernels of such a call. Looks at shapes, strides and dtypes alone.

    Args:
        initial, final, checkpoints: V-first by shape, whatever their layout in memory.
        starts: checkpoints are the states before every chunk.
        segment_tokens: as `kda_prefill` takes it.
        sms: multiprocessors of the GPU.
    """
    if segment_tokens is None:
        segment_chunks = suitable_segment(dims, sequences, varlen, sms)
    else:
        segment_chunks = segment_tokens // CHUNK if segment_tokens < dims.T else 0
    prep = PrepConfig(
        K=dims.K,
        io=DTYPE_NAMES[q.dtype],
        gate=form.gate.form,
        gate_dtype=DTYPE_NAMES[g.dtype],
        bias=form.gate.has_bias,
        beta=form.beta,
        beta_dtype=DTYPE_NAMES[beta.dtype],
        l2norm=form.l2norm,
        varlen=varlen,
    )
    scan = ScanConfig(
        K=dims.K,
        V=dims.V,
        io=DTYPE_NAMES[q.dtype],
        initial=states_in_key(initial),
        final=states_in_key(final),
        state_indices=dtype_name(state_indices),
        mask=mask,
        checkpoints=states_in_key(checkpoints),
        starts=starts,
        varlen=varlen,
        segments="second" if segment_chunks else None,
    )
    sizes = (CHUNK, dims.HV, scan.parts, segment_chunks)
    if varlen:
        return KernelPlan(prep, scan, VarlenPlan(sequences, dims.T, *sizes), sms)
    return KernelPlan(prep, scan, FixedPlan(dims.B, dims.T, *sizes), sms)


def no_kernel(q: torch.Tensor, dims: Dims, states: dict[str, torch.Tensor | None]) -> str | None:
    """Why our kernels do not run this, or None.

    Args:
        states: what is written or too large to copy, by argument; V-first by shape.
    """
    if q.device.type != "cuda":
        return None
    arch = arch_of(q.device)
    if arch != KERNEL_ARCH:
        return f"no kernel of chunked KDA for {arch}; there is one for {KERNEL_ARCH}"
    if q.dtype not in IO_DTYPES:
        return f"no kernel for q of {q.dtype}; it must be bfloat16 or float16"
    if dims.K not in KERNEL_DIMS or dims.V not in KERNEL_DIMS:
        return f"no kernel for K = {dims.K}, V = {dims.V}; each must be 64 or 128"
    return refused_states(states) or missing_compiler()
