"""The shared-memory allocator, by the name that the installed CuTe DSL has for it."""

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # before CuTe DSL 4.8
    from cutlass.utils import SmemAllocator

__all__ = ["SmemAllocator"]
