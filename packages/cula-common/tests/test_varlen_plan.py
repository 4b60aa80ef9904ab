"""Plans of packed sequences, and the Python twin of the schedule against brute force."""

import itertools
import random

import pytest
import torch

from cula.common.varlen import (
    FixedPlan,
    VarlenPlan,
    build_schedule,
    choose_segment_chunks,
    chunk_rows,
    clamped_starts,
    schedule_configs,
    segment_rows,
)
from cula.common.varlen.twin import workspace_words

ADVERSARIAL = [
    ([0], 0),
    ([5], 9),
    ([0, 0], 0),
    ([0, 0, 0, 0], 70),
    ([0, 65, 131, 202, 281], 281),
    ([3, 65, 65, 40, 281], 281),
    ([10, 5, 0, -3], 64),
    ([-(2**63), 2**63 - 1, 2**31, 2**32 + 7], 100),
    ([0, 500, 100, 700], 300),
    ([0, 1, 2, 3, 4, 300], 300),
    ([2**31, 2**32, 2**32 + 64], 64),
    ([0, 64, 64, 128, 128, 128], 128),
]


def random_batch(draw):
    """A batch that is mostly right, with zero lengths, and sometimes nonsense."""
    tokens, sequences = draw.choice([0, 1, 63, 64, 65, 777, 5000]), draw.randint(0, 40)
    inner = sorted(draw.randint(0, tokens) for _ in range(max(sequences - 1, 0)))
    cu = [0, *inner, tokens] if sequences else [0]
    cu = [draw.choice([x, x, cu[i - 1] if i else x]) for i, x in enumerate(cu)]
    if draw.random() < 0.3:
        cu = [draw.choice([x, x - 70, x + 70, -x, x + 2**33]) for x in cu]
    return cu, tokens


def batches():
    draw = random.Random(0)
    yield from ADVERSARIAL
    for _ in range(150):
        yield random_batch(draw)


def owners(cu, tokens):
    """Which sequence each token belongs to, by walking: the first claim stands."""
    owner, claimed = [-1] * tokens, 0
    for n, (start, stop) in enumerate(itertools.pairwise(cu)):
        for t in range(max(start, claimed), min(stop, tokens)):
            owner[t] = n
        claimed = min(max(claimed, start, stop), tokens)
    return owner


def owners_from_rows(ranges, tokens):
    """The same from rows of tables; a token in two rows fails."""
    owner = [-1] * tokens
    for sequence, begin, end in ranges:
        for t in range(begin, end):
            assert owner[t] == -1
            owner[t] = sequence
    return owner


@pytest.mark.parametrize("segment_chunks", [0, 1, 3])
def test_rows_cover_every_token_once(segment_chunks):
    for cu, tokens in batches():
        n = len(cu) - 1
        plan = VarlenPlan(n, tokens, 16, segment_chunks=segment_chunks)
        expected = owners(cu, tokens)
        segments, chunks = segment_rows(plan, cu), chunk_rows(plan, cu)
        assert owners_from_rows([s[:1] + s[2:4] for s in segments], tokens) == expected
        assert owners_from_rows([(c[0], c[2], c[2] + c[3]) for c in chunks], tokens) == expected
        assert len(chunks) <= plan.max_chunks
        assert len(segments) <= plan.max_segments
        assert {s.sequence for s in segments} == set(range(n))


