"""The layout of the preparation's tiles, by the name that it imports."""

from cula.common.cute.wgmma import rows_layout

__all__ = ["rows_layout"]
