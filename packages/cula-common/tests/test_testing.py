"""The error metric, bit comparison and poisoned buffers."""

import math

import pytest
import torch

from cula.common import testing


def test_rel_error_is_the_ratio_of_rms():
    ref = torch.tensor([3.0, -4.0])
    x = ref + torch.tensor([0.3, 0.4])
    assert testing.rel_error(x, ref) == pytest.approx(0.1, rel=1e-6)
    assert testing.rel_error(ref, ref) == 0.0


def test_rel_error_counts_in_float64():
    ref = torch.full((4,), 1e30)
    assert testing.rel_error(ref * 2, ref) == pytest.approx(1.0, rel=1e-6)
    small = torch.full((4,), 1e-30)
    assert testing.rel_error(small * 2, small) == pytest.approx(1e-22, rel=1e-6)


def test_rel_error_against_zero_is_large():
    assert testing.rel_error(torch.ones(3), torch.zeros(3)) == pytest.approx(1e8)


def test_rel_error_in_pieces(monkeypatch):
    x, ref = torch.randn(5, 7), torch.randn(5, 7)
    whole = testing.rel_error(x, ref)
    monkeypatch.setattr(testing, "_PIECE", 4)
    assert testing.rel_error(x, ref) == pytest.approx(whole, rel=1e-12)
    assert testing.rel_error(x.t(), ref.t()) == pytest.approx(whole, rel=1e-12)


def test_nan_is_never_close():
    bad, good = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])
    assert math.isnan(testing.rel_error(bad, good))
    assert math.isnan(testing.rel_error(good, bad))
    for x, ref in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(AssertionError, match=r"^o: error nan"):
            testing.assert_close("o", x, ref, 1.0)


def test_assert_close():
    ref = torch.ones(8)
    assert testing.assert_close("o", ref * 1.01, ref, 0.02) == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(AssertionError, match=r"^o: error 1\.000e-02 is above 5\.000e-03$"):
        testing.assert_close("o", ref * 1.01, ref, 0.005)


def test_shapes_must_agree_and_empty_is_equal():
    with pytest.raises(ValueError, match=r"x: shape \[1\]; must be the reference's, \[3\]"):
        testing.rel_error(torch.ones(1), torch.ones(3))
    assert testing.rel_error(torch.ones(0, 4), torch.ones(0, 4)) == 0.0


def test_same_bits():
    nan = torch.tensor([math.nan, -0.0, 1.0])
    assert testing.same_bits(nan, nan.clone())
    assert not testing.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not testing.same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not testing.same_bits(torch.ones(2), torch.ones(2, 1))
    assert not testing.same_bits(torch.ones(2), torch.nextafter(torch.ones(2), torch.zeros(2)))
    x = torch.randn(4, 6, dtype=torch.float64).to(torch.bfloat16)
    assert testing.same_bits(x.t(), x.t().contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("stride", [None, (40, 10, 1)])
def test_poison_notices_every_stray_write(dtype, stride):
    window = testing.poisoned((2, 3, 4), dtype, stride=stride, padding=16)
    window.tensor.fill_(1)
    assert window.untouched()
    inside = {int(i) for i in (~window.outside).nonzero()}
    assert len(inside) == 24
    for place in range(len(window.buffer)):
        if place not in inside:
            before = window.buffer[place].clone()
            window.buffer[place] = 0
            assert not window.untouched(), place
            window.buffer[place] = before
    assert window.untouched()


def test_poison_shows_in_every_stray_read():
    window = testing.poisoned((2, 4), torch.float32, stride=(6, 1), padding=8)
    window.tensor.fill_(1)
    assert window.tensor.shape == (2, 4) and window.tensor.stride() == (6, 1)
    assert window.buffer[window.outside].isnan().all()
    assert window.buffer.sum().isnan() and window.tensor.sum() == 8
    assert len(window.buffer) >= 10 + 2 * 8


def test_poisoned_empty_tensor():
    window = testing.poisoned((0, 4), torch.float32)
    assert window.tensor.shape == (0, 4) and window.untouched()
