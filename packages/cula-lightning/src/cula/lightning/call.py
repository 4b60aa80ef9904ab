"""What one prefill call is, as data: what was planned for it."""

from dataclasses import dataclass

import torch

from cula.common.backends import Backend
from cula.common.dims import Dims
from cula.lightning.kernel_plan import KernelPlan
from cula.lightning.reference import LightningForm


@dataclass(frozen=True)
class Plan:
    """One call's sizes, form and backend. Equal arguments give equal plans."""

    call: str
    dims: Dims
    sequences: int
    dtype: torch.dtype
    form: LightningForm
    varlen: bool
    state_dtype: torch.dtype | None
    checkpoint_interval: int | None
    backend: Backend
    reason: str
    """Why the backend is not our kernel; empty if it is."""
    kernel: KernelPlan | None = None

    @property
    def empty(self) -> bool:
        """No sequences or no tokens: nothing to launch, only states to pass on."""
        return self.dims.T == 0 or self.sequences == 0

    @property
    def compile_key(self) -> str:
        """What a kernel is compiled for. Batch, length, heads, scale and pool size are run-time."""
        parts = [
            "lightning",
            _short(self.dtype),
            f"k{self.dims.K}v{self.dims.V}",
            f"wg{self.kernel.config.warpgroups}" if self.kernel else "",
            "segments" if self.kernel and self.kernel.config.segments else "",
            f"state.{_short(self.state_dtype)}" if self.state_dtype else "",
            "varlen" if self.varlen else "",
            "checkpoints" if self.checkpoint_interval else "",
        ]
        return "-".join(part for part in parts if part)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
