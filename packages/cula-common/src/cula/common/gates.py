"""Which gate and which beta a KDA call means, from its keywords; checked once, in the plan."""

from dataclasses import dataclass
from typing import Literal

import torch

from cula.common.checks import require, require_flags, require_number, require_tensor
from cula.common.recurrence import kda_log_decay

GateForm = Literal["given", "softplus", "bounded", "sigmoid"]
BetaForm = Literal["given", "sigmoid", "sigmoid2"]

GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that A_log and dt_bias may have."""


@dataclass(frozen=True)
class KdaGate:
    """How a call's ``g`` becomes the log decay; part of a compile key.

    With ``x = g + dt_bias``:

    * ``"given"``: g is the log decay already
    * ``"softplus"``: ``-e^{A_log} softplus(x)``
    * ``"bounded"``: ``lower_bound * sigmoid(e^{A_log} x)``
    * ``"sigmoid"``: ``lower_bound * sigmoid(x)``
    """

    form: GateForm
    has_bias: bool = False
    lower_bound: float | None = None

    def log_decay(
        self,
        g: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Compute the log decay [..., HV, K] of gates ``g`` in plain PyTorch."""
        if self.form == "given":
            return g.to(dtype)
        return kda_log_decay(
            g,
            A_log=None if self.form == "sigmoid" else A_log,
            dt_bias=dt_bias if self.has_bias else None,
            lower_bound=self.lower_bound,
            dtype=dtype,
        )


def kda_gate(
    *,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    HV: int,
    K: int,
    device: torch.device,
) -> KdaGate:
    """Check a call's gate arguments and name the gate that they describe.

    Without ``use_gate_in_kernel`` g is the log decay, and the other arguments are not looked at
    (FLA's meaning: a layer may pass them in either mode).

    Args:
        use_gate_in_kernel: g is raw, and the gate is computed from it.
        A_log: [HV], contiguous.
        dt_bias: [HV * K] or [HV, K], contiguous.
        lower_bound: the smallest log decay, in [-5, 0).
        HV: number of value heads.
        K: key dimension.
        device: where the call's tensors are.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a wrong shape, dtype, device or number; neither A_log nor lower_bound.
    """
    require_flags(use_gate_in_kernel=use_gate_in_kernel)
    if not use_gate_in_kernel:
        return KdaGate("given")
    if lower_bound is not None:
        require_number("lower_bound", lower_bound)
        require(-5.0 <= lower_bound < 0.0, "lower_bound", lower_bound, "must be in [-5, 0)")
        lower_bound = float(lower_bound)
    if A_log is not None:
        require_tensor("A_log", A_log, shape=(HV,), dims="[HV]", dtypes=GATE_DTYPES, device=device)
        _require_contiguous("A_log", A_log)
    if dt_bias is not None:
        require_tensor("dt_bias", dt_bias, dtypes=GATE_DTYPES, device=device)
        require(
            tuple(dt_bias.shape) in ((HV * K,), (HV, K)),
            "dt_bias",
            f"shape {list(dt_bias.shape)}",
            f"must be [HV * K] = [{HV * K}] or [HV, K] = [{HV}, {K}]",
        )
        _require_contiguous("dt_bias", dt_bias)
    require(
        A_log is not None or lower_bound is not None,
        "A_log",
        None,
        "use_gate_in_kernel=True needs A_log or lower_bound",
    )
    if lower_bound is None:
        return KdaGate("softplus", dt_bias is not None)
    form = "sigmoid" if A_log is None else "bounded"
    return KdaGate(form, dt_bias is not None, lower_bound)


def beta_form(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> BetaForm:
    """Name how a call's ``beta`` becomes the step size.

    ``"given"``: as it is; ``"sigmoid"``: sigmoid(beta); ``"sigmoid2"``: 2 sigmoid(beta), which
    allows negative eigenvalues.

    Raises:
        TypeError: a keyword is not True or False.
        ValueError: ``allow_neg_eigval`` without ``use_beta_sigmoid_in_kernel``, which would not
            do anything.
    """
    require_flags(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval
    )
    require(
        use_beta_sigmoid_in_kernel or not allow_neg_eigval,
        "allow_neg_eigval",
        True,
        "needs use_beta_sigmoid_in_kernel=True",
    )
    if not use_beta_sigmoid_in_kernel:
        return "given"
    return "sigmoid2" if allow_neg_eigval else "sigmoid"


def apply_beta(
    form: BetaForm, beta: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute the step size from ``beta`` in plain PyTorch."""
    beta = beta.to(dtype)
    if form == "given":
        return beta
    return torch.sigmoid(beta) * (2.0 if form == "sigmoid2" else 1.0)


def _require_contiguous(arg: str, x: torch.Tensor) -> None:
    require(x.is_contiguous(), arg, f"strides {list(x.stride())}", "must be contiguous")
