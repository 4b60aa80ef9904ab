"""Kimi Delta Attention, one to a few tokens a step.

    S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q
Per value channel, with s the state's row after the decay: one pass gives s.k and s.q, then delta = beta (v - s.k),
o = scale (s.q + delta k.q) and the row becomes s + delta k.
"""

import cutlass.cute as cute
from cutlass import Float32

from cula.common.cute import math
from cula.decode.kernels.decode import DecodeKernel, fake, row, store_if


class KdaDecode(DecodeKernel):
    """`config`: a KdaDecodeConfig."""

    channel_decay = True

    def fake_gates(self, B, T, HV) -> tuple:
        c = self.config
        bias = ((cute.sym_int(),), ()) if c.flat_bias else ((HV,), (c.K,))
        return (
            fake(c.g, (B, T, HV), (c.K,)),
            fake(c.beta_dtype, (B, T, HV)),
            fake(c.A_log, (HV,)),
            fake(c.dt_bias, *bias),
        )

    def gate(self, mG, mBeta, mA, mBias, b, hv, lower_bound):
        return KdaGate(
            self,
            mG[b, None, hv, None],
            mBeta[b, None, hv],
            None if mA is None else mA[hv],
            None if mBias is None else mBias.iterator + hv * self.config.K,
            lower_bound,
        )

    def step(self, rS, shared, token, gate, scale, thread):
        """One token: updates rS, returns the outputs of the thread's value channels."""
        tile = self.tile
        kk, qq, kq, beta = shared.totals(token)
        k_scale, q_scale = Float32(1.0), scale
        if self.config.l2norm:
            k_scale = math.rsqrt(kk + Float32(1e-6))
            q_scale = math.rsqrt(qq + Float32(1e-6)) * scale
        kq = kq * k_scale * q_scale
        k = [x * k_scale for x in tile.gather(row(shared.k, token), thread)]
        q = [x * q_scale for x in tile.gather(row(shared.q, token), thread)]
        decay = tile.gather(row(shared.decay, token), thread)
        o = []
        for j in range(tile.v_per_thread):
            sk, sq = Float32(0.0), Float32(0.0)
            for i in range(tile.k_per_thread):
                s = rS[j, i] * decay[i]
                rS[j, i] = s
                sk, sq = sk + s * k[i], sq + s * q[i]
            sk, sq = math.group_sum(sk, 8), math.group_sum(sq, 8)
            delta = beta * (shared.v[token, tile.v_of(thread, j)] - sk)
            o.append(sq + delta * kq)
            for i in range(tile.k_per_thread):
                rS[j, i] = rS[j, i] + delta * k[i]
        return o


class KdaGate:
    """From a head's raw gates and beta to a decay e^g per channel and a beta per token."""

    def __init__(self, kernel, gG, gBeta, A, bias, lower_bound):
        self.kernel, self.gG, self.gBeta, self.A = kernel, gG, gBeta, A
        self.bias, self.lower_bound = bias, lower_bound

    def fetch(self, t, channel):
        bias = (
            0.0
            if self.bias is None
            else cute.make_tensor(self.bias + channel, cute.make_layout(1))[0]
        )
        return self.gG[t, channel], Float32(bias), self.gBeta[t]

    def publish(self, shared, live, token, channel, raw):
        g, bias, beta = raw
        store_if(live, shared.decay, token, channel, math.decay(self.log_decay(Float32(g) + bias)))
        return self.beta(Float32(beta))

    def log_decay(self, x):
        form = self.kernel.config.gate
        if form == "given":
            return x
        if form == "softplus":
            return -math.exp(Float32(self.A)) * math.softplus(x)
        if form == "bounded":
            x = math.exp(Float32(self.A)) * x
        return self.lower_bound * math.sigmoid(x)

    def beta(self, x):
        form = self.kernel.config.beta
        if form == "given":
            return x
        return math.sigmoid(x) * Float32(2.0 if form == "sigmoid2" else 1.0)
