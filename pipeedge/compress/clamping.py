"""Clamping: the choice of the range of a row's values that the codes cover. Pure functions.

With b bits there are 2^b levels. Spread over the whole range of a row, a few large values force them far
apart. Clamping those values adds some error to them and reduces the error of all others. Every method
here returns two factors (``Levels``) of the row's mean absolute deviation, the same for all rows of a
tensor, so that the codec can compute the levels of each row on the fly:

    lowest level = max(min, mean - low * deviation)    highest = min(max, mean + high * deviation)

Methods:
    none     The whole range.
    laplace  ACIQ: the optimal clamp for a Laplace distribution around the row's mean.
    gelu     ACIQ's one-sided form for a tensor that is the output of GELU, laplace for others.
    ds-aciq  ACIQ with a search for the scale of the Laplace distribution that fits the values.
    mse      Direct search for the two factors with the least quantisation error on a sample.

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
"""Threshold that identifies the output of GELU, which is never below -0.17. Every other tensor that crosses
a cut has values below this one.
"""


@dataclass(frozen=True)
class Levels:
    """Distances of the outermost levels from a row's mean, in mean absolute deviations, up to min and max."""

    low: float = math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"levels {self.low} down and {self.high} up: neither may be negative")


WHOLE_RANGE = Levels()


