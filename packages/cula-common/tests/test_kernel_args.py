"""What compile keys say of tensors, and which tensors sequence kernels take as they lie."""

import pytest
import torch

from cula.common.kernel_args import (
    States,
    dtype_name,
    loadable_states,
    loadable_tokens,
    refused_states,
    states_in_key,
)
from cula.common.layouts import to_v_first


def test_names() -> None:
    assert dtype_name(None) is None
    assert dtype_name(torch.zeros(1, dtype=torch.bfloat16)) == "bf16"
    assert dtype_name(torch.zeros(1, dtype=torch.int64)) == "int64"


def test_states_in_a_key() -> None:
    pool = torch.zeros(3, 2, 16, 8)
    assert states_in_key(None) is None
    assert states_in_key(pool) == States("fp32", True)
    assert states_in_key(to_v_first(pool.bfloat16())) == States("bf16", False)


def test_tokens_that_are_taken_as_they_lie() -> None:
    packed = torch.zeros(2, 5, 3, 4, 16, dtype=torch.bfloat16)  # q, k and v of one projection
    for x in (packed[:, :, 0], packed[:, 1:, 2], packed[:, :, 0, :, 8:]):
        assert loadable_tokens(x) is x


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 5, 4, 16)[..., 1:9],  # starts between multiples of 16 bytes
        torch.randn(2, 5, 4, 20)[..., :16],  # heads at multiples of 20 elements
        torch.randn(2, 5, 16, 4).mT,  # channels are no neighbours
        torch.randn(1, 5, 4, 16).expand(2, 5, 4, 16),  # a stride of 0
    ],
    ids=["start", "heads", "channels", "expanded"],
)
def test_tokens_that_are_copied(x: torch.Tensor) -> None:
    copy = loadable_tokens(x)
    assert copy is not x and torch.equal(copy, x)
    assert loadable_tokens(copy) is copy


def test_states_that_are_taken_as_they_lie() -> None:
    pool = torch.zeros(5, 2, 16, 8)
    for x in (
        pool,
        to_v_first(pool),
        pool[1::2],
        torch.zeros(5, 2 * 16 * 8 + 8)[:, :256].view(5, 2, 16, 8),
    ):
        assert loadable_states(x)


def test_states_that_are_refused() -> None:
    flat = torch.zeros(5 * 256 + 4)
    shifted = flat[1:1281].view(5, 2, 16, 8)
    for x in (shifted, torch.zeros(5, 2, 16, 16)[..., :8], torch.zeros(5, 4, 16, 8)[:, ::2]):
        assert not loadable_states(x)
    good = torch.zeros(5, 2, 16, 8)
    assert refused_states({"state": good, "checkpoints": None}) is None
    reason = refused_states({"state": good, "checkpoints": shifted})
    assert reason == (
        "checkpoints: strides [256, 128, 8, 1]; slots and heads must start at multiples of 8 "
        "elements and the whole at one of 16 bytes"
    )
