"""Letting flash-linear-attention (FLA) run our kernels where its own would run.

FLA 0.5 and 0.6 ask registered backends before they run some of their functions (hooks). A function
without a hook can only be replaced, which `Takeover.patch` does when the user asks for it, and
`Takeover.undo` takes back. Either way an `Adapter` (fla_adapter.py) decides call by call: our plan
is asked whether our kernel runs this call, and what it refuses goes to FLA's own code, with the
reason logged.
"""

import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from operator import is_
from typing import Any

import torch

from cula.common.fla import dispatcher_of, fla_alone, fla_missing
from cula.common.fla_adapter import Adapter

PRIORITY = -1  # FLA asks lower ones first; its own backends have 0 and more


class Takeover:
    """What one package takes over from FLA."""

    def __init__(
        self, package: str, adapters: Sequence[Adapter], further_out: Sequence[Adapter] = ()
    ):
        """Nothing happens yet.

        Args:
            package: the package's name, ``"cula.kda"``.
            adapters: the functions; those that the installed FLA does not have are left out.
            further_out: those that lead to them, for patches past the dispatch.
        """
        self.package = package
        self.adapters = adapters
        self.further_out = further_out
        self.hooked: list[Adapter] = []
        self.without_hook: list[Adapter] = []
        self._patched: set[str] = set()
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
                self.hooked.append(adapter)
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

    def patch(self, past_dispatch: bool = False) -> None:
        """Put an adapter in the place of each function without a hook, in all of FLA's modules.

        A module outside of FLA that has imported such a function by name keeps the original.

        Args:
            past_dispatch: replace functions that have a hook, and those further out, as well.
        """
        wanted = list(self.without_hook)
        if past_dispatch:
            wanted += [*self.hooked, *self.further_out]
        for adapter in wanted:
            original = None if adapter.path in self._patched else _find(adapter.path)
            if original is None:
                continue
            ours = _in_front_of(original, adapter, adapter not in self.without_hook)
            for module in _fla_modules():
                for name, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, name, ours)
                        self._replaced.append((module, name, original, ours))
            self._patched.add(adapter.path)

    def undo(self) -> None:
        """Put FLA's functions back where `patch` replaced them (and nobody else has since)."""
        for module, name, original, ours in self._replaced:
            if vars(module).get(name) is ours:
                setattr(module, name, original)
        self._replaced = []
        self._patched = set()

    def report(self) -> dict[str, str]:
        """Say for each function how it is taken over: "hook", "patch" or "no"."""
        taken = {adapter.path: "hook" for adapter in self.hooked}
        taken |= {adapter.path: "no" for adapter in self.without_hook}
        return taken | dict.fromkeys(sorted(self._patched), "patch")


class Patch:
    """What ``patch_fla()`` returns. As a context manager it takes the patch back at the end."""

    def __init__(self, takeover: Takeover, past_dispatch: bool = False):
        """Patch, if that has not been done."""
        self._takeover = takeover
        takeover.patch(past_dispatch)

    def __enter__(self) -> "Patch":
        """The patch is in place already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo it."""
        self.undo()

    def undo(self) -> None:
        """Put FLA's own functions back."""
        self._takeover.undo()


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


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two calls have the very same arguments, in one order; no value is compared."""
    return len(a) == len(b) and all(map(is_, a.values(), b.values()))


def _register(home_name: str, package: str, adapter: Adapter, function: Callable[..., Any]) -> None:
    names, own = _positional(function), adapter.name
    # What the verifier found, for the run that follows it at once, in the same thread.
    handed = threading.local()

    def verifier(_, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        judged = adapter.judge(_call_of(names, args, kwargs) if args else kwargs)
        if isinstance(judged, str):
            return False, judged
        handed.over = judged
        return True, None

    def verify(_, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """As FLA's own, which looks for the verifier by its name and passes everything on."""
        if function_name != own:
            return True, None  # and FLA finds that there is nothing to run
        try:
            judged = adapter.judge(_call_of(names, args, kwargs) if args else kwargs)
        except Exception as error:
            return False, str(error)
        if isinstance(judged, str):
            return False, judged
        handed.over = judged
        return True, None

    def run(_, *args: Any, **kwargs: Any) -> Any:
        call = _call_of(names, args, kwargs) if args else kwargs
        accepted = getattr(handed, "over", None)
        handed.over = None  # it holds tensors, and is of one call alone
        if accepted is None or not _same(accepted[0], call):
            return adapter.run(call)
        return adapter.serve(accepted)

    members = {
        # One of a kind in a registry: two packages may be in the same one.
        "backend_type": package.replace(".", "_"),
        "priority": PRIORITY,
        "verify": verify,
        own: run,
        f"{own}_verifier": verifier,
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


def _in_front_of(
    original: Callable[..., Any], adapter: Adapter, hook_behind: bool
) -> Callable[..., Any]:
    names, fixed = _positional(original), adapter.fixed

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        call = _call_of(names, args, kwargs) if args else kwargs
        judged = adapter.judge({**call, **fixed} if fixed else call)
        if not isinstance(judged, str):
            return adapter.serve(judged)
        if hook_behind:  # where FLA would ask once more
            with fla_alone():
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    return torch.compiler.disable(ours)
