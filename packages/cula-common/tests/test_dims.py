"""q, k and v against each other."""

import pytest
import torch

from cula.common.dims import Dims, dims_of


def tensors(H: int = 2, HV: int = 4, K: int = 5, V: int = 3) -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(2, 7, H, K),
        "k": torch.zeros(2, 7, H, K),
        "v": torch.zeros(2, 7, HV, V),
    }


def test_sizes() -> None:
    dims = dims_of(**tensors())
    assert dims == Dims(B=2, T=7, H=2, HV=4, K=5, V=3)
    assert dims.group == 2


@pytest.mark.parametrize("shape", [(0, 7), (2, 0), (0, 0)])
def test_empty_batches_are_fine(shape: tuple[int, int]) -> None:
    x = torch.zeros(*shape, 1, 4, dtype=torch.float16)
    dims = dims_of(x, x, x)
    assert dims == Dims(*shape, H=1, HV=1, K=4, V=4)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"q": None}, TypeError, "q: NoneType"),
        ({"v": 3}, TypeError, "v: int"),
        ({"q": torch.zeros(7, 2, 5)}, ValueError, "q: shape"),
        ({"k": torch.zeros(2, 7, 1, 5)}, ValueError, "k: shape"),
        ({"k": torch.zeros(2, 7, 2, 5).bfloat16()}, ValueError, "k: dtype"),
        ({"v": torch.zeros(2, 6, 4, 3)}, ValueError, "v: shape"),
        ({"v": torch.zeros(2, 7, 3, 3)}, ValueError, "v: .*multiple of q's 2 heads"),
        ({"v": torch.zeros(2, 7, 1, 3)}, ValueError, "v: .*multiple"),
        ({"v": torch.zeros(2, 7, 0, 3)}, ValueError, "v: .*multiple"),
        ({"v": torch.zeros(2, 7, 4, 0)}, ValueError, "v: .*V at least 1"),
        ({"v": torch.zeros(2, 7, 4, 3, device="meta")}, ValueError, "v: device meta"),
        ({n: torch.zeros(2, 7, 0, 5) for n in "qk"}, ValueError, "q: .*at least one head"),
        ({n: x.double() for n, x in tensors().items()}, ValueError, "q: dtype"),
    ],
)
def test_refused(change: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dims_of(**(tensors() | change))
