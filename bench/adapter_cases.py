"""What `bench adapters` measures: FLA's functions and its KDA layer, run by us through FLA."""

from dataclasses import dataclass
from typing import Literal

Op = Literal[
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "KimiDeltaAttention",
]

GROUPS = {
    "decode": "Decode: whole calls back to back; host time to enqueue one",
    "prefill": "Prefill: whole calls back to back; host time to enqueue one",
    "layer": "FLA's KDA layer, hidden 2048, 16 heads: GPU time (kernel), whole calls (wrapper)",
}


@dataclass(frozen=True)
class AdapterCase:
    """One call.

    Attributes:
        op: FLA's function, or its layer.
        group: the table it is shown in, a key of ``GROUPS``.
        mode: kernel (GPU time, a layer's alone) or wrapper (whole calls).
        B: sequences.
        T: tokens a sequence; 1 is a decode step from a state to the next.
        H: heads.
        D: head dimension.
        gate: KDA's: "bounded" (lower bound -5) or "softplus".
        quick: part of ``--quick``.
    """

    op: Op
    group: str
    mode: Literal["kernel", "wrapper"]
    B: int
    T: int
    H: int = 16
    D: int = 128
    gate: Literal["bounded", "softplus"] = "bounded"
    quick: bool = True

    @property
    def hidden(self) -> int:
        """The width of a layer's input."""
        return self.H * self.D

    @property
    def name(self) -> str:
        """Mode and shape; the gate only where it is not the usual one."""
        parts = [self.mode, f"B={self.B}", f"T={self.T}", f"H={self.H}", f"D={self.D}"]
        return " ".join([*parts, *([self.gate] if self.gate != "bounded" else [])])


def adapter_cases() -> list[AdapterCase]:
    """All cases, in the order of ``GROUPS``; names are unique per op."""
    decode: tuple[Op, ...] = ("fused_recurrent_kda", "fused_recurrent_simple_gla")
    prefill: tuple[Op, ...] = ("chunk_kda", "chunk_simple_gla")
    cases = [AdapterCase(op, "decode", "wrapper", B, 1) for op in decode for B in (1, 64)]
    cases += [AdapterCase(op, "prefill", "wrapper", 1, 1024) for op in prefill]
    for mode in ("kernel", "wrapper"):
        layer = ("KimiDeltaAttention", "layer", mode)
        cases += [AdapterCase(*layer, 1, 8192), AdapterCase(*layer, 64, 1)]
        cases += [AdapterCase(*layer, 1, 8192, gate="softplus", quick=False)]
    return cases
