"""Which GPU this is, and whether the compiler for its kernels can be found.

Nothing here touches CUDA at import, and every answer is computed once per device.
"""

import functools
from importlib.util import find_spec

import torch

from cula.common.registry import evaluated_while_tracing

KERNEL_ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
"""The architectures that kernels are compiled for, oldest first."""


@evaluated_while_tracing
def arch_of(device: torch.device) -> str:
    """Name the architecture that kernels for ``device`` are compiled for.

    Every 8.x GPU runs code built for ``sm_80``. From Hopper on the kernels use features of one
    exact chip (the ``a`` suffix), and such code does not load on a sibling of the same major
    version; so 9.0, 10.0 and 12.0 have a kernel architecture, and any other capability gets its
    plain name (``sm_103``), which is in no kernel's list and leads to a fallback.

    Args:
        device: a CUDA device; without an index it means the current one.
    """
    return _arch(_index(device))


@evaluated_while_tracing
def sm_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a CUDA ``device``."""
    return _sm_count(_index(device))


@evaluated_while_tracing
def missing_compiler() -> str | None:
    """Say what to install when kernels cannot be compiled here; ``None`` when nothing is missing.

    The modules are looked for and not imported: importing the compiler takes a second, and a
    machine that only runs the reference should not pay for it.
    """
    return _missing_compiler()


@functools.cache
def _missing_compiler() -> str | None:
    wanted = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
    absent = [package for package, module in wanted.items() if find_spec(module) is None]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return f"{' and '.join(absent)} {verb} not installed (pip install {' '.join(absent)})"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _name(capability: tuple[int, int]) -> str:
    exact = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
    if capability[0] == 8:
        return "sm_80"
    return exact.get(capability, "sm_{}{}".format(*capability))


@functools.cache
def _arch(index: int) -> str:
    return _name(torch.cuda.get_device_capability(index))


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
