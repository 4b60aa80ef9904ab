"""Lightning Attention, one to a few tokens a step.

    S <- e^g S + k v^T;   o = scale S^T q
Per value channel: o = scale (e^g s.q + v k.q), and the row becomes e^g s + v k.
"""

from cutlass import Float32

from cula.common.cute import math
from cula.decode.kernels.decode import DecodeKernel, fake, row


class LightningDecode(DecodeKernel):
    """`config`: a LightningDecodeConfig. The decay is one number per head."""

    channel_decay = False

    def fake_gates(self, B, T, HV) -> tuple:
        return (fake("fp32", (HV,)), None, None, None)

    def gate(self, mG, mBeta, mA, mBias, b, hv, lower_bound):
        return LightningGate(mG[hv])

    def step(self, rS, shared, token, gate, scale, thread):
        """One token: updates rS, returns the outputs of the thread's value channels."""
        tile = self.tile
        _, _, kq, _ = shared.totals(token)
        k = tile.gather(row(shared.k, token), thread)
        q = tile.gather(row(shared.q, token), thread)
        o = []
        for j in range(tile.v_per_thread):
            v, sq = shared.v[token, tile.v_of(thread, j)], Float32(0.0)
            for i in range(tile.k_per_thread):
                s = rS[j, i] * gate.decay
                sq = sq + s * q[i]
                rS[j, i] = s + v * k[i]
            o.append((math.group_sum(sq, 8) + v * kq) * scale)
        return o


class LightningGate:
    """A head's decay; nothing per token."""

    def __init__(self, g):
        self.decay = math.decay(Float32(g))

    def fetch(self, t, channel):
        return ()

    def publish(self, shared, live, token, channel, raw):
        return Float32(0.0)
