"""Reaching flash-linear-attention's own code, past its dispatch.

FLA lets other packages, us among them, take over its functions. A fallback to FLA that went
through that dispatch could come back to us and never end. So `fla_function` peels the dispatch
off the function that it returns, and marks the calling context while FLA runs: functions
further down in FLA are dispatched too, and a backend of ours registered for one of them has to
decline while `inside_fla` holds. Nothing in FLA is changed for this, so other threads and other
users of FLA notice nothing.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

OLDEST, NEWEST = (0, 4, 2), (0, 6)
"""Versions of FLA whose functions and dispatch are known: from OLDEST up to any NEWEST.x."""

# The modules in which FLA 0.4.2 to 0.5, and FLA 0.6, define the wrapper that dispatches.
_DISPATCHERS = ("fla.ops.backends", "fla.backends")

_inside: ContextVar[bool] = ContextVar("cula_inside_fla", default=False)


@functools.cache
def fla_missing() -> str | None:
    """Say why FLA cannot be used here, or None. Looks for it without importing it."""
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install fla-core)"
    if find_spec("triton") is None:
        return "flash-linear-attention is installed, but triton is not"
    version = _installed_version()
    if version is not None and (version < OLDEST or version[:2] > NEWEST):
        return f"fla-core {'.'.join(map(str, version))} is installed; 0.4.2 to 0.6 can be used"
    return None


def inside_fla() -> bool:
    """Tell whether this context is in a call of a function that `fla_function` returned.

    A backend that cuLA registers with FLA declines while this holds.
    """
    return _inside.get()


@functools.cache
def fla_function(path: str) -> Callable[..., Any]:
    """Return FLA's own implementation of a function, which never comes back to cuLA.

    Args:
        path: module and name, such as ``"fla.ops.kda.chunk_kda"``.

    Raises:
        ImportError: FLA is missing, cannot be imported, or has no such function of its own.
    """
    module_name, _, name = path.rpartition(".")
    original = _past_dispatch(_own(importlib.import_module(module_name), name))

    @functools.wraps(original)
    def call(*args, **kwargs):
        token = _inside.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _inside.reset(token)

    return call


def _installed_version() -> tuple[int, ...] | None:
    for distribution in ("fla-core", "flash-linear-attention"):
        try:
            found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
        if found:
            return tuple(int(part or 0) for part in found.groups())
    return None


def _own(module: Any, name: str) -> Callable[..., Any]:
    """Find FLA's function of this name, also where somebody put another in its place."""
    below = [m for n, m in sys.modules.items() if n.startswith(module.__name__ + ".")]
    for place in (module, *below):
        found = getattr(place, name, None)
        if callable(found) and str(getattr(found, "__module__", "")).startswith("fla."):
            return found
    raise ImportError(f"{module.__name__}.{name} is not a function of flash-linear-attention")


def _past_dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the innermost dispatching layer of a decorated function calls by default."""
    layers = [function]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    # functools.wraps copies __module__, so only a function's globals say where it was written.
    written_in = [getattr(layer, "__globals__", {}).get("__name__") for layer in layers]
    dispatching = [i for i, where in enumerate(written_in) if where in _DISPATCHERS]
    if not dispatching:
        return function
    original = layers[dispatching[-1] + 1]
    # The layers outside go with the dispatch. FLA keeps torch.compile out of these calls by one.
    return torch.compiler.disable(original)
