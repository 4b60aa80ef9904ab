"""L2's eviction priorities, for the `cache_policy` of TMA copies.

What createpolicy.fractional.L2 gives for a fraction of 1; CUTLASS has the same constants.
"""

from cutlass import Int64
from cutlass.cutlass_dsl import select_

NORMAL = 0x1000000000000000
FIRST = 0x12F0000000000000


def evict_first(alone=True) -> Int64:
    """For what nobody reads again: the next to go. `alone`: whether that is so; may be dynamic."""
    if isinstance(alone, bool):
        return Int64(FIRST if alone else NORMAL)
    return Int64(select_(alone, Int64(FIRST), Int64(NORMAL)))
