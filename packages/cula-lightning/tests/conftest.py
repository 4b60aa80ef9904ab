"""An oracle for Lightning Attention: the quadratic form in float64, with no code of the package.

With the log decay g of a head and the state S before the first token (i, j from 0):
o_i = scale (sum_{j <= i} e^(g (i - j)) (q_i . k_j) v_j + e^(g (i + 1)) S^T q_i), and after T tokens
S <- e^(g T) S + sum_j e^(g (T - 1 - j)) k_j v_j^T.
"""

from types import SimpleNamespace

import pytest
import torch


def _state_after(k, v, g, S):
    """k [T, HV, K], v [T, HV, V], g [HV], S [HV, K, V]."""
    T = k.shape[0]
    weights = (g[:, None] * (T - 1 - torch.arange(T))).exp()  # [HV, T]
    return (g * T).exp()[:, None, None] * S + torch.einsum("ht,thk,thv->hkv", weights, k, v)


def run(q, k, v, g_gamma, *, lengths=None, initial=None, scale=None, every=None):
    """Lightning Attention of a batch.

    `initial` is K-first [N, HV, K, V]; `lengths` are those of packed sequences. Returns
    o [B, T, HV, V], final [N, HV, K, V] and kept: per sequence the K-first states every so many
    tokens.
    """
    shape, K = v.shape, q.shape[-1]
    lengths = [shape[1]] * shape[0] if lengths is None else lengths
    q, k, v = (x.double().flatten(0, 1) for x in (q, k, v))
    g = g_gamma.double()
    HV = g.shape[0]
    heads = torch.arange(HV) // (HV // q.shape[1])
    q, k = q[:, heads], k[:, heads]
    scale = K**-0.5 if scale is None else scale
    outputs, finals, kept = [v[:0]], [], []
    start = 0
    for n, T in enumerate(lengths):
        qn, kn, vn = (x[start : start + T] for x in (q, k, v))
        S = v.new_zeros(HV, K, shape[-1]) if initial is None else initial[n].double()
        i = torch.arange(T)
        distance = (i[:, None] - i).clamp(min=0)
        decay = (g[:, None, None] * distance).exp().tril()
        scores = torch.einsum("ihk,jhk->hij", qn, kn) * decay
        past = (g[:, None] * (i + 1)).exp()  # [HV, T]
        o = torch.einsum("hij,jhv->ihv", scores, vn)
        o = o + torch.einsum("hi,ihk,hkv->ihv", past, qn, S)
        outputs.append(scale * o)
        finals.append(_state_after(kn, vn, g, S))
        steps = range(every, T + 1, every) if every else ()
        kept.append([_state_after(kn[:step], vn[:step], g, S) for step in steps])
        start += T
    final = torch.stack(finals) if finals else v.new_zeros(0, HV, K, shape[-1])
    return SimpleNamespace(o=torch.cat(outputs).view(shape), final=final, kept=kept)


@pytest.fixture(scope="session")
def oracle():
    return run
