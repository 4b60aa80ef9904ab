"""Upstream cuLA's calls: their signatures, defaults, shapes, and the faults that are mended."""

import dataclasses
import inspect

import pytest
import torch

from cula.common.testing import assert_close, same_bits
from cula.decode import upstream
from cula.decode.cases import CASES, make_inputs


def parameters_of(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def test_signatures():
    assert parameters_of(upstream.kda_decode) == [
        "A_log",
        "dt_bias",
        "q",
        "k",
        "v",
        "a",
        "b",
        "initial_state_source",
        "initial_state_indices",
        "cu_seqlens=None",
        "scale=None",
        "use_qk_l2norm_in_kernel=True",
        "softplus_beta=1.0",
        "softplus_threshold=20.0",
        "out=None",
        "state_layout='vk'",
    ]
    assert parameters_of(upstream.fused_sigmoid_gating_delta_rule_update) == [
        "A_log",
        "a",
        "dt_bias",
        "softplus_beta",
        "softplus_threshold",
        "q",
        "k",
        "v",
        "b",
        "initial_state_source",
        "initial_state_indices",
        "scale=None",
        "use_qk_l2norm_in_kernel=False",
        "cu_seqlens=None",
        "is_kda=False",
        "out=None",
        "state_layout='vk'",
    ]
    assert parameters_of(upstream.linear_attention_decode) == [
        "q",
        "k",
        "v",
        "s",
        "out",
        "softmax_scale",
        "stride_q",
        "stride_k",
        "stride_v",
        "stride_s",
        "stride_o",
        "s_offsets",
        "decay_scales",
        "HEAD_DIM",
        "K_SPLIT_DIM",
        "V_SPLIT_DIM",
    ]


# --- kda_decode -----------------------------------------------------------------------------------

NAMES = {
    "a": "g",
    "b": "beta",
    "initial_state_source": "state",
    "initial_state_indices": "state_indices",
}


def inputs_of(**changes):
    case = dataclasses.replace(
        CASES["kda: softplus, 2-D bias"],
        beta="sigmoid",
        K=16,
        V=8,
        HV=4,
        dtype=torch.float32,
        **changes,
    )
    x = make_inputs(case)
    for name in [name for name in x if name.startswith(("use_", "allow_", "update_"))]:
        del x[name]
    for theirs, ours in NAMES.items():
        x[theirs] = x.pop(ours)
    return x


def expect(oracle, x, **more):
    """The result of upstream's arguments, for the oracle of ours."""
    ours = {NAMES.get(name, name): y for name, y in x.items()}
    ours = {n: y.clone() if torch.is_tensor(y) else y for n, y in ours.items()}
    forms = {
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    return oracle.expected({**forms, **ours, **more})


def test_one_token_a_sequence(oracle):
    x = inputs_of()
    want = expect(oracle, x)
    state = x["initial_state_source"]
    o = upstream.kda_decode(**x)
    assert o.shape == x["v"].shape
    assert_close("o", o, want.o, 1e-5)
    assert_close("state", state, want.pool, 1e-5)


def test_packed_tokens_are_a_sequence_each(oracle):
    x = inputs_of()
    want = expect(oracle, x)
    for name in ("q", "k", "v", "a", "b"):
        x[name] = x[name].transpose(0, 1)
    out = torch.full_like(x["v"], torch.nan)
    assert upstream.kda_decode(**x, out=out) is out
    assert_close("o", out.transpose(0, 1), want.o, 1e-5)
    assert_close("state", x["initial_state_source"], want.pool, 1e-5)


def test_bounds_are_honoured(oracle):
    x = inputs_of(lengths=(2, 0, 3))
    want = expect(oracle, x)
    assert_close("o", upstream.kda_decode(**x), want.o, 1e-5)
    assert_close("state", x["initial_state_source"], want.pool, 1e-5)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("rank", ["[N, 1, ..]", "[N, ..]"])
def test_flattened_gates(flat, rank):
    x = inputs_of()
    want = upstream.kda_decode(**x | {"initial_state_source": x["initial_state_source"].clone()})
    if flat:
        x["a"] = x["a"].flatten(2)
    if rank == "[N, ..]":
        x["a"], x["b"] = x["a"][:, 0], x["b"][:, 0]
    assert same_bits(upstream.kda_decode(**x), want)


def test_a_negative_index_gives_zeros(oracle):
    x = inputs_of()
    x["initial_state_indices"] = torch.tensor([-1, 1, 7])
    want = expect(oracle, x)
    out = torch.full_like(x["v"], torch.nan)
    upstream.kda_decode(**x, out=out)
    assert (out[0] == 0).all() and (out[2] == 0).all()
    assert_close("o", out, want.o, 1e-5)
    assert_close("state", x["initial_state_source"], want.pool, 1e-5)


def test_states_in_the_other_layout():
    x = inputs_of()
    k_first = x["initial_state_source"].mT.contiguous()
    want = upstream.kda_decode(**x)
    o = upstream.kda_decode(**x | {"initial_state_source": k_first, "state_layout": "kv"})
    assert same_bits(o, want)
    assert same_bits(k_first, x["initial_state_source"].mT.contiguous())


@pytest.mark.parametrize("given", [True, False])
def test_no_state_is_zero(oracle, given):
    x = inputs_of()
    zero = {
        "initial_state_source": torch.zeros(3, *x["initial_state_source"].shape[1:]),
        "initial_state_indices": torch.tensor([-1, 1, 2]),
    }
    want = expect(oracle, x | zero)
    x["initial_state_source"] = None
    x["initial_state_indices"] = torch.tensor([-1, 40, 3], dtype=torch.int32) if given else None
    o = upstream.kda_decode(**x)
    assert_close("o", o[1:], want.o[1:], 1e-5)
    assert (o[0] == 0).all() == given


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"softplus_beta": 2.0}, NotImplementedError, "softplus_beta: 2.0; only 1"),
        ({"softplus_threshold": 5.0}, NotImplementedError, "softplus_threshold: 5.0; must be"),
        ({"state_layout": "KV"}, ValueError, "state_layout: 'KV'; must be 'vk' or 'kv'"),
        ({"state_layout": "kv"}, ValueError, "initial_state_source: shape"),
        ({"a": torch.zeros(3, 4, 8)}, ValueError, "a: shape"),
        ({"b": torch.zeros(3, 4, 1)}, ValueError, "b: shape"),
        ({"out": torch.zeros(1, 3, 4, 8)}, ValueError, "out: shape"),
        ({"initial_state_indices": torch.tensor([0])}, ValueError, "initial_state_indices: shape"),
        ({"initial_state_indices": [0, 1, 2]}, TypeError, "initial_state_indices: list"),
        ({"softplus_threshold": None}, TypeError, "softplus_threshold: NoneType; must be"),
        ({"cu_seqlens": 3}, TypeError, "cu_seqlens: int; must be a torch.Tensor"),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error) as raised:
        upstream.kda_decode(**inputs_of() | changes)
    assert str(raised.value).startswith(message)


