"""Which part of a row's values the codes cover. Pure.

With b bits there are 2^b levels. Spread over the whole range of a row they lie far apart, for the sake
of a few large values; clamping those costs some error there and makes all others better. Every method
here answers with two factors (``Levels``) of the row's mean absolute deviation, the same for all rows
of a tensor, so that the codec can find each row's levels in passing:

    lowest level = max(min, mean - low * deviation)    highest = min(max, mean + high * deviation)

Methods:
    none     The whole range.
    laplace  ACIQ: the clamp that is best for a Laplace distribution around the row's mean.
    gelu     ACIQ's one-sided form for a tensor that is the output of GELU, laplace for others.
    ds-aciq  ACIQ with the scale of the Laplace distribution searched for, such that it fits the values.
    mse      Direct search of the two factors with the least true quantisation error on a sample.

References:
    ACIQ: R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks
    for rapid-deployment", NeurIPS 2019, section 3 (clipping) and its extension to fused ReLU.
    DS-ACIQ: H. Wang et al., "QuantPipe: applying adaptive post-training quantization for distributed
    transformer pipelines in dynamic edge environments", ICASSP 2023, section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeedge import _native as native

__all__ = [
    "WHOLE_RANGE",
    "Levels",
    "Sample",
    "choose_levels",
    "ds_aciq_levels",
    "gelu_levels",
    "laplace_levels",
    "mse_levels",
]

_GELU_FLOOR = -0.2
"""GELU is nowhere below -0.17, and no other tensor that crosses a cut stays above this."""


@dataclass(frozen=True)
class Levels:
    """How far the levels reach from a row's mean, in mean absolute deviations; never past min and max."""

    low: float = math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"levels reach {self.low} down and {self.high} up; neither may be negative")


WHOLE_RANGE = Levels()


