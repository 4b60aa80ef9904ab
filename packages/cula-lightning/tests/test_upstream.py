"""Upstream cuLA's calls: their state layouts, their defaults, and where we differ on purpose."""

import pytest
import torch

from cula.common.testing import assert_close, same_bits
from cula.lightning.upstream import lightning_attn_fwd, lightning_attn_fwd_varlen

DECAY = torch.tensor([0.0, 0.1, 2.0])


def make(batch: int = 2, tokens: int = 90) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, 3, 16, dtype=torch.bfloat16) for _ in range(3)]


def test_fixed_lengths(oracle) -> None:
    """A V-first state, scale 1 by default, and a tail of 26 tokens that decays by 26 steps."""
    Q, K, V = make()
    initial = torch.randn(2, 3, 16, 16)
    before = initial.clone()
    right = oracle(Q, K, V, -DECAY, initial=initial.mT, scale=1.0)
    O, state = lightning_attn_fwd(
        Q, K, V, DECAY, initial_state=initial, output_final_state=True, chunk_size=64
    )
    assert O.dtype == torch.bfloat16
    assert_close("O", O, right.o, 3e-3)
    assert_close("state", state.mT, right.final, 2e-6)
    assert same_bits(initial, before)


def test_fixed_lengths_without_states(oracle) -> None:
    Q, K, V = make()
    right = oracle(Q, K, V, -DECAY, scale=0.25)
    O, none = lightning_attn_fwd(Q, K, V, DECAY, 0.25)
    assert none is None
    assert_close("O", O, right.o, 3e-3)
    _, state = lightning_attn_fwd(Q, K, V, DECAY, output_final_state=True)
    assert_close("state", state.mT, right.final, 2e-6)


def test_text_for_a_flag() -> None:
    with pytest.raises(TypeError, match="output_final_state: str; must be True or False"):
        lightning_attn_fwd(*make(), DECAY, output_final_state="False")


def test_packed_over_a_pool(oracle) -> None:
    Q, K, V = make(1)
    lengths = [20, 0, 70]
    cu_seqlens = torch.tensor([0, 20, 20, 90], dtype=torch.int32)
    pool = torch.randn(5, 3, 16, 16)
    before = pool.clone()
    indices = torch.tensor([4, 0, 2])
    right = oracle(Q, K, V, -DECAY, lengths=lengths, initial=pool[indices].mT, scale=1.0)
    O, same_pool = lightning_attn_fwd_varlen(
        Q, K, V, DECAY, cu_seqlens, state_pool=pool, initial_state_indices=indices
    )
    assert same_pool is pool
    assert_close("O", O, right.o, 3e-3)
    assert_close("states", pool[indices].mT, right.final, 2e-6)
    assert same_bits(pool[[1, 3]], before[[1, 3]])


def test_packed_makes_a_pool(oracle) -> None:
    Q, K, V = make(1)
    right = oracle(Q, K, V, -DECAY, lengths=[50, 40], scale=1.0)
    O, pool = lightning_attn_fwd_varlen(Q, K, V, DECAY, torch.tensor([0, 50, 90]))
    assert_close("O", O, right.o, 3e-3)
    assert pool.shape == (2, 3, 16, 16)
    assert_close("pool", pool.mT, right.final, 2e-6)


def test_refused() -> None:
    Q, K, V = make()
    with pytest.raises(ValueError, match="decay: smallest value"):
        lightning_attn_fwd(Q, K, V, -DECAY)
    with pytest.raises(ValueError, match="initial_state: shape"):
        lightning_attn_fwd(Q, K, V, DECAY, initial_state=torch.zeros(1, 3, 16, 16))
    with pytest.raises(TypeError, match="cu_seqlens: list"):
        lightning_attn_fwd_varlen(Q, K, V, DECAY, [0, 90])
    with pytest.raises(NotImplementedError, match="no backward"):
        lightning_attn_fwd(Q.requires_grad_(), K, V, DECAY)