@pytest.mark.parametrize("segment_chunks", [0, 1, 2, 5])
def test_segments_are_consistent(segment_chunks):
    """Longest first and stable; in time order within a sequence; their chunks are the table's."""
    for cu, tokens in batches():
        plan = VarlenPlan(len(cu) - 1, tokens, 16, segment_chunks=segment_chunks)
        rows, chunks = segment_rows(plan, cu), chunk_rows(plan, cu)
        sizes = [-(-(s.end - s.begin) // 16) for s in rows]
        keys = [(-size, s.sequence, s.segment) for size, s in zip(sizes, rows, strict=True)]
        assert keys == sorted(keys)
        places = {(s.sequence, s.segment): i for i, s in enumerate(rows)}
        assert sorted(s.first + s.segment for s in rows) == list(range(len(rows)))
        for i, (size, s) in enumerate(zip(sizes, rows, strict=True)):
            mine = chunks[s.chunk : s.chunk + size]
            assert all(c.sequence == s.sequence for c in mine)
            assert [c.begin for c in mine] == list(range(s.begin, s.end, 16))
            assert s.begin == s.start + s.segment * segment_chunks * 16
            assert s.segment == 0 or places[s.sequence, s.segment - 1] < i
            if s.segment < s.segments - 1:
                assert size == segment_chunks


def test_right_input_is_not_changed():
    assert clamped_starts([0, 65, 65, 131], 131) == [0, 65, 65, 131]


def test_bounds_can_be_reached():
    plan = VarlenPlan(5, 100, 16)
    assert len(chunk_rows(plan, [0, 1, 2, 3, 4, 100])) == plan.max_chunks
    plan = VarlenPlan(2, 129, 16, segment_chunks=2)
    assert len(segment_rows(plan, [0, 129, 129])) == plan.max_segments


def test_one_sequence_is_exact():
    for tokens in range(200):
        assert VarlenPlan(1, tokens, 64).max_chunks == -(-tokens // 64)


def test_words_fill_the_sections():
    for cu, tokens in ADVERSARIAL:
        for table in (True, False):
            plan = VarlenPlan(len(cu) - 1, tokens, 16, segment_chunks=1, chunk_table=table)
            assert len(workspace_words(plan, cu)) == plan.scratch_at == plan.workspace_words


def test_scratch_only_beyond_shared_memory():
    small, large = VarlenPlan(4096, 9000, 64), VarlenPlan(4097, 9000, 64)
    assert small.workspace_words == small.scratch_at
    assert large.workspace_words >= large.scratch_at + 4097 + 4097
    assert large.config(64).in_shared is False


def test_compile_key_is_coarse():
    """One kernel for all batches of up to 128 sequences, one up to 4096, one beyond."""
    keys = {VarlenPlan(n, 9 * n, 64, heads=n + 1).config(b) for n in range(5000) for b in (32, 64)}
    assert len(keys) == 6
    assert keys == set(schedule_configs(64))


@pytest.mark.parametrize("segment_chunks", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("length", [0, 1, 64, 65, 300])
def test_fixed_plan_is_the_packed_plan_of_equal_lengths(length, segment_chunks):
    for batch in (0, 1, 3):
        fixed = FixedPlan(batch, length, 64, heads=2, parts=2, segment_chunks=segment_chunks)
        packed = VarlenPlan(batch, batch * length, 64, segment_chunks=segment_chunks)
        cu = [n * length for n in range(batch + 1)]
        assert fixed.max_chunks == len(chunk_rows(packed, cu))
        assert fixed.max_segments == len(segment_rows(packed, cu))
        assert fixed.max_units == 4 * fixed.max_segments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sequences": -1}, "sequences: -1; must be >= 0"),
        ({"chunk": 0}, "chunk: 0; must be >= 1"),
        ({"parts": 0}, "parts: 0; must be >= 1"),
        ({"tokens": 2**31 - 64}, "tokens: 2147483584; tokens [+] chunk must be below 2.31"),
        ({"sequences": 2**16, "heads": 2**15}, "units: 2147483648; .* must be below 2.31"),
        ({"sequences": 2**28}, "workspace: .* must be fewer than 2.31 words"),
    ],
)
def test_plan_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        VarlenPlan(**{"sequences": 2, "tokens": 128, "chunk": 64, **kwargs})


def test_fixed_plan_refuses():
    with pytest.raises(ValueError, match=r"tokens: 2147483648; tokens \+ chunk"):
        FixedPlan(2**15, 2**16, 64)


def test_many_units_are_allowed():
    assert VarlenPlan(2050, 2050, 64, heads=32, parts=2).max_units == 131_200


def segments_for(tokens, heads, **kwargs):
    given = {"chunk": 64, "parts": 2, "slots": 132, "min_chunks": 4, **kwargs}
    return choose_segment_chunks(tokens=tokens, heads=heads, **given)


def test_segments_only_where_a_share_is_exceeded():
    assert segments_for(32768, 66) == 0  # one sequence has a unit for every slot
    assert segments_for(200, 1) == 0  # shorter than the least segment
    assert segments_for(32768, 8) == 63  # 512 chunks x 16 units over 132 slots
    assert segments_for(32768, 8, min_chunks=100) == 100
    plan = VarlenPlan(20, 20 * 512, 64, heads=8, parts=2, segment_chunks=segments_for(10240, 8))
    even = [512 * n for n in range(21)]
    assert len(segment_rows(plan, even)) == 20
    assert len(segment_rows(plan, [0] * 20 + [10240])) > 20


def test_segments_fill_the_slots():
    for heads in (1, 2, 4, 8, 16, 32):
        step = segments_for(65536, heads)
        plan = VarlenPlan(1, 65536, 64, heads=heads, parts=2, segment_chunks=step)
        assert 0.8 * 132 <= len(segment_rows(plan, [0, 65536])) * heads * 2 <= 132 + heads * 2


def test_segments_of_equal_sequences():
    """With a known longest length, a batch of which each sequence fits its share stays whole."""
    assert segments_for(8 * 4096, 8, longest=4096) == segments_for(8 * 4096, 8)  # 63 < 64 chunks
    assert segments_for(16 * 4096, 8, longest=4096) == 0


def test_choice_refuses():
    with pytest.raises(ValueError, match="slots: 0; must be >= 1"):
        segments_for(100, 1, slots=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_schedule_on_the_cpu(dtype):
    plan = VarlenPlan(4, 281, 64, segment_chunks=1)
    cu = torch.tensor([0, 65, 131, 131, 281], dtype=dtype)
    schedule = build_schedule(plan, cu)
    assert schedule.starts.tolist() == cu.tolist()
    assert schedule.chunk_starts.tolist() == [0, 2, 4, 4, 7]
    assert schedule.segment_starts.tolist() == [0, 2, 4, 5, 8]
    assert schedule.header[:3].tolist() == [7, 8, 281]
    assert not schedule.tickets.any()
    rows = [list(row) for row in segment_rows(plan, cu.tolist())]
    assert schedule.segments[: len(rows)].tolist() == rows
    assert (schedule.segments[len(rows) :, 0] == -1).all()
    assert schedule.chunks[:7].tolist() == [list(row) for row in chunk_rows(plan, cu.tolist())]


def test_schedule_in_a_given_workspace():
    plan = VarlenPlan(2, 128, 64, chunk_table=False)
    cu = torch.tensor([0, 100, 128])
    workspace = torch.full((plan.workspace_words + 8,), 7, dtype=torch.int32)
    schedule = build_schedule(plan, cu, workspace)
    assert schedule.workspace.data_ptr() == workspace.data_ptr()
    assert schedule.chunks.shape == (0, 4)
    assert (workspace[plan.workspace_words :] == 7).all()


@pytest.mark.parametrize(
    ("cu", "workspace", "message"),
    [
        (torch.tensor([0.0, 1.0, 2.0]), None, "cu_seqlens: dtype"),
        (torch.tensor([0, 1]), None, "cu_seqlens: shape"),
        (torch.tensor([0, 9, 1, 9, 2, 9])[::2], None, "cu_seqlens: .* must be contiguous"),
        (torch.tensor([0, 1, 2]), torch.empty(3, dtype=torch.int32), "workspace: 3; must hold"),
        (torch.tensor([0, 1, 2]), torch.empty(500), "workspace: dtype"),
        (torch.tensor([0, 1, 2]), torch.empty(500, dtype=torch.int32)[1:], "multiple of 16"),
    ],
)
def test_schedule_refuses(cu, workspace, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(VarlenPlan(2, 128, 64), cu, workspace)
