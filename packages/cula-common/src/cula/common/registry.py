"""Custom operators: torch.compile sees an operator, an eager call pays next to nothing for it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cula.common.checks import require

_library = torch.library.Library("cula", "FRAGMENT")

# What an eager call may hold to go straight to the implementation. Fake tensors, tensor subclasses,
# symbolic sizes and tracing proxies go through PyTorch's dispatcher. What is nobody's argument (a
# list, a NumPy array) does not: the implementation's error for it is clearer than the dispatcher's.
_SCALARS = (type(None), bool, int, float, str, torch.dtype)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, *_SCALARS))
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def evaluated_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile call ``function`` while it traces and keep the result as a constant.

    For functions of the machine and the process (which GPU, what is installed) whose arguments
    are constants too. Does what `torch.compiler.assume_constant_result` does, without its import
    of the compiler, which takes longer than a first call of ours may.
    """
    function._dynamo_marked_constant = True
    return function


def register_op(
    name: str,
    impl: Callable[..., None],
    *,
    mutates: Sequence[str],
    schema: str | None = None,
) -> Callable[..., None]:
    """Register ``impl`` as the operator ``cula::<name>`` and return the way to call it.

    The operator writes into its mutated arguments and returns nothing; so its fake
    implementation has nothing to do. It takes no part in autograd.

    The returned function takes positional arguments. In an eager call on plain tensors it calls
    ``impl`` at once, since even PyTorch's dispatcher would be a quarter of a decode call. Under
    torch.compile, fake tensors, a dispatch mode or a function transform it calls
    ``torch.ops.cula.<name>``. Neither way counts the write in the tensors' version counters.

    Args:
        name: the operator's name.
        impl: takes tensors, optional tensors, ints, floats, bools and strings; annotated with
            their types unless ``schema`` is given.
        mutates: the names of the arguments that ``impl`` writes into.
        schema: the operator's schema, ``"(Tensor q, Tensor(a!) out) -> ()"``, instead of the one
            read from the annotations.
    """
    if schema is None:
        schema = torch.library.infer_schema(impl, mutates_args=tuple(mutates))
    arguments = torch._C.parse_schema(name + schema).arguments
    written = [a.name for a in arguments if a.is_write]
    require(
        sorted(mutates) == sorted(written),
        "mutates",
        tuple(mutates),
        f"the schema writes into {written}",
    )
    # torch.compile passes arguments by name, to functions that have a parameter of this name.
    names = [a.name for a in arguments]
    require("mode" not in names, "impl", "argument mode", "must have another name")
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cula::{name}", _write_nothing, lib=_library)
    op = getattr(torch.ops.cula, name).default

    modes, transforms = (
        torch._C._len_torch_dispatch_stack,
        torch._C._are_functorch_transforms_active,
    )
    plain = _PLAIN.issuperset
    # A symbol or proxy among the numbers never comes without one, or a mode, among the tensors.
    tensors = 1 + max(i for i, a in enumerate(arguments) if "Tensor" in str(a.type))

    def call(*args: Any) -> None:
        if (
            is_dynamo_compiling()
            or modes()
            or transforms()
            or (not plain(map(type, args[:tensors])) and any(map(_dispatched, args)))
        ):
            op(*args)
        else:
            impl(*args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = impl.__doc__
    return call


def _dispatched(x: Any) -> bool:
    """Whether PyTorch's dispatcher has to see a call with such an argument."""
    if type(x) in _PLAIN:
        return False
    return isinstance(x, _SYMBOLS) or hasattr(type(x), "__torch_function__")


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    return None
