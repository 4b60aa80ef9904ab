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

from cula.common.registry import evaluated_while_tracing

OLDEST, NEWEST = (0, 4, 2), (0, 6)
"""Versions of FLA whose functions and dispatch are known: from OLDEST up to any NEWEST.x."""

# The modules in which FLA 0.4.2 to 0.5, and FLA 0.6, define the wrapper that dispatches.
_DISPATCHERS = ("fla.ops.backends", "fla.backends")

_inside: ContextVar[bool] = ContextVar("cula_inside_fla", default=False)


@evaluated_while_tracing
def fla_missing() -> str | None:
    """Say why FLA cannot be used here, or None. Looks for it without importing it."""
    return _fla_missing()


@functools.cache
def _fla_missing() -> str | None:
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


def _layers(function: Any) -> list[Any]:
    """List a decorated function's layers, from the outermost to the function itself."""
    layers = [function]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


def _home(layer: Any) -> str:
    # functools.wraps copies __module__, so only a function's globals say where it was written.
    return getattr(layer, "__globals__", {}).get("__name__") or ""


def _own(module: Any, name: str) -> Any:
    """Find FLA's function of this name, also where somebody put another in its place."""
    below = [m for n, m in list(sys.modules.items()) if n.startswith(module.__name__ + ".")]
    for place in (module, *below):
        found = getattr(place, name, None)
        if callable(found) and _home(_layers(found)[-1]).startswith("fla."):
            return found
    raise ImportError(f"{module.__name__}.{name} is not a function of flash-linear-attention")


def _past_dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what lies beneath the innermost layer that dispatches or is not FLA's."""
    layers = _layers(function)
    start = 0
    for i, layer in enumerate(layers):
        home = _home(layer)
        compiler_switch = getattr(layer, "_torchdynamo_disable", False)
        if home in _DISPATCHERS or not (home.startswith("fla.") or compiler_switch):
            start = i + 1
    if start == 0:
        return function
    # The layers further out go as well. Of these we know how to put one kind back, the one that
    # keeps torch.compile out; if FLA ever adds others there, better no fallback than a wrong one.
    switched_off = False
    for layer in layers[:start]:
        if getattr(layer, "_torchdynamo_disable", False):
            switched_off = True
        elif _home(layer).startswith("fla.") and _home(layer) not in _DISPATCHERS:
            raise ImportError(f"{function.__qualname__}: FLA decorates it outside of its dispatch")
    return torch.compiler.disable(layers[start]) if switched_off else layers[start]
