"""The sizes that q, k and v of one attention call agree on.

Names are the field's: B batch, T tokens, H key heads, HV value heads, K and V the head dimensions.
With `cu_seqlens` the sequences are packed in one batch row, so B is 1 and T counts all tokens.
"""

from dataclasses import dataclass

import torch

from cula.common.checks import require, require_tensor

QKV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Dims:
    """Sizes of one call: q, k [B, T, H, K]; v, o [B, T, HV, V]."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @property
    def group(self) -> int:
        """Value heads that share one key head (grouped value attention)."""
        return self.HV // self.H


def dims_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Dims:
    """Check q, k, v against each other and return their sizes.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: rank, shape, dtype or device disagree, or HV is not a multiple of H.
    """
    require_tensor("q", q, shape=[None] * 4, dims="[B, T, H, K]", dtypes=QKV_DTYPES)
    B, T, H, K = q.shape
    require_tensor("k", k, shape=q.shape, dims="[B, T, H, K]", dtypes=(q.dtype,), device=q.device)
    require_tensor(
        "v", v, shape=(B, T, None, None), dims="[B, T, HV, V]", dtypes=(q.dtype,), device=q.device
    )
    HV, V = v.shape[2:]
    require(H > 0 and K > 0, "q", tuple(q.shape), "must have at least one head and one channel")
    require(
        HV > 0 and V > 0 and HV % H == 0,
        "v",
        tuple(v.shape),
        f"the number of value heads (dimension 2) must be a multiple of q's {H} heads, "
        "and V at least 1",
    )
    return Dims(B, T, H, HV, K, V)