@dataclass(frozen=True)
class Sample:
    """Some rows of a tensor, all finite.

    Attributes:
        values: (rows, length), float32 or the bits of bfloat16 as uint16, contiguous.
        statistics: (rows, 4), float32: minimum, maximum, mean, mean absolute deviation.
    """

    values: npt.NDArray[Any]
    statistics: npt.NDArray[np.float32]

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Sample:
        """Of these rows.

        Raises:
            ValueError: a row with a NaN or an infinity.
        """
        return cls(values, native.row_statistics(values, values.shape[0]))

    def part(self, values: int) -> Sample:
        """About so many of the values, at equal distances, with the statistics of their whole rows."""
        rows, length = self.values.shape
        along = max(1, round(length / 1024)) | 1  # odd: what is special often comes at powers of 2
        across = max(1, rows * length // (along * values))
        return Sample(
            np.ascontiguousarray(self.values[::across, ::along]),
            np.ascontiguousarray(self.statistics[::across]),
        )

    def squared_error(self, bits: int, levels: Levels) -> float:
        """The quantisation error of all values, squared and summed."""
        return native.squared_error(
            values=self.values, statistics=self.statistics, bits=bits, low=levels.low, high=levels.high
        )

    def standardised(self) -> npt.NDArray[np.float32]:
        """(x - mean) / deviation of all values, row by row; rows without deviation left out."""
        values = self.values
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        mean, deviation = self.statistics[:, 2:3], self.statistics[:, 3:4]
        varied = np.isfinite(deviation[:, 0]) & (deviation[:, 0] > 0)
        return np.asarray((values[varied] - mean[varied]) / deviation[varied], dtype=np.float32).ravel()


def choose_levels(clamp: str, sample: Sample, bits: int) -> Levels:
    """The levels for ``bits`` by the method called ``clamp``.

    Raises:
        ValueError: no such method.
    """
    methods: dict[str, Callable[[], Levels]] = {
        "none": lambda: WHOLE_RANGE,
        "laplace": lambda: laplace_levels(bits),
        "gelu": lambda: gelu_levels(sample, bits),
        "ds-aciq": lambda: ds_aciq_levels(sample, bits),
        "mse": lambda: mse_levels(sample, bits),
    }
    if clamp not in methods:
        raise ValueError(f"no clamp is called {clamp}: {', '.join(methods)}")
    return methods[clamp]()


def laplace_levels(bits: int, scale: float = 1.0) -> Levels:
    """ACIQ for a Laplace distribution whose scale is ``scale`` mean absolute deviations.

    Clamped to mean +- alpha and cut into 2^M cells, the distribution with scale b loses
    ``2 b^2 exp(-alpha / b) + alpha^2 / (3 * 4^M)`` (Banner et al., equation 6). With t = alpha / b the
    derivative is 0 where ``t exp(t) = 3 * 4^M``. A level is the middle of its cell, so the outermost
    ones are at ``alpha * (1 - 2^-M)``. The mean absolute deviation is the maximum-likelihood estimate
    of b, so ``scale`` is 1 unless something better is known.
    """
    reach = _lambert_w(3 * 4.0**bits) * (1 - 2.0**-bits) * scale
    return Levels(reach, reach)


def gelu_levels(sample: Sample, bits: int) -> Levels:
    """ACIQ's one-sided form for the output of GELU, ``laplace_levels`` for another tensor.

    One half of the values is close to 0, the other follows an exponential distribution with scale b.
    Cut into 2^M cells, [0, alpha] loses ``b^2 exp(-alpha / b) + alpha^2 / (24 * 4^M)``, least where
    ``t exp(t) = 12 * 4^M`` with t = alpha / b (Banner et al., fused ReLU). Such values have the mean
    b / 2 and the mean absolute deviation ``b exp(-1/2)``, from which alpha is found: it lies
    ``(t - 1/2) b`` above the mean. The lowest level is the smallest value, at most 0.17 below 0.
    """
    if sample.statistics.size and float(sample.statistics[:, 0].min()) < _GELU_FLOOR:
        return laplace_levels(bits)
    reach = _lambert_w(12 * 4.0**bits) * (1 - 0.5 * 2.0**-bits) - 0.5
    return Levels(math.inf, max(reach, 0.0) * math.exp(0.5))


_DS_BINS = 256
_DS_REACH = 8
"""Medians of the distance from the mean: what is farther away would leave the others few bins."""
_DS_STEPS = 100


def ds_aciq_levels(sample: Sample, bits: int) -> Levels:
    """ACIQ with the scale of the Laplace distribution found by a directed search (QuantPipe).

    ACIQ takes the scale b from the mean absolute deviation, and is misled where the values do not
    follow that distribution. The distribution that has the same peak as the histogram of the values has
    ``b = 1 / (2 * peak)``; the search goes from the one towards the other, in 100 equal steps, and takes
    the b whose density is nearest to the histogram, by mean squared difference. That direction and that
    criterion are the paper's; it begins at the b of the variance, where this begins at the likeliest one.
    """
    values = sample.standardised()
    if not values.size:
        return laplace_levels(bits)
    reach = max(_DS_REACH * float(np.median(np.abs(values))), 1e-6)
    counts, edges = np.histogram(values, bins=_DS_BINS, range=(-reach, reach))
    density = counts / (values.size * (edges[1] - edges[0]))
    centres = np.abs(edges[:-1] + edges[1:]) / 2
    scales = np.linspace(1.0, 1 / (2 * float(density.max())), _DS_STEPS + 1)[:, None]
    fits = np.exp(-centres / scales) / (2 * scales)
    best = int(np.argmin(np.mean((fits - density) ** 2, axis=1)))
    return laplace_levels(bits, float(scales[best, 0]))


_MSE_FACTORS = tuple(0.3 * 1.25**step for step in range(22))
"""Where the search begins: each of these for either side, 0.3 to 33 deviations."""
_MSE_FIRST_VALUES = 1 << 13
_MSE_RATIOS = (1.12, 1.06, 1.03)
_MSE_MOVES = 12
"""At most, for each ratio; from one good place to the next the search needs two or three."""
_MSE_GAIN = 0.98
"""What clamping must leave of the whole range's error on the sample: the far values of other rows, which
are what it is about, are not all in the sample."""


def mse_levels(sample: Sample, bits: int) -> Levels:
    """The two factors with the least quantisation error on ``sample``, found by trying.

    A grid on a part of the sample, because there are several local minima: where a level meets a value
    that many have, as 0 after GELU. Then a pattern search from the best: each factor is made larger and
    smaller by a ratio as long as that helps, then by a smaller ratio. The whole range is tried too.
    """
    best = min(
        (Levels(low, high) for low in _MSE_FACTORS for high in _MSE_FACTORS),
        key=functools.partial(sample.part(_MSE_FIRST_VALUES).squared_error, bits),
    )
    cost = functools.partial(sample.squared_error, bits)
    least = cost(best)
    for ratio in _MSE_RATIOS:
        for _ in range(_MSE_MOVES):
            around = (
                Levels(best.low * ratio, best.high),
                Levels(best.low / ratio, best.high),
                Levels(best.low, best.high * ratio),
                Levels(best.low, best.high / ratio),
            )
            found = min(around, key=cost)
            if (error := cost(found)) >= least:
                break
            best, least = found, error
    return best if least < _MSE_GAIN * cost(WHOLE_RANGE) else WHOLE_RANGE


def _lambert_w(value: float) -> float:
    """The t for which ``t * exp(t)`` is ``value``, for values above 1; Newton's method on logarithms."""
    t = math.log(value)
    for _ in range(50):
        step = (t + math.log(t) - math.log(value)) / (1 + 1 / t)
        t -= step
        if abs(step) < 1e-14 * t:
            break
    return t
