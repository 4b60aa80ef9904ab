"""Decay factors e^g of a token's channels, for every form of gate.

Half a percent of error in a factor is half a percent in g; the forms below are good to a few parts
in 10^6 of g, and give exactly 1 for g = 0 and exactly 0 where g masks.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cula.common.cute import math
from cula.kda.sm90 import ptx

LEAST_RATE, MOST_RATE = 1.2e-38, 1e30  # about the least number; what times a bias is finite


def given_factor():
    return lambda x, channel: math.exp(x)


def softplus_factor(bias, rate):
    """(1 + e^x)^-rate = 2^(-rate log2(1 + e^x)), x = g + bias."""
    offsets = [b * Float32(math.LOG2E) for b in bias]

    def factor(g, channel):
        x = g * Float32(math.LOG2E) + offsets[channel]  # of 2
        e = cute.math.exp2(x, fastmath=True)
        # log2(1 + e) loses the digits of a small e, and e overflows where log2(1 + e) is x
        small = math.horner(e, [1 / 3, -1 / 2, 1.0]) * e * Float32(math.LOG2E)
        power = math.select(e < Float32(1 / 64), small, ptx.log2(Float32(1.0) + e))
        power = math.select(x > Float32(90.0), x, power)
        return cute.math.exp2(-rate * power, fastmath=True)

    return factor


def bounded_factor(bias, rate, lower_bound):
    """e^(lower_bound sigmoid(rate x)), x = g + bias."""
    slope = -rate * Float32(math.LOG2E)
    offsets = [b * slope for b in bias]
    bound = lower_bound * Float32(math.LOG2E)

    def factor(g, channel):
        e = cute.math.exp2(g * slope + offsets[channel], fastmath=True)
        return cute.math.exp2(bound * math.reciprocal(Float32(1.0) + e), fastmath=True)

    return factor


@dataclass(frozen=True)
class GateReader:
    """One warp's gates: the lane's two channels of 16 tokens, in each piece of 64 channels.

    Gates of 16 bits come with the keys, into the warp's rows of `back`; those of 32 bits are read
    from memory. Past the end is what makes a factor of 1.

    address: of the lane's first channel of the block's first token. stride: bytes between tokens.
    valid: how many of the block's tokens exist. rate: e^A_log, neither 0 nor infinite, so that its
    product with an infinite gate or with a power of 0 is none of the other.
    """

    config: object
    warp: object
    address: Int64
    stride: Int64
    valid: Int32
    rate: Float32
    lower_bound: Float32

    @property
    def neutral(self) -> int:
        """A word of gates that decay nothing: 0, or where functions of gates decay, -infinity."""
        if self.config.gate == "given":
            return 0
        return {"bf16": 0xFF80FF80, "fp16": 0xFC00FC00, "fp32": 0xFF800000}[self.config.gate_dtype]

    def clear_past_end(self, pieces: int) -> None:
        """Of gates of 16 bits."""
        self.warp.fill_past_end(self.warp.back, self.valid, pieces, self.neutral)

    def load(self, piece: int) -> list:
        """The words of 16 tokens."""
        if self.config.gate_dtype != "fp32":
            return self.warp.gate_words(piece)
        address = ptx.anew(self.address)  # the rows' addresses would wait in registers
        return [
            ptx.load_global_if(
                (row < self.valid),
                address + self.stride * Int64(row),
                piece * 256,
                2,
                self.neutral,
            )
            for row in range(16)
        ]

    def factors(self, words: list, bias: list):
        """e^g of a token's two channels, as a function of the token; words: of `load`."""
        form, dtype = self.config.gate, self.config.gate_dtype
        if form == "given":
            factor = given_factor()
        elif form == "softplus":
            factor = softplus_factor(bias, self.rate)
        else:  # without A_log ("sigmoid") the rate is 1
            factor = bounded_factor(bias, self.rate, self.lower_bound)

        def of(row: int) -> list:
            if dtype == "fp32":
                g = [word.bitcast(Float32) for word in words[row]]
            else:
                g = ptx.unpack(words[row][0], dtype)
            return [factor(x, channel) for channel, x in enumerate(g)]

        return of


def step_size(form: str, beta) -> Float32:
    """beta, final, from what the caller gave."""
    if form == "given":
        return beta
    return math.sigmoid(beta) * Float32(2.0 if form == "sigmoid2" else 1.0)
