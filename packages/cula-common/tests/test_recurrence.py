"""The recurrences against formulations that share nothing with them, in float64."""

import math

import pytest
import torch

from cula.common import recurrence
from cula.common.testing import rel_error, same_bits

F64 = torch.float64


def kda_inputs(T, H=2, HV=2, K=5, V=3, lead=(), seed=0, dtype=F64):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*lead, *shape, generator=gen, dtype=F64).to(dtype)

    q, k, v = randn(T, H, K), randn(T, H, K), randn(T, HV, V)
    g, beta = -randn(T, HV, K).abs(), randn(T, HV).sigmoid()
    return {"q": q, "k": k / K**0.5, "v": v, "g": g, "beta": beta, "state": randn(HV, K, V)}


def kda_by_products(q, k, v, g, beta, state, scale):
    """Unroll S_t = M_t S_{t-1} + beta_t k_t v_t^T with M_t = (I - beta_t k_t k_t^T) diag(e^g_t)
    into explicit matrix products from each token to each later one."""
    T, H, K = q.shape
    HV = v.shape[1]
    o, final = torch.zeros(v.shape, dtype=F64), torch.zeros(HV, K, v.shape[2], dtype=F64)
    for h in range(HV):
        kh, qh = k[:, h // (HV // H)], q[:, h // (HV // H)]
        M = [
            (torch.eye(K, dtype=F64) - beta[t, h] * torch.outer(kh[t], kh[t]))
            @ g[t, h].exp().diag()
            for t in range(T)
        ]

        def state_after(t, M=M, kh=kh, h=h):
            total = torch.zeros(K, v.shape[2], dtype=F64)
            carry = torch.eye(K, dtype=F64)
            for j in range(t, -1, -1):
                total = total + carry @ torch.outer(beta[j, h] * kh[j], v[j, h])
                carry = carry @ M[j]
            return total + carry @ state[h]

        for t in range(T):
            o[t, h] = scale * (state_after(t).T @ qh[t])
        final[h] = state_after(T - 1)
    return o, final


def kda_by_chunk(q, k, v, g, beta, state, scale):
    """The closed form over one chunk: (I + A)^-1 and cumulative gates. For H = HV."""
    o, final = torch.zeros_like(v), torch.zeros_like(state)
    for h in range(v.shape[1]):
        G = g[:, h].cumsum(0)
        qg, kg, kn = q[:, h] * G.exp(), k[:, h] * G.exp(), k[:, h] * (-G).exp()
        b = beta[:, h, None]
        A = (b * (kg @ kn.T)).tril(-1)
        inverse = torch.linalg.inv(torch.eye(len(A), dtype=F64) + A)
        new = inverse @ (b * (v[:, h] - kg @ state[h]))
        o[:, h] = scale * (qg @ state[h] + (qg @ kn.T).tril() @ new)
        final[h] = G[-1].exp()[:, None] * state[h] + (k[:, h] * (G[-1] - G).exp()).T @ new
    return o, final


@pytest.mark.parametrize("oracle", [kda_by_products, kda_by_chunk])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_kda_against_closed_forms(oracle, T):
    x = kda_inputs(T)
    o, state = recurrence.kda_steps(**x, scale=0.7, dtype=F64)
    o_ref, state_ref = oracle(**x, scale=0.7)
    assert rel_error(o, o_ref) < 1e-12 and rel_error(state, state_ref) < 1e-12
    o, state = recurrence.kda_steps(**x, scale=0.7)
    assert o.dtype == state.dtype == torch.float32
    assert rel_error(o, o_ref) < 1e-6 and rel_error(state, state_ref) < 1e-6


@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 4), (3, 12)])
def test_kda_gva_reads_key_head_by_index(H, HV):
    x = kda_inputs(5, H=H, HV=HV)
    o, state = recurrence.kda_steps(**x, scale=1.0, dtype=F64)
    o_ref, state_ref = kda_by_products(**x, scale=1.0)
    assert rel_error(o, o_ref) < 1e-12 and rel_error(state, state_ref) < 1e-12


def test_kda_beta_per_channel():
    x = kda_inputs(4)
    wide = x | {"beta": x["beta"].unsqueeze(-1).expand(-1, -1, 3).clone()}
    for a, b in zip(
        recurrence.kda_steps(**x, scale=1.0), recurrence.kda_steps(**wide, scale=1.0), strict=True
    ):
        assert same_bits(a, b)
    wide["beta"][..., 1] = 0
    o, _ = recurrence.kda_steps(**wide, scale=1.0, dtype=F64)
    o_ref, _ = recurrence.kda_steps(**x, scale=1.0, dtype=F64)
    assert rel_error(o[..., 0], o_ref[..., 0]) < 1e-12
    assert rel_error(o[..., 1], o_ref[..., 1]) > 0.1


