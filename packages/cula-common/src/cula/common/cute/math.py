"""Float32 device mathematics with stated errors.

Built on the approximate special functions (ex2, lg2, rcp, rsqrt: about 2^-22 relative), with
polynomials where an approximation's error would add up: a decay factor multiplies a state thousands
of times, so its error near 1 matters.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_

LOG2E = 1.4426950408889634


def select(condition, x, y) -> Float32:
    """`x` where the condition holds, else `y`, without a branch."""
    return Float32(select_(condition, Float32(x), Float32(y)))


def horner(x, coefficients) -> Float32:
    """Polynomial in x, highest coefficient first."""
    total = Float32(coefficients[0])
    for c in coefficients[1:]:
        total = total * x + Float32(c)
    return total


def exp(x) -> Float32:
    """e^x to about 2^-21 relative."""
    return cute.math.exp2(x * Float32(LOG2E), fastmath=True)


def decay(g) -> Float32:
    """e^g for a log decay g, rounded once for slow decays.

    A slow decay is applied to the same state for about 1/|g| steps, so an error of ex2.approx's
    size would grow to parts in 10^4. For |g| < 1/2 the Taylor sum of e^g - 1 is below 1e-8 off and
    only the final addition rounds.
    """
    series = horner(g, [1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0]) * g
    return select(cute.arch.fmax(g, -g) < Float32(0.5), series + Float32(1.0), exp(g))


def reciprocal(x) -> Float32:
    """1/x to about 2^-22 relative."""
    return cute.arch.rcp_approx(x)


def sigmoid(x) -> Float32:
    """1 / (1 + e^-x); exactly 0 where e^-x overflows."""
    return reciprocal(Float32(1.0) + exp(-x))


def softplus(x) -> Float32:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), relative error about 2^-21 everywhere.

    log1p(e) for 0 <= e <= 1 is 2 artanh(z), z = e / (2 + e) <= 1/3: a short odd series, where log2
    of 1 + e would lose the digits of a small e.
    """
    magnitude = cute.arch.fmax(x, -x)
    e = exp(-magnitude)
    z = e * reciprocal(e + Float32(2.0))
    z2 = z * z
    series = horner(z2, [2 / 15, 2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0]) * z
    return cute.arch.fmax(x, Float32(0.0)) + series


def rsqrt(x) -> Float32:
    """1 / sqrt(x) to about 2^-22 relative."""
    return cute.math.rsqrt(x, fastmath=True)


def group_sum(x, lanes: int) -> Float32:
    """Sum over groups of `lanes` neighbouring lanes; every lane of a group gets the same bits."""
    return cute.arch.warp_reduction_sum(x, threads_in_group=lanes)


def scattered_sums(values: list, lane, lanes: int) -> Float32:
    """Sums of several values over groups of `lanes` lanes, one sum a lane.

    Lane l of a group gets the sum of `values[l // (lanes // len(values))]`. Half the values move in
    each step, so n sums cost n - 1 shuffles and a few, where n times `group_sum` costs
    n log2(lanes).

    Args:
        values: a power of two of them, at most `lanes`.
        lane: this lane's index, in the warp or the group.
    """
    offset = lanes // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        values = [
            select(upper, high, low)
            + cute.arch.shuffle_sync_bfly(select(upper, low, high), offset=offset)
            for low, high in zip(values[:half], values[half:], strict=True)
        ]
        offset //= 2
    total = values[0]
    while offset > 0:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        offset //= 2
    return total
