"""Taking functions over from FLA: by its hooks, and by patches where it has none.

The packages written here imitate how each version of FLA dispatches, and nothing else of it.
"""

import importlib
import logging
import sys
import textwrap
import threading
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from cula.common import fla, fla_adapter, fla_backend
from cula.common.fla_adapter import INSIDE, Adapter
from cula.common.fla_backend import Patch, Takeover

# Operations have registries, made when first called for; the wrapper is outermost.
BY_OPERATION = {
    "fla/ops/backends.py": """
        from functools import wraps
        import torch

        class BaseBackend:
            backend_type, priority = "base", 5

            def verify(self, name, *args, **kwargs):
                verifier = getattr(self, name + "_verifier", None)
                return verifier(*args, **kwargs) if verifier else (True, None)

        class BackendRegistry:
            _registries = {}

            def __init__(self, operation):
                self._backends = {}
                BackendRegistry._registries[operation] = self

            def register(self, backend):
                self._backends[backend.backend_type] = backend

            @classmethod
            def ensure_initialized(cls, operation):
                if operation == "kda" and operation not in cls._registries:
                    cls(operation)

        def dispatch(operation):
            def decorator(function):
                @wraps(function)
                def wrapper(*args, **kwargs):
                    BackendRegistry.ensure_initialized(operation)
                    registry = BackendRegistry._registries.get(operation)
                    backends = registry._backends.values() if registry else ()
                    for backend in sorted(backends, key=lambda b: b.priority):
                        if backend.verify(function.__name__, *args, **kwargs)[0]:
                            run = getattr(backend, function.__name__, None)
                            if run is not None:
                                return run(*args, **kwargs)
                    return function(*args, **kwargs)
                return torch.compiler.disable(wrapper)
            return decorator
    """,
    "fla/ops/kda/chunk.py": """
        from fla.ops.backends import dispatch

        @dispatch("kda")
        def chunk_kda(q, size=1, extra=None):
            return ("fla", q, size, extra)
    """,
}

# A function has a registry, or an operation has.
BY_FUNCTION = {
    "fla/backends.py": """
        from functools import wraps
        from inspect import unwrap
        import torch

        functions, operations = {}, {}

        class BaseBackend:
            backend_type, priority = "base", 5

            def verify(self, name, *args, **kwargs):
                verifier = getattr(self, name + "_verifier", None)
                return verifier(*args, **kwargs) if verifier else (True, None)

        def register(key):
            def decorator(backend):
                if isinstance(key, str):
                    registry = operations.setdefault(key, {})
                else:
                    registry = functions[unwrap(key)]
                registry[backend.backend_type] = backend()
                return backend
            return decorator

        def around(registry, function):
            @wraps(function)
            def wrapper(*args, **kwargs):
                for backend in sorted(registry.values(), key=lambda b: b.priority):
                    if backend.verify(function.__name__, *args, **kwargs)[0]:
                        run = getattr(backend, function.__name__, None)
                        if run is not None:
                            return run(*args, **kwargs)
                return function(*args, **kwargs)
            return torch.compiler.disable(wrapper)

        def dispatch(key):
            if isinstance(key, str):
                return lambda f: around(operations.setdefault(key, {}), f)
            return around(functions.setdefault(key, {}), key)
    """,
    "fla/ops/kda/chunk.py": """
        import torch
        from fla.backends import dispatch

        @torch.compiler.disable
        @dispatch
        def chunk_kda(q, extra=None, size=1):
            return ("fla", q, size, extra)
    """,
    "fla/ops/kda/recurrent.py": """
        from fla.backends import dispatch

        @dispatch("kda")
        def recurrent_fwd(q, size=1, extra=None):
            return ("fla", q, size, extra)

        @dispatch("kda")
        def gate(q):
            return ("fla", q)

        def recurrent(q, size=1):
            return recurrent_fwd(q=q, size=size)
    """,
}

# No hook at all.
PLAIN = {
    "fla/ops/kda/chunk.py": """
        import torch

        @torch.compiler.disable
        def chunk_kda(q, size=1, extra=None):
            return ("fla", q, size, extra)
    """,
}

EVERY = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/kda/__init__.py": "from fla.ops.kda.chunk import chunk_kda",
    # A layer that has imported the function by name.
    "fla/layers.py": """
        from fla.ops.kda import chunk_kda

        def layer(q, **options):
            return chunk_kda(q, **options)
    """,
}
VERSIONS = {"0.4.2": PLAIN, "0.5": BY_OPERATION, "0.6": BY_FUNCTION}
PATH = "fla.ops.kda.chunk_kda"
INNER = "fla.ops.kda.recurrent.recurrent_fwd"


