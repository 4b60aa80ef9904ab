"""`kda_prefill` on a CPU, against the chunked float64 oracle of conftest.py."""

import pytest
import torch

from cula.common.layouts import to_v_first
from cula.common.testing import assert_close, poisoned, same_bits
from cula.kda import chunk_kda, kda_prefill, reference
from cula.kda.cases import CASES, Case, make_inputs

KERNEL = ("segment_tokens",)
POOL = ("state", "state_indices", "has_initial_state")
ROUNDING = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}


def starts_from(inputs: dict, sequences: int) -> torch.Tensor | None:
    """The K-first states that the sequences start from, said once more and in a loop."""
    state = inputs.get("state")
    if state is None:
        return None
    slots, HV, V, K = state.shape
    initial = torch.zeros(sequences, HV, K, V, dtype=torch.float64)
    for n in range(sequences):
        slot = n if inputs.get("state_indices") is None else int(inputs["state_indices"][n])
        begins = inputs.get("has_initial_state") is None or bool(inputs["has_initial_state"][n])
        if begins and 0 <= slot < slots:
            initial[n] = state[slot].mT
    return initial


def expected(oracle, inputs: dict, lengths=None):
    sequences = len(lengths) if lengths is not None else inputs["v"].shape[0]
    form = {
        name: x
        for name, x in inputs.items()
        if name not in (*POOL, *KERNEL, "cu_seqlens", "checkpoints", "checkpoint_interval")
    }
    return oracle(
        **form,
        lengths=lengths,
        initial=starts_from(inputs, sequences),
        every=inputs.get("checkpoint_interval"),
    )


def small(tokens: int = 22, **changes) -> dict:
    """Inputs of one small dense call with given gates, K = 16, V = 8."""
    torch.manual_seed(1)
    inputs = {
        "q": torch.randn(1, tokens, 1, 16),
        "k": torch.randn(1, tokens, 1, 16),
        "v": torch.randn(1, tokens, 2, 8),
        "g": -torch.rand(1, tokens, 2, 16),
        "beta": torch.rand(1, tokens, 2),
        "use_gate_in_kernel": False,
    }
    return inputs | changes


