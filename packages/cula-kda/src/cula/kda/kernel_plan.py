"""Which kernels run a call, if any: from shapes, strides and dtypes alone."""

import os
from dataclasses import dataclass

import torch

from cula.common.arch import arch_of, missing_compiler
from cula.common.dims import Dims
from cula.common.layouts import has_dense_slots, to_k_first
from cula.common.varlen import FixedPlan, VarlenPlan
from cula.kda.reference import KdaForm
from cula.kda.sm90.config import CHUNK, PrepConfig, Record, ScanConfig, States

KERNEL_ARCH = "sm_90a"
KERNEL_DIMS = (64, 128)
IO_DTYPES = (torch.bfloat16, torch.float16)
NOT_VERIFIED = (
    "the kernels for chunked KDA have not been verified on this GPU yet; "
    "ask for them with backend='cute'"
)
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}


@dataclass(frozen=True)
class KernelPlan:
    """What the two kernels are compiled for, and the sizes of their launches.

    schedule: of packed sequences; None for a batch of equal lengths.
    """

    prep: PrepConfig
    scan: ScanConfig
    heads: int
    chunks: int
    units: int
    schedule: VarlenPlan | None

    @property
    def record_words(self) -> int:
        """Length of the int32 workspace between the kernels."""
        return self.chunks * self.heads * Record(self.prep.K).bytes // 4

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a call takes for its own use."""
        words = self.record_words + (self.schedule.workspace_words if self.schedule else 0)
        return 4 * words


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
    varlen: bool,
) -> KernelPlan:
    """The kernels of such a call. Looks at shapes, strides and dtypes alone.

    Args:
        initial, final, checkpoints: V-first by shape, whatever their layout in memory.
    """
    prep = PrepConfig(
        K=dims.K,
        io=NAMES[q.dtype],
        gate=form.gate.form,
        gate_dtype=NAMES[g.dtype],
        bias=form.gate.has_bias,
        beta=form.beta,
        beta_dtype=NAMES[beta.dtype],
        l2norm=form.l2norm,
        varlen=varlen,
    )
    scan = ScanConfig(
        K=dims.K,
        V=dims.V,
        io=NAMES[q.dtype],
        initial=_states(initial),
        final=_states(final),
        state_indices=None if state_indices is None else NAMES[state_indices.dtype],
        mask=mask,
        checkpoints=_states(checkpoints),
        varlen=varlen,
    )
    if varlen:
        schedule = VarlenPlan(sequences, dims.T, CHUNK, dims.HV, scan.parts)
        return KernelPlan(prep, scan, dims.HV, schedule.max_chunks, schedule.max_units, schedule)
    fixed = FixedPlan(dims.B, dims.T, CHUNK, dims.HV, scan.parts)
    return KernelPlan(prep, scan, dims.HV, fixed.max_chunks, fixed.max_units, None)


def _states(x: torch.Tensor | None) -> States | None:
    return None if x is None else States(NAMES[x.dtype], x.stride(-1) == 1)


def loadable_states(x: torch.Tensor) -> bool:
    """Whether the scan reads and writes states [slots, HV, V, K] where they lie."""
    dense = has_dense_slots(x) or has_dense_slots(to_k_first(x))
    return dense and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:2])


def no_kernel(
    requested: str,
    q: torch.Tensor,
    dims: Dims,
    states: dict[str, torch.Tensor | None],
) -> str | None:
    """Why our kernels do not run this, or None.

    Args:
        requested: the backend asked for: until a GPU has verified them, the kernels run for those
            who insist.
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
    for arg, x in states.items():
        if x is not None and not loadable_states(x):
            return (
                f"{arg}: strides {list(x.stride())}; slots and heads must start at multiples of 8 "
                "elements and the whole at one of 16 bytes"
            )
    asked = requested if requested != "auto" else os.environ.get("CULA_BACKEND")
    return missing_compiler() or (None if asked == "cute" else NOT_VERIFIED)
