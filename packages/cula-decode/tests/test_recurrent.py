"""Steps with separate final states, by the compiled kernels under a PTX emulator, again and again.

Skipped without the emulator, and on a machine with a GPU (as test_emulated.py is).
"""

import os

import pytest
import torch

ptxemu = pytest.importorskip("ptxemu")
if torch.cuda.is_available():
    pytest.skip("a GPU is there to run the kernels", allow_module_level=True)
pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cula.common.jit import compile_kernel  # noqa: E402
from cula.common.reference import KdaInputs, LightningInputs  # noqa: E402
from cula.common.testing import assert_close, same_bits  # noqa: E402
from cula.decode import fused_recurrent_kda, lightning_decode, plan, run  # noqa: E402
from cula.decode.recurrent import recurrent_kda, recurrent_lightning  # noqa: E402

ARCH = "sm_90a"
B, H, D = 2, 1, 64
FORM = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": False,
    "scale": None,
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


@pytest.mark.parametrize("v_first", [True, False])
def test_kda_goes_the_short_way_the_second_time(planned, monkeypatch, v_first):
    A_log, dt_bias = torch.randn(H), torch.randn(H * D)
    for seed, lower_bound in enumerate((-5.0, -5.0, -2.0)):
        x, initial = tokens(seed), torch.randn(B, H, D, D)
        before, final = initial.clone(), torch.full_like(initial, torch.nan)
        out = torch.full_like(x[2], torch.nan)
        states = (initial, final) if v_first else (initial.mT, final.mT)
        recurrent_kda(
            KdaInputs(*x, A_log, dt_bias),
            *states,
            None,
            out,
            **FORM,
            lower_bound=lower_bound,
        )
        assert same_bits(initial, before)
        with monkeypatch.context() as plain:
            plain.setattr(plan, "choose_backend", lambda *args, **options: "reference")
            o, state = fused_recurrent_kda(
                *x, A_log, dt_bias, initial_state=initial, output_final_state=True,
                state_v_first=v_first, lower_bound=lower_bound, **FORM,
            )  # fmt: skip
        assert_close("o", out, o, 1e-5)
        assert_close("final", final, state, 1e-5)
    # A bound is no part of what is compiled, but of what is known.
    assert len(planned) == 2 and planned[0] == planned[1]


def test_lightning_from_zero_and_from_a_state(planned, monkeypatch):
    g_gamma = torch.tensor([-0.25])
    for seed, start in enumerate((False, True, True, False)):
        q, k, v, *_ = tokens(seed)
        initial = torch.randn(B, H, D, D)
        final, out = torch.full_like(initial, torch.nan), torch.full_like(v, torch.nan)
        states = (initial.mT if start else None, final.mT, None)
        recurrent_lightning(LightningInputs(q, k, v, g_gamma), *states, out, scale=0.5)
        pool = initial.mT.clone() if start else torch.zeros(B, H, D, D)
        with monkeypatch.context() as plain:
            plain.setattr(plan, "choose_backend", lambda *args, **options: "reference")
            o = lightning_decode(q, k, v, g_gamma, pool, scale=0.5, backend="reference")
        assert_close("o", out, o, 1e-5)
        assert_close("final", final, pool.mT, 1e-5)
    assert len(planned) == 2


def test_a_call_that_the_known_launch_refuses_is_planned_anew(planned):
    x, form = tokens(0), {**FORM, "lower_bound": None}
    inputs = KdaInputs(*x, torch.randn(H), None)
    out = torch.empty_like(x[2])

    def refuse(*args):
        raise ValueError("strides")

    recurrent_kda(inputs, None, None, None, out, **form)
    (key,) = run._launches
    run._launches[key] = (refuse, 1.0)
    again = torch.empty_like(out)
    recurrent_kda(inputs, None, None, None, again, **form)
    assert same_bits(out, again) and len(planned) == 2
