"""Stand-ins for the tensors that sequence kernels take, for compiling them.

A size that two tensors share is one symbol: the compiled function checks that they agree.
"""

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula.common.cute.dtypes import DTYPES
from cula.common.kernel_args import States


def fake_tokens(dtype, B, T, heads, channels):
    """[B, T, heads, channels], as `loadable_tokens` leaves it."""
    strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
    return make_fake_tensor(dtype, (B, T, heads, channels), (*strides, 1), assumed_align=16)


def fake_states(kind: States | None, HV, V: int, K: int):
    """[any, HV, V, K], as `loadable_states` wants it; None for states that are absent."""
    if kind is None:
        return None
    outer = [cute.sym_int64(divisibility=8) for _ in range(2)]
    inner = (K, 1) if kind.v_first else (1, V)
    shape = (cute.sym_int(), HV, V, K)
    return make_fake_tensor(DTYPES[kind.dtype], shape, (*outer, *inner), assumed_align=16)


def fake_vector(dtype, align: int | None = None):
    """[any], dense. align: in bytes, if more than the dtype's."""
    return make_fake_tensor(dtype, (cute.sym_int(),), (1,), assumed_align=align)
