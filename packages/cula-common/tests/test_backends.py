"""Which backend is chosen, and that a fallback is announced once."""

import re
import threading
import time
import warnings

import pytest
import torch

from cula.common import backends

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    backends._warn_first_time.cache_clear()
    yield
    backends._warn_first_time.cache_clear()


def choose(requested="auto", device=GPU, cute=None, fla=None, call="kda_decode", **more):
    return backends.choose_backend(
        call, requested, device, cute_missing=cute, fla_missing=fla, **more
    )


@pytest.fixture
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_auto_is_silent_where_nothing_is_lost(silence):
    assert choose() == "cute"
    assert choose(fla="FLA is not installed") == "cute"
    assert choose(device=CPU) == "reference"
    assert choose(device=CPU, cute="no GPU", fla="no FLA") == "reference"


def test_fallback_to_fla_names_what_was_missing():
    with pytest.warns(UserWarning, match=r"kda_decode: FLA runs this.*: no kernel for K = 60$"):
        assert choose(cute="no kernel for K = 60") == "fla"


def test_fallback_to_reference_names_both():
    with pytest.warns(UserWarning) as caught:
        assert choose(cute="no kernel for K = 60", fla="FLA is not installed") == "reference"
    (only,) = caught
    assert "kda_decode" in str(only.message)
    assert "no kernel for K = 60" in str(only.message)
    assert "FLA is not installed" in str(only.message)


def test_warning_comes_once_per_call_and_reason():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            choose(cute="a")
            choose(cute="b")
            choose(cute="a", call="lightning_decode")
    assert len(caught) == 3
    assert {str(w.message)[-1] for w in caught} == {"a", "b"}


def test_warning_comes_once_from_many_threads(monkeypatch):
    start = threading.Barrier(8)
    # Long enough for all threads to be at the warning together.
    monkeypatch.setattr(backends, "_depth_of_caller", lambda: time.sleep(0.05) or 1)

    def work():
        start.wait()
        choose(cute="a")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_warning_points_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose(cute="a")
    assert caught[0].filename == __file__


def test_warning_can_be_left_out(silence):
    assert choose(cute="a", warn=False) == "fla"
    assert choose(cute="a", fla="b", warn=False) == "reference"


def test_forced_backends(silence):
    assert choose("cute") == "cute"
    assert choose("fla", cute="a") == "fla"
    assert choose("reference") == "reference"
    assert choose("reference", device=CPU, cute="a", fla="b") == "reference"


@pytest.mark.parametrize(
    ("requested", "device", "text"),
    [
        ("cute", GPU, "backend: 'cute'; cannot run kda_decode here: no kernel"),
        ("fla", GPU, "backend: 'fla'; cannot run kda_decode here: no FLA"),
        (
            "cute",
            CPU,
            "backend: 'cute'; cannot run kda_decode here: it needs tensors on a GPU, not on cpu",
        ),
    ],
)
def test_forced_backend_that_cannot_run(requested, device, text):
    with pytest.raises(NotImplementedError, match="^" + re.escape(text) + "$"):
        choose(requested, device, cute="no kernel", fla="no FLA")


def test_unknown_backend():
    text = "backend: 'triton'; must be one of auto, cute, fla, reference"
    with pytest.raises(ValueError, match=f"^{text}$"):
        choose("triton")


def test_environment(monkeypatch, silence):
    monkeypatch.setenv("CULA_BACKEND", "reference")
    assert choose() == "reference"
    assert choose("cute") == "cute"
    monkeypatch.setenv("CULA_BACKEND", "auto")
    assert choose() == "cute"
    monkeypatch.setenv("CULA_BACKEND", "")
    assert choose() == "cute"
    monkeypatch.setenv("CULA_BACKEND", "cute")
    with pytest.raises(NotImplementedError, match=r"^CULA_BACKEND: 'cute'; .* here: no kernel$"):
        choose(cute="no kernel")
    monkeypatch.setenv("CULA_BACKEND", "gpu")
    with pytest.raises(ValueError, match=r"^CULA_BACKEND: 'gpu'; must be one of"):
        choose()


def test_choice_does_not_break_a_graph():
    def f(x):
        return x + 1, choose(cute="no kernel for sm_75")

    compiled = torch.compile(f, fullgraph=True, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compiled(torch.zeros(2))[1] == "fla"
        assert compiled(torch.zeros(2))[1] == "fla"
    assert sum("no kernel for sm_75" in str(w.message) for w in caught) == 1
