"""The calls inside torch.compile, autocast, inference mode and autograd."""

import dataclasses

import pytest
import torch

import cula.decode
from cula.common.testing import same_bits
from cula.decode.cases import CASES, make_inputs

NAMES = [
    "kda: no slots among them",
    "kda: speculative, packed",
    "kda: verify",
    "lightning: no slots among them",
    "lightning: verify",
    "kda: recurrent",
    "kda: recurrent, no initial state",
]
EACH = pytest.mark.parametrize("name", NAMES)


def inputs_of(name):
    return make_inputs(dataclasses.replace(CASES[name], K=16, V=8))


def copy_of(x):
    return {name: y.clone() if torch.is_tensor(y) else y for name, y in x.items()}


def call_of(name):
    return getattr(cula.decode, CASES[name].call)


def run(name, x, function=None):
    """What a call returns, and all that it wrote into."""
    x = copy_of(x)
    result = (function or call_of(name))(**x)
    results = list(result) if isinstance(result, tuple) else [result]
    return [*results, x.get("state"), x.get("token_states")]


def same(a, b):
    return all(
        x is y if x is None or y is None else same_bits(x, y) for x, y in zip(a, b, strict=True)
    )


@EACH
def test_compiled_without_a_break(name):
    """A layer around the call, as a whole graph, equals the call."""
    call = call_of(name)

    def layer(**x):
        result = call(**{**x, "q": x["q"] * 2, "k": x["k"] * 1})
        o, *rest = result if isinstance(result, tuple) else (result,)
        return (o + 1, *rest)

    torch._dynamo.reset()
    x = inputs_of(name)
    want = run(name, x, layer)
    found = run(name, x, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert same(found, want)


def test_compiled_for_any_batch():
    """Another batch size gives another result, not another error, from the same function."""
    torch._dynamo.reset()
    compiled = torch.compile(
        cula.decode.kda_decode, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for B in (2, 3, 7):
        case = dataclasses.replace(CASES["kda: named slots"], K=16, V=8, B=B)
        x = make_inputs(case)
        assert same(run("kda: named slots", x, compiled), run("kda: named slots", x))


@EACH
def test_gradients_are_not_recorded(name):
    x = inputs_of(name)
    want = run(name, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = run(name, x)
        assert same(found, want)
        assert not any(y.requires_grad for y in found if y is not None)


@pytest.mark.parametrize("name", [n for n in NAMES if "recurrent" not in n])
def test_serving_calls_take_parameters_as_they_are(name):
    """A model's parameters require gradients; the calls have none, and say nothing about it."""
    x = inputs_of(name)
    want = run(name, x)
    for n in ("A_log", "dt_bias", "g_gamma"):
        if n in x:
            x[n] = torch.nn.Parameter(x[n])
    leaf = dict(x)
    o = call_of(name)(**leaf)
    assert not o.requires_grad
    assert same_bits(o, want[0])


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(name, dtype):
    x = inputs_of(name)
    for n in ("q", "k", "v"):
        x[n] = x[n].float()
    want = run(name, x)
    with torch.autocast("cpu", dtype=dtype):
        found = run(name, x)
    assert same(found, want)
    assert found[0].dtype == torch.float32


def test_fake_tensors_pass_through():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        for name in NAMES:
            real = inputs_of(name)
            x = {n: mode.from_tensor(y) if torch.is_tensor(y) else y for n, y in real.items()}
            result = call_of(name)(**x)
            o = result[0] if isinstance(result, tuple) else result
            assert o.shape == real["v"].shape and o.dtype == real["v"].dtype


@EACH
def test_tensors_of_the_meta_device_have_shapes_alone(name):
    real, x = inputs_of(name), make_inputs(dataclasses.replace(CASES[name], K=16, V=8), "meta")
    for found, want in zip(run(name, x), run(name, real), strict=True):
        assert (found is None) == (want is None)
        assert found is None or (found.is_meta and found.shape == want.shape)
        assert found is None or found.dtype == want.dtype
    x["v"] = x["v"][:, :, :1]
    with pytest.raises(ValueError):
        call_of(name)(**x)


@pytest.mark.parametrize(
    ("name", "op"), [("kda: verify", "kda_decode"), ("lightning: verify", "lightning_decode")]
)
def test_the_operator_is_sound(name, op):
    """torch.library's own checks of schema and fake implementation."""
    x = inputs_of(name)
    schema = getattr(torch.ops.cula, op).default._schema
    defaults = {
        "update_state": False,
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False,
        "backend": "auto",
        "out": torch.empty_like(x["v"]),
    }
    args = [x.get(a.name, defaults.get(a.name)) for a in schema.arguments]
    written = {a.name for a in schema.arguments if a.is_write}
    assert written == {"state", "token_states", "out"}
    torch.library.opcheck(
        getattr(torch.ops.cula, op).default, args, test_utils=("test_schema", "test_faketensor")
    )