@dataclass(frozen=True)
class Sample:
    """A sample of a tensor's rows, all finite.

    Attributes:
        values: Values (rows, length), float32 or the bits of bfloat16 as uint16, contiguous.
        statistics: Minimum, maximum, mean and mean absolute deviation of each row, float32 (rows, 4).
        symmetric: Whether large values are as likely on either side of the mean, as after a transform.
    """

    values: npt.NDArray[Any]
    statistics: npt.NDArray[np.float32]
    symmetric: bool = False

    @classmethod
    def of(cls, values: npt.NDArray[Any], *, symmetric: bool = False) -> Sample:
        """Return the sample of the rows ``values``.

        Raises:
            ValueError: A row contains NaN or infinity.
        """
        return cls(values, native.row_statistics(values, values.shape[0]), symmetric)

    def part(self, values: int) -> Sample:
        """Return about ``values`` equidistant values, with the statistics of their whole rows."""
        rows, length = self.values.shape
        along = max(1, round(length / 1024)) | 1  # odd, because special values often repeat at powers of 2
        across = max(1, rows * length // (along * values))
        return Sample(
            np.ascontiguousarray(self.values[::across, ::along]),
            np.ascontiguousarray(self.statistics[::across]),
            self.symmetric,
        )

    def squared_error(self, bits: int, levels: Levels) -> float:
        """Return the quantisation error of all values, squared and summed."""
        return native.squared_error(
            values=self.values, statistics=self.statistics, bits=bits, low=levels.low, high=levels.high
        )

    def standardised(self) -> npt.NDArray[np.float32]:
        """Return (x - mean) / deviation of all values, row by row, without rows whose deviation is zero."""
        values = self.values
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        mean, deviation = self.statistics[:, 2:3], self.statistics[:, 3:4]
        varied = np.isfinite(deviation[:, 0]) & (deviation[:, 0] > 0)
        return np.asarray((values[varied] - mean[varied]) / deviation[varied], dtype=np.float32).ravel()


def choose_levels(clamp: str, sample: Sample, bits: int) -> Levels:
    """Return the levels for ``bits`` chosen by the method called ``clamp``.

    Raises:
        ValueError: There is no such method.
    """
    methods: dict[str, Callable[[], Levels]] = {
        "none": lambda: WHOLE_RANGE,
        "laplace": lambda: laplace_levels(bits),
        "gelu": lambda: gelu_levels(sample, bits),
        "ds-aciq": lambda: ds_aciq_levels(sample, bits),
        "mse": lambda: mse_levels(sample, bits),
    }
    if clamp not in methods:
        raise ValueError(f"there is no clamp {clamp}: choose one of {', '.join(methods)}")
    return methods[clamp]()


def laplace_levels(bits: int, scale: float = 1.0) -> Levels:
    """Return ACIQ's levels for a Laplace distribution with a scale of ``scale`` mean absolute deviations.

    Clamped to mean +- alpha and cut into 2^M cells, the distribution with scale b loses
    ``2 b^2 exp(-alpha / b) + alpha^2 / (3 * 4^M)`` (Banner et al., equation 6). With t = alpha / b the
    derivative is 0 where ``t exp(t) = 3 * 4^M``. A level is the middle of its cell, so the outermost
    ones are at ``alpha * (1 - 2^-M)``. The mean absolute deviation is the maximum-likelihood estimate of b,
    so ``scale`` is 1 unless a better value is known.
    """
    reach = _lambert_w(3 * 4.0**bits) * (1 - 2.0**-bits) * scale
    return Levels(reach, reach)


def gelu_levels(sample: Sample, bits: int) -> Levels:
    """Return ACIQ's one-sided levels for the output of GELU, or ``laplace_levels`` for other values.

    One half of the values is close to 0, the other follows an exponential distribution with scale b.
    Cut into 2^M cells, [0, alpha] loses ``b^2 exp(-alpha / b) + alpha^2 / (24 * 4^M)``, which is least where
    ``t exp(t) = 12 * 4^M`` with t = alpha / b (Banner et al., fused ReLU). Such values have the mean
    b / 2 and the mean absolute deviation ``b exp(-1/2)``, which gives alpha: it lies ``(t - 1/2) b`` above
    the mean. The lowest level is the smallest value, at most 0.17 below 0.
    """
    if sample.symmetric or (sample.statistics.size and float(sample.statistics[:, 0].min()) < _GELU_FLOOR):
        return laplace_levels(bits)
    reach = _lambert_w(12 * 4.0**bits) * (1 - 0.5 * 2.0**-bits) - 0.5
    return Levels(math.inf, max(reach, 0.0) * math.exp(0.5))


_DS_BINS = 256
_DS_REACH = 8
"""Largest distance from the mean in the histogram, in medians of that distance. Values farther away would
leave few bins to the others.
"""
_DS_STEPS = 100


def ds_aciq_levels(sample: Sample, bits: int) -> Levels:
    """Return ACIQ's levels with a Laplace scale that is found by a directed search (QuantPipe).

    ACIQ derives the scale b from the mean absolute deviation, which misleads it if the values do not follow
    that distribution. The distribution with the same peak as the histogram of the values has ``b = 1 / (2 *
    peak)``. The search goes from the first scale towards the second in 100 equal steps, and takes the b whose
    density is nearest to the histogram, by mean squared difference. Direction and criterion are the paper's;
    the paper starts at the b of the variance, this search at the maximum-likelihood estimate.
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
"""Factors at which the search starts, for either side: 0.3 to 33 deviations."""
_MSE_FIRST_VALUES = 1 << 13
_MSE_RATIOS = (1.12, 1.06, 1.03)
_MSE_MOVES = 12
"""Largest number of moves for each ratio; from a good start the search needs two or three."""
_MSE_GAIN = 0.98
"""Largest error that clamping may leave, as a fraction of the whole range's error on the sample. The sample
does not contain all of the outliers that clamping is about.
"""


def mse_levels(sample: Sample, bits: int) -> Levels:
    """Return the two factors with the least quantisation error on ``sample``, found by search.

    A grid search on part of the sample comes first, because there are several local minima: places where a
    level meets a frequent value, such as 0 after GELU. For a symmetric sample, its diagonal is enough. A
    pattern search from the best follows: each factor is multiplied and divided by a ratio as long as that
    helps, then by a smaller ratio. The whole range is tried too.
    """
    best = min(
        (
            Levels(low, high)
            for low in _MSE_FACTORS
            for high in ((low,) if sample.symmetric else _MSE_FACTORS)
        ),
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
    """Return the t for which ``t * exp(t)`` is ``value``, above 1, by Newton's method on logarithms."""
    t = math.log(value)
    for _ in range(50):
        step = (t + math.log(t) - math.log(value)) / (1 + 1 / t)
        t -= step
        if abs(step) < 1e-14 * t:
            break
    return t
