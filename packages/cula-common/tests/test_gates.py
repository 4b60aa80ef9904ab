"""Gates and betas: what the keywords mean, and the formulas at their extremes."""

import math
import re

import pytest
import torch

from cula.common import gates
from cula.common.recurrence import kda_log_decay

F64 = torch.float64
CPU = torch.device("cpu")
HV, K = 3, 4
A_LOG = torch.tensor([-2.0, 0.0, 1.5])
BIAS = torch.linspace(-1.0, 1.0, HV * K)


def name_gate(**more):
    given = {"use_gate_in_kernel": True, "A_log": None, "dt_bias": None, "lower_bound": None}
    return gates.kda_gate(**given | more, HV=HV, K=K, device=CPU)


@pytest.mark.parametrize(
    ("keywords", "gate"),
    [
        ({"use_gate_in_kernel": False}, gates.KdaGate("given")),
        (
            {"use_gate_in_kernel": False, "A_log": A_LOG, "dt_bias": BIAS, "lower_bound": -5},
            gates.KdaGate("given"),
        ),
        ({"A_log": A_LOG}, gates.KdaGate("softplus")),
        ({"A_log": A_LOG, "dt_bias": BIAS}, gates.KdaGate("softplus", True)),
        (
            {"A_log": A_LOG, "dt_bias": BIAS.view(HV, K), "lower_bound": -5},
            gates.KdaGate("bounded", True, -5.0),
        ),
        ({"lower_bound": -0.5}, gates.KdaGate("sigmoid", False, -0.5)),
        ({"lower_bound": -5.0, "dt_bias": BIAS.half()}, gates.KdaGate("sigmoid", True, -5.0)),
    ],
)
def test_keywords_name_a_gate(keywords, gate):
    named = name_gate(**keywords)
    assert named == gate and hash(named) == hash(gate)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({}, ValueError, "A_log: None; use_gate_in_kernel=True needs A_log or lower_bound"),
        (
            {"dt_bias": BIAS},
            ValueError,
            "A_log: None; use_gate_in_kernel=True needs A_log or lower_bound",
        ),
        ({"lower_bound": 0.0}, ValueError, "lower_bound: 0.0; must be in [-5, 0)"),
        ({"lower_bound": -5.5}, ValueError, "lower_bound: -5.5; must be in [-5, 0)"),
        ({"lower_bound": math.nan}, ValueError, "lower_bound: nan; must be in [-5, 0)"),
        ({"lower_bound": "-5"}, TypeError, "lower_bound: str; must be a number"),
        ({"lower_bound": True}, TypeError, "lower_bound: bool; must be a number"),
        ({"A_log": [0.0] * HV}, TypeError, "A_log: list; must be a torch.Tensor"),
        ({"A_log": A_LOG[:2]}, ValueError, "A_log: shape [2]; must be [HV] = [3]"),
        (
            {"A_log": A_LOG.to(F64)},
            ValueError,
            "A_log: dtype torch.float64; must be float32, bfloat16 or float16",
        ),
        (
            {"A_log": A_LOG.to("meta")},
            ValueError,
            "A_log: device meta; must be cpu",
        ),
        (
            {"A_log": A_LOG, "dt_bias": BIAS.view(K, HV)},
            ValueError,
            "dt_bias: shape [4, 3]; must be [HV * K] = [12] or [HV, K] = [3, 4]",
        ),
        (
            {"A_log": A_LOG, "dt_bias": BIAS.view(K, HV).t()},
            ValueError,
            "dt_bias: strides [1, 3]; must be contiguous",
        ),
        (
            {"A_log": torch.zeros(6)[::2]},
            ValueError,
            "A_log: strides [2]; must be contiguous",
        ),
    ],
)
def test_wrong_gate_arguments(keywords, error, text):
    with pytest.raises(error, match="^" + re.escape(text) + "$"):
        name_gate(**keywords)


def softplus(x):
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


