"""Upstream cuLA's calls: their state layouts, their defaults, and where we differ on purpose."""

import pytest
import torch

from cula.common.testing import same_bits
from cula.kda import chunk_kda, upstream


def make() -> dict:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 90, 2, 32, dtype=torch.bfloat16) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": torch.rand(1, 90, 2),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
        "A_log": torch.randn(2),
        "dt_bias": torch.randn(64),
        "cu_seqlens": torch.tensor([0, 0, 20, 90], dtype=torch.int32),
    }


def test_chunk_kda_is_k_first() -> None:
    inputs, initial = make(), torch.randn(3, 2, 32, 32)
    given = upstream.chunk_kda(**inputs, initial_state=initial, output_final_state=True)
    right = chunk_kda(**inputs, initial_state=initial, output_final_state=True)
    assert same_bits(given[0], right[0]) and same_bits(given[1], right[1])
    x = {**inputs, "cu_seqlens": None}
    names = ("q", "k", "v", "g", "beta")
    positional = [x.pop(name) for name in names]
    flags = [x.pop(name) for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel")]
    o, none = upstream.chunk_kda(*positional, None, None, False, *flags, **x)
    assert none is None and same_bits(o, chunk_kda(**(inputs | {"cu_seqlens": None}))[0])


def test_chunk_kda_differentiates_and_returns_h() -> None:
    inputs = make()
    inputs["q"].requires_grad_()
    upstream.chunk_kda(**inputs)[0].sum().backward()
    assert inputs["q"].grad.any()
    with torch.inference_mode():
        assert upstream.chunk_kda(**inputs, return_intermediate_states=True)[2].shape[1] == 3


def test_hopper_prefill_is_v_first() -> None:
    inputs, initial = make(), torch.randn(3, 2, 32, 32)
    before = initial.clone()
    o, final = upstream.kda_prefill_hopper(
        **inputs, initial_state=initial, output_final_state=True, chunk_indices=torch.zeros(3, 2)
    )
    right, right_final = chunk_kda(
        **inputs, initial_state=initial.mT.contiguous(), output_final_state=True
    )
    assert same_bits(o, right) and same_bits(final, right_final.mT.contiguous())
    assert same_bits(initial, before)
    assert upstream.kda_prefill_hopper(**inputs)[1] is None


def test_blackwell_prefill_is_k_first() -> None:
    inputs, initial = make(), torch.randn(3, 2, 32, 32)
    given = upstream.flash_kda_prefill(**inputs, initial_state=initial, output_final_state=True)
    right = chunk_kda(**inputs, initial_state=initial, output_final_state=True)
    assert same_bits(given[0], right[0]) and same_bits(given[1], right[1])


@pytest.mark.parametrize("call", [upstream.kda_prefill_hopper, upstream.flash_kda_prefill])
def test_prefill_calls_refuse_gradients_and_strangers(call) -> None:
    inputs = make()
    with pytest.raises(TypeError, match="layout"):
        call(**inputs, layout="vk")
    inputs["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward"):
        call(**inputs)
    with torch.no_grad():
        assert call(**inputs)[0].isfinite().all()
