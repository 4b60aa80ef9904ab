"""Errors name the argument, its value and the rule."""

import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula.common import checks

CPU = torch.device("cpu")


def raises(error, text):
    return pytest.raises(error, match="^" + re.escape(text) + "$")


def test_require():
    checks.require(True, "scale", 1.0, "must be positive")
    with raises(ValueError, "scale: -1.0; must be positive"):
        checks.require(False, "scale", -1.0, "must be positive")
    with raises(TypeError, "scale: str; must be a number"):
        checks.require(False, "scale", "str", "must be a number", TypeError)


def test_require_tensor_accepts():
    x = torch.zeros(2, 3, 4)
    checks.require_tensor("q", x)
    checks.require_tensor("q", x, shape=(2, None, 4), dtypes=(torch.float32,), device=CPU)
    checks.require_tensor("q", torch.nn.Parameter(x), shape=(2, 3, 4))


def test_require_tensor_refuses():
    x = torch.zeros(2, 3, 4)
    with raises(TypeError, "q: list; must be a torch.Tensor"):
        checks.require_tensor("q", [1, 2])
    with raises(TypeError, "q: NoneType; must be a torch.Tensor"):
        checks.require_tensor("q", None)
    with raises(ValueError, "q: shape [2, 3, 4]; must be [B, T, K] = [2, any, 5]"):
        checks.require_tensor("q", x, shape=(2, None, 5), dims="[B, T, K]")
    with raises(ValueError, "q: shape [2, 3, 4]; must be [2, 12]"):
        checks.require_tensor("q", x, shape=(2, 12))
    with raises(ValueError, "q: dtype torch.float32; must be bfloat16 or float16"):
        checks.require_tensor("q", x, dtypes=(torch.bfloat16, torch.float16))
    with raises(ValueError, "q: dtype torch.float32; must be int32"):
        checks.require_tensor("q", x, dtypes=(torch.int32,))
    with raises(ValueError, "q: device cpu; must be cuda:1"):
        checks.require_tensor("q", x, device=torch.device("cuda", 1))


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def check(cu, *, batch=1, tokens=6, device=CPU, **more):
    return checks.require_cu_seqlens(cu, batch=batch, tokens=tokens, device=device, **more)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_accepts(dtype):
    assert check(offsets(0, 2, 6, dtype=dtype)) == 2
    assert check(offsets(0, 0, 6, 6, dtype=dtype)) == 3
    assert check(offsets(0, dtype=dtype), tokens=0) == 0
    assert check(offsets(0, 0, 0, dtype=dtype), tokens=0) == 2
    assert check(offsets(0, 2, 6, dtype=dtype), cu_seqlens_cpu=offsets(0, 2, 6)) == 2


@pytest.mark.parametrize(
    ("cu", "more", "text"),
    [
        ([0.0, 6.0], {}, "cu_seqlens: dtype torch.float32; must be int32 or int64"),
        ([[0, 6]], {}, "cu_seqlens: shape [1, 2]; must be [N + 1] = [any]"),
        ([0, 6], {"batch": 2}, "cu_seqlens: given with batch size 2; the batch size must be 1"),
        ([1, 6], {}, "cu_seqlens: first entry 1; must start at 0"),
        ([0, 4, 3, 6], {}, "cu_seqlens: entry 2 is 3 after 4; must not decrease"),
        ([0, 2, 5], {}, "cu_seqlens: last entry 5; must equal the number of tokens, 6"),
        ([0, 2, 7], {}, "cu_seqlens: last entry 7; must equal the number of tokens, 6"),
        ([0], {}, "cu_seqlens: last entry 0; must equal the number of tokens, 6"),
    ],
)
def test_cu_seqlens_refuses(cu, more, text):
    with raises(ValueError, text):
        check(torch.tensor(cu), **more)


