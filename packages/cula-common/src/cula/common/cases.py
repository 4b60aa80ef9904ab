"""The kernels of this package, for compile checks and for filling a cache ahead of time."""

from typing import Literal

from cula.common.varlen import schedule_configs

CHUNK = 64  # tokens a chunk in every prefill kernel


def kernel_configs(which: Literal["common", "all"] = "all", arch: str = "sm_90a") -> tuple:
    """What to compile for a GPU; there is no kernel here that only some callers need."""
    return tuple(schedule_configs(CHUNK, early_release=arch != "sm_80"))
