"""What one decode call is, as data: the states it works on, and what was planned for it."""

from dataclasses import dataclass

import torch

from cula.common.backends import Backend
from cula.common.dims import Dims
from cula.common.reference import KdaForm, LightningForm
from cula.decode.kernels.config import DecodeConfig


@dataclass(frozen=True)
class States:
    """The states of one call.

    state: the pool [slots, HV, V, K] that steps start from, or None for zero; `update`: it also
    gets the final states.
    final: [N, HV, V, K], gets the final states instead.
    indices [N] or [N, tokens], accepted [N], cu_seqlens [N + 1]: as the public calls say.
    tokens: [B, T, HV, V, K], gets the state after every token.
    """

    state: torch.Tensor | None
    update: bool
    final: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @property
    def writes(self) -> str:
        """Where the final states go: "none", "in_place" or "separate"."""
        if self.final is not None:
            return "separate"
        return "in_place" if self.update else "none"

    @property
    def per_token(self) -> bool:
        """Whether every token names a slot of its own."""
        return self.indices is not None and self.indices.dim() == 2


@dataclass(frozen=True)
class Plan:
    """One call's sizes, form and backend."""

    call: str
    dims: Dims
    sequences: int
    form: KdaForm | LightningForm
    backend: Backend
    reason: str
    """Why the backend is not our kernel; empty if it is."""
    arch: str = ""
    config: DecodeConfig | None = None

    @property
    def empty(self) -> bool:
        """No sequences or no tokens: nothing to launch."""
        return self.dims.T == 0 or self.sequences == 0

    @property
    def compile_key(self) -> str:
        """What a kernel is compiled for. Batch, length, heads, scale and pool size are run-time."""
        return "" if self.config is None else repr(self.config)
