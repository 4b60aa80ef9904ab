"""Letting flash-linear-attention (FLA) run our kernels where its own would run.

FLA 0.5 and 0.6 ask registered backends before they run some of their functions (hooks). A function
without a hook can only be replaced, which `Takeover.patch` does when the user asks for it, and
`Takeover.undo` takes back. Either way an `Adapter` decides call by call: our plan is asked whether
our kernel runs this call, and what it refuses goes to FLA's own code, with the reason logged.
"""

import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch

from cula.common.fla import dispatcher_of, fla_missing, inside_fla

MAX_KINDS = 4096  # of accepted calls that an adapter remembers
PRIORITY = 1  # FLA asks lower ones first; its own backends have 3 and more
INSIDE = "FLA is running as cuLA's fallback"

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1024)
def log_once(message: str) -> None:
    """Log at INFO, the first time only (as far as memory of a bounded size goes)."""
    _log.info(message)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One function of FLA's that cuLA can take over.

    The three functions take what a call of FLA's names, as a dictionary with FLA 0.6's names;
    keywords that the caller left out are not in it.

    Attributes:
        path: module and name, such as ``"fla.ops.kda.chunk_kda"``.
        operation: the name under which a version of FLA without a registry for every function
            files this one.
        key: what our plan's answer depends on, short and cheap to make. Calls that were accepted
            are known by it. Should a call of a known key not fit after all, `run` falls back by
            itself, or raises as any wrong call does.
        plan: our plan of a call, for a backend; raises what our call would raise.
        run: our call.
    """

    path: str
    operation: str
    key: Callable[[Mapping[str, Any]], Hashable]
    plan: Callable[[Mapping[str, Any], str], Any]
    run: Callable[[Mapping[str, Any]], Any]
    accepted: set[Hashable] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.path.rpartition(".")[2]

    def refusal(self, call: Mapping[str, Any]) -> str | None:
        """Why FLA has to run this call, or None if cuLA does."""
        if inside_fla():
            return INSIDE
        try:
            key = self.key(call)
            if key in self.accepted:
                return None
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"  # a wrong call; FLA says so in its words
        reason = self._planned(call)
        if reason is None:
            if len(self.accepted) >= MAX_KINDS:
                self.accepted.clear()
            self.accepted.add(key)
            log_once(f"{self.path}: cuLA runs this")
        else:
            log_once(f"{self.path}: FLA runs this: {reason}")
        return reason

    def _planned(self, call: Mapping[str, Any]) -> str | None:
        """Ask our plan. On a GPU only a kernel of ours is worth more than FLA's; elsewhere our
        reference is all there is."""
        q = call["q"]
        backend = os.environ.get("CULA_BACKEND") or ("cute" if q.is_cuda else "reference")
        try:
            plan = self.plan(call, backend)
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
        return "FLA was asked for" if plan.backend == "fla" else None


class Takeover:
    """What one package takes over from FLA."""

    def __init__(self, package: str, adapters: Sequence[Adapter]):
        """Nothing happens yet.

        Args:
            package: the package's name, ``"cula.kda"``.
            adapters: the functions; those that the installed FLA does not have are left out.
        """
        self.package = package
        self.adapters = adapters
        self.hooked: list[str] = []
        self.without_hook: list[Adapter] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def register(self) -> None:
        """Register with FLA's dispatch every function that it dispatches.

        Raises:
            ImportError: FLA is missing, is of a version that is not known, or cannot be imported.
        """
        missing = fla_missing()
        if missing is not None:
            raise ImportError(f"{self.package}.fla: {missing}")
        self.hooked, self.without_hook = [], []
        for adapter in self.adapters:
            function = _find(adapter.path)
            if function is None:
                continue
            home = dispatcher_of(function)
            if home is not None:
                _register(home, self.package, adapter, function)
                self.hooked.append(adapter.path)
            else:
                self.without_hook.append(adapter)

    def warn(self) -> None:
        """Warn of the functions that FLA has no hook for: nothing is taken over there yet."""
        if not self.without_hook:
            return
        names = ", ".join(adapter.path for adapter in self.without_hook)
        why = "the installed FLA has no hook there"
        if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
            why = "FLA_DISABLE_BACKEND_DISPATCH=1 keeps FLA from asking anybody"
        warnings.warn(
            f"{names}: still FLA's own, since {why}. {self.package}.fla.patch_fla() puts cuLA in "
            "its place",
            stacklevel=3,
        )

    def patch(self) -> None:
        """Put an adapter in the place of each function without a hook, in all of FLA's modules.

        A module outside of FLA that has imported such a function by name keeps the original.
        """
        if self._replaced:
            return
        for adapter in self.without_hook:
            original = _find(adapter.path)
            if original is None:
                continue
            ours = _in_front_of(original, adapter)
            for module in _fla_modules():
                for name, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, name, ours)
                        self._replaced.append((module, name, original, ours))

    def undo(self) -> None:
        """Put FLA's functions back where `patch` replaced them (and nobody else has since)."""
        for module, name, original, ours in self._replaced:
            if vars(module).get(name) is ours:
                setattr(module, name, original)
        self._replaced = []

    def report(self) -> dict[str, str]:
        """Say for each function how it is taken over: "hook", "patch" or "no"."""
        patched = bool(self._replaced)
        return dict.fromkeys(self.hooked, "hook") | {
            adapter.path: "patch" if patched else "no" for adapter in self.without_hook
        }