def forget():
    for name in [n for n in sys.modules if n == "fla" or n.startswith("fla.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    fla.fla_function.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that makes one of the imitations importable as ``fla``."""
    real = {n: m for n, m in sys.modules.items() if n == "fla" or n.startswith("fla.")}
    monkeypatch.setattr(fla_backend, "fla_missing", lambda: None)
    fla_adapter.log_once.cache_clear()

    def write(version):
        for name, text in (EVERY | VERSIONS[version]).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        forget()
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("fla.layers").layer

    yield write
    forget()
    sys.modules.update(real)


def adapter(path=PATH):
    """Takes sizes up to 4; sizes of "fla" are FLA's by request."""
    plans = []

    def plan(call, backend):
        plans.append((dict(call), backend))
        size = call.get("size", 1)
        if size == "fla":
            return SimpleNamespace(backend="fla")
        if size > 4:
            raise NotImplementedError(f"no kernel for size {size}")
        return SimpleNamespace(backend=backend)

    def run(call):
        return ("cula", call["q"], call.get("size", 1), call.get("extra"))

    made = Adapter(path, "kda", lambda call: (call["q"].shape, call.get("size")), plan, run)
    return made, plans


def taken(version, install, path=PATH):
    layer = install(version)
    made, plans = adapter(path)
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    return layer, takeover, plans


Q = torch.zeros(2)


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_a_hook_takes_what_the_plan_takes(install, version, caplog):
    caplog.set_level(logging.INFO, logger="cula")
    layer, takeover, plans = taken(version, install)
    assert takeover.report() == {PATH: "hook"}
    assert layer(Q)[0] == "cula"
    assert layer(Q, size=4)[0] == "cula"
    assert layer(Q, size=5)[0] == "fla"
    assert layer(Q, size=5)[0] == "fla"
    assert layer(Q, size="fla")[0] == "fla"
    assert [backend for _, backend in plans] == ["reference"] * len(plans)
    said = [record.message for record in caplog.records if record.name.startswith("cula")]
    assert said == [
        f"{PATH}: cuLA runs this",
        f"{PATH}: FLA runs this: no kernel for size 5",
        f"{PATH}: FLA runs this: FLA was asked for",
    ]


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_a_known_kind_of_call_is_not_planned_again(install, version):
    layer, _, plans = taken(version, install)
    for _ in range(3):
        layer(Q, size=2)
    assert len(plans) == 1
    layer(torch.zeros(3), size=2)
    assert len(plans) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_positional_arguments_mean_what_the_installed_version_says(install, version):
    layer, takeover, _ = taken(version, install)
    takeover.patch()
    kda = sys.modules["fla.ops.kda"]
    order = {"size": 3, "extra": "x"}
    given = reversed(order.values()) if version == "0.6" else order.values()
    assert kda.chunk_kda(Q, *given) == ("cula", Q, 3, "x")
    assert layer(Q, extra="y") == ("cula", Q, 1, "y")
    takeover.undo()


def launching(path=PATH, backend="cute"):
    """An adapter whose calls leave a launch behind, and what it did."""
    done, plans = [], []

    def plan(call, asked):
        plans.append(asked)
        return SimpleNamespace(backend=backend)

    def run(call):
        done.append("run")
        return ("cula", call["q"])

    def again(call, launch):
        done.append(launch)
        if call.get("extra") == "odd":
            raise ValueError("strides")
        return ("cula", call["q"])

    key = adapter(path)[0].key
    made = Adapter(path, "kda", key, plan, run, lambda call, result: "launch", again)
    return made, done, plans


@pytest.mark.parametrize("version", VERSIONS)
def test_the_second_call_goes_to_the_launch_of_the_first(install, version):
    layer = install(version)
    made, done, plans = launching()
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    keys = []
    key = made.key
    object.__setattr__(made, "key", lambda call: keys.append(1) or key(call))
    with Patch(takeover):
        for _ in range(3):
            assert layer(Q)[1] is Q
        assert done == ["run", "launch", "launch"]
        assert len(plans) == 1 and len(keys) == 3  # one look a call
        layer(Q, extra="odd")
    assert done[3:] == ["launch", "run"]


def test_what_the_reference_runs_takes_no_launch_that_others_left(install):
    """Were it one of our kernel's, from before CULA_BACKEND or without gradients, say."""
    layer = install("0.6")
    made, done, _ = launching(backend="reference")
    Takeover("cula.kda", [made]).register()
    for _ in range(3):
        layer(Q)
    assert done == ["run"] * 3


def backend_of(install):
    """What FLA asks and calls, and what our adapter did."""
    install("0.6")
    made, done, _ = launching()
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    home = sys.modules["fla.backends"]
    (registry,) = (r for r in home.functions.values() if r)
    return registry["cula_kda"], done


def test_what_was_verified_is_of_that_call_alone(install):
    backend, done = backend_of(install)
    assert backend.verify("chunk_kda", Q) == (True, None)
    assert backend.chunk_kda(Q) == ("cula", Q)
    assert backend.verify("chunk_kda", Q) == (True, None)
    other = torch.zeros(2)
    assert backend.chunk_kda(other)[1] is other  # not the one that was verified
    assert backend.chunk_kda(Q)[1] is Q  # nor once more
    assert done == ["run"] * 3


def test_what_was_verified_is_not_held_on_to(install):
    backend, _ = backend_of(install)
    assert backend.verify("chunk_kda", Q)[0]  # so that the next is of a known kind
    q = torch.zeros(2)
    gone = weakref.ref(q)
    assert backend.verify("chunk_kda", q)[0]
    backend.chunk_kda(q)
    del q
    assert gone() is None


def test_another_function_of_the_registry_is_not_ours(install):
    backend, _ = backend_of(install)
    assert backend.verify("chunk_kda_bwd", Q) == (True, None)  # as FLA's own: no verifier
    assert not hasattr(backend, "chunk_kda_bwd")


def test_an_error_while_verifying_declines(install, monkeypatch):
    backend, _ = backend_of(install)
    monkeypatch.setattr(fla_adapter, "inside_fla", lambda: 1 / 0)
    assert backend.verify("chunk_kda", Q) == (False, "division by zero")


@pytest.mark.parametrize("version", VERSIONS)
def test_threads_do_not_see_each_other_s_calls(install, version):
    layer = install(version)
    made, done, _ = launching()
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    wrong = []

    def work(n):
        mine = [torch.zeros(n % 3 + 1) for _ in range(5)]
        for q in mine * 100:
            if layer(q)[1] is not q:
                wrong.append(q)

    with Patch(takeover):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and len(done) == 8 * 500


def test_an_operation_s_hook(install):
    layer, takeover, _ = taken("0.6", install, INNER)
    assert takeover.report() == {INNER: "hook"}
    module = importlib.import_module("fla.ops.kda.recurrent")
    assert module.recurrent(Q, size=2)[0] == "cula"
    assert module.recurrent(Q, size=9)[0] == "fla"
    # What else is filed under the operation stays as it is.
    assert module.gate(Q) == ("fla", Q)
    assert layer(Q)[0] == "fla"


def test_two_packages_share_an_operation(install):
    install("0.6")
    importlib.import_module("fla.ops.kda.recurrent")
    first, _ = adapter(INNER)
    second, _ = adapter("fla.ops.kda.recurrent.gate")
    for package, made in (("cula.decode", first), ("cula.kda", second)):
        Takeover(package, [made]).register()
    module = sys.modules["fla.ops.kda.recurrent"]
    assert module.recurrent_fwd(Q)[0] == module.gate(Q)[0] == "cula"


def test_without_a_hook_nothing_changes_until_asked_for(install):
    layer = install("0.4.2")
    before = {n: dict(vars(m)) for n, m in sys.modules.items() if n.split(".")[0] == "fla"}
    made, _ = adapter()
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    with pytest.warns(UserWarning, match=r"chunk_kda: still FLA's own.*cula\.kda\.fla\.patch_fla"):
        takeover.warn()
    assert layer(Q)[0] == "fla"
    assert takeover.report() == {PATH: "no"}
    with Patch(takeover) as patch:
        assert layer(Q)[0] == "cula" and layer(Q, size=5)[0] == "fla"
        assert takeover.report() == {PATH: "patch"}
        Patch(takeover)  # once is enough
        assert layer(Q)[0] == "cula"
    assert takeover.report() == {PATH: "no"}
    patch.undo()
    for name, members in before.items():
        assert {n: vars(sys.modules[name])[n] for n in members} == members, name


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_a_hook_is_not_patched_as_well(install, version):
    _, takeover, _ = taken(version, install)
    before = sys.modules["fla.layers"].chunk_kda
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        takeover.warn()
    with Patch(takeover):
        assert sys.modules["fla.layers"].chunk_kda is before


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_a_patch_past_the_dispatch(install, version):
    layer, takeover, plans = taken(version, install)
    before = sys.modules["fla.layers"].chunk_kda
    with Patch(takeover, past_dispatch=True):
        assert takeover.report() == {PATH: "patch"}
        assert sys.modules["fla.layers"].chunk_kda is not before
        Patch(takeover, past_dispatch=True)  # once is enough
        assert layer(Q)[0] == "cula"
        assert layer(Q, size=5)[0] == "fla"
        assert len(plans) == 2  # FLA's dispatch, behind, does not make us plan again
        assert fla.fla_function(PATH)(Q)[0] == "fla"
    assert takeover.report() == {PATH: "hook"}
    assert sys.modules["fla.layers"].chunk_kda is before


def test_a_patch_further_out_says_what_is_passed_on(install):
    install("0.6")
    module = importlib.import_module("fla.ops.kda.recurrent")
    inner, plans = adapter(INNER)
    path = "fla.ops.kda.recurrent.recurrent"
    outer = Adapter(path, "kda", inner.key, inner.plan, inner.run, fixed={"extra": "fixed"})
    takeover = Takeover("cula.decode", [inner], [outer])
    takeover.register()
    with Patch(takeover, past_dispatch=True):
        assert takeover.report() == {INNER: "patch", path: "patch"}
        assert module.recurrent(Q) == ("cula", Q, 1, "fixed")
        assert module.recurrent(Q, size=9)[0] == "fla"
        assert len(plans) == 2
    assert takeover.report() == {INNER: "hook"}
    assert module.recurrent(Q, size=2) == ("cula", Q, 2, None)


def test_what_somebody_put_there_since_is_left_alone(install):
    _, takeover, _ = taken("0.4.2", install)
    takeover.patch()
    layers = sys.modules["fla.layers"]
    layers.chunk_kda = theirs = lambda q: "theirs"
    takeover.undo()
    assert layers.chunk_kda is theirs
    assert sys.modules["fla.ops.kda"].chunk_kda(Q)[0] == "fla"


@pytest.mark.parametrize("version", VERSIONS)
def test_our_fallback_does_not_come_back_to_us(install, version):
    layer = install(version)
    made, plans = adapter()

    def run(call):
        return ("cula", fla.fla_function(PATH)(**call))

    takeover = Takeover("cula.kda", [Adapter(PATH, "kda", made.key, made.plan, run)])
    takeover.register()
    takeover.patch()
    assert layer(Q) == ("cula", ("fla", Q, 1, None))
    assert len(plans) == 1
    takeover.undo()


def test_inside_fla_the_answer_is_no(install):
    install("0.6")
    made, plans = adapter()
    token = fla._running.set(("something",))
    try:
        assert made.refusal({"q": Q}) == INSIDE
    finally:
        fla._running.reset(token)
    assert not plans and made.refusal({"q": Q}) is None


@pytest.mark.parametrize("wrong", [{}, {"q": None}, {"q": Q, "size": []}])
def test_a_wrong_call_is_fla_s_to_refuse(wrong):
    made, _ = adapter()
    assert made.refusal(wrong)


def test_environment_chooses(install, monkeypatch):
    made, plans = adapter()
    monkeypatch.setenv("CULA_BACKEND", "fla")
    assert made.refusal({"q": Q}) == "FLA was asked for"
    monkeypatch.setenv("CULA_BACKEND", "reference")
    assert made.refusal({"q": Q}) is None
    assert [backend for _, backend in plans] == ["fla", "reference"]


def test_on_a_gpu_only_a_kernel_of_ours_is_worth_it(monkeypatch):
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    made, plans = adapter()
    q = SimpleNamespace(shape=(1,), is_cuda=True)
    assert made.refusal({"q": q}) is None
    assert plans[0][1] == "cute"


def test_memory_of_kinds_is_bounded(monkeypatch):
    monkeypatch.setattr(fla_adapter, "MAX_KINDS", 3)
    made, _ = adapter()
    for n in range(10):
        assert made.refusal({"q": torch.zeros(n)}) is None
        assert len(made.accepted) <= 3


def test_a_function_that_this_version_lacks_is_left_out(install):
    install("0.5")
    made, _ = adapter("fla.ops.kda.no_such")
    takeover = Takeover("cula.kda", [made])
    takeover.register()
    assert takeover.report() == {}


def test_no_fla(monkeypatch):
    monkeypatch.setattr(fla_backend, "fla_missing", lambda: "it is not there")
    with pytest.raises(ImportError, match=r"cula\.kda\.fla: it is not there"):
        Takeover("cula.kda", []).register()


def test_dispatch_switched_off(install, monkeypatch):
    _, takeover, _ = taken("0.4.2", install)
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.warns(UserWarning, match="FLA_DISABLE_BACKEND_DISPATCH=1 keeps FLA"):
        takeover.warn()


def test_torch_compile_breaks_around_a_patch(install):
    layer, takeover, _ = taken("0.4.2", install)
    with Patch(takeover):
        compiled = torch.compile(lambda x: layer(x)[1] + 1, backend="eager")
        assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