def test_cu_seqlens_refuses_what_is_no_tensor_empty_or_strided():
    with raises(TypeError, "cu_seqlens: list; must be a torch.Tensor"):
        check([0, 6])
    with raises(ValueError, "cu_seqlens: shape [0]; must hold N + 1 >= 1 entries"):
        check(torch.zeros(0, dtype=torch.int32))
    with raises(ValueError, "cu_seqlens: stride 2; must be contiguous"):
        check(offsets(0, 9, 6, 9)[::2])


def test_cu_seqlens_on_another_device():
    with raises(ValueError, "cu_seqlens: device cpu; must be cuda:0"):
        check(offsets(0, 6), device=torch.device("cuda", 0))


def test_cu_seqlens_cpu_copy_is_checked():
    cu = offsets(0, 2, 6)
    with raises(ValueError, "cu_seqlens_cpu: shape [2]; must be [N + 1] = [3]"):
        check(cu, cu_seqlens_cpu=offsets(0, 6))
    with raises(ValueError, "cu_seqlens_cpu: entry 2 is 6 after 8; must not decrease"):
        check(cu, cu_seqlens_cpu=offsets(0, 8, 6))
    with raises(TypeError, "cu_seqlens_cpu: list; must be a torch.Tensor"):
        check(cu, cu_seqlens_cpu=[0, 2, 6])


def test_device_values_are_read_only_on_demand():
    """The meta device stands for a GPU: its values cannot be read at all."""
    meta = torch.device("meta")
    cu = torch.empty(3, dtype=torch.int32, device=meta)
    assert check(cu, device=meta) == 2
    with raises(ValueError, "cu_seqlens_cpu: last entry 5; must equal the number of tokens, 6"):
        check(cu, device=meta, cu_seqlens_cpu=offsets(0, 2, 5))
    with pytest.raises((NotImplementedError, RuntimeError)):
        check(cu, device=meta, validate=True)


def test_fake_values_are_not_read():
    with FakeTensorMode():
        assert check(torch.zeros(3, dtype=torch.int32)) == 2


def test_known_keywords():
    ignored = {"chunk_size": "the kernels choose their own"}
    checks.require_known_keywords("chunk_kda", {}, ignored)
    checks.require_known_keywords("chunk_kda", {"chunk_size": 64}, ignored)
    text = "chunksize: 64; chunk_kda() has no such keyword (accepted and ignored: chunk_size)"
    with raises(TypeError, text):
        checks.require_known_keywords("chunk_kda", {"chunk_size": 64, "chunksize": 64}, ignored)
    text = "x: tensor of shape [9]; f() has no such keyword (accepted and ignored: none)"
    with raises(TypeError, text):
        checks.require_known_keywords("f", {"x": torch.zeros(9)}, {})


def test_needs_grad():
    plain, wants = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert checks.needs_grad(plain, None, wants)
    assert not checks.needs_grad(plain, None)
    with torch.no_grad():
        assert not checks.needs_grad(wants)
    with torch.inference_mode():
        assert not checks.needs_grad(wants)
    assert not checks.needs_grad(3, "text", [wants])  # the plan's errors are clearer than ours


def test_numbers():
    for number in (1, -0.5, np.float32(2), float("inf")):
        checks.require_number("scale", number)
    for other in ("0.5", None, True, 1j, torch.tensor(0.5), [1.0]):
        with pytest.raises(TypeError) as raised:
            checks.require_number("scale", other)
        assert str(raised.value) == f"scale: {type(other).__name__}; must be a number"


def test_flags():
    checks.require_flags()
    checks.require_flags(update_state=True, use_gate_in_kernel=False)
    for other in ("no", None, 1, torch.tensor(True)):
        with pytest.raises(TypeError) as raised:
            checks.require_flags(a=True, update_state=other)
        assert str(raised.value) == f"update_state: {type(other).__name__}; must be True or False"


def test_elements_in_one_place():
    x = torch.zeros(3, 4)
    for fine in (x, x.T, x[:, ::2], x[:1].expand(1, 4), x[:0], x[None].expand(1, 3, 4)):
        checks.require_own_elements("out", fine)
    with pytest.raises(ValueError, match=r"^out: strides \[0, 1\]; is written into"):
        checks.require_own_elements("out", x[:1].expand(3, 4))
