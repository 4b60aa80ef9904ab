"""Lightning Attention, one to a few tokens a step.

    S <- e^g S + k v^T;   o = scale S^T q

Per value channel: o = scale (e^g s.q + v k.q), and the row becomes e^g s + v k.
"""

from cutlass import Float32

from cula.common.cute import math
from cula.decode.kernels.decode import DecodeKernel, fake


class LightningDecode(DecodeKernel):
    """`config`: a LightningDecodeConfig. The decay is one number per head."""

    channel_decay = False

    def fake_gates(self, B, T, HV) -> tuple:
        return (fake("fp32", (HV,)), None, None, None)

    def gate(self, mG, mBeta, mA, mBias, b, hv, lower_bound):
        return LightningGate(mG[hv])

    def step(self, rS, shared, token, gate, scale, thread):
        """One token: updates rS. Returns one of the thread's rows, its output, and whether this
        lane stores it."""
        tile = self.tile
        _, _, kq, _ = shared.totals(token)
        rows = range(tile.v_per_thread)
        v = [shared.v[token, tile.v_of(thread, j)] for j in rows]
        sq = [Float32(0.0) for _ in rows]
        for piece in tile.pieces():
            k = tile.gather(shared.k, token, thread, piece)
            q = tile.gather(shared.q, token, thread, piece)
            for j in rows:
                for e, i in enumerate(piece):
                    s = rS[j, i] * gate.decay
                    sq[j] = sq[j] + s * q[e]
                    rS[j, i] = s + v[j] * k[e]
        lane, span = thread % tile.lanes, tile.lanes // tile.v_per_thread
        j = lane // span
        o = math.scattered_sums(sq, lane, tile.lanes) + shared.v[token, tile.v_of(thread, j)] * kq
        return j, o * scale, lane % span == 0


class LightningGate:
    """A head's decay; nothing per token."""

    def __init__(self, g):
        self.decay = math.decay(Float32(g))

    def fetch(self, t, channel):
        return ()

    def publish(self, shared, live, token, channel, raw):
        return Float32(0.0)