FORMS = {
    "softplus": (None, True, lambda x, a: -math.exp(a) * softplus(x)),
    "bounded": (-5.0, True, lambda x, a: -5.0 * sigmoid(math.exp(a) * x)),
    "sigmoid": (-2.5, False, lambda x, a: -2.5 * sigmoid(x)),
}
EXTREMES = [0.0, -0.0, 1e-3, -0.3, 5.0, -5.0, 19.9, 20.1, 40.0, -40.0, 300.0, -700.0, 1e4, -1e3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (torch.float32, 2e-6)])
def test_formulas_at_any_size(form, dtype, tol):
    """Against Python's own arithmetic, relative to each value: small results count too."""
    lower_bound, needs_A, formula = FORMS[form]
    g = torch.tensor(EXTREMES, dtype=F64).view(-1, 1, 1).expand(-1, HV, K).to(dtype)
    bias = BIAS.to(dtype)
    A = A_LOG if needs_A else None
    gate = name_gate(A_log=A, dt_bias=bias.float(), lower_bound=lower_bound)
    assert gate.form == form
    got = gate.log_decay(g, A, bias, dtype=dtype)
    assert got.shape == g.shape and got.dtype == dtype
    assert torch.isfinite(got).all() and (got <= 0).all()
    for (t, h, d), value in zip(
        [(t, h, d) for t in range(len(EXTREMES)) for h in range(HV) for d in range(K)],
        got.flatten().tolist(),
        strict=True,
    ):
        x = (g[t, h, d] + bias[h * K + d]).item()
        want = formula(x, A_LOG[h].item())
        smallest = torch.finfo(dtype).tiny
        # An argument of size s known to eps is a result known to s * eps.
        slack = tol * max(1.0, math.exp(A_LOG[h].item()) * abs(x) if form == "bounded" else abs(x))
        assert abs(value - want) <= slack * abs(want) + smallest, (EXTREMES[t], h, d)


def test_raw_gate_of_minus_1000_keeps_the_state():
    """In front of the gate's formula -1000 means no decay at all; only given gates mask."""
    g = torch.full((2, HV, K), -1000.0)
    assert (kda_log_decay(g, A_log=A_LOG) == 0).all()
    assert (gates.KdaGate("given").log_decay(g) == -1000).all()
    assert (gates.KdaGate("given").log_decay(g).exp() == 0).all()


def test_bias_may_have_either_shape_and_any_leading_dimensions():
    g = torch.randn(2, 5, HV, K)
    flat = kda_log_decay(g, A_log=A_LOG, dt_bias=BIAS)
    assert torch.equal(flat, kda_log_decay(g, A_log=A_LOG, dt_bias=BIAS.view(HV, K)))
    assert torch.allclose(flat[1, 2], kda_log_decay(g[1, 2], A_log=A_LOG, dt_bias=BIAS))


def test_what_a_gate_does_not_use_is_not_used():
    g = torch.randn(2, HV, K)
    without_bias = gates.KdaGate("softplus").log_decay(g, A_LOG, BIAS)
    assert torch.equal(without_bias, kda_log_decay(g, A_log=A_LOG))
    no_rate = gates.KdaGate("sigmoid", False, -5.0).log_decay(g, A_LOG)
    assert torch.equal(no_rate, kda_log_decay(g, lower_bound=-5.0))


def test_log_decay_needs_a_rate_or_a_bound():
    with pytest.raises(ValueError, match=r"^A_log: None; must be given unless lower_bound is$"):
        kda_log_decay(torch.zeros(1, HV, K))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_gradients_stay_finite(lower_bound):
    g = torch.tensor([-1000.0, -30.0, 0.0, 30.0, 1000.0], dtype=F64).view(5, 1, 1)
    x = [g.requires_grad_(), torch.zeros(1, dtype=F64).requires_grad_()]
    out = kda_log_decay(x[0], A_log=x[1], lower_bound=lower_bound, dtype=F64)
    assert all(torch.isfinite(d).all() for d in torch.autograd.grad(out.sum(), x))
    y = torch.randn(2, HV, K, dtype=F64, requires_grad=True)
    A, bias = A_LOG.to(F64).requires_grad_(), BIAS.to(F64).requires_grad_()

    def f(y, A, bias):
        return kda_log_decay(y, A_log=A, dt_bias=bias, lower_bound=lower_bound, dtype=F64)

    assert torch.autograd.gradcheck(f, (y, A, bias))


@pytest.mark.parametrize(
    ("sigmoid_in_kernel", "negative", "form", "expected"),
    [
        (False, False, "given", [-800.0, 0.0, 0.25, 800.0]),
        (True, False, "sigmoid", [0.0, 0.5, sigmoid(0.25), 1.0]),
        (True, True, "sigmoid2", [0.0, 1.0, 2 * sigmoid(0.25), 2.0]),
    ],
)
def test_betas(sigmoid_in_kernel, negative, form, expected):
    assert gates.beta_form(sigmoid_in_kernel, negative) == form
    got = gates.apply_beta(form, torch.tensor([-800.0, 0.0, 0.25, 800.0]), dtype=F64)
    assert torch.allclose(got, torch.tensor(expected, dtype=F64), rtol=1e-15, atol=0)


def test_negative_eigenvalues_need_the_sigmoid():
    text = "allow_neg_eigval: True; needs use_beta_sigmoid_in_kernel=True"
    with pytest.raises(ValueError, match=f"^{text}$"):
        gates.beta_form(False, True)
