"""The kernels' algorithm with their roundings, in plain PyTorch: is it accurate enough at all?

One head, one sequence, whole chunks of 64 tokens. What is rounded, and to what, is what the
kernels' DESIGN.md says; everything else is float64. Whether the kernels do that is for the
emulated tests.
"""

import pytest
import torch

from cula.common.recurrence import kda_steps
from cula.common.testing import rel_error

CHUNK, BLOCK, D = 64, 16, 128


def half(x):
    return x.half().double()


def bfloat(x):
    return x.bfloat16().double()


def blocks_of(x):
    return x.unflatten(0, (-1, BLOCK))


def vectors(k, q, a):
    """Of blocks of 16 tokens: kf, qf, kb by products of halves, level by level."""
    kb = half(k)
    kf, qf = half(kb * half(a)), half(half(q) * half(a))
    levels = []
    L = 1
    while L < BLOCK:
        levels.append((L, half(kb), kf, qf))
        totals = half(a.unflatten(0, (-1, L)).prod(1))
        other = totals.view(-1, 2, D).flip(1).reshape(-1, D).repeat_interleave(L, 0)
        upper = (torch.arange(len(a)) // L % 2 == 1)[:, None]
        kb = torch.where(upper, kb, half(kb * other))
        kf = torch.where(upper, half(kf * other), kf)
        qf = torch.where(upper, half(qf * other), qf)
        L *= 2
    return levels, kf, qf, kb


def scores(k, q, a, exact_diagonal):
    """sum_d x_i k_j e^(G_i - G_j) for j < i, of keys and of queries, and the blocks' vectors."""
    levels, kf, qf, kb = vectors(k, q, a)
    row, column = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None]
    A, P = torch.zeros(2, CHUNK, CHUNK).double()
    for L, kb_L, kf_L, qf_L in levels:
        here = (row // (2 * L) == column // (2 * L)) & (row // L % 2 == 1) & (column // L % 2 == 0)
        A, P = torch.where(here, kf_L @ kb_L.T, A), torch.where(here, qf_L @ kb_L.T, P)
    totals = blocks_of(a).prod(1)
    for i in range(4):
        for j in range(i):
            r, c = (slice(BLOCK * n, BLOCK * (n + 1)) for n in (i, j))
            between = half(totals[j + 1 : i].prod(0))
            A[r, c], P[r, c] = kf[r] @ half(kb[c] * between).T, qf[r] @ half(kb[c] * between).T
    return A, P + torch.diag(exact_diagonal), totals, kf, qf, kb


def inverse(A, beta):
    """T by exact inverses of 16 x 16 blocks, and merges of halves."""
    T = torch.zeros(CHUNK, CHUNK).double()
    part = [slice(BLOCK * n, BLOCK * (n + 1)) for n in range(4)]
    X = [torch.linalg.inv(torch.eye(BLOCK).double() + A[p, p].tril(-1)) for p in part]
    for j in range(4):
        T[part[j], part[j]] = half(X[j] * beta[part[j]])
        for i in range(j + 1, 4):
            total = sum(half(-A[part[i], part[m]]) @ T[part[m], part[j]] for m in range(j, i))
            T[part[i], part[j]] = half(half(X[i]) @ half(total))
    return half(T)


def records_of(k, q, g, beta, scale):
    """What `prep` leaves of each chunk: Kg, Qg, Kr, T, Aqk, decay."""
    records = []
    for start in range(0, len(k), CHUNK):
        now = slice(start, start + CHUNK)
        kc, qc, a, b = k[now], q[now] * scale, g[now].exp().float().double(), beta[now]
        A, P, totals, kf, qf, kb = scores(kc, qc, a, (kc * qc).sum(-1))
        T = inverse(b[:, None] * A, b)
        before = torch.stack([totals[:n].prod(0) for n in range(4)]).repeat_interleave(BLOCK, 0)
        after = torch.stack([totals[n + 1 :].prod(0) for n in range(4)]).repeat_interleave(BLOCK, 0)
        Kg, Qg, Kr = half(kf * before), half(qf * before), half(kb * after)
        records.append((Kg, Qg, Kr, T, half(P), totals.prod(0)))
    return records


def walk(records, v, S):
    """(o, S) after the records' chunks, from S."""
    outputs = []
    for (Kg, Qg, Kr, T, P, decay), values in zip(records, v.split(CHUNK), strict=True):
        X = half(values - Kg @ half(S))
        new = half(T @ X)
        outputs.append(bfloat(Qg @ half(S) + P @ new))
        S = decay[:, None] * S + Kr.T @ new
    return torch.cat(outputs), S


def chunked(q, k, v, g, beta, scale):
    """(o, final S) with the roundings of the kernels."""
    return walk(records_of(k, q, g, beta, scale), v, torch.zeros(D, D).double())


def cut(q, k, v, g, beta, scale, chunks):
    """The same with segments of so many chunks: M and b of each, states between them, outputs."""
    records, S, outputs = records_of(k, q, g, beta, scale), torch.zeros(D, D).double(), []
    for i in range(0, len(records), chunks):
        these, values = records[i : i + chunks], v[i * CHUNK : (i + chunks) * CHUNK]
        o, final = walk(these, values, S)
        outputs.append(o)
        _, b = walk(these, values, torch.zeros_like(S))
        _, M = walk(these, torch.zeros_like(values), torch.eye(D).double())
        S = (M.float() @ S.float() + b.float()).double()
    return torch.cat(outputs), final


KINDS = {
    "bounded": {},
    "lower bound": {"g": lambda x: torch.full_like(x, -5.0)},
    "no decay": {"g": torch.zeros_like},
    "slow": {"g": lambda x: -0.02 * x.abs()},
    "slow, softplus": {"g": lambda x: -torch.nn.functional.softplus(x - 4.0)},
    "strong": {"g": lambda x: -8.0 * x.abs()},
    "masked": {"g": lambda x: torch.where(torch.rand(len(x), 1) < 0.03, -1000.0, -0.02)},
    "correlated": {"g": lambda x: -0.02 * x.abs(), "noise": 0.1},
    "correlated, no decay": {"g": torch.zeros_like, "noise": 1.0},
    "beta to 2": {"g": lambda x: -0.02 * x.abs(), "beta": 2.0},
    "beta to 2, no decay": {"g": torch.zeros_like, "beta": 2.0},
    "repeated": {"g": lambda x: -0.002 * x.abs(), "noise": 0.0},
}


def make(kind: str, tokens: int = 192):
    torch.manual_seed(3)
    how = KINDS[kind]
    q, k, v, x = (torch.randn(tokens, D).double() for _ in range(4))
    if "noise" in how:
        k = torch.randn(D).double() + how["noise"] * k
    q, k, v = (bfloat(y) for y in (q, k, v))
    q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    g = how.get("g", lambda x: -5.0 * torch.sigmoid(x))(x).expand(tokens, D).float().double()
    return q, k, v, g, how.get("beta", 1.0) * torch.rand(tokens).double()


def exact(q, k, v, g, beta, scale):
    head = [x[:, None] for x in (q, k, v, g, beta)]
    o, S = kda_steps(*head, torch.zeros(1, D, D).double(), scale, dtype=torch.float64)
    return o[:, 0], S[0]


@pytest.mark.parametrize("kind", KINDS)
def test_roundings_stay_within_tolerance(kind: str) -> None:
    given = make(kind)
    o, S = exact(*given, D**-0.5)
    got_o, got_S = chunked(*given, D**-0.5)
    assert rel_error(got_o, o) <= 5e-3
    assert rel_error(got_S, S) <= 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_no_further_from_the_truth(kind: str) -> None:
    """Where nothing decays, too: M's rounding is that of the state which it replaces."""
    given = make(kind, 8 * CHUNK)
    truth = exact(*given, D**-0.5)
    whole, segments = chunked(*given, D**-0.5), cut(*given, D**-0.5, 1)
    for right, one, other in zip(truth, whole, segments, strict=True):
        assert rel_error(other, right) <= 1.1 * rel_error(one, right) + 1e-5


def test_steps_of_two_on_repeated_keys() -> None:
    """Every step reflects one direction: the sums over T alternate, and every rounding grows."""
    q, k, v, g, beta = make("repeated", 192)
    given = (q, k, v, g, torch.full_like(beta, 2.0))
    (o, S), (got_o, got_S) = exact(*given, D**-0.5), chunked(*given, D**-0.5)
    assert rel_error(got_o, o) <= 5e-2
    assert rel_error(got_S, S) <= 5e-2
