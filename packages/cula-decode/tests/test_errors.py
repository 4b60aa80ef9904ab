"""Wrong arguments: the type of error, and a message of the form "argument: value; rule"."""

import dataclasses

import pytest
import torch

from cula.decode import fused_recurrent_kda, kda_decode, lightning_decode
from cula.decode.cases import CASES, make_inputs

B, T, H, HV, K, V = 3, 2, 2, 4, 16, 8


def inputs_of(call, name="named slots", **changes):
    sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
    case = CASES[f"{call.split('_')[0]}: {name}"]
    return make_inputs(dataclasses.replace(case, **{**sizes, **changes}))


def refuse(function, x, error, message):
    """The call raises, with the message at its start, and has written nothing."""
    state = x.get("state")
    before = state.clone() if torch.is_tensor(state) else None
    with pytest.raises(error) as raised:
        function(**x)
    text = str(raised.value)
    assert text.startswith(message), text
    assert "; " in text or error is TypeError, text
    assert before is None or torch.equal(state, before)


BOTH = [
    ("q", lambda x: x[0], ValueError, "q: shape [2, 2, 16]; must be [B, T, H, K]"),
    ("q", lambda x: x.double(), ValueError, "q: dtype torch.float64; must be"),
    ("q", lambda x: None, TypeError, "q: NoneType; must be a torch.Tensor"),
    ("k", lambda x: x[:, :1], ValueError, "k: shape [3, 1, 2, 16]; must be [B, T, H, K] = "),
    ("k", lambda x: x.float(), ValueError, "k: dtype torch.float32; must be bfloat16"),
    ("v", lambda x: x[:2], ValueError, "v: shape [2, 2, 4, 8]; must be [B, T, HV, V]"),
    ("v", lambda x: x[:, :, :3], ValueError, "v: (3, 2, 3, 8); the number of value heads"),
    ("v", lambda x: x.half(), ValueError, "v: dtype torch.float16; must be bfloat16"),
    ("v", lambda x: x.to("meta"), ValueError, "v: device meta; must be cpu"),
    ("state", lambda x: None, TypeError, "state: NoneType; must be a torch.Tensor"),
    ("state", lambda x: x.mT, ValueError, "state: shape [5, 4, 16, 8]; must be [slots, HV, V, K]"),
    ("state", lambda x: x.view(5, 2, 16, 16), ValueError, "state: shape [5, 2, 16, 16]; must be"),
    ("state", lambda x: x.view(5, -1), ValueError, "state: shape [5, 512]; must be"),
    ("state", lambda x: x.half(), ValueError, "state: dtype torch.float16; must be float32 or"),
    ("state_indices", lambda x: x[:2], ValueError, "state_indices: shape [2]; must be [N] or"),
    ("state_indices", lambda x: x.float(), ValueError, "state_indices: dtype torch.float32;"),
    ("state_indices", lambda x: x[:, None, None], ValueError, "state_indices: shape [3, 1, 1];"),
    ("state_indices", lambda x: x.view(3, 1)[:, :0], ValueError, "state_indices: shape [3, 0];"),
    ("state_indices", lambda x: x.to("meta"), ValueError, "state_indices: device meta;"),
    ("state_indices", lambda x: x.tolist(), TypeError, "state_indices: list; must be a torch."),
    ("state_indices", lambda x: 3, TypeError, "state_indices: int; must be a torch.Tensor"),
    ("state_indices", lambda x: x.numpy(), TypeError, "state_indices: ndarray; must be a torch."),
    ("q", lambda x: x.float().numpy(), TypeError, "q: ndarray; must be a torch.Tensor"),
    ("scale", lambda x: "0.5", TypeError, "scale: str; must be a number"),
    ("scale", lambda x: torch.tensor(0.5), TypeError, "scale: Tensor; must be a number"),
    ("scale", lambda x: 1j, TypeError, "scale: complex; must be a number"),
    ("update_state", lambda x: "no", TypeError, "update_state: str; must be True or False"),
    ("update_state", lambda x: None, TypeError, "update_state: NoneType; must be True or False"),
    (
        "num_accepted_tokens",
        lambda x: torch.ones(3, dtype=torch.int32),
        ValueError,
        "num_accepted_tokens: given; needs state_indices of shape [N, tokens]",
    ),
    (
        "token_states",
        lambda x: torch.zeros(B, T, HV, K, V),
        ValueError,
        "token_states: shape [3, 2, 4, 16, 8]; must be [B, T, HV, V, K]",
    ),
    (
        "token_states",
        lambda x: torch.zeros(B, T, HV, V, K).bfloat16(),
        ValueError,
        "token_states: dtype torch.bfloat16; must be float32",
    ),
    (
        "token_states",
        lambda x: torch.zeros(1, T, HV, V, K).expand(B, T, HV, V, K),
        ValueError,
        "token_states: strides [0, 512, 128, 16, 1]; is written into",
    ),
    (
        "out",
        lambda x: torch.zeros(B, T, HV, 1, dtype=torch.bfloat16).expand(B, T, HV, V),
        ValueError,
        "out: strides [8, 4, 1, 0]; is written into",
    ),
    ("state", lambda x: x[:1].expand(x.shape), ValueError, "state: strides [0, 128, 16, 1]; is"),
    ("out", lambda x: torch.zeros(B, T, H, V), ValueError, "out: shape [3, 2, 2, 8]; must be"),
    ("out", lambda x: torch.zeros(B, T, HV, V), ValueError, "out: dtype torch.float32; must be"),
    ("backend", lambda x: "gpu", ValueError, "backend: 'gpu'; must be one of auto, cute, fla"),
    ("backend", lambda x: "cute", NotImplementedError, "backend: 'cute'; cannot run"),
    ("backend", lambda x: "fla", NotImplementedError, "backend: 'fla'; cannot run"),
    ("cu_seqlens", lambda x: torch.tensor([0, 3]), ValueError, "cu_seqlens: given with batch size"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "message"), BOTH)
