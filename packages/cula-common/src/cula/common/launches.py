"""Launches that are kept, so that a call like an earlier one is not planned again.

A key holds what selects the kernels and what nobody else checks; that all other sizes, dtypes,
strides and alignments fit, the compiled functions see by themselves, and a call that they refuse is
planned anew.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

MAX_LAUNCHES = 4096  # of an operator's family: one for each kind of call and batch size

Launch = TypeVar("Launch")


def keep(
    launches: dict[tuple, Launch],
    key: tuple | None,
    launch: Launch,
    given: Iterable,
    used: Iterable,
) -> None:
    """Keeps a launch for the calls with this key, unless one of this call's arguments was copied.

    Args:
        launches: those kept so far; emptied when there are `MAX_LAUNCHES`.
        key: of the kind of call; None where it has none.
        given, used: the arguments as they came, and as the kernels got them.
    """
    if key is None or any(a is not b for a, b in zip(given, used, strict=True)):
        return
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[key] = launch


def on_device(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The function with its device made the current one; as it is where there is only one."""
    if torch.cuda.device_count() <= 1:
        return function

    def launch(*args):
        with torch.cuda.device(device):
            function(*args)

    return launch
