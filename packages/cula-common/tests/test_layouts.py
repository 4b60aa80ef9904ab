"""State layouts and slot pools."""

import re

import pytest
import torch

from cula.common import layouts


def test_conversions_are_views():
    k_first = torch.arange(24.0).view(1, 2, 3, 4)
    v_first = layouts.to_v_first(k_first)
    assert v_first.shape == (1, 2, 4, 3)
    assert v_first.data_ptr() == k_first.data_ptr()
    assert v_first[0, 1, 3, 2] == k_first[0, 1, 2, 3]
    assert torch.equal(layouts.to_k_first(v_first), k_first)


def test_shapes():
    assert layouts.state_shape(5, 2, 64, 128) == (5, 2, 128, 64)
    assert layouts.state_shape(5, 2, 64, 128, v_first=False) == (5, 2, 64, 128)


def padded_pool(slots=3, heads=2, rows=4, columns=8, padding=5):
    size = heads * rows * columns
    flat = torch.zeros(slots * (size + padding))
    return flat.as_strided(
        (slots, heads, rows, columns), (size + padding, rows * columns, columns, 1)
    )


def test_dense_slots():
    pool = torch.zeros(3, 2, 4, 8)
    assert layouts.has_dense_slots(pool)
    assert layouts.has_dense_slots(padded_pool())
    assert layouts.has_dense_slots(pool[::2])
    assert layouts.has_dense_slots(pool[1:1])
    assert layouts.has_dense_slots(pool[:1].expand(1, 2, 4, 8))
    # Strides of dimensions of size 1 say nothing.
    assert layouts.has_dense_slots(torch.zeros(64).as_strided((2, 1, 4, 8), (32, 3, 8, 1)))
    assert layouts.has_dense_slots(torch.zeros(64).as_strided((2, 2, 4, 1), (8, 4, 1, 9)))


def test_slots_that_are_not_dense():
    pool = torch.zeros(3, 4, 4, 8)
    assert not layouts.has_dense_slots(pool[:, ::2])
    assert not layouts.has_dense_slots(pool.transpose(-1, -2))
    assert not layouts.has_dense_slots(pool[..., :4])
    # Every slot at the same place: a write to one would be a write to all.
    assert not layouts.has_dense_slots(pool[:1].expand(3, 4, 4, 8))


def require(state, **more):
    more = {"slots": None, "heads": 2, "K": 8, "V": 4} | more
    layouts.require_state("state", state, **more)


def test_require_state_accepts():
    require(torch.zeros(3, 2, 4, 8))
    require(padded_pool(), slots=3)
    require(torch.zeros(3, 2, 8, 4, dtype=torch.bfloat16), v_first=False)
    require(torch.zeros(3, 2, 8, 4).transpose(-1, -2), dense=False)


@pytest.mark.parametrize(
    ("state", "more", "text"),
    [
        (
            torch.zeros(3, 2, 8, 4),
            {},
            "state: shape [3, 2, 8, 4]; must be [slots, HV, V, K] = [any, 2, 4, 8]",
        ),
        (
            torch.zeros(3, 2, 4, 8),
            {"v_first": False},
            "state: shape [3, 2, 4, 8]; must be [slots, HV, K, V] = [any, 2, 8, 4]",
        ),
        (
            torch.zeros(3, 64),
            {},
            "state: shape [3, 64]; must be [slots, HV, V, K] = [any, 2, 4, 8]",
        ),
        (
            torch.zeros(3, 2, 4, 8),
            {"slots": 2},
            "state: shape [3, 2, 4, 8]; must be [slots, HV, V, K] = [2, 2, 4, 8]",
        ),
        (
            torch.zeros(3, 2, 4, 8, dtype=torch.float16),
            {},
            "state: dtype torch.float16; must be float32 or bfloat16",
        ),
        (
            torch.zeros(3, 2, 8, 4).transpose(-1, -2),
            {},
            "state: strides [64, 32, 1, 4]; each slot must be contiguous "
            "(padding between slots is allowed)",
        ),
    ],
)
def test_require_state_refuses(state, more, text):
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        require(state, **more)
