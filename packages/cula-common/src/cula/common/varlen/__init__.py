"""Schedules of packed sequences: bounds from shapes alone, tables built on the device.

    plan = VarlenPlan(sequences=N, tokens=T, chunk=64, heads=H, parts=2)    # shapes only
    schedule = build_schedule(plan, cu_seqlens)                             # one launch
    kernel(..., schedule.workspace, plan.max_units, ...)                    # reads its rows

A kernel reads rows with `cula.common.varlen.device`. At most 32 sequences need no launch:
`warp.warp_schedule` makes the same rows in a warp's registers. Fixed lengths ([B, T] without
cu_seqlens) need neither: `FixedPlan` and `device.fixed_segment`. DESIGN.md describes the tables.

`device`, `steps`, `warp` and `kernel` import cutlass; what is exported here does not.
"""

from cula.common.varlen.config import ScheduleConfig
from cula.common.varlen.fixed import FixedPlan
from cula.common.varlen.plan import VarlenPlan, choose_segment_chunks, schedule_configs
from cula.common.varlen.schedule import Schedule, build_schedule
from cula.common.varlen.twin import ChunkRow, SegmentRow, chunk_rows, clamped_starts, segment_rows

__all__ = [
    "ChunkRow",
    "FixedPlan",
    "Schedule",
    "ScheduleConfig",
    "SegmentRow",
    "VarlenPlan",
    "build_schedule",
    "choose_segment_chunks",
    "chunk_rows",
    "clamped_starts",
    "schedule_configs",
    "segment_rows",
]
