"""What FLA is asked to do, by versions of it that know less and less. No FLA is needed here: the
twins below have the signatures of its releases and compute by the oracle of conftest.py."""

import pytest
import torch

from cula.common.testing import assert_close
from cula.kda import fla_fallback, kda_prefill
from cula.kda.cases import CASES, make_inputs
from cula.kda.plan import plan_prefill
from cula.kda.reference import KdaInputs, kda_forward


class Twin:
    """FLA's chunk_kda as a version knows it: refuses what that version cannot do."""

    def __init__(self, oracle, *, grouped: bool) -> None:
        self.oracle = oracle
        self.grouped = grouped
        self.calls = 0

    def compute(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        scale,
        initial_state,
        output_final_state,
        use_gate_in_kernel=False,
        cu_seqlens=None,
        safe_gate=False,
        lower_bound=None,
        A_log=None,
        dt_bias=None,
        **form,
    ):
        self.calls += 1
        assert scale is not None and (self.grouped or q.shape[2] == v.shape[2])
        assert initial_state is None or initial_state.dtype == torch.float32
        assert not (safe_gate and use_gate_in_kernel) or -5 <= lower_bound < 0
        assert A_log is not None or not use_gate_in_kernel
        assert dt_bias is None or dt_bias.dim() == 1
        lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
        result = self.oracle(
            q,
            k,
            v,
            g,
            beta,
            lengths=lengths,
            initial=initial_state,
            scale=scale,
            use_gate_in_kernel=use_gate_in_kernel,
            lower_bound=lower_bound,
            A_log=A_log,
            dt_bias=dt_bias,
            **form,
        )
        return result.o.to(q.dtype), result.final.float() if output_final_state else None


def fla_0_4_2(oracle):
    twin = Twin(oracle, grouped=False)

    def chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        safe_gate=False,
        lower_bound=None,
        disable_recompute=False,
        return_intermediate_states=False,
        cp_context=None,
        transpose_state_layout=False,
        **kwargs,
    ):
        assert kwargs.keys() <= {"A_log", "dt_bias"}
        return twin.compute(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            cu_seqlens=cu_seqlens,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            **kwargs,
        )

    return twin, chunk_kda


def fla_0_6(oracle):
    twin = Twin(oracle, grouped=True)

    def chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        disable_recompute=False,
        return_intermediate_states=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        cp_context=None,
        use_graph=False,
        max_num_seqs=None,
        **kwargs,
    ):
        assert kwargs.keys() <= {"A_log", "dt_bias", "chunk_size"}
        kwargs.pop("chunk_size", None)
        return twin.compute(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            cu_seqlens=cu_seqlens,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            **kwargs,
        )

    return twin, chunk_kda


VERSIONS = {"0.4.2": fla_0_4_2, "0.6": fla_0_6}
NAMES = ("tail", "grouped heads", "softplus", "sigmoid gate", "masked", "beta logits")


@pytest.fixture(params=VERSIONS)
def fla(request, oracle, monkeypatch) -> Twin:
    twin, function = VERSIONS[request.param](oracle)
    monkeypatch.setattr(fla_fallback, "fla_function", lambda path: function)
    return twin


@pytest.mark.parametrize("name", [*NAMES, "beta to 2", "varlen, empty ones", "checkpoints"])
def test_forward_is_the_reference(fla: Twin, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    plan = plan_prefill(**inputs)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    tensors = KdaInputs(**{n: inputs[n] for n in names if n in inputs})
    every = case.checkpoint_interval
    initial = torch.randn(plan.sequences, case.HV, case.K, case.V)
    for start in (initial, None):
        options = {"cu_seqlens": inputs.get("cu_seqlens"), "every": every}
        given = fla_fallback.forward(plan.form, tensors, start, **options)
        right = kda_forward(plan.form, tensors, start, **options)
        assert_close("o", given.o, right.o, 3e-3)
        assert_close("final", given.final, right.final, 1e-5)
        assert len(given.marks) == len(right.marks)
        for mark, other in zip(given.marks, right.marks, strict=True):
            assert mark.starts == other.starts and mark.count == other.count
            assert_close("mark", mark.states, other.states, 1e-5)
    assert fla.calls >= 2


def test_calls_reach_fla(fla: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' way to FLA: pool in, pool out, results where they belong."""
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **kwargs: "fla")
    case = CASES["grouped heads"]
    inputs, twin = make_inputs(case), make_inputs(case)
    o = kda_prefill(**inputs)
    monkeypatch.setattr("cula.kda.plan.choose_backend", lambda *args, **kwargs: "reference")
    assert fla.calls == 1
    assert_close("o", o, kda_prefill(**twin), 3e-3)
    assert_close("state", inputs["state"], twin["state"], 1e-5)
    assert fla.calls == 1


@pytest.mark.parametrize("option", [{"use_graph": True}, {"chunk_size": 32}])
def test_what_an_old_version_lacks_is_named(oracle, monkeypatch, option: dict) -> None:
    _, function = fla_0_4_2(oracle)
    monkeypatch.setattr(fla_fallback, "fla_function", lambda path: function)
    inputs = make_inputs(CASES["one chunk"])
    plan = plan_prefill(**inputs)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    tensors = KdaInputs(*(inputs[n] for n in names))
    (name,) = option
    with pytest.raises(NotImplementedError, match=name):
        fla_fallback.chunk(plan.form, tensors, None, safe_gate=True, **option)
