"""How results are judged, and how stray reads and writes are caught."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECE = 1 << 24  # elements


def rel_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ``RMS(x - ref) / (RMS(ref) + 1e-8)`` in float64; nan if either holds a nan.

    Empty tensors have no error. An infinity in the same place and of the same sign in both is
    nan too: there is no error to speak of, so compare finite values.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(f"x: shape {list(x.shape)}; must be the reference's, {list(ref.shape)}")
    if x.numel() == 0:
        return 0.0
    x, ref = x.detach().flatten(), ref.detach().to(x.device).flatten()
    difference = power = 0.0
    # In pieces: a float64 copy of a whole activation can be larger than the memory.
    for part, want in zip(x.split(_PIECE), ref.split(_PIECE), strict=True):
        want = want.to(torch.float64)
        difference += float((part.to(torch.float64) - want).square().sum())
        power += float(want.square().sum())
    return math.sqrt(difference / x.numel()) / (math.sqrt(power / x.numel()) + 1e-8)


def assert_close(name: str, x: torch.Tensor, ref: torch.Tensor, tol: float) -> float:
    """Raise AssertionError unless `rel_error` is at most ``tol``; return the error."""
    error = rel_error(x, ref)
    # Written so that a nan fails.
    if not error <= tol:
        raise AssertionError(f"{name}: error {error:.3e} is above {tol:.3e}")
    return error


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are alike in shape, dtype and every bit (nan and -0 included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b.to(a.device)))


@dataclass(frozen=True)
class Poisoned:
    """A tensor that is a window of a larger buffer filled with nan (or the largest integer)."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    outside: torch.Tensor

    def untouched(self) -> bool:
        """Tell whether everything around the window still holds the poison, bit by bit."""
        now = _bits(self.buffer)[self.outside]
        return bool((now == _bits(_poison(1, self.buffer.dtype, self.buffer.device))).all())


def poisoned(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    stride: Sequence[int] | None = None,
    padding: int = 256,
) -> Poisoned:
    """Make a window of the given shape in a larger buffer full of poison, itself poisoned too.

    A kernel that reads beside the window shows a nan, and one that writes there is found by
    `Poisoned.untouched`.

    Args:
        shape: the window's shape.
        dtype: its dtype.
        device: its device.
        stride: its strides in elements, contiguous by default; gaps between are poison as well.
        padding: how many elements lie before it, and at least how many behind it.
    """
    shape = tuple(shape)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    span = 0
    if 0 not in shape:
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    buffer = _poison(span + 2 * padding, dtype, device)
    outside = torch.ones(buffer.shape, dtype=torch.bool, device=device)
    outside.as_strided(shape, stride, padding).fill_(False)
    return Poisoned(buffer.as_strided(shape, stride, padding), buffer, outside)


def _poison(count: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full((count,), value, dtype=dtype, device=device)


def _bits(x: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])
