"""Reaching flash-linear-attention's own code, past its dispatch.

FLA lets other packages, us among them, take over its functions. A fallback to FLA that went
through that dispatch could come back to us and never end. So `fla_function` returns what is
beneath the dispatch, and marks the calling context while FLA runs: functions further down in FLA
are dispatched too, and a backend of ours registered for one of them has to decline while
`inside_fla` holds. Nothing in FLA is changed for this, so other threads and other users of FLA
notice nothing.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

# Where torch.compiler.disable defines its wrapper.
_COMPILER_SWITCH = "torch._dynamo.eval_frame"

_running: ContextVar[tuple[str, ...]] = ContextVar("cula_running_fla", default=())


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

    A backend that cuLA registers with FLA declines while this holds. (Autograd runs a backward
    in threads of its own, which are not in that context.)
    """
    return bool(_running.get())


@contextmanager
def fla_alone() -> Iterator[None]:
    """While this holds in a context, everything of ours declines what FLA offers it.

    For comparisons: FLA's models on FLA's kernels, with our backends registered.
    """
    token = _running.set((*_running.get(), "fla_alone"))
    try:
        yield
    finally:
        _running.reset(token)


def dispatcher_of(function: Callable[..., Any]) -> str | None:
    """Name the module whose dispatch FLA has put in front of this function of its own, if any."""
    homes = (_home(layer) for layer in _layers(function))
    return next((home for home in homes if home in _DISPATCHERS), None)


@functools.cache
def fla_function(path: str) -> Callable[..., Any]:
    """Return FLA's own implementation of a function, past the dispatch in front of it.

    Args:
        path: module and name, such as ``"fla.ops.kda.chunk_kda"``.

    Returns:
        A function with the same arguments and results, which torch.compile does not trace into.
        It raises RuntimeError when FLA leads back to it: an endless loop otherwise.

    Raises:
        ImportError: FLA is missing, cannot be imported, or has no such function of its own.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # FLA and Triton raise what they like when they miss a GPU
        raise ImportError(f"{module_name} cannot be imported: {error}") from error
    original = _past_dispatch(_own(module, name))

    @functools.wraps(original)
    def call(*args, **kwargs):
        running = _running.get()
        if path in running:
            raise RuntimeError(
                f"{path}: called while it runs; FLA's dispatch led back to cuLA. A backend that "
                "calls cuLA must decline while cula.common.fla.inside_fla() holds"
            )
        token = _running.set((*running, path))
        try:
            return original(*args, **kwargs)
        finally:
            _running.reset(token)

    return torch.compiler.disable(call)


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
    homes = [_home(layer) for layer in layers]
    start = 0
    for i, home in enumerate(homes):
        if home in _DISPATCHERS or not home.startswith(("fla.", "torch.")):
            start = i + 1
    # The layers further out are lost with it. One that keeps torch.compile out may go, since
    # fla_function does that too; for any other, better no fallback than a wrong one.
    for home in homes[:start]:
        if home.startswith(("fla.", "torch.")) and home not in (*_DISPATCHERS, _COMPILER_SWITCH):
            raise ImportError(f"{function.__qualname__}: FLA decorates it outside of its dispatch")
    return layers[start]
