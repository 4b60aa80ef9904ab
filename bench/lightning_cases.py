"""The Lightning prefill cases: which shapes are measured, in which mode, and why."""

import math
import random
from dataclasses import dataclass
from typing import Literal

Mode = Literal["kernel", "wrapper"]
Layout = Literal["fixed", "uniform", "skewed", "random"]

BATCHES = (1, 2)
LENGTHS = (1024, 4096, 8192, 16384)
SEQUENCES = (5, 8, 10, 12, 16, 20, 25)
PACKED = (1024, 2048, 4096, 8192, 16384, 32768)

# Groups, in the order in which they run and are shown. Few heads last: for each of their numbers a
# baseline tunes itself anew.
GROUPS = {
    "kernel": "GPU time, equal lengths, no state: by CUDA-graph replay",
    "wrapper": "Whole calls, equal lengths, no state: back to back, by events; host time of one",
    "states": "GPU time, equal lengths, from an initial state to a final one",
    "varlen": "Packed sequences: whole calls, by events (FLA's cannot be captured in a graph)",
    "shapes": "GPU time, D = 64 and grouped value heads",
    "few": "GPU time, few heads",
}


@dataclass(frozen=True)
class LightningCase:
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
        segment: tokens a segment, where the call asks for it; 0: whole sequences.
        states: initial and final states; packed sequences keep a final one in any case.
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
    states: bool = False
    segment: int | None = None
    quick: bool = False

    @property
    def op(self) -> str:
        """The call under test."""
        return "lightning_prefill"

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.layout != "fixed"

    @property
    def name(self) -> str:
        """Mode and shape; HV, states and segment only where they are not the usual ones."""
        parts = [self.mode, *([f"{self.layout} N={self.B}"] if self.packed else [f"B={self.B}"])]
        parts += [f"T={self.T}", f"H={self.H}"]
        if self.HV != self.H:
            parts.append(f"HV={self.HV}")
        parts.append(f"D={self.D}")
        if self.states:
            parts.append("h0_ht")
        if self.segment is not None:
            parts.append(f"segment={self.segment}")
        return " ".join(parts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if not self.packed:
            return [self.T] * self.B
        return shared_out(self.layout, self.B, self.T)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences; a uniform split drops what is left over."""
        return sum(self.lengths)

    @property
    def floor_bytes(self) -> int:
        """Bytes of q, k, v read once and of o written once; states are not counted."""
        return self.tokens * 2 * self.D * (2 * self.H + 2 * self.HV)


def shared_out(layout: str, sequences: int, tokens: int) -> list[int]:
    """Lengths of packed sequences, as the published benchmark draws them.

    Args:
        layout: "uniform" (equal, the remainder dropped), "skewed" (the first has half of all) or
            "random" (flat Dirichlet shares, those of NumPy's ``RandomState(42)``).
        sequences: how many.
        tokens: of all.

    Returns:
        A length per sequence.
    """
    if layout == "uniform":
        return [tokens // sequences] * sequences
    if layout == "skewed":
        short = max(1, tokens // (2 * (sequences - 1)))
        return [tokens - short * (sequences - 1), *[short] * (sequences - 1)]
    draw = _numpy_generator(42)
    weights = [-math.log(1.0 - draw.random()) for _ in range(sequences)]
    lengths = [max(1, round(tokens * w / sum(weights))) for w in weights]
    lengths[0] = max(1, lengths[0] + tokens - sum(lengths))
    return lengths


def _numpy_generator(seed: int) -> random.Random:
    """The Mersenne twister as NumPy's ``RandomState`` seeds it: the same numbers without NumPy."""
    words = [seed]
    for i in range(1, 624):
        last = words[-1]
        words.append((1812433253 * (last ^ (last >> 30)) + i) & 0xFFFFFFFF)
    generator = random.Random()
    generator.setstate((3, (*words, 624), None))
    return generator


def lightning_cases(heads: int = 64, head_dim: int = 128) -> list[LightningCase]:
    """All cases, grouped.

    Args:
        heads: H of the published shapes.
        head_dim: D of the published shapes.

    Returns:
        The cases in the order of ``GROUPS``; names are unique.
    """
    H, D = heads, head_dim
    cases = []
    kinds: list[tuple[str, Mode, bool]] = [
        ("kernel", "kernel", False),
        ("wrapper", "wrapper", False),
        ("states", "kernel", True),
    ]
    for group, mode, states in kinds:
        cases += [
            LightningCase(
                group, mode, "fixed", B, T, H, H, D, states=states, quick=(B, T) == (1, 4096)
            )
            for B in BATCHES
            for T in LENGTHS
        ]
    cases += [
        LightningCase("varlen", "wrapper", layout, N, T, H, H, D, quick=(N, T) == (10, 8192))
        for layout in ("uniform", "skewed", "random")
        for N in SEQUENCES
        for T in PACKED
    ]
    if (H, D) == (64, 128):
        cases += [LightningCase("shapes", "kernel", "fixed", B, 8192, 64, 64, 64) for B in BATCHES]
        cases += [LightningCase("shapes", "kernel", "fixed", B, 8192, 16, 64, 128) for B in BATCHES]
    cases += [
        LightningCase(
            "few", "kernel", "fixed", 1, 32768, few, few, D, segment=segment, quick=few == 8
        )
        for few, segment in ((4, None), (8, None), (16, None), (8, 0))
        if few != H
    ]
    return cases