class Patch:
    """What ``patch_fla()`` returns. As a context manager it takes the patch back at the end."""

    def __init__(self, takeover: Takeover):
        """Patch, if that has not been done."""
        self._takeover = takeover
        takeover.patch()

    def __enter__(self) -> "Patch":
        """The patch is in place already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo it."""
        self.undo()

    def undo(self) -> None:
        """Put FLA's own functions back."""
        self._takeover.undo()


def device_kind(call: Mapping[str, Any], tensors: Sequence[str]) -> tuple[int, bool]:
    """For a key: the device's index (-1: CPU), and whether autograd would record the call."""
    recorded = torch.is_grad_enabled() and any(
        call.get(name) is not None and call[name].requires_grad for name in tensors
    )
    return call["q"].get_device(), recorded


def dtype_of(x: torch.Tensor | None) -> torch.dtype | None:
    """For a key: the dtype, or None."""
    return None if x is None else x.dtype


def _find(path: str) -> Callable[..., Any] | None:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # FLA and Triton raise what they like when they miss a GPU
        raise ImportError(f"{module_name} cannot be imported: {error}") from error
    return getattr(module, name, None)


def _fla_modules() -> list[Any]:
    return [m for n, m in list(sys.modules.items()) if n == "fla" or n.startswith("fla.")]


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of the installed FLA's function; their order differs between versions."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature(function).parameters.values() if p.kind in kinds)


def _call_of(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _register(home_name: str, package: str, adapter: Adapter, function: Callable[..., Any]) -> None:
    names = _positional(function)

    def verifier(_, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        reason = adapter.refusal(_call_of(names, args, kwargs) if args else kwargs)
        return reason is None, reason

    def run(_, *args: Any, **kwargs: Any) -> Any:
        return adapter.run(_call_of(names, args, kwargs) if args else kwargs)

    members = {
        # One of a kind in a registry: two packages may be in the same one.
        "backend_type": package.replace(".", "_"),
        "priority": PRIORITY,
        adapter.name: run,
        f"{adapter.name}_verifier": verifier,
    }
    home = importlib.import_module(home_name)
    if not hasattr(home, "register"):
        _register_before_0_6(home, adapter, members)
        return
    backend = type("CulaBackend", (home.BaseBackend,), members)
    try:
        home.register(function)(backend)
    except KeyError:  # no registry of its own: FLA files it under its operation
        home.register(adapter.operation)(backend)


def _register_before_0_6(home: Any, adapter: Adapter, members: dict[str, Any]) -> None:
    backend = type("CulaBackend", (home.BaseBackend,), members)
    # A registry is made when its operation is first called, and would then replace ours.
    home.BackendRegistry.ensure_initialized(adapter.operation)
    registry = home.BackendRegistry._registries.get(adapter.operation)
    (registry or home.BackendRegistry(adapter.operation)).register(backend())


def _in_front_of(original: Callable[..., Any], adapter: Adapter) -> Callable[..., Any]:
    names = _positional(original)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        call = _call_of(names, args, kwargs)
        if adapter.refusal(call) is None:
            return adapter.run(call)
        return original(*args, **kwargs)

    return torch.compiler.disable(ours)
