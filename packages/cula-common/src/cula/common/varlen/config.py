"""The compile key of the schedule's kernel. Does not import cutlass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """Compile key of `ScheduleKernel`; `VarlenPlan.config` makes it.

    chunk          tokens a chunk
    index_bits     32 or 64, of cu_seqlens
    threads        of a block
    per_thread     neighbouring sequences that a thread scans
    in_shared      keep the per-sequence tables in shared memory: at most threads * per_thread
                   sequences
    early_release  let a dependent launch start at once (programmatic dependent launch, sm_90
                   and later); it has to wait with griddepcontrol before it reads the workspace. The
                   schedule itself does not wait, so it must not be such a launch
    """

    chunk: int
    index_bits: int
    threads: int = 128
    per_thread: int = 1
    in_shared: bool = True
    early_release: bool = False

    def kernel(self):
        """The kernel object; imports cutlass."""
        from cula.common.varlen.kernel import ScheduleKernel

        return ScheduleKernel(self)
