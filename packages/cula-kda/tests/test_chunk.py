"""`chunk_kda` on a CPU: FLA's meaning, checks and gradients, against the oracle of conftest.py."""

import pytest
import torch

from cula.common.testing import assert_close, same_bits
from cula.kda import chunk_kda

INPUTS = ("q", "k", "v", "g", "beta")
FORMS = {
    "given": {},
    "norms": {"use_qk_l2norm_in_kernel": True},
    "softplus": {"use_gate_in_kernel": True, "A_log": (4,), "dt_bias": (64,)},
    "bounded": {"use_gate_in_kernel": True, "A_log": (4,), "dt_bias": (4, 16), "lower_bound": -4.0},
    "sigmoid gate": {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True},
    "beta": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
}


def make(dtype=torch.float32, batch=2, tokens=45, form="given", seed=0) -> dict:
    torch.manual_seed(seed)
    inputs = {
        "q": torch.randn(batch, tokens, 2, 16) / 4,
        "k": torch.randn(batch, tokens, 2, 16) / 4,
        "v": torch.randn(batch, tokens, 4, 8),
        "g": -torch.rand(batch, tokens, 4, 16),
        "beta": torch.rand(batch, tokens, 4),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    extra = {n: torch.randn(x) if isinstance(x, tuple) else x for n, x in FORMS[form].items()}
    return inputs | extra


def want(oracle, inputs: dict, **more):
    form = {"use_gate_in_kernel": False, "use_qk_l2norm_in_kernel": False} | inputs | more
    form.pop("safe_gate", None)
    return oracle(**form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
def test_matches_the_oracle(oracle, form: str, dtype: torch.dtype, tol: float) -> None:
    inputs = make(dtype, form=form)
    right = want(oracle, inputs)
    o, final = chunk_kda(**inputs, output_final_state=True)
    assert o.dtype == dtype and final.dtype == torch.float32
    assert_close("o", o, right.o, tol)
    assert_close("final", final, right.final, 2e-6)
    o_again, none = chunk_kda(**inputs)
    assert none is None and same_bits(o_again, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_state_in_both_layouts(oracle, dtype: torch.dtype) -> None:
    inputs = make()
    initial = torch.randn(2, 4, 16, 8).to(dtype)
    before = initial.clone()
    right = want(oracle, inputs, initial=initial)
    o, final = chunk_kda(**inputs, initial_state=initial, output_final_state=True)
    assert_close("o", o, right.o, 2e-6)
    assert_close("final", final, right.final, 2e-6)
    v_first = initial.mT.contiguous()
    o_v, final_v = chunk_kda(
        **inputs, initial_state=v_first, output_final_state=True, state_v_first=True
    )
    assert same_bits(o_v, o) and same_bits(final_v, final.mT.contiguous())
    assert same_bits(initial, before) and same_bits(v_first, before.mT.contiguous())


def test_deprecated_layout_keyword() -> None:
    inputs = make()
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, old = chunk_kda(**inputs, output_final_state=True, transpose_state_layout=True)
    _, new = chunk_kda(**inputs, output_final_state=True, state_v_first=True)
    assert same_bits(old, new)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        chunk_kda(**inputs, state_v_first=True, transpose_state_layout=True)


def test_packed_sequences(oracle) -> None:
    lengths = [0, 10, 33, 0, 1]
    inputs = make(batch=1, tokens=44)
    initial = torch.randn(5, 4, 16, 8)
    right = want(oracle, inputs, initial=initial, lengths=lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    for cpu in (None, cu_seqlens.clone()):
        o, final = chunk_kda(
            **inputs,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=cu_seqlens.int(),
            cu_seqlens_cpu=cpu,
        )
        assert_close("o", o, right.o, 2e-6)
        assert_close("final", final, right.final, 2e-6)
    assert same_bits(final[0], initial[0])


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_intermediate_states(oracle, chunk_size: int) -> None:
    """h holds the state at the start of each chunk, of each sequence in order, in k's dtype."""
    lengths = [128, 0, 70, 5]
    inputs = make(torch.bfloat16, batch=1, tokens=203)
    initial = torch.randn(4, 4, 16, 8)
    right = want(oracle, inputs, initial=initial, lengths=lengths, every=chunk_size)
    starts = []
    for n, length in enumerate(lengths):
        starts += [initial[n].double(), *right.kept[n]][: -(-length // chunk_size)]
    with torch.inference_mode():
        o, final, h = chunk_kda(
            **inputs,
            initial_state=initial,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            chunk_size=chunk_size,
            return_intermediate_states=True,
        )
    assert final is None and h.dtype == torch.bfloat16
    assert h.shape == (1, len(starts), 4, 16, 8)
    assert_close("h", h[0], torch.stack(starts), 3e-3)
    assert_close("o", o, right.o, 3e-3)


def test_intermediate_states_of_a_batch() -> None:
    inputs = make(batch=2, tokens=70)
    with torch.inference_mode():
        _, final, h = chunk_kda(
            **inputs, output_final_state=True, state_v_first=True, return_intermediate_states=True
        )
        alone = {name: inputs[name][1:] for name in INPUTS}
        first = {name: x[:, :64] for name, x in alone.items()}
        _, after = chunk_kda(**first, output_final_state=True, state_v_first=True)
    assert h.shape == (2, 2, 4, 8, 16) and final.shape == (2, 4, 8, 16)
    assert not h[:, 0].any()
    assert_close("h", h[1, 1], after[0], 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(oracle, form: str) -> None:
    """Those of the reference against autograd through the float64 chunked form."""
    inputs = make(tokens=20, form=form)
    inputs["initial_state"] = torch.randn(2, 4, 16, 8)
    floats = {n: x.requires_grad_() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    weight, weight_final = torch.randn(2, 20, 4, 8), torch.randn(2, 4, 16, 8)

    o, final = chunk_kda(**inputs, output_final_state=True)
    grads = torch.autograd.grad((o * weight).sum() + (final * weight_final).sum(), floats.values())
    twins = {n: x.detach().double().requires_grad_() for n, x in floats.items()}
    other = {n: x for n, x in inputs.items() if n not in twins}
    initial = twins["initial_state"]
    args = other | {n: x for n, x in twins.items() if n != "initial_state"}
    right = want(oracle, args, initial=initial)
    loss = (right.o * weight).sum() + (right.final * weight_final).sum()
    for name, grad, true in zip(
        floats, grads, torch.autograd.grad(loss, twins.values()), strict=True
    ):
        assert grad.dtype == torch.float32
        assert_close(name, grad, true, 1e-5)


def test_gradients_through_packed_and_bf16() -> None:
    inputs = {name: x.requires_grad_() for name, x in make(torch.bfloat16, 1, 30).items()}
    o, _ = chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 0, 11, 30]))
    o.float().square().sum().backward()
    for x in inputs.values():
        assert x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() and x.grad.any()


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    inputs = {name: x.requires_grad_() for name, x in make().items()}
    with torch.no_grad():
        o, final = chunk_kda(**inputs, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad
    with torch.inference_mode():
        assert chunk_kda(**inputs)[0].grad_fn is None
    assert chunk_kda(**inputs)[0].grad_fn is not None


def test_use_graph_pads_with_empty_sequences() -> None:
    inputs = make(batch=1, tokens=30)
    padded = torch.tensor([0, 12, 30, 30, 30])
    o, _ = chunk_kda(**inputs, cu_seqlens=padded, use_graph=True, max_num_seqs=4)
    assert same_bits(o, chunk_kda(**inputs, cu_seqlens=padded[:3])[0])


def refused() -> dict[str, tuple[dict, type[Exception], str]]:
    state, wrong = torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 8, 16)
    cu = torch.tensor([0, 20, 45])
    raw = {"use_gate_in_kernel": True}
    one = {name: x[:1] for name, x in make().items()}
    return {
        "unknown keyword": ({"chunk_indices": cu}, TypeError, "chunk_indices"),
        "batch with cu_seqlens": ({"cu_seqlens": cu}, ValueError, "cu_seqlens.*batch"),
        "number of states": (one | {"initial_state": state}, ValueError, "initial_state"),
        "layout": ({"initial_state": wrong}, ValueError, "initial_state"),
        "other layout": ({"initial_state": state, "state_v_first": True}, ValueError, "initial"),
        "dtype of state": ({"initial_state": state.double()}, ValueError, "initial_state.*dtype"),
        "no A_log": (raw, ValueError, "A_log"),
        "A_log": (raw | {"A_log": torch.zeros(2)}, ValueError, "A_log"),
        "dt_bias": (raw | {"A_log": torch.zeros(4), "dt_bias": cu}, ValueError, "dt_bias"),
        "lower_bound": (raw | {"lower_bound": -6.0}, ValueError, "lower_bound"),
        "safe_gate": (
            raw | {"A_log": torch.zeros(4), "safe_gate": True},
            ValueError,
            "lower_bound",
        ),
        "chunk_size": ({"chunk_size": 128}, ValueError, "chunk_size: 128"),
        "neg_eigval": ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval"),
        "k": ({"k": torch.zeros(2, 45, 2, 8)}, ValueError, "k: shape"),
        "v heads": ({"v": torch.zeros(2, 45, 3, 8)}, ValueError, "v: .*multiple"),
        "g": ({"g": torch.zeros(2, 45, 2, 16)}, ValueError, "g: shape"),
        "beta": ({"beta": torch.zeros(2, 45, 4, 8)}, ValueError, "beta: shape"),
        "q dtype": ({"q": torch.zeros(2, 45, 2, 16, dtype=torch.float64)}, ValueError, "q: dtype"),
        "no tensor": ({"g": None}, TypeError, "g: NoneType"),
        "state no tensor": ({"initial_state": [1.0]}, TypeError, "initial_state: list"),
        "h outside inference": (
            {"return_intermediate_states": True},
            ValueError,
            "return_intermediate_states",
        ),
        "cp_context": ({"cp_context": type("C", (), {"cu_seqlens": cu})()}, ValueError, "batch"),
        "cp without lengths": ({"cp_context": object()}, ValueError, "cp_context"),
        "cp, cpu": (
            one | {"cp_context": type("C", (), {"cu_seqlens": torch.tensor([0, 45])})()},
            NotImplementedError,
            "cp_context.*FLA",
        ),
        "cp, final state": (
            {"cp_context": object(), "output_final_state": True},
            ValueError,
            "output_final_state",
        ),
        "graph, max_num_seqs": (
            one | {"cu_seqlens": cu, "use_graph": True, "max_num_seqs": 3},
            ValueError,
            "max_num_seqs",
        ),
        "graph, recompute": (
            {"use_graph": True, "disable_recompute": True},
            ValueError,
            "disable_recompute",
        ),
        "host's cu_seqlens alone": ({"cu_seqlens_cpu": cu}, ValueError, "cu_seqlens_cpu: given"),
        "text for output_final_state": (
            {"output_final_state": "False"},
            TypeError,
            "output_final_state: str",
        ),
        "text for return_intermediate_states": (
            {"return_intermediate_states": "False"},
            TypeError,
            "return_intermediate_states: str",
        ),
        "text for state_v_first": ({"state_v_first": "False"}, TypeError, "state_v_first: str"),
        "text for safe_gate": ({"safe_gate": "False"}, TypeError, "safe_gate: str"),
        "text for use_graph": ({"use_graph": "False"}, TypeError, "use_graph: str"),
        "backend": ({"backend": "cute"}, NotImplementedError, "cute.*chunk_kda"),
        "backend name": ({"backend": "triton"}, ValueError, "backend"),
    }


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    change, error, match = refused()[name]
    with pytest.raises(error, match=match):
        chunk_kda(**(make() | change))


def test_what_fla_accepts_positionally() -> None:
    """FLA 0.6's order of arguments, and its indifference to gate arguments that are not in use."""
    x = make()
    right, _ = chunk_kda(**x, scale=0.5, use_qk_l2norm_in_kernel=True)
    given, _ = chunk_kda(*x.values(), 0.5, None, False, True, A_log=torch.zeros(7), dt_bias=None)
    assert same_bits(given, right)
