"""Launches that are kept for later calls, and those that are not."""

import contextlib

import pytest
import torch

from cula.common import launches
from cula.common.launches import keep, on_device


def test_a_launch_is_kept_if_nothing_was_copied() -> None:
    x, kept = torch.zeros(2), {}
    keep(kept, ("copied",), "no", [x, None], [x.clone(), None])
    keep(kept, None, "no", [x], [x])
    assert not kept
    keep(kept, ("as it came",), "yes", [x, None], [x, None])
    assert kept == {("as it came",): "yes"}


def test_there_is_an_end_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_LAUNCHES", 3)
    kept = {}
    for i in range(4):
        keep(kept, (i,), i, [], [])
    assert kept == {(3,): 3}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_device_is_set_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    seen = []

    @contextlib.contextmanager
    def device(which):
        seen.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda", 1)
    function = on_device(lambda *args: seen.append(args), second)
    assert not seen
    function(1, 2)
    assert seen == ([second, (1, 2)] if count > 1 else [(1, 2)])
