"""One function of flash-linear-attention's (FLA) that cuLA can take over: which calls, and how.

FLA asks (`judge`) and then calls (`serve`). A decode step takes the GPU a few microseconds, so not
both may look at the arguments: what `judge` has found under a call's key, `serve` is given.
"""

import functools
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cula.common.fla import inside_fla

MAX_KINDS = 4096  # of accepted calls that an adapter remembers
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
