"""Kimi Delta Attention, one to a few tokens a step.

    S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q

Per value channel, with s the state's row after the decay: one pass gives s.k and s.q, then
delta = beta (v - s.k), o = scale (s.q + delta k.q) and the row becomes s + delta k.
"""

import cutlass.cute as cute
from cutlass import Float32

from cula.common.cute import math
from cula.decode.kernels.decode import DecodeKernel, fake
from cula.decode.kernels.staging import store_if


class KdaDecode(DecodeKernel):
    """`config`: a KdaDecodeConfig."""

    channel_decay = True

    def fake_gates(self, B, T, HV) -> tuple:
        c = self.config
        bias = (cute.sym_int(),) if c.flat_bias else (HV, c.K)
        return (
            fake(c.g, (B, T, HV, c.K)),
            fake(c.beta_dtype, (B, T, HV)),
            fake(c.A_log, (HV,)),
            fake(c.dt_bias, bias),
        )

    def gate(self, mG, mBeta, mA, mBias, b, hv, lower_bound):
        return KdaGate(
            self,
            mG[b, None, hv, None],
            mBeta[b, None, hv],
            None if mA is None else mA[hv],
            self.head_bias(mBias, hv),
            lower_bound,
        )

    def head_bias(self, mBias, hv):
        """A head's biases (K), of (HV, K) or of (HV * K), in any strides."""
        if mBias is None:
            return None
        if not self.config.flat_bias:
            return mBias[hv, None]
        return cute.domain_offset((hv * self.config.K,), mBias)

    def step(self, rS, shared, token, gate, scale, thread):
        """One token: updates rS. Returns one of the thread's rows, its output, and whether this
        lane stores it."""
        tile = self.tile
        kk, qq, kq, beta = shared.totals(token)
        # the norms' factors go onto the sums over K, not onto every entry of k and q
        k_scale, q_scale = Float32(1.0), scale
        if self.config.l2norm:
            k_scale = math.rsqrt(kk + Float32(1e-6))
            q_scale = math.rsqrt(qq + Float32(1e-6)) * scale
        rows = range(tile.v_per_thread)
        sk, sq = [Float32(0.0) for _ in rows], [Float32(0.0) for _ in rows]
        for piece in tile.pieces():
            k = tile.gather(shared.k, token, thread, piece)
            q = tile.gather(shared.q, token, thread, piece)
            decay = tile.gather(shared.decay, token, thread, piece)
            for j in rows:
                for e, i in enumerate(piece):
                    s = rS[j, i] * decay[e]
                    rS[j, i] = s
                    sk[j], sq[j] = sk[j] + s * k[e], sq[j] + s * q[e]
        # one sum a lane: of a row's pair of lanes, the first learns delta, the second the output
        lane = thread % tile.lanes
        sums = [x for pair in zip(sk, sq, strict=True) for x in pair]
        total, span = math.scattered_sums(sums, lane, tile.lanes), tile.lanes // len(sums)
        v = shared.v[token, tile.v_of(thread, lane // (2 * span))]
        delta = beta * (v - total * k_scale) * k_scale
        o = (total + cute.arch.shuffle_sync_bfly(delta, offset=span) * kq) * q_scale
        first = cute.arch.lane_idx() - lane
        deltas = [cute.arch.shuffle_sync(delta, first + 2 * span * j) for j in rows]
        for piece in tile.pieces():  # k is read again: keeping it would cost registers
            k = tile.gather(shared.k, token, thread, piece)
            for j in rows:
                for e, i in enumerate(piece):
                    rS[j, i] = rS[j, i] + deltas[j] * k[e]
        return lane // (2 * span), o, lane % (2 * span) == span


class KdaGate:
    """From a head's raw gates and beta to a decay e^g per channel and a beta per token."""

    def __init__(self, kernel, gG, gBeta, A, bias, lower_bound):
        self.kernel, self.gG, self.gBeta, self.A = kernel, gG, gBeta, A
        self.bias, self.lower_bound = bias, lower_bound

    def fetch(self, t, channel):
        bias = 0.0 if self.bias is None else self.bias[channel]
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
