"""Which implementation a call runs: our kernel, FLA's, or the reference."""

import os
import sys
import threading
import warnings
from functools import cache
from typing import Literal, get_args

import torch

from cula.common.registry import evaluated_while_tracing

Backend = Literal["cute", "fla", "reference"]

_once = threading.Lock()


@evaluated_while_tracing
def choose_backend(
    call: str,
    requested: str,
    device: torch.device,
    *,
    cute_missing: str | None,
    fla_missing: str | None,
    warn: bool = True,
) -> Backend:
    """Choose the backend of one plan.

    ``"auto"`` means the environment variable ``CULA_BACKEND`` if that is set; otherwise the
    reference for tensors that are not on a GPU, and for those that are, the first that is
    possible of our kernel, FLA and the reference. Not getting our kernel on a GPU warns once
    per call and reason. Any other name is an order and not a wish: it is met or it raises.

    Args:
        call: the public call's name, for messages.
        requested: "auto", "cute", "fla" or "reference".
        device: where the tensors are.
        cute_missing: why our kernel cannot run this, or None.
        fla_missing: why FLA cannot run this, or None.
        warn: say when a fallback is taken.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: the backend asked for cannot run this; says why.
    """
    source = "backend"
    if requested == "auto":
        forced = os.environ.get("CULA_BACKEND")
        if forced:
            requested, source = forced, "CULA_BACKEND"
    on_gpu = device.type == "cuda"

    if requested == "auto":
        if not on_gpu:
            return "reference"
        if cute_missing is None:
            return "cute"
        if fla_missing is None:
            if warn:
                _warn(f"{call}: FLA runs this instead of a cuLA kernel: {cute_missing}")
            return "fla"
        if warn:
            _warn(
                f"{call}: the slow reference runs this. No cuLA kernel: {cute_missing}. "
                f"No FLA: {fla_missing}"
            )
        return "reference"

    if requested == "reference":
        return "reference"
    if requested not in ("cute", "fla"):
        names = ", ".join(("auto", *get_args(Backend)))
        raise ValueError(f"{source}: {requested!r}; must be one of {names}")
    missing = cute_missing if requested == "cute" else fla_missing
    if not on_gpu:
        missing = f"it needs tensors on a GPU, not on {device}"
    if missing is not None:
        raise NotImplementedError(f"{source}: {requested!r}; cannot run {call} here: {missing}")
    return requested


def _warn(message: str) -> None:
    with _once:
        _warn_first_time(message)


@cache
def _warn_first_time(message: str) -> None:
    warnings.warn(message, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Stack level, as seen by the function above, of the nearest frame outside of cuLA."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cula."):
        frame, depth = frame.f_back, depth + 1
    return depth
