"""What several packages' tests need.

A stand-in for flash-linear-attention 0.6, for tests of what cuLA registers with it: it has FLA's
module names, signatures and way to dispatch; its functions only say that they ran. And stand-ins
for compiled kernels, for tests of the way to them.
"""

import importlib
import sys
import textwrap

import pytest
import torch

from cula.common import fla, fla_adapter, fla_backend, jit

KDA = """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
    return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, **kwargs"""
RECURRENT_KDA = """q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
    state_v_first=False, cu_seqlens=None, **kwargs"""
RECURRENT_KDA_FWD = """q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None,
    output_final_state=False, inplace_final_state=True, state_v_first=False, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, out=None, **kwargs"""
SIMPLE_GLA = """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs"""
RECURRENT_SIMPLE_GLA = """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs"""

SIGNATURES = {
    "KDA": KDA,
    "RECURRENT_KDA": RECURRENT_KDA,
    "RECURRENT_KDA_FWD": RECURRENT_KDA_FWD,
    "SIMPLE_GLA": SIMPLE_GLA,
    "RECURRENT_SIMPLE_GLA": RECURRENT_SIMPLE_GLA,
}
FILES = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/backends.py": """
        from functools import wraps
        from inspect import unwrap
        import torch

        functions, operations = {}, {}

        class BaseBackend:
            backend_type, priority = "base", 5

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
                    run = getattr(backend, function.__name__, None)
                    verify = getattr(backend, function.__name__ + "_verifier", None)
                    if run is not None and verify(*args, **kwargs)[0]:
                        return run(*args, **kwargs)
                return function(*args, **kwargs)
            return torch.compiler.disable(wrapper)

        def dispatch(key):
            if isinstance(key, str):
                return lambda f: around(operations.setdefault(key, {}), f)
            return around(functions.setdefault(key, {}), key)
    """,
    "fla/ops/kda/__init__.py": """
        import torch
        from fla.backends import dispatch
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda

        @torch.compiler.disable
        @dispatch
        def chunk_kda(%(KDA)s):
            return "fla", None
    """,
    "fla/ops/kda/fused_recurrent.py": """
        from fla.backends import dispatch

        @dispatch("kda")
        def fused_recurrent_kda_fwd(%(RECURRENT_KDA_FWD)s):
            return "fla", None

        def fused_recurrent_kda(%(RECURRENT_KDA)s):
            given = dict(locals())
            del given["kwargs"]
            return fused_recurrent_kda_fwd(**given, inplace_final_state=False)
    """,
    "fla/ops/simple_gla/__init__.py": """
        from fla.ops.simple_gla.chunk import chunk_simple_gla
        from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla
    """,
    "fla/ops/simple_gla/chunk.py": """
        import torch

        @torch.compiler.disable
        def chunk_simple_gla(%(SIMPLE_GLA)s):
            return "fla", None
    """,
    "fla/ops/simple_gla/fused_recurrent.py": """
        from fla.backends import dispatch

        @dispatch
        def fused_recurrent_simple_gla(%(RECURRENT_SIMPLE_GLA)s):
            return "fla", None
    """,
    "fla/ops/lightning_attn.py": """
        import torch
        from fla.ops.simple_gla.chunk import chunk_simple_gla
        from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla

        def decay(q, layer_idx, num_layers):
            heads = torch.arange(q.shape[2], dtype=torch.float)
            return -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads

        def chunk_lightning_attn(q, k, v, layer_idx, num_layers, **options):
            g_gamma = decay(q, layer_idx, num_layers)
            return chunk_simple_gla(q=q, k=k, v=v, g_gamma=g_gamma, **options)

        def fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, **options):
            g_gamma = decay(q, layer_idx, num_layers)
            return fused_recurrent_simple_gla(q=q, k=k, v=v, g_gamma=g_gamma, **options)
    """,
}


def _forget(adapters: str) -> dict:
    gone = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "fla" or n == adapters}
    for name in gone:
        del sys.modules[name]
    importlib.invalidate_caches()
    fla.fla_function.cache_clear()
    fla_adapter.log_once.cache_clear()
    return gone


@pytest.fixture(params=["stand-in", "installed"])
def import_with_fla(request, tmp_path, monkeypatch):
    """Returns a function that imports, for instance, ``cula.kda.fla`` afresh.

    The FLA that it finds is the stand-in, or the installed one where that can be imported.
    """
    monkeypatch.delenv("CULA_BACKEND", raising=False)
    before: list[tuple[str, dict]] = []

    def load(adapters: str):
        if request.param == "installed":
            if fla.fla_missing() is not None:
                pytest.skip(fla.fla_missing())
            try:
                importlib.import_module("fla.ops.lightning_attn")
            except Exception as error:
                pytest.skip(f"the installed FLA cannot be imported: {error}")
            sys.modules.pop(adapters, None)
            fla_adapter.log_once.cache_clear()
            return importlib.import_module(adapters)
        before.append((adapters, _forget(adapters)))
        for name, text in FILES.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text) % SIGNATURES)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(fla_backend, "fla_missing", lambda: None)
        return importlib.import_module(adapters)

    load.stand_in = request.param == "stand-in"
    yield load
    for adapters, modules in before:
        _forget(adapters)
        sys.modules.update(modules)


def _kind(x):
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    return x


@pytest.fixture
def not_planned_again(monkeypatch):
    """Returns a function that makes a check for a family: a call, made twice, is planned once.

    Plans choose our kernel, on any machine, and kernels only note what they were launched with.
    """

    def family(package: str):
        def module(name: str):
            return importlib.import_module(f"cula.{package}.{name}")

        home = module("run" if package == "decode" else "launch")
        launched: list[tuple] = []

        def compiled(config, arch):
            return lambda *args: launched.append((config, [_kind(x) for x in args]))

        monkeypatch.setattr(module("plan"), "choose_backend", lambda *args, **options: "cute")
        for name, value in (("arch_of", "sm_90a"), ("sm_count", 132)):
            monkeypatch.setattr(module("plan"), name, lambda _, value=value: value, raising=False)
        monkeypatch.setattr(jit, "compiled", compiled)
        monkeypatch.setattr(home, "_launches", {})

        def refuse(*args, **options):
            raise AssertionError("planned again")

        def check(call):
            """Both calls' results, which hold nothing."""
            launched.clear()
            first = call()
            want = list(launched)
            assert want, "nothing was launched"
            launched.clear()
            with monkeypatch.context() as again:
                again.setattr(module("plan"), "choose_backend", refuse)
                for name in ("plan_kda", "plan_lightning", "plan_chunk", "plan_prefill"):
                    for user in ("run", "fla"):
                        found = sys.modules.get(f"cula.{package}.{user}")
                        if hasattr(found, name):
                            again.setattr(found, name, refuse)
                second = call()
            assert launched == want, "not what was planned"
            return first, second

        check.module, check.launched = module, launched
        return check

    return family
