"""Tensors as compiled kernels take them: what a compile key says of them, and what must be copied.

Imports no compiler. What the names of dtypes mean in device code: `cula.common.cute.dtypes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cula.common.layouts import has_dense_slots, to_k_first

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""Dtypes by their names in compile keys."""


@dataclass(frozen=True)
class States:
    """States in memory: "fp32" or "bf16"; V-first: a value channel's K channels are neighbours."""

    dtype: str
    v_first: bool


def dtype_name(x: torch.Tensor | None) -> str | None:
    """The dtype's name in a compile key; None for an argument that is absent."""
    return None if x is None else DTYPE_NAMES[x.dtype]


def states_in_key(x: torch.Tensor | None) -> States | None:
    """What a compile key says of states [slots, HV, V, K], V-first by shape."""
    return None if x is None else States(DTYPE_NAMES[x.dtype], x.stride(-1) == 1)


def loadable_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, channels], or a copy where TMA cannot read it as it lies."""
    aligned = x.data_ptr() % 16 == 0 and all(s % 8 == 0 and s > 0 for s in x.stride()[:3])
    if aligned and x.stride(3) == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def loadable_states(x: torch.Tensor) -> bool:
    """Whether a sequence kernel reads and writes states [slots, HV, V, K] where they lie."""
    dense = has_dense_slots(x) or has_dense_slots(to_k_first(x))
    return dense and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:2])


def refused_states(states: Mapping[str, torch.Tensor | None]) -> str | None:
    """Why a sequence kernel cannot use one of these where it lies, or None.

    Args:
        states: by argument's name, ``[slots, HV, V, K]``, V-first by shape; None where absent.
    """
    for arg, x in states.items():
        if x is not None and not loadable_states(x):
            return (
                f"{arg}: strides {list(x.stride())}; slots and heads must start at multiples of 8 "
                "elements and the whole at one of 16 bytes"
            )
    return None
