"""The serving calls on the CPU: slots, speculative steps, packed sequences, layouts, long runs."""

import dataclasses
import inspect

import pytest
import torch

from cula.common.recurrence import lightning_log_decay
from cula.common.testing import assert_close, poisoned, same_bits
from cula.decode import kda_decode, lightning_decode
from cula.decode.cases import CASES, make_inputs

CALLS = {"kda_decode": kda_decode, "lightning_decode": lightning_decode}
EACH = pytest.mark.parametrize("call", CALLS)


def inputs_of(call, name="one token", **changes):
    case = CASES[f"{call.split('_')[0]}: {name}"]
    return make_inputs(dataclasses.replace(case, K=16, V=8, **changes))


def copy_of(x):
    return {name: y.clone() if torch.is_tensor(y) else y for name, y in x.items()}


# --- signatures -----------------------------------------------------------------------------------


def test_signatures():
    assert str(inspect.signature(kda_decode)).replace("torch.", "") == (
        "(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, "
        "state_indices: Tensor | None = None, cu_seqlens: Tensor | None = None, "
        "num_accepted_tokens: Tensor | None = None, update_state: bool = True, "
        "token_states: Tensor | None = None, A_log: Tensor | None = None, "
        "dt_bias: Tensor | None = None, lower_bound: float | None = None, "
        "scale: float | None = None, use_gate_in_kernel: bool = True, "
        "use_qk_l2norm_in_kernel: bool = True, use_beta_sigmoid_in_kernel: bool = False, "
        "allow_neg_eigval: bool = False, out: Tensor | None = None, backend: str = 'auto') "
        "-> Tensor"
    )
    assert str(inspect.signature(lightning_decode)).replace("torch.", "") == (
        "(q: Tensor, k: Tensor, v: Tensor, g_gamma: Tensor, state: Tensor, *, "
        "state_indices: Tensor | None = None, cu_seqlens: Tensor | None = None, "
        "num_accepted_tokens: Tensor | None = None, update_state: bool = True, "
        "token_states: Tensor | None = None, scale: float | None = None, "
        "out: Tensor | None = None, backend: str = 'auto') -> Tensor"
    )


# --- outputs --------------------------------------------------------------------------------------


@EACH
def test_output_is_new_or_the_given_one(call):
    x = inputs_of(call)
    o = CALLS[call](**copy_of(x))
    assert (o.shape, o.dtype) == (x["v"].shape, x["v"].dtype)
    out = torch.full_like(o, torch.nan)
    assert CALLS[call](**copy_of(x), out=out) is out
    assert same_bits(o, out)


@EACH
@pytest.mark.parametrize("scale", [0.0, 1.0, -2.5])
def test_scale_is_a_factor_on_the_output(oracle, call, scale):
    x = inputs_of(call, "several tokens")
    oracle.decode(call, x | {"scale": scale})


@EACH
def test_inputs_are_not_written(call):
    x = inputs_of(call, "speculative")
    before = copy_of(x)
    CALLS[call](**x)
    for name, y in before.items():
        if torch.is_tensor(y) and name != "state":
            assert same_bits(x[name], y), name


@EACH
@pytest.mark.parametrize("token", [0, 2, 5])
def test_outputs_do_not_see_later_tokens(call, token):
    x = inputs_of(call, "several tokens", T=6)
    o = CALLS[call](**copy_of(x))
    for name in ("q", "k", "v", "g", "beta"):
        if name in x:
            changed = copy_of(x)
            changed[name][:, token] = 3.0
            other = CALLS[call](**changed)
            assert same_bits(o[:, :token], other[:, :token])
            assert not same_bits(o[:, token:], other[:, token:])


@EACH
def test_a_step_of_several_tokens_is_several_steps(call):
    x = inputs_of(call, "several tokens", dtype=torch.float32)
    together = copy_of(x)
    o = CALLS[call](**together)
    for t in range(5):
        step = {
            n: y[:, t : t + 1] if n in ("q", "k", "v", "g", "beta") else y for n, y in x.items()
        }
        assert_close("o", CALLS[call](**step), o[:, t : t + 1], 1e-6)
    assert_close("state", x["state"], together["state"], 1e-6)


# --- slots ----------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_name_slots(oracle, call, dtype):
    x = inputs_of(call, B=4)
    x["state"] = torch.randn(5, *x["state"].shape[1:])
    for indices in ([-1, 3, 0, -1], [5, 4, -(2**31), 2**31 - 1], [-1] * 4):
        y = copy_of(x) | {"state_indices": torch.tensor(indices, dtype=dtype)}
        out = oracle.decode(call, y)
        for n, slot in enumerate(indices):
            assert (0 <= slot < 5) or (out[n] == 0).all()


@EACH
def test_an_empty_pool_names_no_slot(call):
    x = inputs_of(call)
    x["state"] = x["state"][:0]
    x["state_indices"] = torch.zeros(3, dtype=torch.int32)
    assert (CALLS[call](**x) == 0).all()


