"""Tokens on their way into shared memory: thread = channel, a few tokens at a time.

What all threads of a block need of a token is computed once here: the decay of each channel, beta,
and the sums over K that norms and outputs use.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cula.common.cute import math, vector


class Shared:
    """The tables in shared memory: a row of Float32 a token, and for each 32 channels of it the
    sums k.k, q.q, k.q, and beta."""

    def __init__(self, kernel, smem):
        self.kernel = kernel

        def rows(width):
            return smem.allocate_tensor(
                Float32, cute.make_layout((kernel.stage, width), stride=(width, 1)), 16
            )

        K = kernel.config.K
        self.q, self.k, self.v = rows(K), rows(K), rows(kernel.tile.rows)
        self.decay = rows(K) if kernel.channel_decay else None
        self.sums = rows(K // 32 * 4)

    def totals(self, token):
        """(k.k, q.q, k.q, beta) of a staged token."""
        parts = [
            vector.load_shared(self.sums[token, None].iterator + 4 * w, 4)
            for w in range(self.kernel.config.K // 32)
        ]
        sums = [sum(column[1:], column[0]) for column in zip(*parts, strict=True)]
        return (*sums[:3], parts[0][3])


@dataclass(frozen=True)
class TokenInputs:
    """A head's q, k and v, and how threads share the channels of a stage of tokens."""

    kernel: object
    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    t0: Int32
    v0: Int32
    thread: Int32

    def places(self, width):
        """This thread's places in a table of `stage` rows, pass by pass: (token, channel, whether
        there is such a place; None where every thread has one)."""
        size, threads = self.kernel.stage * width, self.kernel.tile.threads
        for start in range(0, size, threads):
            i = self.thread + start
            yield (
                i // width % self.kernel.stage,
                i % width,
                (i < size if start + threads > size else None),
            )

    def fetch(self, gate, first, count):
        """Raw values of the tokens from `first` on. Past the sequence's end the last token is read
        again and not used: loads without a branch can all be in flight at once."""

        def at(token):
            return self.t0 + cutlass.min(first + token, count - 1)

        channels = [
            (self.gQ[at(token), c], self.gK[at(token), c], gate.fetch(at(token), c))
            for token, c, _ in self.places(self.kernel.config.K)
        ]
        values = [
            self.gV[at(token), self.v0 + c] for token, c, _ in self.places(self.kernel.tile.rows)
        ]
        return channels, values

    def publish(self, gate, shared, tokens, first, count):
        """Computes what a token's threads need of each other and puts it into shared memory."""
        channels, values = tokens
        for (token, c, placed), (q, k, raw) in zip(
            self.places(self.kernel.config.K), channels, strict=True
        ):
            live = alive(self.kernel, placed, first + token, count)
            q, k = Float32(q), Float32(k)
            store_if(live, shared.q, token, c, q)
            store_if(live, shared.k, token, c, k)
            beta = gate.publish(shared, live, token, c, raw)
            for i, x in enumerate((k * k, q * q, k * q)):
                x = math.group_sum(x, 32)
                store_if(both(live, c % 32 == 0), shared.sums, token, c // 32 * 4 + i, x)
            store_if(both(live, c % 32 == 0), shared.sums, token, c // 32 * 4 + 3, beta)
        for (token, c, placed), v in zip(self.places(self.kernel.tile.rows), values, strict=True):
            live = alive(self.kernel, placed, first + token, count)
            store_if(live, shared.v, token, c, Float32(v))


def alive(kernel, placed, token, count):
    """Whether a staged place counts; None: always, known when compiling."""
    return placed if kernel.config.single else both(placed, token < count)


def both(a, b):
    return b if a is None else a & b


def store_if(condition, tensor, token, column, value):
    if condition is None:
        tensor[token, column] = value
    else:
        store_where(condition, tensor, token, column, value)


@cute.jit
def store_where(
    condition: cutlass.Boolean, tensor: cute.Tensor, token: Int32, column: Int32, value: Float32
):
    if condition:
        tensor[token, column] = value