@pytest.mark.parametrize("call", [kda_decode, lightning_decode], ids=lambda c: c.__name__)
def test_both_families(call, name, wrong, error, message):
    x = inputs_of(call.__name__)
    x[name] = wrong(x.get(name))
    refuse(call, x, error, message)


KDA = [
    ("g", lambda x: x[..., :8], ValueError, "g: shape [3, 2, 4, 8]; must be [B, T, HV, K]"),
    ("g", lambda x: x.double(), ValueError, "g: dtype torch.float64; must be"),
    ("g", lambda x: None, TypeError, "g: NoneType"),
    ("beta", lambda x: x[..., 0], ValueError, "beta: shape [3, 2]; must be [B, T, HV]"),
    ("beta", lambda x: x.long(), ValueError, "beta: dtype torch.int64; must be"),
    ("A_log", lambda x: x[:2], ValueError, "A_log: shape [2]; must be [HV] = [4]"),
    ("A_log", lambda x: x.double(), ValueError, "A_log: dtype torch.float64"),
    ("dt_bias", lambda x: x[:8], ValueError, "dt_bias: shape [8]; must be [HV * K] = [64] or"),
    ("dt_bias", lambda x: x.view(16, 4), ValueError, "dt_bias: shape [16, 4]"),
    ("dt_bias", lambda x: x.view(16, 4).mT, ValueError, "dt_bias: "),
    ("lower_bound", lambda x: 0.0, ValueError, "lower_bound: 0.0; must be in [-5, 0)"),
    ("lower_bound", lambda x: -5.5, ValueError, "lower_bound: -5.5; must be in [-5, 0)"),
    ("lower_bound", lambda x: float("nan"), ValueError, "lower_bound: nan; must be in [-5, 0)"),
    ("lower_bound", lambda x: [-5.0], TypeError, "lower_bound: list"),
    ("backend", lambda x: ["cute"], ValueError, "backend: ['cute']; must be one of"),
    ("allow_neg_eigval", lambda x: True, ValueError, "allow_neg_eigval: True; needs"),
    *(
        (flag, lambda x: "no", TypeError, f"{flag}: str; must be True or False")
        for flag in (
            "use_gate_in_kernel",
            "use_qk_l2norm_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
        )
    ),
]


@pytest.mark.parametrize(("name", "wrong", "error", "message"), KDA)
def test_kda(name, wrong, error, message):
    x = inputs_of("kda_decode")
    x[name] = wrong(x.get(name))
    refuse(kda_decode, x, error, message)


def test_a_gate_needs_a_parameter():
    x = inputs_of("kda_decode")
    del x["A_log"], x["lower_bound"]
    refuse(kda_decode, x, ValueError, "A_log: None; use_gate_in_kernel=True needs A_log or")
    x["use_gate_in_kernel"] = False  # the log decay itself
    x["g"] = -x["g"].abs()
    kda_decode(**x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:3], "g_gamma: shape [3]; must be [HV] = [4]"),
        (lambda x: x.bfloat16(), "g_gamma: dtype torch.bfloat16; must be float32"),
        (lambda x: x[None], "g_gamma: shape [1, 4]"),
        (lambda x: -x, "g_gamma: largest value 3; must be at most 0"),
        (lambda x: x * float("nan"), "g_gamma: largest value nan; must be at most 0"),
    ],
)
def test_lightning(wrong, message):
    x = inputs_of("lightning_decode")
    x["g_gamma"] = wrong(x["g_gamma"])
    refuse(lightning_decode, x, ValueError, message)


