"""What FLA is asked to do, by versions of it. No FLA is needed here: the twins below have the
signatures of its releases and compute by the oracle of conftest.py."""

import pytest
import torch

from cula.common.reference import LightningForm
from cula.common.testing import assert_close
from cula.lightning import chunk_lightning_attn, fla_fallback, lightning_prefill
from cula.lightning.cases import CASES, make_inputs
from cula.lightning.plan import plan_prefill
from cula.lightning.reference import LightningInputs, lightning_forward


class Twin:
    """FLA's chunk_simple_gla: refuses what FLA cannot do."""

    def __init__(self, oracle) -> None:
        self.oracle = oracle
        self.chunk_sizes = []
        self.recurrent = 0

    def fused_recurrent(
        self,
        q,
        k,
        v,
        g_gamma=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
    ):
        self.recurrent += 1
        return self.compute(
            q, k, v, None, g_gamma, scale, initial_state, output_final_state, cu_seqlens
        )

    def compute(self, q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens):
        assert g is None and q.shape[2] == v.shape[2] == g_gamma.shape[0]
        assert initial_state is None or initial_state.dtype == torch.float32
        lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
        result = self.oracle(q, k, v, g_gamma, lengths=lengths, initial=initial_state, scale=scale)
        return result.o.to(q.dtype), result.final.float() if output_final_state else None


def fla_0_4_2(oracle):
    twin = Twin(oracle)

    def chunk_simple_gla(
        q,
        k,
        v,
        g=None,
        g_gamma=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        head_first=False,
    ):
        twin.chunk_sizes.append(None)
        return twin.compute(
            q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens
        )

    return twin, chunk_simple_gla


def fla_0_6(oracle):
    twin = Twin(oracle)

    def chunk_simple_gla(
        q,
        k,
        v,
        g=None,
        g_gamma=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        **kwargs,
    ):
        twin.chunk_sizes.append(kwargs.pop("chunk_size", None))
        assert not kwargs
        return twin.compute(
            q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens
        )

    return twin, chunk_simple_gla


@pytest.fixture(params=[fla_0_4_2, fla_0_6], ids=["0.4.2", "0.6"])
def fla(request, oracle, monkeypatch) -> Twin:
    twin, function = request.param(oracle)
    paths = {
        fla_fallback.CHUNK_SIMPLE_GLA: function,
        fla_fallback.RECURRENT_SIMPLE_GLA: twin.fused_recurrent,
    }
    monkeypatch.setattr(fla_fallback, "fla_function", paths.__getitem__)
    return twin


@pytest.mark.parametrize("tokens", [1, 63, 64, 128, 130])
def test_a_final_state_after_a_partial_chunk_is_not_left_to_the_chunked_kernel(
    fla: Twin, tokens: int
) -> None:
    x = torch.randn(1, tokens, 2, 64)
    inputs = LightningInputs(x, x, x, torch.tensor([0.0, -7.9]))
    for final in (True, False):
        fla_fallback.chunk(LightningForm(1.0), inputs, None, output_final_state=final)
    assert (fla.recurrent, len(fla.chunk_sizes)) == ((0, 2) if tokens % 64 == 0 else (1, 1))


@pytest.mark.parametrize("name", ["tail", "grouped heads", "varlen, empty ones", "checkpoints"])
def test_forward_is_the_reference(fla: Twin, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    plan = plan_prefill(**inputs)
    tensors = LightningInputs(*(inputs[n] for n in ("q", "k", "v", "g_gamma")))
    initial = torch.randn(plan.sequences, case.HV, case.K, case.V)
    for start in (initial, None):
        options = {"cu_seqlens": inputs.get("cu_seqlens"), "every": case.checkpoint_interval}
        given = fla_fallback.forward(plan.form, tensors, start, **options)
        right = lightning_forward(plan.form, tensors, start, **options)
        assert_close("o", given.o, right.o, 3e-3)
        assert_close("final", given.final, right.final, 1e-5)
        assert len(given.marks) == len(right.marks)
        for mark, other in zip(given.marks, right.marks, strict=True):
            assert mark.starts == other.starts and mark.count == other.count
            assert_close("mark", mark.states, other.states, 1e-5)
    assert len(fla.chunk_sizes) + fla.recurrent >= 2


def test_calls_reach_fla(fla: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' way to FLA: pool in, pool out, results where they belong."""
    case = CASES["grouped heads"]
    results = {}
    for backend in ("fla", "reference"):
        monkeypatch.setattr(
            "cula.lightning.plan.choose_backend", lambda *a, chosen=backend, **k: chosen
        )
        inputs = make_inputs(case)
        o = lightning_prefill(**inputs)
        q, k, v = (inputs[n] for n in ("q", "k", "v"))
        chunked = chunk_lightning_attn(q, k, v, 1, 2, output_final_state=True, chunk_size=32)
        q.requires_grad_()
        grad = torch.autograd.grad(chunk_lightning_attn(q, k, v, 1, 2)[0].sum(), q)[0]
        results[backend] = (o, inputs["state"], *chunked, grad)
    assert len(fla.chunk_sizes) + fla.recurrent == 3
    assert set(fla.chunk_sizes[1:]) <= {None, 32, 64}
    for given, right in zip(*results.values(), strict=True):
        assert_close("result", given, right, 5e-3)
