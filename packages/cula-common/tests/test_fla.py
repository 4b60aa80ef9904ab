"""FLA's own functions, reached past a dispatch that points back at us.

The packages written here imitate how each version of FLA dispatches, and nothing else of it.
"""

import importlib
import sys
import textwrap
import threading

import pytest
import torch

from cula.common import fla

# No dispatch in front of chunk_kda at all.
PLAIN = {
    "fla/ops/kda/chunk.py": """
        import torch

        @torch.compiler.disable
        def chunk_kda(x):
            return ("fla", x)
    """,
}

# A registry per operation name, wrapper outermost.
BY_OPERATION = {
    "fla/ops/backends.py": """
        from functools import wraps

        backends = {}

        def dispatch(operation):
            def decorator(function):
                @wraps(function)
                def wrapper(*args, **kwargs):
                    for backend in backends.get(operation, []):
                        if getattr(backend, "accepts", lambda: True)():
                            return getattr(backend, function.__name__)(*args, **kwargs)
                    return function(*args, **kwargs)
                return wrapper
            return decorator
    """,
    "fla/ops/kda/chunk.py": """
        import torch
        from fla.ops.backends import dispatch

        @dispatch("kda")
        @torch.compiler.disable
        def chunk_kda(x):
            return ("fla", x)
    """,
}

# A registry per function as well, wrapped twice against torch.compile; and an undispatched
# function that calls a dispatched one.
BY_FUNCTION = {
    "fla/backends.py": """
        from functools import wraps
        import torch

        backends = {}

        def dispatch(key):
            def decorator(function):
                @wraps(function)
                def wrapper(*args, **kwargs):
                    for backend in backends.get(key, []):
                        if getattr(backend, "accepts", lambda: True)():
                            return getattr(backend, function.__name__)(*args, **kwargs)
                    return function(*args, **kwargs)
                return torch.compiler.disable(wrapper)
            return decorator if isinstance(key, str) else dispatch("kda")(key)
    """,
    "fla/guards.py": """
        from functools import wraps

        def guard(function):
            @wraps(function)
            def wrapper(x):
                return function(x + 0)
            return wrapper
    """,
    "fla/ops/kda/chunk.py": """
        import torch
        from fla.backends import dispatch
        from fla.guards import guard

        @torch.compiler.disable
        @dispatch
        def chunk_kda(x):
            if x == "fail":
                raise ValueError("from fla")
            return ("fla", x)

        @dispatch("kda")
        def recurrent_fwd(x):
            return ("fla", x)

        @guard
        def recurrent(x):
            return recurrent_fwd(x)

        @guard
        @dispatch("kda")
        def guarded_outside(x):
            return ("fla", x)
    """,
}
VERSIONS = {"0.4": PLAIN, "0.5": BY_OPERATION, "0.6": BY_FUNCTION}
PATH = "fla.ops.kda.chunk_kda"


