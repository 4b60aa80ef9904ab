"""Right first: errors against a float64 reference, computed in slices that fit any GPU."""

import math

import torch


class AccuracyError(Exception):
    """A result is further from the reference than its tolerance allows."""


class RelativeError:
    """RMS(x - ref) / (RMS(ref) + 1e-8), gathered slice by slice in float64."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._reference = 0.0
        self._count = 0

    def add(self, x: torch.Tensor, ref: torch.Tensor) -> None:
        """Count one slice.

        Args:
            x: what was computed, any dtype.
            ref: what it should be, the same shape.

        Raises:
            ValueError: the shapes differ.
        """
        if x.shape != ref.shape:
            raise ValueError(f"x: shape {tuple(x.shape)}; must be {tuple(ref.shape)}")
        exact = ref.double()
        self._difference += (x.double() - exact).square().sum().item()
        self._reference += exact.square().sum().item()
        self._count += ref.numel()

    def value(self) -> float:
        """Returns: the error over all slices; nan if anything was nan."""
        if self._count == 0:
            return 0.0
        rms = math.sqrt(self._reference / self._count)
        return math.sqrt(self._difference / self._count) / (rms + 1e-8)


def check(name: str, error: float, tolerance: float) -> None:
    """Refuse an error above its tolerance.

    Args:
        name: what was compared.
        error: as ``RelativeError`` gives it; nan never passes.
        tolerance: the most that is allowed.

    Raises:
        AccuracyError: naming all three.
    """
    if not error <= tolerance:
        raise AccuracyError(f"{name}: error {error:.2e}; must be at most {tolerance:.0e}")
