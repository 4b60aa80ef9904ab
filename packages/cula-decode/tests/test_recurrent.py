"""Steps with separate final states, by the compiled kernels under a PTX emulator, again and again.

Skipped without the emulator, and on a machine with a GPU (as test_emulated.py is).
"""

import importlib
import os

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.testing import assert_close, same_bits  # noqa: E402
from cula.decode import fused_recurrent_kda, kda_decode, lightning_decode, plan, run  # noqa: E402

ARCH = "sm_90a"
B, H, D = 2, 1, 64
FORM = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
kernels = {}


@pytest.fixture
def planned(tmp_path_factory, monkeypatch):
    """Calls on CPU tensors run kernels; returns the list of what was planned and compiled."""
    os.environ.setdefault("CUTE_DSL_DUMP_DIR", str(tmp_path_factory.mktemp("dump")))
    ptxemu.install()
    seen = []

    def compiled(config, arch):
        seen.append(config)
        if config not in kernels:
            kernels[config] = compile_kernel(config, arch)

        def launch(*args):
            with ptxemu.device(mode="lazy") as device:
                kernels[config](*args)
            assert not device.hazards, device.report()

        return launch

    monkeypatch.setattr(plan, "choose_backend", lambda *args, **options: "cute")
    monkeypatch.setattr(plan, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(run.jit, "compiled", compiled)
    monkeypatch.setattr(run, "_launches", {})
    return seen


def tokens(seed):
    torch.manual_seed(seed)
    q, k, v, g = (torch.randn(B, 1, H, D) for _ in range(4))
    return q, k, v, g, torch.randn(B, 1, H)


def by_reference(monkeypatch, call, *args, **options):
    with monkeypatch.context() as plain:
        plain.setattr(plan, "choose_backend", lambda *args, **options: "reference")
        plain.setattr(run, "_launches", {})
        return call(*args, **options)


@pytest.mark.parametrize("by_fla", [False, True])
@pytest.mark.parametrize("v_first", [True, False])
def test_kda_goes_the_short_way_the_second_time(
    import_with_fla, planned, monkeypatch, v_first, by_fla
):
    import_with_fla("cula.decode.fla")
    call = fused_recurrent_kda
    if by_fla:
        call = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    A_log, dt_bias = torch.randn(H), torch.randn(H * D)
    for seed, lower_bound in enumerate((-5.0, -5.0, -2.0)):
        x, initial = (*tokens(seed), A_log, dt_bias), torch.randn(B, H, D, D)
        given = {**FORM, "lower_bound": lower_bound, "state_v_first": v_first}
        given |= {"initial_state": initial.clone(), "output_final_state": True}
        out, final = call(*x, **given)
        assert same_bits(given["initial_state"], initial)
        o, state = by_reference(monkeypatch, fused_recurrent_kda, *x, **given)
        assert_close("o", out, o, 1e-5)
        assert_close("final", final, state, 1e-5)
    # A bound is no part of what is compiled, but of what is known.
    assert len(planned) == 2 and planned[0] == planned[1]


def test_fla_s_pool_goes_the_short_way(import_with_fla, planned, monkeypatch):
    import_with_fla("cula.decode.fla")
    inner = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    A_log, dt_bias = torch.randn(H), torch.randn(H * D)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    for seed in range(2):
        x, pool = tokens(seed), torch.randn(5, H, D, D)
        given = {**FORM, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
        twin = pool.clone()
        out, state = inner(
            *x, **given, initial_state=pool, ssm_state_indices=slots, state_v_first=True
        )
        assert state is pool
        o = by_reference(monkeypatch, kda_decode, *x, twin, state_indices=slots, **given)
        assert_close("o", out, o, 1e-5)
        assert_close("pool", pool, twin, 1e-5)
    assert len(planned) == 1


def test_lightning_from_zero_and_from_a_state(import_with_fla, planned, monkeypatch):
    import_with_fla("cula.decode.fla")
    call = importlib.import_module("fla.ops.simple_gla").fused_recurrent_simple_gla
    g_gamma = torch.tensor([-0.25])
    for seed, start in enumerate((False, True, True, False)):
        q, k, v, *_ = tokens(seed)
        initial = torch.randn(B, H, D, D)
        out, final = call(
            q=q,
            k=k,
            v=v,
            g_gamma=g_gamma,
            initial_state=initial if start else None,
            output_final_state=True,
            scale=0.5,
        )
        pool = initial.mT.clone() if start else torch.zeros(B, H, D, D)
        o = by_reference(monkeypatch, lightning_decode, q, k, v, g_gamma, pool, scale=0.5)
        assert_close("o", out, o, 1e-5)
        assert_close("final", final, pool.mT, 1e-5)
    assert len(planned) == 2


def test_a_call_that_the_known_launch_refuses_is_planned_anew(planned):
    x = (*tokens(0), torch.randn(H))

    def refuse(*args):
        raise ValueError("strides")

    out, _ = fused_recurrent_kda(*x, **FORM)
    (key,) = run._launches
    run._launches[key] = (refuse, 1.0)
    again, _ = fused_recurrent_kda(*x, **FORM)
    assert same_bits(out, again) and len(planned) == 2
