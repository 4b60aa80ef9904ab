"""The decode cases: which shapes are measured, in which mode, and why."""

from dataclasses import dataclass
from typing import Literal

Op = Literal["kda_decode", "lightning_decode"]
Mode = Literal["kernel", "rotated", "wrapper", "first-call"]

OPS: tuple[Op, ...] = ("lightning_decode", "kda_decode")

PUBLISHED_BATCHES = (1, 4, 16, 64, 256)
HEADS = (4, 8, 12, 16, 32, 96)
BATCHES = tuple(2**i for i in range(10))  # 1 .. 512

# Groups, in the order in which they run and are shown.
GROUPS = {
    "kernel": "Kernel only: GPU time by CUDA-graph replay over the same buffers",
    "rotated": "Kernel only, rotated buffers: no call finds its data in the L2 cache",
    "wrapper": "Wrapper: whole calls back to back, by events; host time to enqueue one",
    "pool": "A state pool: slots drawn at random from twice as many",
    "bf16": "bf16 state: half the bytes",
    "tokens": "Several tokens a step",
    "gva": "GVA: four value heads a key head",
    "first-call": "Import and first call in a new process, compile cache filled",
    "heads": "Few and many heads",
}


@dataclass(frozen=True)
class DecodeCase:
    """One decode case.

    Attributes:
        op: the call under test.
        group: the table it is shown in, a key of ``GROUPS``.
        mode: kernel (GPU time, same buffers), rotated (GPU time, buffers beyond the L2), wrapper
            (whole call) or first-call.
        B: sequences.
        T: tokens a step.
        H: key heads.
        HV: value heads.
        D: head dimension, K = V.
        state: dtype of the state, "fp32" or "bf16".
        pool: the state is a pool of 2 B slots, named by ``state_indices``.
        quick: part of ``--quick``.
    """

    op: Op
    group: str
    mode: Mode
    B: int
    T: int = 1
    H: int = 64
    HV: int = 64
    D: int = 128
    state: Literal["fp32", "bf16"] = "fp32"
    pool: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """Mode and shape; T, HV, state and pool only where they are not the usual ones."""
        parts = [self.mode, f"B={self.B}"]
        if self.T != 1:
            parts.append(f"T={self.T}")
        parts.append(f"H={self.H}")
        if self.HV != self.H:
            parts.append(f"HV={self.HV}")
        parts.append(f"D={self.D}")
        if self.state != "fp32":
            parts.append(f"state={self.state}")
        if self.pool:
            parts.append("pool")
        return " ".join(parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the sequences' states, read once and written once a step."""
        return self.B * self.HV * self.D * self.D * (4 if self.state == "fp32" else 2)

    @property
    def floor_bytes(self) -> int:
        """The fewest bytes a step can move: each input read once, each output written once."""
        tokens = self.B * self.T
        per_token = 2 * (2 * self.H * self.D + 2 * self.HV * self.D)  # q, k, v and o in bf16
        if self.op == "kda_decode":
            per_token += 2 * self.HV * self.D + 4 * self.HV  # g in bf16, beta in fp32
        return 2 * self.state_bytes + tokens * per_token


def decode_cases(heads: int = 64, head_dim: int = 128) -> list[DecodeCase]:
    """All cases, grouped, for both families.

    Args:
        heads: H of the published batch sizes.
        head_dim: D of every case.

    Returns:
        The cases in the order of ``GROUPS``; names are unique per op.
    """
    cases: dict[tuple[str, str], DecodeCase] = {}
    for group in GROUPS:
        for op in OPS:
            for case in _group(group, op, heads, head_dim):
                cases.setdefault((op, case.name), case)  # measured once, where it comes first
    return list(cases.values())


def _group(group: str, op: Op, H: int, D: int) -> list[DecodeCase]:
    def case(mode: Mode, B: int, **shape) -> DecodeCase:
        return DecodeCase(op, group, mode, B, **{"H": H, "HV": H, "D": D, **shape})

    if group in ("kernel", "rotated", "wrapper"):
        return [case(group, B, quick=B in (1, 64)) for B in PUBLISHED_BATCHES]
    if group == "pool":
        return [case("kernel", 64, pool=True), case("wrapper", 1, pool=True)]
    if group == "bf16":
        return [case("kernel", B, state="bf16", quick=B == 64) for B in (64, 256)]
    if group == "tokens":
        return [
            case("kernel", B, T=T, quick=(B, T) == (64, 4)) for B in (1, 64) for T in (2, 3, 4, 8)
        ]
    if group == "gva":
        return [case("kernel", B, H=16, HV=64, quick=B == 64) for B in PUBLISHED_BATCHES]
    if group == "heads":
        sweep = [(heads, B) for heads in HEADS for B in BATCHES]
        return [case("kernel", B, H=heads, HV=heads) for heads, B in sweep]
    return [case("first-call", 1, quick=True)]