def test_kda_rank_one_keys_with_beta_two():
    """Repeated unit keys and beta = 2: the error operator reflects, S^T k alternates exactly."""
    T, K = 40, 4
    key = torch.full((K,), 0.5, dtype=F64)
    k = key.expand(T, 1, K)
    v = torch.ones(T, 1, 2, dtype=F64)
    o, _ = recurrence.kda_steps(
        k, k, v, torch.zeros(T, 1, K), torch.full((T, 1), 2.0), None, 1.0, dtype=F64
    )
    expected = torch.tensor([2.0, 0.0], dtype=F64).repeat(T // 2)
    assert torch.allclose(o[:, 0, 0], expected, atol=1e-12)


def test_kda_mask_forgets_everything_before_it():
    x = kda_inputs(6)
    x["g"][3] = -1000.0
    o, state = recurrence.kda_steps(**x, scale=1.0, dtype=F64)
    tail = {n: t[3:] for n, t in x.items() if n != "state"}
    o_tail, state_tail = recurrence.kda_steps(**tail, state=None, scale=1.0, dtype=F64)
    assert torch.isfinite(o).all()
    assert rel_error(o[3:], o_tail) < 1e-14 and rel_error(state, state_tail) < 1e-14


def lightning_inputs(T, H=3, K=5, V=4, lead=(), seed=1):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*lead, *shape, generator=gen, dtype=F64)

    return {
        "q": randn(T, H, K),
        "k": randn(T, H, K),
        "v": randn(T, H, V),
        "g_gamma": -torch.rand(H, generator=gen, dtype=F64),
        "state": randn(H, K, V),
    }


def lightning_by_matrix(q, k, v, g_gamma, state, scale):
    """o = scale [ e^{g (t+1)} q S0 + sum_{j <= t} e^{g (t-j)} (q_t . k_j) v_j ]."""
    T = q.shape[0]
    t = torch.arange(T, dtype=F64)
    ages = t[:, None] - t
    o, final = torch.zeros_like(v), torch.zeros_like(state)
    for h in range(q.shape[1]):
        gamma = g_gamma[h].exp()
        decay = torch.where(ages >= 0, gamma ** ages.clamp(min=0), 0.0)
        fresh = ((q[:, h] @ k[:, h].T) * decay) @ v[:, h]
        o[:, h] = scale * (fresh + gamma ** (t[:, None] + 1) * (q[:, h] @ state[h]))
        left = gamma ** (T - 1 - t)
        final[h] = gamma**T * state[h] + (k[:, h] * left[:, None]).T @ v[:, h]
    return o, final


@pytest.mark.parametrize("T", [1, 2, 11])
def test_lightning_against_closed_form(T):
    x = lightning_inputs(T)
    o, state = recurrence.lightning_steps(**x, scale=0.3, dtype=F64)
    o_ref, state_ref = lightning_by_matrix(**x, scale=0.3)
    assert rel_error(o, o_ref) < 1e-12 and rel_error(state, state_ref) < 1e-12
    o, state = recurrence.lightning_steps(**x, scale=0.3)
    assert o.dtype == state.dtype == torch.float32
    assert rel_error(o, o_ref) < 1e-6 and rel_error(state, state_ref) < 1e-6


CALLS = {
    "kda": (recurrence.kda_steps, kda_inputs),
    "lightning": (recurrence.lightning_steps, lightning_inputs),
}
family = pytest.mark.parametrize(("steps", "inputs"), CALLS.values(), ids=CALLS.keys())


@family
def test_batch_is_the_sequences_one_by_one(steps, inputs):
    x = inputs(7, lead=(3,))
    o, state = steps(**x, scale=1.0, dtype=F64)
    for b in range(3):
        one = {n: t if n == "g_gamma" else t[b] for n, t in x.items()}
        o_b, state_b = steps(**one, scale=1.0, dtype=F64)
        assert rel_error(o[b], o_b) < 1e-14 and rel_error(state[b], state_b) < 1e-14


@family
def test_no_state_is_a_zero_state(steps, inputs):
    x = inputs(4)
    zero = x | {"state": torch.zeros_like(x["state"])}
    for a, b in zip(steps(**x | {"state": None}, scale=1.0), steps(**zero, scale=1.0), strict=True):
        assert same_bits(a, b)


@family
def test_no_tokens(steps, inputs):
    x = {n: t.float() for n, t in inputs(0).items()}
    before = x["state"].clone()
    o, state = steps(**x, scale=1.0)
    assert o.shape == x["v"].shape and o.dtype == torch.float32
    assert same_bits(state, before)
    assert state.data_ptr() != x["state"].data_ptr()
    _, state = steps(**x | {"state": None}, scale=1.0)
    assert same_bits(state, torch.zeros_like(before))


@family
def test_inputs_stay_as_they_were(steps, inputs):
    x = {n: t.float() for n, t in inputs(5).items()}
    before = {n: t.clone() for n, t in x.items()}
    steps(**x, scale=1.0)
    assert all(same_bits(x[n], before[n]) for n in x)