@pytest.mark.parametrize("call", [kda_decode, lightning_decode], ids=lambda c: c.__name__)
def test_a_pool_smaller_than_the_batch(call):
    x = inputs_of(call.__name__, "one token")
    x["state"] = x["state"][:2]
    refuse(call, x, ValueError, "state: shape [2, 4, 8, 16]; must have a slot for each of the 3")


@pytest.mark.parametrize("call", [kda_decode, lightning_decode], ids=lambda c: c.__name__)
def test_states_that_are_only_read_may_be_one_state(call):
    x = inputs_of(call.__name__, update_state=False)
    x["state"] = x["state"][:1].expand(x["state"].shape)
    one = call(**x)
    assert torch.equal(call(**{**x, "state": x["state"].contiguous()}), one)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 3, 6], "cu_seqlens: first entry 1; must start at 0"),
        ([0, 4, 3, 6], "cu_seqlens: entry 2 is 3 after 4; must not decrease"),
        ([0, 3, 5], "cu_seqlens: last entry 5; must equal the number of tokens, 6"),
        ([0, 3, 7], "cu_seqlens: last entry 7; must equal the number of tokens, 6"),
        ([], "cu_seqlens: shape [0]; must hold N + 1 >= 1 entries"),
        ([[0, 6]], "cu_seqlens: shape [1, 2]; must be [N + 1]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("call", [kda_decode, lightning_decode], ids=lambda c: c.__name__)
def test_bounds_of_sequences(call, bounds, message, dtype):
    x = inputs_of(call.__name__, "varlen", lengths=(3, 3))
    x["cu_seqlens"] = torch.tensor(bounds, dtype=dtype)
    refuse(call, x, ValueError, message)


@pytest.mark.parametrize("call", [kda_decode, lightning_decode], ids=lambda c: c.__name__)
def test_kinds_of_bounds(call):
    x = inputs_of(call.__name__, "varlen", lengths=(3, 3))
    right = x["cu_seqlens"]
    x["cu_seqlens"] = right.float()
    refuse(call, x, ValueError, "cu_seqlens: dtype torch.float32; must be int32 or int64")
    x["cu_seqlens"] = torch.stack([right, right], dim=1)[:, 0]
    refuse(call, x, ValueError, "cu_seqlens: stride 2; must be contiguous")
    x["cu_seqlens"] = right.tolist()
    with pytest.raises((TypeError, RuntimeError), match="cu_seqlens"):
        call(**x)


def test_unknown_keywords():
    for call in (kda_decode, lightning_decode):
        x = inputs_of(call.__name__)
        with pytest.raises(TypeError, match="initial_state"):
            call(**x, initial_state=x["state"])


RECURRENT = [
    ("initial_state", lambda x: x.mT, ValueError, "initial_state: shape [3, 4, 8, 16]; must be"),
    ("initial_state", lambda x: x[:2], ValueError, "initial_state: shape [2, 4, 16, 8]; must be"),
    ("initial_state", lambda x: x.double(), ValueError, "initial_state: dtype torch.float64"),
    ("initial_state", lambda x: "zero", TypeError, "initial_state: str; must be a torch.Tensor"),
    ("q", lambda x: x[0], ValueError, "q: shape [2, 2, 16]; must be [B, T, heads, channels]"),
    ("v", lambda x: None, TypeError, "v: NoneType"),
    ("beta", lambda x: x[..., None], ValueError, "beta: shape [3, 2, 4, 1]; must be [B, T, HV]"),
    ("lower_bound", lambda x: -6, ValueError, "lower_bound: -6; must be in [-5, 0)"),
    ("backend", lambda x: "cute", NotImplementedError, "backend: 'cute'; cannot run"),
    ("cu_seqlens", lambda x: torch.tensor([0, 2]), ValueError, "cu_seqlens: given with batch"),
    ("cu_seqlens", lambda x: 3, TypeError, "cu_seqlens: int; must be a torch.Tensor"),
    ("cu_seqlens", lambda x: torch.tensor(3), ValueError, "cu_seqlens: shape []; must be [N + 1]"),
    ("A_log", lambda x: [0.0], TypeError, "A_log: list; must be a torch.Tensor"),
    ("scale", lambda x: "0.5", TypeError, "scale: str; must be a number"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "message"), RECURRENT)
def test_recurrent(name, wrong, error, message):
    x = inputs_of("kda", "recurrent")
    x[name] = wrong(x.get(name))
    if name == "cu_seqlens":
        x["initial_state"] = x["initial_state"][:1]
    refuse(fused_recurrent_kda, x, error, message)


def test_a_state_of_the_wrong_layout_is_refused_at_equal_size():
    x = inputs_of("kda", "recurrent", K=16, V=8)
    fused_recurrent_kda(**x)
    x["state_v_first"] = True
    refuse(fused_recurrent_kda, x, ValueError, "initial_state: shape [3, 4, 16, 8]; must be")