@EACH
def test_a_slot_named_twice_holds_one_of_the_results(oracle, call):
    x = inputs_of(call, B=2)
    x["state_indices"] = torch.tensor([1, 1])
    alone = []
    for n in range(2):
        y = copy_of(x)
        y["state_indices"][1 - n] = -1
        want = oracle.expected(y)
        alone.append((want.o[n], want.pool[1]))
    untouched = x["state"][0].clone()
    o = CALLS[call](**x)
    for n in range(2):  # both start from what the slot held
        assert_close("o", o[n], alone[n][0], 4e-3)
    errors = [(x["state"][1].double() - pool).abs().max() for _, pool in alone]
    assert min(errors) < 1e-5 < max(errors)
    assert same_bits(x["state"][0], untouched)


@EACH
@pytest.mark.parametrize("accepted", [[1, 2, 3], [0, 6, -1], [2**31 - 1, -(2**31), 5]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_step_starts_from_the_accepted_token(oracle, call, accepted, dtype):
    x = inputs_of(call, "a slot a token")
    x["num_accepted_tokens"] = torch.tensor(accepted, dtype=dtype)
    out = oracle.decode(call, x)
    for n, count in enumerate(accepted):
        assert 1 <= count <= 5 or (out[n] == 0).all()


@EACH
def test_speculation_equals_decoding_what_was_accepted(call):
    """Draft five tokens, accept three, go on from there: as if only those three had come."""
    x = inputs_of(call, "a slot a token", dtype=torch.float32)
    start = x["state"][x["state_indices"][:, 0].long()].clone()
    x["state_indices"] = torch.arange(15).view(3, 5)
    x["state"] = torch.randn(15, *x["state"].shape[1:])
    x["state"][x["state_indices"][:, 0]] = start
    CALLS[call](**x)
    x["num_accepted_tokens"] = torch.full((3,), 3)
    after = CALLS[call](**x)
    alone = {n: y for n, y in x.items() if n not in ("state_indices", "num_accepted_tokens")}
    alone["state"] = start
    first = {n: y[:, :3] if n in ("q", "k", "v", "g", "beta") else y for n, y in alone.items()}
    CALLS[call](**first)
    assert_close("o", after, CALLS[call](**alone), 1e-6)


@EACH
def test_fewer_slots_than_tokens(oracle, call):
    x = inputs_of(call, "a slot a token")
    x["state_indices"] = x["state_indices"][:, :2].contiguous()
    oracle.decode(call, x)


@EACH
def test_verifying_leaves_the_pool_alone(call):
    x = inputs_of(call, "verify")
    before = x["state"].clone()
    CALLS[call](**x)
    assert same_bits(x["state"], before)
    assert (x["token_states"] != 0).any()


# --- packed sequences -----------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (2, 0, 0, 1), (0, 0), (1,), (0,)], ids=str)
def test_sequences_without_tokens(oracle, call, lengths, dtype):
    x = inputs_of(call, "varlen", lengths=lengths, index_dtype=dtype)
    before = x["state"].clone()
    oracle.decode(call, x)
    empty = [n for n, length in enumerate(lengths) if length == 0]
    assert same_bits(x["state"][empty], before[empty])


@EACH
def test_no_sequences_and_no_tokens(call):
    x = inputs_of(call, B=0)
    assert CALLS[call](**x).shape == (0, 1, 2, 8)
    x = inputs_of(call, T=0)
    before = x["state"].clone()
    assert CALLS[call](**x).shape == (3, 0, 2, 8)
    assert same_bits(x["state"], before)
    x = inputs_of(call, "varlen", lengths=())
    x["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    assert CALLS[call](**x).shape == (1, 0, 2, 8)


@EACH
def test_packed_sequences_are_each_alone(call):
    x = inputs_of(call, "varlen", lengths=(2, 5, 1))
    packed = copy_of(x)
    o = CALLS[call](**packed)
    for n, (start, end) in enumerate([(0, 2), (2, 7), (7, 8)]):
        part = {
            name: y[:, start:end] if name in ("q", "k", "v", "g", "beta") else y
            for name, y in copy_of(x).items()
            if name != "cu_seqlens"
        }
        part["state"] = part["state"][n : n + 1]
        assert same_bits(CALLS[call](**part), o[:, start:end])
        assert same_bits(part["state"][0], packed["state"][n])


# --- layouts --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("name", ["several tokens", "speculative", "K-first"])
def test_strided_tensors_equal_contiguous_ones(call, name):
    x = inputs_of(call, name)
    plain = {n: y.contiguous() if torch.is_tensor(y) else y for n, y in copy_of(x).items()}
    want = CALLS[call](**plain)
    strided = {}
    for n, y in x.items():
        if torch.is_tensor(y) and n not in ("cu_seqlens", "A_log", "dt_bias"):
            y = torch.stack([y, torch.full_like(y, -1)], dim=-1)[..., 0]
        strided[n] = y
    out = torch.zeros(*want.shape[:-1], 3 * want.shape[-1], dtype=want.dtype)
    out = out[..., : want.shape[-1]]
    assert same_bits(CALLS[call](**strided, out=out), want)
    assert same_bits(strided["state"].contiguous(), plain["state"])


@EACH
def test_views_into_one_packed_tensor(oracle, call):
    x = inputs_of(call, "packed qkv, padded slots")
    assert not x["q"].is_contiguous() and not x["state"].is_contiguous()
    oracle.decode(call, x)


@EACH
def test_nothing_around_the_tensors_is_used(oracle, call):
    x = inputs_of(call, "no slots among them")
    HV, V, K = x["state"].shape[1:]
    buffers = {}
    for name, y in x.items():
        if torch.is_tensor(y):
            stride = (HV * V * K + 32, V * K, K, 1) if name == "state" else None
            buffers[name] = poisoned(y.shape, y.dtype, stride=stride)
            buffers[name].tensor.copy_(y)
            x[name] = buffers[name].tensor
    oracle.decode(call, x)
    assert all(b.untouched() for b in buffers.values())


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("name", ["named slots", "several tokens", "speculative"])
@EACH
def test_grouped_heads_equal_repeated_ones(call, name, group):
    x = inputs_of(call, name, H=2, HV=2 * group)
    repeated = copy_of(x)
    for n in ("q", "k"):
        repeated[n] = repeated[n].repeat_interleave(group, dim=2)
    assert same_bits(CALLS[call](**x), CALLS[call](**repeated))
    assert same_bits(x["state"], repeated["state"])


@pytest.mark.parametrize("H", [1, 3, 12, 96])
@EACH
def test_heads_have_their_own_parameters(oracle, call, H):
    for name in ("several tokens", "grouped heads"):
        HV = H if name == "several tokens" else 2 * H
        oracle.decode(call, inputs_of(call, name, B=1, T=2, H=H, HV=HV))
    if call == "kda_decode":
        x = inputs_of(call, "softplus, 2-D bias", B=1, H=H, HV=H)
        oracle.decode(call, x)


# --- numbers --------------------------------------------------------------------------------------


@EACH
def test_values_of_every_size(oracle, call):
    x = inputs_of(call, "several tokens")
    v = x["v"]
    sizes = torch.logspace(-6, 5, v.numel()).view(v.shape)
    v.copy_(torch.where(v < 0, -sizes, sizes))
    v.view(-1)[::7] = -0.0
    out = oracle.decode(call, x)
    assert out.isfinite().all()


def test_gates_of_every_kind(oracle):
    """g = 0, at the bound, -1000 at single tokens; softplus means of -0.02 to -20 a token."""
    for mean in (-60.0, 0.0, 60.0):
        oracle.decode("kda_decode", inputs_of("kda_decode", "bounded, no bias", gate_mean=mean))
    for mean in (-3.9, 0.5, 20.0):
        x = inputs_of("kda_decode", "softplus, strong", gate_mean=mean)
        oracle.decode("kda_decode", x)
    for every in (1, 2, 3):
        x = inputs_of("kda_decode", "masked", mask=every)
        oracle.decode("kda_decode", x)
    x = inputs_of("kda_decode", "given gates")
    x["g"].zero_()
    oracle.decode("kda_decode", x)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_repeated_keys(oracle, beta):
    x = inputs_of("kda_decode", "repeated keys", T=40)
    x["beta"].fill_(beta)
    out = oracle.decode("kda_decode", x, o_tolerance=0.02)
    assert out.isfinite().all()


STEPS = 256


def test_many_kda_steps(oracle):
    """Step after step from the same pool, held to the float64 recurrence over the whole run."""
    x = inputs_of("kda_decode", "softplus, weak", B=1, T=STEPS, dtype=torch.float32)
    want = oracle.expected(copy_of(x))
    for t in range(STEPS):
        step = {
            n: y[:, t : t + 1] if n in ("q", "k", "v", "g", "beta") else y for n, y in x.items()
        }
        o = kda_decode(**step)
    assert_close("last o", o, want.o[:, -1:], 1e-4)
    assert_close("state", x["state"], want.pool, 1e-4)


def test_many_lightning_steps(oracle):
    x = inputs_of("lightning_decode", B=1, T=STEPS, H=3, HV=3, dtype=torch.float32)
    x["g_gamma"] = lightning_log_decay(3, 0, 24)
    want = oracle.expected(copy_of(x))
    for t in range(STEPS):
        step = {n: y[:, t : t + 1] if n in ("q", "k", "v") else y for n, y in x.items()}
        o = lightning_decode(**step)
    assert_close("last o", o, want.o[:, -1:], 1e-4)
    assert_close("state", x["state"], want.pool, 1e-4)


def test_a_bf16_state_is_rounded_once_a_step(oracle):
    x = inputs_of("kda_decode", "softplus", B=1, state=torch.bfloat16)
    exact = x["state"].double()
    for _ in range(30):
        y = copy_of(x) | {"state": exact}
        exact = oracle.expected(y).pool.bfloat16().double()
        kda_decode(**x)
    assert_close("state", x["state"], exact, 4e-3)
