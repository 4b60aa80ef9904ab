"""Decay factors e^g of a token's channels, for every form of gate.

Half a percent of error in a factor is half a percent in g; the forms below are good to a few parts
in 10^6 of g, and give exactly 1 for g = 0 and exactly 0 where g masks.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from cula.common.cute import math
from cula.kda.sm90 import ptx

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
LN2 = 0.6931471805599453


def factors_given(g) -> list:
    return [math.exp(x) for x in g]


def factors_softplus(g, bias, rate) -> list:
    """(1 + e^x)^-rate = 2^(-rate log2(1 + e^x)), x = g + bias."""
    found = []
    for x, b in zip(g, bias, strict=True):
        e = math.exp(x + b)
        # log2(1 + e) loses the digits of a small e, and e overflows where log2(1 + e) is x / ln 2
        small = math.horner(e, [1 / 3, -1 / 2, 1.0]) * e * Float32(math.LOG2E)
        power = math.select(e < Float32(1 / 64), small, ptx.log2(Float32(1.0) + e))
        power = math.select(x + b > Float32(64.0), (x + b) * Float32(math.LOG2E), power)
        found.append(cute.math.exp2(-rate * power, fastmath=True))
    return found


def factors_bounded(g, bias, rate, lower_bound) -> list:
    """e^(lower_bound sigmoid(rate x)), x = g + bias."""
    found = []
    for x, b in zip(g, bias, strict=True):
        found.append(math.exp(lower_bound * math.sigmoid(rate * (x + b))))
    return found


@dataclass(frozen=True)
class GateReader:
    """One warp's gates: the lane's two channels of 16 tokens, in each piece of 64 channels.

    address: of the lane's first channel of the block's first token. stride: bytes between tokens.
    valid: how many of the block's tokens exist.
    """

    config: object
    address: Int64
    stride: Int64
    valid: Int32
    rate: Float32
    lower_bound: Float32

    def load(self, piece: int) -> list:
        """The words of 16 tokens; zeros past the end."""
        dtype = DTYPES[self.config.gate_dtype]
        count = dtype.width // 16
        step = 64 * dtype.width // 8
        address = ptx.anew(self.address)  # the rows' addresses would wait in registers
        return [
            ptx.load_global_if(
                (row < self.valid),
                address + self.stride * Int64(row),
                piece * step,
                count,
            )
            for row in range(16)
        ]

    def factors(self, row: int, words, bias) -> list:
        """e^g of a token's two channels; 1 past the end."""
        if self.config.gate_dtype == "fp32":
            g = [word.bitcast(Float32) for word in words]
        else:
            g = ptx.unpack(words[0], self.config.gate_dtype)
        form = self.config.gate
        if form == "given":
            found = factors_given(g)
        elif form == "softplus":
            found = factors_softplus(g, bias, self.rate)
        else:  # without A_log ("sigmoid") the rate is 1
            found = factors_bounded(g, bias, self.rate, self.lower_bound)
        there = row < self.valid
        return [math.select(there, x, 1.0) for x in found]


def step_size(form: str, beta) -> Float32:
    """beta, final, from what the caller gave."""
    if form == "given":
        return beta
    return math.sigmoid(beta) * Float32(2.0 if form == "sigmoid2" else 1.0)
