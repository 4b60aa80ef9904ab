"""One registered operator, called every way that PyTorch can call it."""

import timeit
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cula.common import registry

ran = []


def scale_into(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    state: torch.Tensor,
    factor: float,
    repeats: int,
    negate: bool,
    label: str,
    bound: float | None,
) -> None:
    """out = x * factor (+ bias); state counts the repeats."""
    ran.append(label)
    result = x * factor if bias is None else x * factor + bias
    out.copy_(-result if negate else result)
    state.add_(repeats if bound is None else bound)


scale_op = registry.register_op("test_scale_into", scale_into, mutates=("out", "state"))


@pytest.fixture
def args():
    ran.clear()
    x = torch.arange(6.0)
    return SimpleNamespace(
        x=x, out=torch.full((6,), -1.0), state=torch.zeros(2), want=x * 2.0, want_state=[3.0, 3.0]
    )


def call(a, op=scale_op, x=None):
    op(a.x if x is None else x, None, a.out, a.state, 2.0, 3, False, "m", None)


class Seen(TorchDispatchMode):
    """Lists the operators that pass through PyTorch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_eager_goes_straight_to_the_implementation(args):
    dispatched = []
    library = torch.library.Library("cula", "IMPL")
    library.impl("test_scale_into", lambda *a: dispatched.append(a), "CPU")
    try:
        call(args)
        assert ran == ["m"] and not dispatched
        call(args, op=torch.ops.cula.test_scale_into)
        assert ran == ["m"] and len(dispatched) == 1
    finally:
        library._destroy()
    assert torch.equal(args.out, args.want) and args.state.tolist() == args.want_state


def test_every_kind_of_argument_arrives(args):
    bias = torch.ones(6)
    for op in (scale_op, torch.ops.cula.test_scale_into):
        args.state.zero_()
        op(args.x, bias, args.out, args.state, 3.0, 7, True, "other", 0.5)
        assert torch.equal(args.out, -(args.x * 3.0 + 1.0))
        assert args.state.tolist() == [0.5, 0.5]
    assert ran == ["other", "other"]


@pytest.mark.parametrize("wrong", [[1.0], (1.0,), {}, np.ones(6), object()], ids=type)
def test_what_is_no_argument_gets_the_implementations_error(args, wrong):
    """Not the dispatcher's, which shows the operator's schema in place of the rule."""
    with pytest.raises((TypeError, AttributeError)) as raised:
        call(args, x=wrong)
    assert ran == ["m"] and "cula::" not in str(raised.value)


def test_a_dispatch_mode_sees_the_operator(args):
    with Seen() as seen:
        call(args)
    assert "cula::test_scale_into" in seen.names
    assert torch.equal(args.out, args.want)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_autograd(args, guard):
    with guard():
        call(args)
        fresh = SimpleNamespace(x=args.x, out=torch.empty(6), state=torch.zeros(2))
        call(fresh)
        call(fresh, op=torch.ops.cula.test_scale_into)
    assert torch.equal(args.out, args.want)
    assert torch.equal(fresh.out, args.want) and fresh.state.tolist() == [6.0, 6.0]


def layer(x, state):
    out = torch.empty_like(x)
    scale_op(x, None, out, state, 2.0, 3, False, "m", None)
    return out + 1


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_compile(args, guard, backend):
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with guard():
        for _ in range(2):
            got = compiled(args.x, args.state)
            assert torch.equal(got, args.want + 1)
    assert args.state.tolist() == [6.0, 6.0]
    assert ran == ["m", "m"]


def test_the_graph_holds_the_operator_and_its_length_is_not_in_it(args):
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=keep, dynamic=True)
    for length in (5, 6, 9):
        assert torch.equal(compiled(torch.ones(length), args.state), torch.full((length,), 3.0))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.cula.test_scale_into.default in called
    assert ran == ["m"] * 3


def test_fake_tensors_run_nothing(args):
    with FakeTensorMode():
        x = torch.empty(6)
        fake = SimpleNamespace(x=x, out=torch.empty(6), state=torch.zeros(2))
        call(fake)
        layered = layer(x, fake.state)
    assert layered.shape == (6,)
    # Outside of the mode too: a fake tensor takes its mode along.
    call(fake)
    assert ran == []


def test_function_transforms_do_not_reach_the_implementation(args):
    """Their tensors look plain from Python; the implementation would misread them."""

    def f(x):
        out = torch.empty_like(x)
        scale_op(x, None, out, args.state, 2.0, 3, False, "m", None)
        return out

    with pytest.raises(RuntimeError, match="test_scale_into"):
        torch.func.vmap(f)(args.x.view(3, 2))
    with pytest.raises(RuntimeError, match="test_scale_into"):
        torch.func.functionalize(f)(args.x)
    assert ran == []


def test_export(args):
    class Layer(torch.nn.Module):
        def forward(self, x, state):
            return layer(x, state)

    program = torch.export.export(Layer(), (args.x, args.state))
    assert "cula.test_scale_into" in program.graph_module.code
    assert torch.equal(program.module()(args.x, torch.zeros(2)), args.want + 1)


def test_opcheck(args):
    inputs = (args.x, None, args.out, args.state, 2.0, 3, False, "m", None)
    torch.library.opcheck(torch.ops.cula.test_scale_into.default, inputs)


def test_explicit_schema(args):
    def double_into(x, out):
        torch.add(x, x, out=out)

    double = registry.register_op(
        "test_double_into", double_into, mutates=("out",), schema="(Tensor x, Tensor(a!) out) -> ()"
    )
    double(args.x, args.out)
    assert torch.equal(args.out, args.want)
    compiled = torch.compile(lambda x, out: double(x, out), fullgraph=True, backend="aot_eager")
    compiled(args.x + 1, args.out)
    assert torch.equal(args.out, args.want + 2)


def test_schema_must_say_what_is_mutated():
    def f(x, out):
        out.copy_(x)

    with pytest.raises(ValueError, match=r"mutates: \('out',\); the schema writes into \[\]"):
        registry.register_op(
            "test_wrong_schema", f, mutates=("out",), schema="(Tensor x, Tensor out) -> ()"
        )


def test_argument_names_that_pytorch_takes_for_its_own():
    def f(mode: str, out: torch.Tensor) -> None:
        out.zero_()

    with pytest.raises(ValueError, match=r"^impl: argument mode; must have another name"):
        registry.register_op("test_reserved_name", f, mutates=("out",))


def test_short_path_costs_a_fraction_of_the_dispatcher():
    def nothing(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        indices: torch.Tensor | None,
        out: torch.Tensor,
        scale: float,
        label: str,
    ) -> None:
        return None

    op = registry.register_op("test_nothing", nothing, mutates=("state", "out"))
    x = torch.zeros(1)
    given = (x, x, x, x, x, x.clone(), None, x.clone(), 1.0, "m")

    def seconds(f):
        return min(timeit.repeat(lambda: f(*given), number=2000, repeat=15)) / 2000

    bare, short = seconds(nothing), seconds(op)
    dispatched = seconds(torch.ops.cula.test_nothing.default)
    assert short - bare < (dispatched - bare) / 2


def test_constants_while_tracing():
    asked = []

    @registry.evaluated_while_tracing
    def number_of(name):
        asked.append(name)
        return 3

    compiled = torch.compile(lambda x: x * number_of("things"), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert asked == ["things"]


def test_a_container_reaches_the_implementation():
    def complains(x: torch.Tensor, out: torch.Tensor) -> None:
        raise TypeError(f"x: {type(x).__name__}; must be a torch.Tensor")

    op = registry.register_op("test_complains", complains, mutates=("out",))
    with pytest.raises(TypeError, match=r"x: list; must be a torch\.Tensor"):
        op([1.0], torch.zeros(1))
