"""The shipped model of digits, whole or cut into stages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from arrays import load_arrays

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model

CPU = torch.device("cpu")
DIGITS = find_model("vit-digits")


def through(model: Model, dtypes: list[torch.dtype], cuts: list[int], inputs: Payload) -> torch.Tensor:
    payload = inputs
    with torch.inference_mode():
        for dtype, (start, stop) in zip(dtypes, pairwise([0, *cuts, model.n_layers]), strict=True):
            payload = model.load(LayerRange(start, stop), dtype=dtype)(payload)
            tokens = inputs[0].shape[1] if model.takes_text else None
            specs = model.payload_specs(stop, inputs[0].shape[0], tokens, dtype)
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in payload]
            assert found == [(spec.shape, spec.dtype) for spec in specs]
    return payload[0]


def heldout() -> tuple[torch.Tensor, torch.Tensor]:
    arrays = load_arrays(Path(str(DIGITS.directory)).parent / "digits.npz")
    images = torch.from_numpy((arrays["images_heldout"][:, None].astype(np.float32) / 16 - 0.5) / 0.5)
    return images, torch.from_numpy(arrays["labels_heldout"])