def test_several_tokens_of_several_sequences_are_refused():
    x = inputs_of(T=2)
    with pytest.raises(ValueError, match=r"^v: shape \[3, 2, 4, 8\]; must be \[N, 1, HV, V\]"):
        upstream.kda_decode(**x)


# --- fused_sigmoid_gating_delta_rule_update -------------------------------------------------------


def test_the_order_and_default_of_sglang(oracle):
    x = inputs_of()
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    want = expect(oracle, x, use_qk_l2norm_in_kernel=False)
    names = ("q", "k", "v", "b", "initial_state_source", "initial_state_indices")
    gate = (x["A_log"], x["a"], x["dt_bias"], 1.0, 20.0)
    o = upstream.fused_sigmoid_gating_delta_rule_update(
        *gate, *(x[name] for name in names), is_kda=True
    )
    assert_close("o", o, want.o, 1e-5)
    assert_close("state", x["initial_state_source"], want.pool, 1e-5)


def test_only_kda():
    x = inputs_of()
    with pytest.raises(NotImplementedError, match="is_kda: False; only KDA"):
        upstream.fused_sigmoid_gating_delta_rule_update(
            **x, softplus_beta=1.0, softplus_threshold=20.0
        )
    with pytest.raises(TypeError, match="is_kda: str; must be True or False"):
        upstream.fused_sigmoid_gating_delta_rule_update(
            **x, softplus_beta=1.0, softplus_threshold=20.0, is_kda="False"
        )


# --- linear_attention_decode ----------------------------------------------------------------------


