"""Compute the same cases on processors of different kinds: a program, for ``test_arm_*.py``.

    arm_cases.py encoders FOLDER OUT.npz      outputs of the models in FOLDER, by number type
    arm_cases.py decoders FOLDER OUT.npz      scores by the models and GGUF files in FOLDER, by number type

What is random comes from numpy's generator of bits, which gives the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator

from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models import find_model
from pipeedge.models.decoder import DECODER_DTYPES, find_decoder
from pipeedge.models.dtypes import dtype_name, find_dtype


def floats(random: Generator, *shape: int) -> np.ndarray:
    """Return whole multiples of 2^-12, which no function of a library has rounded."""
    return (random.integers(-(1 << 14), 1 << 14, shape) / 4096).astype(np.float32)


def encoders(folder: Path) -> dict[str, np.ndarray]:
    """Return the outputs of each model in ``folder`` in each number type."""
    found = {}
    for directory in sorted(folder.iterdir()):
        model, random = find_model(directory), np.random.default_rng(8)
        inputs = []
        for name, shape in zip(model.input_names, model.input_shapes(3, 9, eight_bit=False), strict=True):
            if name == "pixel_values":
                inputs.append(torch.from_numpy(floats(random, *shape.shape)))
            elif name == "attention_mask":
                inputs.append((torch.arange(9) < torch.tensor([[9], [4], [7]])).long())
            else:
                numbers = random.integers(0, 2 if name == "token_type_ids" else 16, shape.shape)
                inputs.append(torch.from_numpy(numbers))
        for dtype in ("float32", "bfloat16", "int8", "int4"):
            with torch.inference_mode():
                (found[f"{directory.name} {dtype}"],) = (
                    output.float().numpy() for output in model.load(dtype=find_dtype(dtype))(tuple(inputs))
                )
    return found


def decoders(folder: Path) -> dict[str, np.ndarray]:
    """Return the scores of a text in chunks by each model in ``folder``, in each number type."""
    found = {}
    for directory in sorted(folder.iterdir()):
        model = find_decoder(directory)
        tokens = np.random.default_rng(9).integers(2, model.config.vocab, 70).tolist()
        for dtype in DECODER_DTYPES:
            decoder = LocalDecoder(model, dtype, context=len(tokens), threads=1)
            lists = decoder.begin()
            hidden = [decoder.step([(lists, at, tokens[at : at + 33])]) for at in range(0, len(tokens), 33)]
            found[f"{directory.name} {dtype_name(dtype)}"] = decoder.score(torch.cat(hidden)).numpy()
    return found


def main() -> None:
    """Compute the cases that the arguments name."""
    what, of, target = sys.argv[1:]
    torch.set_num_threads(1)
    np.savez(target, **{"encoders": encoders, "decoders": decoders}[what](Path(of)))


if __name__ == "__main__":
    main()
