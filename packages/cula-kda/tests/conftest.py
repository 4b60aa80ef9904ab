"""An oracle for KDA: the chunked matrix form in float64, sharing no code with the package.

Over a chunk, with G the running sum of the log decay g and S the state before it:
A_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd) for j < i; T = (I + A)^-1 diag(beta);
V' = T (V - (K e^G) S); o = scale ((Q e^G) S + tril(Q K e^(G_i - G_j)) V');
S <- diag(e^G_C) S + (K e^(G_C - G))^T V'.
"""

from types import SimpleNamespace

import pytest
import torch

CHUNK = 16


def _sequence(q, k, v, g, beta, S, scale, every):
    """One sequence, tensors [T, HV, .], S [HV, K, V]: o, final S, the states every so often."""
    T = v.shape[0]
    outputs, kept = [torch.zeros_like(v[:0])], []
    for start in range(0, T, CHUNK):
        part = slice(start, min(start + CHUNK, T))
        qc, kc, vc, gc = (x[part].transpose(0, 1) for x in (q, k, v, g))  # [HV, C, .]
        bc = beta[part].T[..., None]
        G = gc.cumsum(1)
        C = G.shape[1]
        later = torch.ones(C, C, dtype=torch.bool).tril()
        difference = (G[:, :, None] - G[:, None]).masked_fill(~later[None, :, :, None], -torch.inf)
        decay = difference.exp()  # [HV, C, C, K]
        pairs = torch.einsum("hik,hjk,hijk->hij", kc, kc, decay)
        A = (bc * pairs).tril(-1)
        rhs = bc * (vc - (kc * G.exp()) @ S)
        V_new = torch.linalg.solve_triangular(
            torch.eye(C, dtype=A.dtype) + A, rhs, upper=False, unitriangular=True
        )
        scores = torch.einsum("hik,hjk,hijk->hij", qc, kc, decay)
        outputs.append((scale * ((qc * G.exp()) @ S + scores @ V_new)).transpose(0, 1))
        last = G[:, -1:]
        S = last.exp().mT * S + (kc * (last - G).exp()).mT @ V_new
        if every and (start + C) % every == 0:
            kept.append(S)
    return torch.cat(outputs), S, kept


def run(
    q,
    k,
    v,
    g,
    beta,
    *,
    lengths=None,
    initial=None,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    scale=None,
    use_gate_in_kernel=True,
    use_qk_l2norm_in_kernel=True,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    every=None,
):
    """KDA of a batch. `initial` is K-first [N, HV, K, V]; `lengths` are those of packed sequences.

    Returns o [B, T, HV, V], final [N, HV, K, V] and kept: per sequence the K-first states every so
    many tokens (a multiple of 16).
    """
    shape = v.shape
    lengths = [shape[1]] * shape[0] if lengths is None else lengths
    q, k, v, g, beta = (x.double().flatten(0, 1) for x in (q, k, v, g, beta))
    HV, K = g.shape[1:]
    if use_gate_in_kernel:
        x = g if dt_bias is None else g + dt_bias.double().view(HV, K)
        rate = 1.0 if A_log is None else A_log.double().exp()[:, None]
        if lower_bound is None:
            g = -rate * (x.clamp(min=0) + (-x.abs()).exp().log1p())
        else:
            g = lower_bound / (1 + (-rate * x).exp())
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) / (1 + (-beta).exp())
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    heads = torch.arange(HV) // (HV // q.shape[1])
    q, k = q[:, heads], k[:, heads]
    scale = K**-0.5 if scale is None else scale
    outputs, finals, kept = [], [], []
    start = 0
    for n, length in enumerate(lengths):
        part = slice(start, start + length)
        S = v.new_zeros(HV, K, v.shape[-1]) if initial is None else initial[n].double()
        o, S, states = _sequence(q[part], k[part], v[part], g[part], beta[part], S, scale, every)
        outputs.append(o)
        finals.append(S)
        kept.append(states)
        start += length
    final = torch.stack(finals) if finals else v.new_zeros(0, HV, K, v.shape[-1])
    o = torch.cat([v[:0], *outputs]).view(shape)
    return SimpleNamespace(o=o, final=final, kept=kept)


@pytest.fixture(scope="session")
def oracle():
    return run
