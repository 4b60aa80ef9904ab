"""Letting flash-linear-attention (FLA) run our kernels where its own would run.

FLA 0.5 and 0.6 ask registered backends before they run some of their functions (hooks). A function
without a hook can only be replaced, which `Takeover.patch` does when the user asks for it, and
`Takeover.undo` takes back. Either way an `Adapter` decides call by call: our plan is asked whether
our kernel runs this call, and what it refuses goes to FLA's own code, with the reason logged.

FLA asks (a verifier) and then calls. A decode step takes the GPU a few microseconds, so neither may
look at the arguments twice: what the verifier has found under a call's key, the run takes over.
"""

import functools
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from operator import is_
from typing import Any

import torch

from cula.common.fla import dispatcher_of, fla_alone, fla_missing, inside_fla

MAX_KINDS = 4096  # of accepted calls that an adapter remembers
PRIORITY = 1  # FLA asks lower ones first; its own backends have 3 and more
INSIDE = "FLA is running as cuLA's fallback"

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1024)
def log_once(message: str) -> None:
    """Log at INFO, the first time only (as far as memory of a bounded size goes)."""
    _log.info(message)


# A call that cuLA runs: its arguments, its key, the launch that an earlier one of its kind left.
Accepted = tuple[Mapping[str, Any], Hashable, Any]


# In place of a launch: nothing is known of the key; our kernel runs it, and may leave a launch.
_UNKNOWN, _NO_LAUNCH_YET = object(), object()


def _nothing_kept(call: Mapping[str, Any], result: Any) -> Any:
    return None


@dataclass(frozen=True, eq=False)
class Adapter:
    """One function of FLA's that cuLA can take over.

    The functions take what a call of FLA's names, as a dictionary with FLA 0.6's names;
    keywords that the caller left out are not in it.

    Attributes:
        path: module and name, such as ``"fla.ops.kda.chunk_kda"``.
        operation: the name under which a version of FLA without a registry for every function
            files this one.
        key: what our plan's answer depends on, and what selects the launch of a call; short and
            cheap to make. Calls that were accepted are known by it. Should a call of a known key
            not fit after all, `run` falls back by itself, or raises as any wrong call does.
        plan: our plan of a call, for a backend; raises what our call would raise.
        run: our call.
        kept: the launch that a call, once it has run with this result, left behind for others of
            its key; None if there is none.
        again: our call by such a launch; raises TypeError or ValueError, nothing having been
            launched that a `run` would not do again, where the launch refuses the arguments.
        fixed: keywords that a function further out passes to the one that this adapter is of: it
            stands for them, and is only ever patched.
        accepted: the keys of calls that are ours, each with its launch; or None for those that the
            reference runs.
    """

    path: str
    operation: str
    key: Callable[[Mapping[str, Any]], Hashable]
    plan: Callable[[Mapping[str, Any], str], Any]
    run: Callable[[Mapping[str, Any]], Any]
    kept: Callable[[Mapping[str, Any], Any], Any] = _nothing_kept
    again: Callable[[Mapping[str, Any], Any], Any] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    accepted: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.path.rpartition(".")[2]

    def refusal(self, call: Mapping[str, Any]) -> str | None:
        """Why FLA has to run this call, or None if cuLA does."""
        judged = self.judge(call)
        return judged if isinstance(judged, str) else None

    def judge(self, call: Mapping[str, Any]) -> Accepted | str:
        """The call with all that is known of its kind, or why FLA has to run it."""
        if inside_fla():
            return INSIDE
        try:
            key = self.key(call)
            launch = self.accepted.get(key, _UNKNOWN)
            if launch is not _UNKNOWN:
                return call, key, launch
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"  # a wrong call; FLA says so in its words
        backend, reason = self._planned(call)
        if reason is not None:
            log_once(f"{self.path}: FLA runs this: {reason}")
            return reason
        if len(self.accepted) >= MAX_KINDS:
            self.accepted.clear()
        launch = self.accepted[key] = _NO_LAUNCH_YET if backend == "cute" else None
        log_once(f"{self.path}: cuLA runs this")
        return call, key, launch

    def serve(self, accepted: Accepted) -> Any:
        """Run a call that `judge` has accepted, the short way if its kind has one."""
        call, key, launch = accepted
        if launch is None or self.again is None:
            return self.run(call)
        if launch is _NO_LAUNCH_YET:
            result = self.run(call)
            launch = self.kept(call, result)
            if launch is not None:
                self.accepted[key] = launch
            return result
        try:
            return self.again(call, launch)
        except (TypeError, ValueError):  # what the launch refuses is planned anew
            return self.run(call)

    def _planned(self, call: Mapping[str, Any]) -> tuple[str, str | None]:
        """Ask our plan: the backend, and why FLA runs this or None. On a GPU only a kernel of ours
        is worth more than FLA's; elsewhere our reference is all there is."""
        q = call["q"]
        backend = os.environ.get("CULA_BACKEND") or ("cute" if q.is_cuda else "reference")
        try:
            plan = self.plan(call, backend)
        except (TypeError, ValueError, NotImplementedError) as error:
            return "fla", str(error)
        return plan.backend, "FLA was asked for" if plan.backend == "fla" else None


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


def device_kind(call: Mapping[str, Any], tensors: Sequence[str]) -> tuple[type, int, bool]:
    """For a key: q's class, the device's index (-1: CPU), whether autograd would record the call.

    The class, since a fake tensor or a subclass is no call for a launch that plain tensors left.
    """
    q = call["q"]
    recorded = torch.is_grad_enabled() and any(
        call.get(name) is not None and call[name].requires_grad for name in tensors
    )
    return type(q), q.get_device(), recorded


def kind_of(x: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
    """For a key: dtype and shape, or None."""
    return None if x is None else (x.dtype, x.shape)


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
