"""Where the model of times cuts sequences; what it is made of was measured (DESIGN.md)."""

import pytest

from cula.common.dims import Dims
from cula.lightning.cut import Cut, best_cut, given_cut, whole, works

SMS = 132


def dims(T: int, H: int, *, B: int = 1, HV: int | None = None, D: int = 128) -> Dims:
    return Dims(B=B, T=T, H=H, HV=HV or H, K=D, V=D)


def times(call: Dims, sequences: int, cut: Cut, varlen: bool = False) -> float:
    """Predicted microseconds, the mean of what a packed call may be."""
    possible = works(call, sequences, varlen, SMS)
    if not cut.segment_chunks:
        each = [work.whole(cut.warpgroups) for work in possible]
    else:
        each = [work.cut(cut.segment_chunks, cut.warpgroups) for work in possible]
    return sum(each) / len(each)


@pytest.mark.parametrize("H, whole_time", [(4, 492), (8, 489), (16, 493)], ids=lambda x: str(x))
def test_whole_sequences_take_what_was_measured(H: int, whole_time: float) -> None:
    call = dims(32768, H)
    assert times(call, 1, Cut(0, 1)) == pytest.approx(whole_time, rel=0.03)


@pytest.mark.parametrize("H, chunks", [(4, 16), (8, 32), (16, 64), (32, 128)])
def test_one_long_sequence_fills_the_gpu_once(H: int, chunks: int) -> None:
    cut = best_cut(dims(32768, H), 1, False, SMS)
    assert cut == Cut(chunks, 2)
    assert H * 512 // chunks == 128


@pytest.mark.parametrize("H", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("T", [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("B", [1, 2, 3, 4])
def test_no_other_length_is_faster(B: int, T: int, H: int) -> None:
    """Over all lengths, not only those that fill the GPU a whole number of times."""
    call = dims(T, H, B=B)
    chosen = best_cut(call, B, False, SMS)
    lengths = range(4, T // 64, 1 + T // 32768)
    least = min(times(call, B, Cut(n, groups)) for n in lengths for groups in (1, 2))
    uncut = whole(call, B, SMS)
    if not chosen.segment_chunks:
        stays = times(call, B, uncut)
        assert chosen == uncut and least > 0.95 * min(stays / 1.15, stays - 5)
        return
    assert times(call, B, chosen) < min(times(call, B, uncut) / 1.15, times(call, B, uncut) - 5)
    assert times(call, B, chosen) <= 1.06 * least


@pytest.mark.parametrize(
    "call, sequences, varlen",
    [
        (dims(1024, 4), 1, False),
        (dims(131072, 64), 1, False),
        (dims(16384, 64, B=2), 2, False),
        (dims(32768, 16, HV=64), 1, False),
        (dims(32768, 64), 5, True),
        (dims(4096, 64), 20, True),
        (dims(32768, 4), 5000, True),
    ],
    ids=str,
)
def test_what_fills_the_gpu_or_is_short_stays_whole(call, sequences, varlen) -> None:
    assert best_cut(call, sequences, varlen, SMS) == whole(call, sequences, SMS)


def test_packed_sequences_may_be_of_any_length() -> None:
    """Even ones would be as fast whole; one that has half of all tokens would not."""
    call = dims(32768, 8)
    even, skewed = works(call, 8, True, SMS)
    cut = best_cut(call, 8, True, SMS)
    assert cut.segment_chunks
    chosen = [work.cut(cut.segment_chunks, cut.warpgroups) for work in (even, skewed)]
    assert chosen[0] < 1.1 * even.whole(1) and chosen[1] < 0.5 * skewed.whole(1)


def test_the_workspace_has_a_bound() -> None:
    assert best_cut(dims(32768, 8), 200, True, SMS).segment_chunks
    assert not best_cut(dims(1 << 20, 8), 5000, True, SMS).segment_chunks


def test_one_packed_sequence_is_cut_as_a_row() -> None:
    for T in (1000, 32768):
        assert best_cut(dims(T, 8), 1, True, SMS) == best_cut(dims(T, 8), 1, False, SMS)


def test_given_segments_get_warpgroups() -> None:
    assert given_cut(dims(32768, 4), 1, False, SMS, 32) == Cut(32, 1)
    assert given_cut(dims(32768, 8), 1, False, SMS, 32) == Cut(32, 2)
    assert given_cut(dims(32768, 8), 1, False, SMS, 0) == whole(dims(32768, 8), 1, SMS)
    assert given_cut(dims(32768, 8, D=64), 1, False, SMS, 32) == Cut(32, 1)


def test_nothing_to_do() -> None:
    for call, sequences in ((dims(0, 8), 1), (dims(8, 8, B=0), 0)):
        assert best_cut(call, sequences, False, SMS) == given_cut(call, sequences, False, SMS, 4)
