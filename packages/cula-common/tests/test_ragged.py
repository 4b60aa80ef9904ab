"""Sequences of many lengths through one recurrence, against one at a time."""

import pytest
import torch

from cula.common.ragged import Sequences, scan, sequences_of
from cula.common.testing import same_bits

LENGTHS = {
    "equal": [7, 7, 7],
    "mixed": [3, 0, 12, 7, 7, 1, 0, 30],
    "none": [],
    "empty ones": [0, 0],
    "one": [20],
}


def decayed_sum(inputs, state):
    """A recurrence with per-sequence states: s <- s / 2 + x_t y_t, o_t = s."""
    x, y = inputs
    o = []
    for t in range(x.shape[1]):
        state = state / 2 + x[:, t] * y[:, t]
        o.append(state)
    return torch.stack(o, 1), state


def alone(x, y, state, length):
    """The states after 0, 1, ... tokens of one sequence, as Python numbers."""
    states = [float(state)]
    for t in range(length):
        states.append(states[-1] / 2 + float(x[t]) * float(y[t]))
    return states


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("every", [None, 1, 5])
def test_scan_is_one_sequence_at_a_time(name: str, every: int | None) -> None:
    lengths = LENGTHS[name]
    torch.manual_seed(0)
    x, y = (torch.randn(sum(lengths) + 2, dtype=torch.float64) for _ in range(2))
    initial = torch.randn(len(lengths), dtype=torch.float64)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    sequences = Sequences(tuple(starts), tuple(lengths))
    result = scan(sequences, decayed_sum, [x, y], initial, o_shape=(), every=every)
    kept = {(n, m.count): s for m in result.marks for n, s in zip(m.numbers, m.states, strict=True)}
    for mark in result.marks:
        assert mark.starts == tuple(starts[n] for n in mark.numbers)
    expected_marks = 0
    for n, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        states = alone(x[start:], y[start:], initial[n], length)
        assert result.o[start : start + length].tolist() == states[1:]
        assert float(result.final[n]) == states[-1]
        for count in range(1, length // every + 1 if every else 0):
            assert float(kept[n, count]) == states[count * every]
            expected_marks += 1
    assert len(kept) == expected_marks
    # Tokens of no sequence.
    assert not result.o[sum(lengths) :].any()


def test_scan_sees_equal_lengths_and_few_steps() -> None:
    """The work is that of the longest sequence: other sequences ride along."""
    seen = []

    def step(inputs, state):
        seen.append(tuple(inputs[0].shape))
        return decayed_sum(inputs, state)

    lengths = (4, 9, 4, 2)
    x = torch.ones(19)
    scan(Sequences((0, 4, 13, 17), lengths), step, [x, x], torch.zeros(4), o_shape=())
    assert seen == [(4, 2), (3, 2), (1, 5)]


def test_scan_is_differentiable() -> None:
    x = torch.randn(16, dtype=torch.float64, requires_grad=True)
    y = torch.randn(16, dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, dtype=torch.float64, requires_grad=True)
    sequences = Sequences((0, 5, 5), (5, 0, 11))

    def call(x, y, state):
        result = scan(sequences, decayed_sum, [x, y], state, o_shape=(), every=4)
        return result.o, result.final, *(mark.states for mark in result.marks)

    assert torch.autograd.gradcheck(call, (x, y, state))


def test_bits_do_not_depend_on_the_strides_of_the_states() -> None:
    seen = []

    def step(inputs, state):
        seen.append(state.stride())
        return inputs[0], state

    x = torch.randn(6, 2, 2)
    for state in (torch.randn(3, 4, 5), torch.randn(3, 5, 4).mT):
        scan(Sequences((0, 2, 4), (2, 2, 2)), step, [x], state, o_shape=(2, 2))
    assert seen[0] == seen[1]


def test_sequences_of_a_batch() -> None:
    assert sequences_of(3, 7) == Sequences((0, 7, 14), (7, 7, 7))
    assert sequences_of(0, 7) == Sequences((), ())
    assert sequences_of(2, 0) == Sequences((0, 0), (0, 0))


@pytest.mark.parametrize(
    "bounds, starts, lengths",
    [
        ([0], (), ()),
        ([0, 4, 4, 10], (0, 4, 4), (4, 0, 6)),
        ([2, 4, 8], (2, 4), (2, 4)),
        ([-5, 4, 99], (0, 4), (4, 6)),
        ([0, 8, 3, 10], (0, 8, 8), (8, 0, 2)),
        ([99, 100], (10,), (0,)),
    ],
)
def test_sequences_of_any_values(bounds, starts, lengths) -> None:
    """Out of range or decreasing: clamped, so that no token belongs to two sequences."""
    given = torch.tensor(bounds, dtype=torch.int32)
    assert sequences_of(1, 10, given) == Sequences(starts, lengths)
    assert len(Sequences(starts, lengths)) == len(starts)


def test_host_copy_is_used_instead_of_the_device_values() -> None:
    device = torch.empty(3, dtype=torch.int32, device="meta")
    assert sequences_of(1, 10, device, torch.tensor([0, 4, 10])).lengths == (4, 6)


def test_inputs_are_not_written() -> None:
    x, state = torch.randn(12), torch.randn(2)
    before, before_state = x.clone(), state.clone()
    result = scan(Sequences((0, 0), (0, 0)), decayed_sum, [x, x], state, o_shape=())
    result.final.fill_(3.0)
    scan(Sequences((0, 5), (5, 7)), decayed_sum, [x, x], state, o_shape=())
    assert same_bits(x, before) and same_bits(state, before_state)
