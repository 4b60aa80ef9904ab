"""The KDA prefill cases: which shapes are measured, in which mode, and why."""

from dataclasses import dataclass
from typing import Literal

from bench.lightning_cases import shared_out

Mode = Literal["kernel", "wrapper"]
Layout = Literal["fixed", "uniform", "skewed", "random"]

BATCHES = (1, 2)
LENGTHS = (512, 1024, 4096, 8192, 16384)
SEQUENCES = (10, 20)
PACKED = (4096, 8192, 16384)

# Groups, in the order in which they run and are shown. Few heads last: for each of their numbers a
# baseline tunes itself anew.
GROUPS = {
    "kernel": "GPU time, equal lengths, a final state: by CUDA-graph replay",
    "wrapper": "Whole calls, equal lengths: back to back, by events; host time of one",
    "forms": "GPU time of other gates, of an initial state and of checkpoints every 64 tokens",
    "varlen": "Packed sequences: whole calls, by events (FLA's cannot be captured in a graph)",
    "shapes": "GPU time, D = 64 and grouped value heads",
    "few": "Few heads",
}


@dataclass(frozen=True)
class KdaCase:
    """One prefill case.

    Attributes:
        group: the table it is shown in, a key of ``GROUPS``.
        mode: kernel (GPU time) or wrapper (whole calls).
        layout: "fixed", or how T tokens are shared out over N packed sequences.
        B: batch rows, or the number of packed sequences.
        T: tokens a row, or packed.
        H: key heads.
        HV: value heads.
        D: head dimension, K = V.
        gate: "bounded" (lower bound -5, as published) or "softplus".
        initial: the sequences start from a state; all keep a final one.
        checkpoints: a state is kept every 64 tokens.
        quick: part of ``--quick``.
    """

    group: str
    mode: Mode
    layout: Layout
    B: int
    T: int
    H: int = 64
    HV: int = 64
    D: int = 128
    gate: Literal["bounded", "softplus"] = "bounded"
    initial: bool = False
    checkpoints: bool = False
    quick: bool = False

    @property
    def op(self) -> str:
        """The call under test."""
        return "kda_prefill"

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.layout != "fixed"

    @property
    def name(self) -> str:
        """Mode and shape; HV, gate and states only where they are not the usual ones."""
        parts = [self.mode, *([f"{self.layout} N={self.B}"] if self.packed else [f"B={self.B}"])]
        parts += [f"T={self.T}", f"H={self.H}"]
        if self.HV != self.H:
            parts.append(f"HV={self.HV}")
        parts.append(f"D={self.D}")
        if self.gate != "bounded":
            parts.append(self.gate)
        if self.initial:
            parts.append("h0")
        if self.checkpoints:
            parts.append("checkpoints")
        return " ".join(parts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return shared_out(self.layout, self.B, self.T) if self.packed else [self.T] * self.B

    @property
    def tokens(self) -> int:
        """Tokens of all sequences; a uniform split drops what is left over."""
        return sum(self.lengths)

    @property
    def floor_bytes(self) -> int:
        """Bytes of q, k, v, g, beta read once and of o written once; checkpoints, too."""
        per_token = 2 * self.D * (2 * self.H + 3 * self.HV) + 4 * self.HV
        states = self.tokens // 64 * self.HV * self.D * self.D * 4 if self.checkpoints else 0
        return self.tokens * per_token + states


def kda_cases(heads: int = 64, head_dim: int = 128) -> list[KdaCase]:
    """All cases, grouped.

    Args:
        heads: H of the published shapes.
        head_dim: D of the published shapes.

    Returns:
        The cases in the order of ``GROUPS``; names are unique.
    """
    H, D = heads, head_dim
    modes: tuple[Mode, ...] = ("kernel", "wrapper")
    cases = [
        KdaCase(mode, mode, "fixed", B, T, H, H, D, quick=(B, T) in ((1, 512), (1, 8192)))
        for mode in modes
        for B in BATCHES
        for T in LENGTHS
    ]
    cases += [
        KdaCase("forms", "kernel", "fixed", 1, 8192, H, H, D, gate="softplus", quick=True),
        KdaCase("forms", "kernel", "fixed", 1, 8192, H, H, D, initial=True),
        KdaCase("forms", "kernel", "fixed", 1, 8192, H, H, D, checkpoints=True),
    ]
    cases += [
        KdaCase("varlen", "wrapper", layout, N, T, H, H, D, quick=(N, T) == (10, 8192))
        for layout in ("uniform", "random", "skewed")
        for N in SEQUENCES
        for T in PACKED
    ]
    if (H, D) == (64, 128):
        cases += [KdaCase("shapes", "kernel", "fixed", 1, 8192, 64, 64, 64)]
        cases += [KdaCase("shapes", "kernel", "fixed", 1, 8192, 16, 64, 128)]
    few = ((4, 8192), (8, 8192), (16, 8192), (8, 32768))
    cases += [
        KdaCase("few", mode, "fixed", 1, T, h, h, D, quick=(h, T) == (8, 8192))
        for h, T in few
        for mode in modes
        if h != H
    ]
    return cases
