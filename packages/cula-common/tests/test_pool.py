"""Slots and checkpoints: what is read, what is written, and what is not."""

import pytest
import torch

from cula.common.layouts import to_v_first
from cula.common.pool import (
    checkpoint_row,
    load_states,
    require_checkpoints,
    require_pool,
    store_checkpoints,
    store_states,
    valid_slots,
)
from cula.common.ragged import Mark
from cula.common.testing import poisoned, same_bits

CPU = torch.device("cpu")
SIZES = {"heads": 2, "key_dim": 3, "value_dim": 4, "device": CPU}


def pool(slots: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(slots, 2, 4, 3).to(dtype)


def indices(*slots: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(slots, dtype=dtype)


def test_valid_slots() -> None:
    given = indices(-(2**31), -1, 0, 4, 5, 2**31 - 1)
    assert valid_slots(given, 5).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_load(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    state = pool(dtype=dtype)
    state[1] = torch.nan  # named by nobody who reads it
    given = indices(4, -1, 0, 5, 1, dtype=index_dtype)
    starts = torch.tensor([True, True, True, True, False])
    loaded = load_states(state, given, starts, sequences=5)
    assert loaded.dtype == torch.float32
    assert same_bits(loaded[0], state[4].float()) and same_bits(loaded[2], state[0].float())
    for n in (1, 3, 4):
        assert not loaded[n].any()
    loaded.fill_(7.0)
    assert state[0].ne(7.0).all()


def test_load_without_indices() -> None:
    state = pool()
    assert same_bits(load_states(state, None, None, sequences=3), state[:3])
    starts = torch.tensor([False, True, True])
    assert not load_states(state, None, starts, sequences=3)[0].any()
    assert load_states(state[:0], indices(0, 1), None, sequences=2).shape == (2, 2, 4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "given",
    [(3, 0), (-1, 3, 0, -1), (3, -1), (-1, 5, 9), (0,), (4, 2, 1, 3, 0), ()],
    ids=str,
)
def test_store_touches_only_named_slots(dtype: torch.dtype, given: tuple[int, ...]) -> None:
    window = poisoned((5, 2, 4, 3), dtype, stride=(31, 12, 3, 1))
    window.tensor.copy_(pool())
    before, values = window.tensor.clone(), torch.randn(len(given), 2, 4, 3)
    store_states(window.tensor, indices(*given), values)
    for slot in range(5):
        right = values[given.index(slot)].to(dtype) if slot in given else before[slot]
        assert same_bits(window.tensor[slot].clone(), right)
    assert window.untouched()


def test_store_without_indices_and_into_nothing() -> None:
    state, values = pool(), torch.randn(3, 2, 4, 3)
    before = state.clone()
    store_states(state, None, values)
    assert same_bits(state[:3], values) and same_bits(state[3:], before[3:])
    store_states(state[:0], indices(0), values[:1])


def test_store_into_a_k_first_pool() -> None:
    k_first, values = torch.randn(3, 2, 3, 4), torch.randn(2, 2, 4, 3)
    store_states(to_v_first(k_first), indices(2, 0), values)
    assert same_bits(k_first[2].mT.contiguous(), values[0])


def test_named_slot_keeps_special_values() -> None:
    """A rewrite of slot 0, where no sequence has a slot, is exact: nan and -0 stay."""
    state = pool(dtype=torch.bfloat16)
    state[0, 0, 0] = torch.tensor([torch.nan, -0.0, torch.inf])
    before = state.clone()
    store_states(state, indices(-1, 77), torch.randn(2, 2, 4, 3))
    assert same_bits(state, before)


@pytest.mark.parametrize("interval", [64, 128, 192])
def test_checkpoint_rows_never_meet(interval: int) -> None:
    """Every checkpoint has a row of its own below tokens // interval, whatever the lengths."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 500, (7,), generator=generator).tolist()
        start, rows = 0, []
        for length in lengths:
            rows += [checkpoint_row(start, j + 1, interval) for j in range(length // interval)]
            start += length
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < start // interval for row in rows)
        assert rows == sorted(rows)


def test_store_checkpoints() -> None:
    buffer = torch.full((4, 2, 4, 3), torch.nan, dtype=torch.bfloat16)
    states = torch.randn(2, 2, 3, 4)  # K-first
    store_checkpoints(buffer, 64, [Mark((1, 0), (70, 0), 1, states)])
    assert same_bits(buffer[1], states[0].mT.contiguous().bfloat16())
    assert same_bits(buffer[0], states[1].mT.contiguous().bfloat16())
    assert buffer[2:].isnan().all()


def test_what_is_accepted() -> None:
    require_pool(None, None, None, sequences=2, **SIZES)
    padded = torch.zeros(5, 40).as_strided((5, 2, 4, 3), (40, 12, 3, 1))
    for state in (pool(), pool(dtype=torch.bfloat16), padded, to_v_first(torch.zeros(5, 2, 3, 4))):
        require_pool(state, None, None, sequences=5, **SIZES)
        require_pool(state, indices(1, 2), torch.tensor([True, False]), sequences=2, **SIZES)
    require_checkpoints(None, None, tokens=1000, **SIZES)
    require_checkpoints(pool(7), 128, tokens=1000, **SIZES)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"state": pool().half()}, "state: dtype"),
        ({"state": torch.zeros(5, 2, 3, 4)}, "state: shape"),
        ({"state": torch.zeros(5, 2, 4, 6)[..., ::2]}, "state: strides"),
        ({"state": pool()[:1].expand(5, -1, -1, -1)}, "state: strides"),
        ({"state": pool(1), "state_indices": None}, "state: .*slot"),
        ({"state": None}, "state_indices: given"),
        ({"state_indices": indices(1)}, "state_indices: shape"),
        ({"state_indices": torch.zeros(2)}, "state_indices: dtype"),
        ({"has_initial_state": torch.ones(2)}, "has_initial_state: dtype"),
        ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, "has_initial_state: shape"),
    ],
)
def test_pool_refused(change: dict, match: str) -> None:
    given = {"state": pool(), "state_indices": indices(1, 2), "has_initial_state": None} | change
    with pytest.raises(ValueError, match=match):
        require_pool(**given, sequences=2, **SIZES)


@pytest.mark.parametrize(
    "checkpoints, interval, match",
    [
        (pool(), None, "checkpoint_interval: None"),
        (None, 64, "checkpoints: None"),
        (pool(), 63, "checkpoint_interval: 63"),
        (pool(), 0, "checkpoint_interval: 0"),
        (pool(), -64, "checkpoint_interval: -64"),
        (pool(), 64.0, "checkpoint_interval: 64.0"),
        (pool(4), 64, "checkpoints: .*5 rows"),
        (pool().half(), 64, "checkpoints: dtype"),
        (torch.zeros(5, 2, 4, 6)[..., ::2], 64, "checkpoints: strides"),
    ],
)
def test_checkpoints_refused(checkpoints, interval, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        require_checkpoints(checkpoints, interval, tokens=350, **SIZES)