def lightning_inputs(slots=3, dtype=torch.float32):
    torch.manual_seed(0)
    B, H, K, V = 3, 2, 16, 16
    return {
        "q": torch.randn(B, H, K).to(dtype),
        "k": torch.randn(B, H, K).to(dtype),
        "v": torch.randn(B, H, V).to(dtype),
        "s": torch.randn(slots * H, V, K),
        "out": torch.full((B, H, V), torch.nan).to(dtype),
        "softmax_scale": 0.3,
        "stride_q": H * K,
        "stride_k": H * K,
        "stride_v": H * V,
        "stride_s": V * K,
        "stride_o": H * V,
        "s_offsets": None,
        "decay_scales": torch.tensor([0.0, 1.5]),
        "HEAD_DIM": K,
        "K_SPLIT_DIM": K,
        "V_SPLIT_DIM": 8,
    }


def lightning_expected(oracle, x):
    ours = {name: x[name].clone()[:, None] for name in ("q", "k", "v")}
    s = x["s"]
    ours["state"] = (s.view(-1, 2, 16, 16) if s.dim() == 3 else s).clone()
    ours |= {"g_gamma": -x["decay_scales"], "scale": x["softmax_scale"]}
    return oracle.expected({**ours, "state_indices": x["s_offsets"]})


@pytest.mark.parametrize("rank", [3, 4])
def test_lightning_step(oracle, rank):
    x = lightning_inputs()
    if rank == 4:
        x["s"] = x["s"].view(-1, 2, 16, 16)
    want = lightning_expected(oracle, x)
    assert upstream.linear_attention_decode(**x) is None
    assert_close("o", x["out"], want.o[:, 0], 1e-5)
    assert_close("state", x["s"].view_as(want.pool), want.pool, 1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_name_slots(oracle, dtype):
    x = lightning_inputs(slots=6)
    x["s_offsets"] = torch.tensor([5, -1, 2], dtype=dtype)
    want = lightning_expected(oracle, x)
    upstream.linear_attention_decode(**x)
    assert_close("o", x["out"], want.o[:, 0], 1e-5)
    assert (x["out"][1] == 0).all()
    assert_close("state", x["s"].view_as(want.pool), want.pool, 1e-5)


def test_a_larger_pool_without_offsets(oracle):
    x = lightning_inputs(slots=6)
    before = x["s"].clone()
    want = lightning_expected(oracle, x)
    upstream.linear_attention_decode(**x)
    assert_close("o", x["out"], want.o[:, 0], 1e-5)
    assert same_bits(x["s"][6:], before[6:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HEAD_DIM": 128}, "HEAD_DIM: 128; must be q's last size, 16"),
        ({"q": torch.zeros(3, 1, 2, 16)}, "q: shape [3, 1, 2, 16]; must be [B, H, D]"),
        ({"s": torch.zeros(7, 16, 16)}, "s: shape [7, 16, 16]; its first size must be a"),
        ({"s": torch.zeros(6, 8, 32)}, "s: shape [6, 8, 32]; must be [slots * H, V, K]"),
        ({"decay_scales": torch.tensor([0.0, -1.0])}, "decay_scales: smallest value -1.0;"),
        ({"decay_scales": torch.zeros(2).half()}, "decay_scales: dtype torch.float16;"),
        ({"decay_scales": torch.zeros(3)}, "decay_scales: shape [3]; must be [H] = [2]"),
        ({"s_offsets": torch.zeros(3, 1).int()}, "s_offsets: shape [3, 1]; must be [N] = [3]"),
        ({"out": torch.zeros(3, 2, 8)}, "out: shape"),
    ],
)
def test_what_lightning_refuses(changes, message):
    with pytest.raises(ValueError) as raised:
        upstream.linear_attention_decode(**lightning_inputs() | changes)
    assert str(raised.value).startswith(message)


# --- torch.compile --------------------------------------------------------------------------------


def test_a_compiled_lightning_step_has_no_break():
    torch._dynamo.reset()
    x, y = lightning_inputs(), lightning_inputs()
    upstream.linear_attention_decode(**x)
    torch.compile(upstream.linear_attention_decode, fullgraph=True, backend="aot_eager")(**y)
    assert same_bits(x["out"], y["out"]) and same_bits(x["s"], y["s"])


def test_a_compiled_kda_step_has_no_break():
    torch._dynamo.reset()
    x, y = inputs_of(), inputs_of()
    o = upstream.kda_decode(**x)
    compiled = torch.compile(upstream.kda_decode, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**y), o)
    assert same_bits(x["initial_state_source"], y["initial_state_source"])