def forget():
    for name in [n for n in sys.modules if n == "fla" or n.startswith("fla.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    fla.fla_function.cache_clear()
    fla._fla_missing.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that makes one of the imitations importable as ``fla``."""
    real = {n: m for n, m in sys.modules.items() if n == "fla" or n.startswith("fla.")}

    def write(version):
        files = {"fla/__init__.py": "", "fla/ops/__init__.py": ""} | VERSIONS[version]
        exported = [
            n for n in ("chunk_kda", "recurrent", "guarded_outside") if n in files_text(files)
        ]
        files["fla/ops/kda/__init__.py"] = f"from fla.ops.kda.chunk import {', '.join(exported)}"
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        forget()
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("fla.ops.kda")

    yield write
    forget()
    sys.modules.update(real)


def files_text(files):
    return files["fla/ops/kda/chunk.py"]


def registered():
    home = sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]
    return home.backends


class PointsBack:
    """A backend of ours: answers FLA's calls, and falls back to FLA."""

    calls = 0

    def chunk_kda(self, x):
        self.calls += 1
        return ("cula", fla.fla_function(PATH)(x))


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_fallback_ends_in_fla_though_its_dispatch_points_at_us(install, version):
    kda = install(version)
    captured_before = kda.chunk_kda
    backend = PointsBack()
    registered()["kda"] = [backend]
    assert captured_before(1) == ("cula", ("fla", 1))
    assert fla.fla_function(PATH)(2) == ("fla", 2)
    assert backend.calls == 1
    # FLA is as it was: its callers still reach the backend.
    assert kda.chunk_kda is captured_before
    assert registered() == {"kda": [backend]}
    assert captured_before(3) == ("cula", ("fla", 3))


@pytest.mark.parametrize("version", VERSIONS)
def test_without_any_backend(install, version):
    install(version)
    function = fla.fla_function(PATH)
    assert function(1) == ("fla", 1)
    assert function.__name__ == "chunk_kda"
    assert fla.fla_function(PATH) is function


@pytest.mark.parametrize("version", VERSIONS)
def test_a_function_put_in_fla_s_place_is_not_taken_for_it(install, version):
    kda = install(version)

    def ours(x):
        return ("cula", fla.fla_function(PATH)(x))

    kda.chunk_kda = ours
    assert kda.chunk_kda(1) == ("cula", ("fla", 1))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_function_wrapped_around_fla_s_is_peeled_off(install, version):
    from functools import wraps

    kda = install(version)
    for place in (kda, sys.modules["fla.ops.kda.chunk"]):
        original = place.chunk_kda

        @wraps(original)
        def ours(x):
            return ("cula", fla.fla_function(PATH)(x))

        place.chunk_kda = ours
    assert kda.chunk_kda(1) == ("cula", ("fla", 1))


def test_backend_of_an_inner_function_declines_inside(install):
    kda = install("0.6")

    class Polite:
        def accepts(self):
            return not fla.inside_fla()

        def recurrent_fwd(self, x):
            return ("cula", fla.fla_function("fla.ops.kda.recurrent")(x))

    registered()["kda"] = [Polite()]
    assert kda.recurrent(1) == ("cula", ("fla", 1))
    assert fla.fla_function("fla.ops.kda.recurrent")(2) == ("fla", 2)
    assert not fla.inside_fla()


def test_backend_that_does_not_decline_is_named_and_does_not_recurse(install):
    kda = install("0.6")

    class Rude:
        def recurrent_fwd(self, x):
            return fla.fla_function("fla.ops.kda.recurrent")(x)

    registered()["kda"] = [Rude()]
    with pytest.raises(RuntimeError, match="dispatch led back to cuLA") as caught:
        kda.recurrent(1)
    assert not isinstance(caught.value, RecursionError)
    assert not fla.inside_fla()


def test_other_threads_keep_their_dispatch(install):
    kda = install("0.6")
    inside, leave = threading.Event(), threading.Event()
    seen = []

    class Waits:
        def __init__(self):
            self.ran = False

        def accepts(self):
            return not fla.inside_fla()

        def recurrent_fwd(self, x):
            return ("cula", x)

    class Slow(str):
        def __add__(self, other):
            seen.append(fla.inside_fla())
            inside.set()
            assert leave.wait(30)
            return self

    registered()["kda"] = [Waits()]
    results = []
    worker = threading.Thread(
        target=lambda: results.append(fla.fla_function("fla.ops.kda.recurrent")(Slow("slow")))
    )
    worker.start()
    assert inside.wait(30)
    # The worker is inside FLA now, past its dispatch; this thread is not.
    assert not fla.inside_fla()
    assert kda.recurrent(1) == ("cula", 1)
    leave.set()
    worker.join(30)
    assert seen == [True] and results == [("fla", "slow")]


def test_errors_pass_and_leave_the_context_clean(install):
    install("0.6")
    with pytest.raises(ValueError, match=r"^from fla$"):
        fla.fla_function(PATH)("fail")
    assert not fla.inside_fla()
    assert fla.fla_function(PATH)(1) == ("fla", 1)


def test_torch_compile_does_not_trace_into_it(install):
    install("0.6")
    function = fla.fla_function(PATH)
    compiled = torch.compile(lambda x: x + function(1)[1], backend="eager")
    assert compiled(torch.zeros(1)).item() == 1.0
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: x + function(1)[1], fullgraph=True, backend="eager")(torch.zeros(1))


def test_decorations_outside_of_the_dispatch_are_not_dropped(install):
    install("0.6")
    with pytest.raises(ImportError, match="guarded_outside: FLA decorates it outside"):
        fla.fla_function("fla.ops.kda.guarded_outside")


def test_what_is_not_there(install):
    install("0.6")
    with pytest.raises(ImportError, match=r"fla\.ops\.kda\.no_such is not a function of flash-l"):
        fla.fla_function("fla.ops.kda.no_such")
    with pytest.raises(ImportError, match=r"^fla\.ops\.none cannot be imported: "):
        fla.fla_function("fla.ops.none.f")


@pytest.mark.parametrize(
    ("absent", "version", "message"),
    [
        ((), (0, 4, 2), None),
        ((), (0, 5, 2), None),
        ((), (0, 6, 0), None),
        ((), (0, 6, 9), None),
        ((), None, None),
        ((), (0, 4, 1), "fla-core 0.4.1 is installed; 0.4.2 to 0.6 can be used"),
        ((), (0, 7, 0), "fla-core 0.7.0 is installed; 0.4.2 to 0.6 can be used"),
        (("triton",), (0, 6, 0), "flash-linear-attention is installed, but triton is not"),
        (
            ("fla", "triton"),
            None,
            "flash-linear-attention is not installed (pip install fla-core)",
        ),
    ],
)
def test_missing(monkeypatch, absent, version, message):
    fla._fla_missing.cache_clear()
    monkeypatch.setattr(fla, "find_spec", lambda name: None if name in absent else object())
    monkeypatch.setattr(fla, "_installed_version", lambda: version)
    assert fla.fla_missing() == message
    fla._fla_missing.cache_clear()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"fla-core": "0.6.0"}, (0, 6, 0)),
        ({"fla-core": "0.5.2+cu13"}, (0, 5, 2)),
        ({"fla-core": "0.6"}, (0, 6, 0)),
        ({"flash-linear-attention": "0.4.2.dev3"}, (0, 4, 2)),
        ({}, None),
    ],
)
def test_installed_version(monkeypatch, versions, expected):
    def version(distribution):
        if distribution not in versions:
            raise fla.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(fla.metadata, "version", version)
    assert fla._installed_version() == expected


def test_fla_alone_lasts_as_long_as_its_block():
    assert not fla.inside_fla()
    with fla.fla_alone():
        assert fla.inside_fla()
        with fla.fla_alone():
            assert fla.inside_fla()
        assert fla.inside_fla()
    assert not fla.inside_fla()