@pytest.mark.parametrize("name", CASES)
def test_case(oracle, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    want = expected(oracle, inputs, case.lengths)
    before = None if case.state is None else inputs["state"].clone()
    o = kda_prefill(**inputs)
    assert o.dtype == case.dtype
    unit = case.magnitude
    assert_close("o", o / unit, want.o / unit, ROUNDING[case.dtype])
    if case.state is not None:
        # Reflections (beta = 2 on one key) keep every rounding error of 130 tokens alive.
        tol = ROUNDING[case.state] * (10 if case.beta_mean else 1)
        slots = inputs["state_indices"].tolist()
        for n, slot in enumerate(slots):
            assert_close(f"{n}", inputs["state"][slot].mT / unit, want.final[n] / unit, tol)
        for slot in set(range(len(before))) - set(slots):
            assert same_bits(inputs["state"][slot], before[slot])
    if case.checkpoint_interval:
        start = 0
        for n, length in enumerate(case.lengths):
            row = start // case.checkpoint_interval
            assert len(want.kept[n]) == length // case.checkpoint_interval
            for i, state in enumerate(want.kept[n]):
                assert_close("checkpoint", inputs["checkpoints"][row + i].mT, state, 2e-6)
            start += length


def test_every_length_to_130(oracle) -> None:
    lengths = list(range(131))
    torch.manual_seed(0)
    inputs = small(tokens=sum(lengths))
    inputs |= {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "state": torch.randn(131, 2, 8, 16),
    }
    want = expected(oracle, inputs, lengths)
    o = kda_prefill(**inputs)
    assert_close("o", o, want.o, 1e-5)
    for n in range(131):
        assert_close(f"length {n}", inputs["state"][n].mT, want.final[n], 1e-5)


def test_decay_at_its_bounds_with_neighbours(oracle) -> None:
    """Few tokens with gates at the lower bound beside a long mild sequence: nothing leaks."""
    for lengths in ([3, 60], [60, 3], [22, 40, 17]):
        inputs = small(tokens=sum(lengths))
        inputs["g"][:, : lengths[0]] = -5.0
        inputs["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        inputs["state"] = torch.randn(len(lengths), 2, 8, 16)
        want = expected(oracle, inputs, lengths)
        o = kda_prefill(**inputs)
        assert_close("o", o, want.o, 1e-5)
        assert_close("state", inputs["state"].mT, want.final, 1e-5)


def test_dense_batch_is_the_packed_batch() -> None:
    case = Case((50,) * 3, H=1, HV=2, K=32, V=16)
    dense = make_inputs(case)
    packed = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in dense.items()}
    for name in ("q", "k", "v", "g", "beta"):
        packed[name] = packed[name].flatten(0, 1)[None]
    packed["cu_seqlens"] = torch.tensor([0, 50, 100, 150], dtype=torch.int32)
    o = kda_prefill(**dense)
    assert same_bits(kda_prefill(**packed).view(o.shape), o)
    assert same_bits(packed["state"], dense["state"])


@pytest.mark.parametrize("name", ["g", "k", "v", "beta"])
@pytest.mark.parametrize("tokens, token", [(22, 21), (130, 63), (130, 64), (130, 65)])
def test_no_token_sees_a_later_one(name: str, tokens: int, token: int) -> None:
    inputs = small(tokens)
    before = kda_prefill(**inputs)
    inputs[name] = inputs[name].clone()
    inputs[name][:, token] *= 0.5
    after = kda_prefill(**inputs)
    assert same_bits(after[:, :token], before[:, :token])
    assert not same_bits(after[:, token:], before[:, token:])


def test_slots_that_are_none(oracle) -> None:
    pool = poisoned((5, 2, 8, 16), torch.float32, stride=(2 * 8 * 16 + 24, 8 * 16, 16, 1))
    pool.tensor.copy_(torch.randn(5, 2, 8, 16))
    inputs = small(tokens=40, state=pool.tensor)
    inputs["cu_seqlens"] = torch.tensor([0, 10, 20, 25, 40], dtype=torch.int32)
    inputs["state_indices"] = torch.tensor([-1, 3, 0, 5], dtype=torch.int32)
    inputs["has_initial_state"] = torch.tensor([True, True, False, True])
    pool.tensor[0] = torch.nan  # what is not read may hold anything
    before = pool.tensor.clone()
    want = expected(oracle, inputs, [10, 10, 5, 15])
    o = kda_prefill(**inputs)
    assert_close("o", o, want.o, 1e-5)
    assert_close("slot 3", pool.tensor[3].mT, want.final[1], 1e-5)
    assert_close("slot 0", pool.tensor[0].mT, want.final[2], 1e-5)
    for slot in (1, 2, 4):
        assert same_bits(pool.tensor[slot], before[slot])
    assert pool.untouched()


@pytest.mark.parametrize("indices", [[-1, -1], [4, 100], [-7, 2**31 - 1]])
def test_no_valid_slot_at_all(indices: list[int]) -> None:
    inputs = small(tokens=20, state=torch.randn(4, 2, 8, 16))
    inputs["cu_seqlens"] = torch.tensor([0, 9, 20])
    inputs["state_indices"] = torch.tensor(indices)
    before = inputs["state"].clone()
    o = kda_prefill(**inputs)
    assert same_bits(inputs["state"], before)
    del inputs["state"], inputs["state_indices"]
    assert same_bits(kda_prefill(**inputs), o)


def test_one_slot_for_two_sequences() -> None:
    """Both start from the slot's old state; it ends up with one of their final states."""
    inputs = small(tokens=20, state=torch.randn(2, 2, 8, 16))
    inputs["cu_seqlens"] = torch.tensor([0, 10, 20])
    apart = inputs | {"state": inputs["state"][1:].repeat(2, 1, 1, 1)}
    o = kda_prefill(**inputs, state_indices=torch.tensor([1, 1]))
    assert same_bits(kda_prefill(**apart), o)
    assert any(same_bits(inputs["state"][1], final) for final in apart["state"])


def test_pool_without_slots() -> None:
    inputs = small(state=torch.zeros(0, 2, 8, 16), state_indices=torch.tensor([0]))
    o = kda_prefill(**inputs)
    assert same_bits(o, kda_prefill(**small()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_first_pool_as_a_view(dtype: torch.dtype) -> None:
    k_first = torch.randn(1, 2, 16, 8).to(dtype)
    v_first = k_first.mT.contiguous()
    o = kda_prefill(**small(state=v_first))
    assert same_bits(kda_prefill(**small(state=to_v_first(k_first))), o)
    assert same_bits(k_first.mT.contiguous(), v_first)


def test_nothing_to_do() -> None:
    for shape, N, cu_seqlens in (
        ((2, 0), 2, None),
        ((0, 5), 0, None),
        ((1, 0), 0, torch.tensor([0])),
        ((1, 0), 3, torch.tensor([0, 0, 0, 0])),
    ):
        B, T = shape
        state = torch.randn(4, 2, 8, 16)
        before = state.clone()
        starts = torch.arange(N) != 1
        o = kda_prefill(
            torch.zeros(B, T, 1, 16),
            torch.zeros(B, T, 1, 16),
            torch.zeros(B, T, 2, 8),
            torch.zeros(B, T, 2, 16),
            torch.zeros(B, T, 2),
            use_gate_in_kernel=False,
            state=state,
            has_initial_state=starts,
            cu_seqlens=cu_seqlens,
        )
        assert o.shape == (B, T, 2, 8)
        # A sequence without tokens that starts from zero has zero as its final state.
        before[:N][~starts] = 0
        assert same_bits(state, before)


def test_checkpoints_of_a_batch(oracle) -> None:
    """Rows count from floor(n T / interval); those of no checkpoint keep their bits."""
    torch.manual_seed(2)
    inputs = small()
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = torch.rand(3, 150, *inputs[name].shape[2:])
    inputs["g"] = -inputs["g"]
    inputs["checkpoints"] = torch.full((9, 2, 8, 16), torch.nan, dtype=torch.bfloat16)
    inputs["checkpoint_interval"] = 64
    kda_prefill(**inputs)
    want = expected(oracle, inputs)
    rows = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (2, 0), 5: (2, 1)}
    for row in range(9):
        if row in rows:
            n, i = rows[row]
            assert_close("row", inputs["checkpoints"][row].mT, want.kept[n][i], 3e-3)
        else:
            assert inputs["checkpoints"][row].isnan().all()


def test_strided_inputs_and_output() -> None:
    """Views into a packed qkv between poison, padded everything: the bits of contiguous copies."""
    torch.manual_seed(3)
    T, width = 70, 2 * 64 + 2 * 64 + 2 * 64 + 40
    packed = poisoned((2, T, width), torch.bfloat16)
    q, k, v = (packed.tensor[..., i * 128 : i * 128 + 128].unflatten(-1, (2, 64)) for i in range(3))
    g = poisoned((2, T, 2, 64), torch.float32, stride=(T * 300, 300, 80, 1)).tensor
    beta = poisoned((2, T, 2), torch.bfloat16, stride=(T * 5, 5, 2)).tensor
    out = poisoned((2, T, 2, 64), torch.bfloat16, stride=(T * 256, 256, 96, 1))
    for x in (q, k, v, g, beta):
        x.copy_(torch.randn(x.shape))
    views = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "lower_bound": -5.0}
    o = kda_prefill(**views, out=out.tensor)
    assert o is out.tensor and out.untouched() and o.isfinite().all()
    copies = {n: x.contiguous() if isinstance(x, torch.Tensor) else x for n, x in views.items()}
    assert same_bits(kda_prefill(**copies), o.contiguous())


@pytest.mark.parametrize("heads", [1, 3, 12, 96])
def test_every_head_and_channel_has_its_own_gate(oracle, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 30, heads, 8) for _ in range(4))
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(1, 30, heads)}
    inputs |= {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads * 8)}
    inputs["state"] = torch.randn(1, heads, 8, 8)
    want = expected(oracle, inputs)
    assert_close("o", kda_prefill(**inputs), want.o, 2e-6)
    assert_close("state", inputs["state"].mT, want.final, 2e-6)


