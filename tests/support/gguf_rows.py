"""Draw rows of weights in the forms of GGUF files."""

from __future__ import annotations

import numpy as np

from pipeedge import _native as native

FORMS = {name: (values, size) for name, values, size in native.weight_codings()}
"""Values and bytes of a unit, by form."""


def random_rows(form: str, rows: int, width: int, seed: int) -> np.ndarray:
    """Return rows of a form with any codes, whose scales are float16 of usual sizes."""
    values, size = FORMS[form]
    drawn = np.random.default_rng(seed)
    units = drawn.integers(0, 256, (rows, width // values, size), np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(form, (0,))
    for place in places:
        scales = drawn.uniform(-0.1, 0.1, (rows, width // values)).astype("<f2")
        units[:, :, place : place + 2] = scales.view(np.uint8).reshape(rows, -1, 2)
    if form == "Q8_0":
        units[units == 128] = 129  # no code is -128
        units[:, :, :2] = scales.view(np.uint8).reshape(rows, -1, 2)
    return units.reshape(rows, -1)