@family
def test_two_halves_are_the_whole(steps, inputs):
    x = inputs(9)
    o, state = steps(**x, scale=1.0, dtype=F64)
    first = {n: t[:4] if n not in ("state", "g_gamma") else t for n, t in x.items()}
    second = {n: t[4:] if n not in ("state", "g_gamma") else t for n, t in x.items()}
    o_first, middle = steps(**first, scale=1.0, dtype=F64)
    o_second, last = steps(**second | {"state": middle}, scale=1.0, dtype=F64)
    assert rel_error(torch.cat([o_first, o_second]), o) < 1e-14
    assert rel_error(last, state) < 1e-14


@family
def test_gradients(steps, inputs):
    x = {n: t.requires_grad_() for n, t in inputs(4).items()}
    names = list(x)

    def f(*tensors):
        return steps(**dict(zip(names, tensors, strict=True)), scale=0.5, dtype=F64)

    assert torch.autograd.gradcheck(f, tuple(x.values()))


@family
def test_recording_gradients_changes_no_bit(steps, inputs):
    x = {n: t.float() for n, t in inputs(6).items()}
    plain = steps(**x, scale=0.5)
    recorded = steps(**{n: t.requires_grad_() for n, t in x.items()}, scale=0.5)
    assert all(r.requires_grad for r in recorded)
    assert all(same_bits(p, r.detach()) for p, r in zip(plain, recorded, strict=True))
    with torch.no_grad():
        assert not any(r.requires_grad for r in steps(**x, scale=0.5))


@family
def test_precision_settings_change_no_bit(steps, inputs):
    """Matrix products would come out in bfloat16 here."""
    x = {n: t.float() for n, t in inputs(6, K=64, V=32).items()}
    plain = steps(**x, scale=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = steps(**x, scale=0.5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        medium = steps(**x, scale=0.5)
    finally:
        torch.set_float32_matmul_precision(before)
    for p, c, m in zip(plain, cast, medium, strict=True):
        assert same_bits(p, c) and same_bits(p, m)


@family
def test_low_precision_inputs_are_widened_and_not_rounded(steps, inputs):
    x = {n: t.to(torch.bfloat16) for n, t in inputs(5).items()}
    wide = {n: t.to(F64) for n, t in x.items()}
    for a, b in zip(steps(**x, scale=1.0), steps(**wide, scale=1.0), strict=True):
        assert a.dtype == torch.float32 and same_bits(a, b)


@family
def test_strided_inputs(steps, inputs):
    x = {n: t.float() for n, t in inputs(5).items()}
    views = {n: torch.stack([t, torch.full_like(t, math.nan)], -1)[..., 0] for n, t in x.items()}
    for a, b in zip(steps(**x, scale=1.0), steps(**views, scale=1.0), strict=True):
        assert rel_error(a, b) < 1e-6


@family
def test_fullgraph_compile(steps, inputs):
    x = {n: t.float() for n, t in inputs(3).items()}
    compiled = torch.compile(lambda **y: steps(**y, scale=0.5), fullgraph=True, backend="eager")
    for a, b in zip(compiled(**x), steps(**x, scale=0.5), strict=True):
        assert same_bits(a, b)


def test_l2_normalise():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]])
    y = recurrence.l2_normalise(x)
    assert torch.allclose(y[0], torch.tensor([0.6, 0.8]))
    assert torch.equal(y[1], torch.zeros(2))
    # 1e-6 inside the root: 1e-3 / sqrt(1e-6 + 1e-6).
    assert y[2, 0].item() == pytest.approx(2**-0.5, rel=1e-6)
    assert recurrence.l2_normalise(x.bfloat16()).dtype == torch.float32
    assert recurrence.l2_normalise(x, 0.0, dtype=F64)[2, 0].item() == pytest.approx(1.0)


def test_lightning_log_decay():
    g = recurrence.lightning_log_decay(4, 3, 12)
    assert g.dtype == torch.float32
    expected = [-(8 / 4) * (1 - 3 / 12) * h for h in range(4)]
    assert torch.allclose(g, torch.tensor(expected), rtol=1e-6)
    assert g[0] == 0.0
    assert recurrence.lightning_log_decay(1, 0, 1).tolist() == [0.0]
    assert recurrence.lightning_log_decay(3, 0, 2).device.type == "cpu"
    assert recurrence.lightning_log_decay(3, 0, 2, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, 1), "heads: 0; must be positive"),
        ((4, 0, 0), "num_layers: 0; must be positive"),
        ((4, 12, 12), r"layer_idx: 12; must be in \[0, 12\)"),
        ((4, -1, 12), r"layer_idx: -1; must be in \[0, 12\)"),
    ],
)
def test_lightning_log_decay_refuses(arguments, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        recurrence.lightning_log_decay(*arguments)