def test_index_dtypes_agree() -> None:
    case = Case((20, 0, 31), varlen=True, K=32, V=16)
    wide, narrow = (make_inputs(case) for _ in range(2))
    for name in ("cu_seqlens", "state_indices"):
        wide[name] = wide[name].long()
    assert same_bits(kda_prefill(**wide), kda_prefill(**narrow))
    assert same_bits(wide["state"], narrow["state"])


def test_grouped_heads_are_repeated_heads() -> None:
    inputs = make_inputs(Case((60,), H=2, HV=8, K=32, V=16))
    repeated = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    for name in ("q", "k"):
        repeated[name] = repeated[name].repeat_interleave(4, 2)
    assert same_bits(kda_prefill(**inputs), kda_prefill(**repeated))
    assert same_bits(inputs["state"], repeated["state"])


def test_prefill_in_two_calls_is_one() -> None:
    whole, first = (small(90, state=torch.zeros(1, 2, 8, 16)) for _ in range(2))
    o = kda_prefill(**whole)
    parts = []
    for part in (slice(0, 37), slice(37, 90)):
        cut = {n: first[n][:, part] for n in ("q", "k", "v", "g", "beta")}
        parts.append(kda_prefill(**(first | cut)))
    assert_close("o", torch.cat(parts, 1), o, 1e-6)
    assert_close("state", first["state"], whole["state"], 1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
def test_calls_without_tokens_read_nothing_on_the_host(monkeypatch, packed, state) -> None:
    """On a GPU they, too, may be captured in a CUDA graph."""
    monkeypatch.setattr(reference, "kda_forward", None)
    inputs = make_inputs(Case((0,) * 3, varlen=packed, state=state, checkpoint_interval=64))
    before = None if state is None else inputs["state"].clone()
    o = kda_prefill(**inputs)
    assert o.shape == inputs["v"].shape
    if state is not None:
        slots = inputs["state_indices"].tolist()
        before[slots[1]] = 0.0  # the one that has no initial state
        assert same_bits(inputs["state"], before)
    given = {n: inputs[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens") if n in inputs}
    initial = None if state is None else torch.randn(3, 2, 128, 128).to(state)
    _, final = chunk_kda(**given, initial_state=initial, output_final_state=True)
    right = torch.zeros(3, 2, 128, 128) if initial is None else initial.float()
    assert same_bits(final, right)
