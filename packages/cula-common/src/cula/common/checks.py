"""One style of error for wrong arguments: ``argument: value; rule``.

The checks run where a plan is made, which is once per set of shapes, and never in a launch.
They raise ``TypeError`` for an argument of the wrong kind and ``ValueError`` for a wrong value.
None of them reads a value from a GPU unless the caller asks for it.
"""

import itertools
import numbers
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.compiler import is_dynamo_compiling

INDEX_DTYPES = (torch.int32, torch.int64)
"""Dtypes of everything that counts or names: cu_seqlens, state_indices."""


def require(
    ok: bool, arg: str, value: object, rule: str, error: type[Exception] = ValueError
) -> None:
    """Raise ``error`` with the text ``"{arg}: {value}; {rule}"`` unless ``ok`` holds."""
    if not ok:
        raise error(f"{arg}: {value}; {rule}")


def require_tensor(
    arg: str,
    x: object,
    *,
    shape: Sequence[int | None] | None = None,
    dims: str = "",
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """Check that ``x`` is a tensor of the given shape, dtype and device.

    Args:
        arg: the argument's name, as the user spells it.
        x: what the user gave.
        shape: the expected sizes; ``None`` in a place allows any size there.
        dims: the meaning of the sizes, for the message: ``"[B, T, H, K]"``.
        dtypes: the allowed dtypes.
        device: the device that ``x`` must be on.

    Raises:
        TypeError: ``x`` is no tensor.
        ValueError: its shape, dtype or device differs.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{arg}: {type(x).__name__}; must be a torch.Tensor")
    if shape is not None and not _fits(x.shape, shape):
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        meaning = f"{dims} = {expected}" if dims else expected
        raise ValueError(f"{arg}: shape {list(x.shape)}; must be {meaning}")
    if dtypes is not None and x.dtype not in dtypes:
        raise ValueError(f"{arg}: dtype {x.dtype}; must be {_one_of(dtypes)}")
    if device is not None and x.device != device:
        raise ValueError(f"{arg}: device {x.device}; must be {device}")


def require_number(arg: str, x: object) -> None:
    """Check that ``x`` is a number: a text would be read as one, and a tensor's value on a GPU
    would have to be waited for.

    Raises:
        TypeError: it is something else.
    """
    ok = isinstance(x, (numbers.Real, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool)
    require(ok, arg, type(x).__name__, "must be a number", TypeError)


def require_flags(**flags: object) -> None:
    """Check that keywords are True or False: any text is true, "False" too.

    Raises:
        TypeError: naming the first that is something else.
    """
    for arg, x in flags.items():
        ok = isinstance(x, (bool, torch.SymBool))
        require(ok, arg, type(x).__name__, "must be True or False", TypeError)


def require_own_elements(arg: str, x: torch.Tensor) -> None:
    """Check that no two elements of ``x``, which a call writes into, share memory by expansion.

    Raises:
        ValueError: a stride is 0.
    """
    shared = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    rule = "is written into, so each element must have a place of its own"
    require(not shared, arg, f"strides {list(x.stride())}", rule)


def require_cu_seqlens(
    cu_seqlens: torch.Tensor,
    *,
    batch: int,
    tokens: int,
    device: torch.device,
    cu_seqlens_cpu: torch.Tensor | None = None,
    validate: bool = False,
) -> int:
    """Check cumulative sequence lengths and return the number of sequences N.

    Sequence n holds the tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``. Values that the host
    can see (a CPU tensor, or ``cu_seqlens_cpu``) must start at 0, never decrease and end at
    ``tokens``. Values on a GPU are not looked at, since that would wait for the GPU: the kernels
    clamp them. ``validate=True`` copies them back and checks them too. While torch.compile traces,
    and for fake tensors, there are no values to check. ``[0]`` (no sequence, no tokens) is valid.

    Args:
        cu_seqlens: int32 or int64 of shape [N + 1], contiguous, on ``device``.
        batch: the batch size of the tensors it divides; must be 1.
        tokens: the number of tokens T.
        device: where the tensors are.
        cu_seqlens_cpu: the same numbers on the CPU, if the caller has them.
        validate: read the values even if that means waiting for the GPU.

    Raises:
        TypeError: something that is no tensor.
        ValueError: anything else that is wrong, naming the argument, its value and the rule.
    """
    require_tensor(
        "cu_seqlens", cu_seqlens, shape=(None,), dims="[N + 1]", dtypes=INDEX_DTYPES, device=device
    )
    require(batch == 1, "cu_seqlens", f"given with batch size {batch}", "the batch size must be 1")
    entries = cu_seqlens.shape[0]
    require(entries > 0, "cu_seqlens", "shape [0]", "must hold N + 1 >= 1 entries")
    require(
        entries == 1 or cu_seqlens.stride(0) == 1,
        "cu_seqlens",
        f"stride {cu_seqlens.stride(0)}",
        "must be contiguous",
    )
    if cu_seqlens_cpu is not None:
        require_tensor(
            "cu_seqlens_cpu",
            cu_seqlens_cpu,
            shape=(entries,),
            dims="[N + 1]",
            dtypes=INDEX_DTYPES,
            device=torch.device("cpu"),
        )
        if readable(cu_seqlens_cpu):
            _require_offsets("cu_seqlens_cpu", cu_seqlens_cpu.tolist(), tokens)
    if readable(cu_seqlens) and (validate or cu_seqlens.device.type == "cpu"):
        _require_offsets("cu_seqlens", cu_seqlens.tolist(), tokens)
    return entries - 1


def require_known_keywords(
    call: str, given: Mapping[str, object], ignored: Mapping[str, str]
) -> None:
    """Refuse keywords that a drop-in call neither uses nor is documented to ignore.

    Args:
        call: the public call's name.
        given: the keywords that its signature did not name.
        ignored: keyword -> why it does not apply here.

    Raises:
        TypeError: a keyword is not in ``ignored``.
    """
    for name, value in given.items():
        if name not in ignored:
            also = ", ".join(sorted(ignored)) or "none"
            rule = f"{call}() has no such keyword (accepted and ignored: {also})"
            raise TypeError(f"{name}: {_short(value)}; {rule}")


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Tell whether autograd would have to record a call with these arguments."""
    # what is no tensor is refused where the plan is made
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
    )


def readable(x: torch.Tensor) -> bool:
    """Tell whether ``x`` holds values now: not while tracing, and not in a fake tensor."""
    return not is_dynamo_compiling() and type(x) in (torch.Tensor, torch.nn.Parameter)


def _fits(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(given) != len(wanted):
        return False
    for g, w in zip(given, wanted, strict=True):  # noqa: SIM110 - a generator takes twice as long
        if w is not None and g != w:
            return False
    return True


def _one_of(dtypes: Collection[torch.dtype]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _require_offsets(arg: str, offsets: list[int], tokens: int) -> None:
    require(offsets[0] == 0, arg, f"first entry {offsets[0]}", "must start at 0")
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        require(start <= end, arg, f"entry {n + 1} is {end} after {start}", "must not decrease")
    require(
        offsets[-1] == tokens,
        arg,
        f"last entry {offsets[-1]}",
        f"must equal the number of tokens, {tokens}",
    )
