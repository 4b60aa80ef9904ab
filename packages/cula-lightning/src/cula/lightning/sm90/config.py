"""What is known of a prefill kernel when it is compiled.

No import of cutlass: a cached kernel needs none.
"""

from dataclasses import dataclass

from cula.common.kernel_args import States

CHUNK = 64  # tokens a chunk
PART = 64  # value channels that one warpgroup holds the state of


@dataclass(frozen=True)
class PrefillConfig:
    """The compile key; None for an argument that is absent.

    K, V: channels of a key (64 or 128) and of a value (a multiple of 64).
    warpgroups: state warpgroups of a block; each holds 64 value channels of one head.
    io: dtype of q, k, v and the output, "bf16" or "fp16".
    initial, final: the states that sequences start from and where their last ones go, in the slots
        that `state_indices` ("int32", "int64") name; absent: sequence n has slot n.
    mask: has_initial_state is given.
    checkpoints: states kept along the way.
    varlen: the sequences are packed, and a schedule (cula.common.varlen) says where they lie.
    segments: long sequences are cut along time. "first": the pass that finds what all segments but
        a sequence's last add to the state; "second": the pass that starts from their sums.
    """

    K: int
    V: int
    warpgroups: int
    io: str
    initial: States | None = None
    final: States | None = None
    state_indices: str | None = None
    mask: bool = False
    checkpoints: States | None = None
    varlen: bool = False
    segments: str | None = None

    @property
    def parts(self) -> int:
        """Blocks that share a head."""
        return self.V // (PART * self.warpgroups)

    def kernel(self):
        if self.segments == "first":
            from cula.lightning.sm90.segments import SegmentStates

            return SegmentStates(self)
        from cula.lightning.sm90.prefill import LightningPrefill

        return LightningPrefill(self)


@dataclass(frozen=True)
class PrefixConfig:
    """The compile key of the kernel between the two passes; fields as in PrefillConfig."""

    K: int
    V: int
    varlen: bool = False

    def kernel(self):
        from cula.lightning.sm90.prefix import SegmentPrefix

        return SegmentPrefix(self)
