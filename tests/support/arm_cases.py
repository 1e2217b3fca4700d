"""Compute the same cases on processors of different kinds: a program, for ``test_arm_*.py``.

    arm_cases.py kernels COUNT OUT.json       digests of integers and codes by instruction set
    arm_cases.py attention COUNT OUT.npz      attention of small shapes
    arm_cases.py encoders FOLDER OUT.npz      outputs of the models in FOLDER, by number type
    arm_cases.py decoders FOLDER OUT.npz      scores by the models and GGUF files in FOLDER, by number type

What is random comes from numpy's generator of bits, which gives the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf_rows import FORMS, random_rows
from numpy.random import Generator

from pipeedge import _native as native
from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models import find_model
from pipeedge.models.decoder import DECODER_DTYPES, find_decoder
from pipeedge.models.dtypes import dtype_name, find_dtype


def halves(random: Generator, *shape: int) -> np.ndarray:
    """Return the bits of bfloat16 of moderate size and either sign."""
    return (random.integers(0x3E00, 0x4080, shape) | random.integers(0, 2, shape) << 15).astype(np.uint16)


def floats(random: Generator, *shape: int) -> np.ndarray:
    """Return whole multiples of 2^-12, which no function of a library has rounded."""
    return (random.integers(-(1 << 14), 1 << 14, shape) / 4096).astype(np.float32)


def layer(random: Generator, variant: str | None) -> bytes:
    """Return the results of a linear layer in 8 bits."""
    rows, inputs, outputs = (int(random.integers(1, most)) for most in (20, 100, 70))
    packed = np.empty(native.linear8_packed_bytes(outputs, inputs, variant), np.int8)
    weights = random.integers(-127, 128, (outputs, inputs), np.int8)
    native.linear8_pack(weights=weights, packed=packed, variant=variant)
    norm, residual = random.integers(0, 2, 2)
    out = np.empty((rows, outputs), np.uint16)
    native.linear8_apply(
        x=halves(random, rows, inputs),
        norm=(halves(random, inputs), halves(random, inputs), 1e-6) if norm else None,
        packed=packed,
        scales=np.abs(floats(random, outputs)) / 1024,
        bias=halves(random, outputs),
        activation=("none", "gelu", "gelu_tanh")[random.integers(3)],
        residual=halves(random, rows, outputs) if residual else None,
        out=out,
        threads=1,
        variant=variant,
    )
    return out.tobytes()


def codes(random: Generator, variant: str | None) -> bytes:
    """Return the codes of some rows, and what they decode to."""
    rows, length = int(random.integers(1, 6)), int(random.integers(1, 300))
    bits, block = int(random.choice(BIT_WIDTHS)), int(random.choice([0, 0, 2, 16, 64, 256]))
    low, high = (float(random.choice([1.5, np.inf])) for _ in range(2))
    values = floats(random, rows, length)
    encoded, ranges = (
        np.empty(native.packed_bytes(values.size, bits), np.uint8),
        np.empty(2 * rows, np.float32),
    )
    how = {"codes": encoded, "ranges": ranges, "bits": bits, "block": block, "seed": 7, "variant": variant}
    native.encode(values=values, rows=rows, low=low, high=high, **how)
    decoded = np.empty_like(values)
    native.decode(values=decoded, **how)
    return encoded.tobytes() + ranges.tobytes() + decoded.tobytes()


def score(random: Generator, variant: str | None, weights: str) -> bytes:
    """Return the scores of some rows by a head of a decoder, each of which has the same bits alone."""
    rows, inputs, outputs = (int(random.integers(1, most)) for most in (30, 100, 70))
    head = native.DecoderHead(
        weights=weights,
        stream="float32",
        hidden=inputs,
        tokens=outputs,
        norm_centred=bool(random.integers(2)),
        eps=1e-6,
        scale=0.5,
        cap=float(random.choice([0.0, 30.0])),
    )
    head.fill("weight", 0, floats(random, outputs, inputs))
    if random.integers(2):
        head.fill("norm", 0, floats(random, inputs))
    hidden, scores = floats(random, rows, inputs), np.empty((rows, outputs), np.float32)
    head.score(hidden, scores, threads=1, variant=variant)
    row, alone = int(random.integers(rows)), np.empty((1, outputs), np.float32)
    head.score(hidden[row : row + 1].copy(), alone, threads=1, variant=variant)
    if alone.tobytes() != scores[row].tobytes():
        raise AssertionError(f"{variant}, {weights}: row {row} of {rows}x{inputs}x{outputs} differs alone")
    return scores.tobytes()


def forms(random: Generator, _: str | None) -> bytes:
    """Return the weights of some rows of a GGUF file, and what a stage keeps of them."""
    form = sorted(FORMS.keys() - {"int8", "int4"})[random.integers(len(FORMS) - 2)]
    values, _ = FORMS[form]
    rows, width = int(random.integers(1, 6)), values * int(random.integers(1, 4))
    weights = native.decode_rows(form, random_rows(form, rows, width, int(random.integers(1 << 30))), width)
    kept = (native.encode_rows(coding, weights, threads=1).tobytes() for coding in ("int8", "int4"))
    return weights.tobytes() + b"".join(kept)


def kernels(count: int) -> dict[str, str]:
    """Return a digest of ``count`` cases for each kernel and instruction set."""
    found = {}
    products, scores = native.linear8_variants()[:-1], native.decoder_variants()[:-1]
    # Instructions for products of bfloat16 round in their own ways.
    widening = [name for name in scores if name not in ("amxbf16", "avx512bf16", "neonbf16")]
    for name, case, variants in (
        ("layer", layer, products),
        ("codes", codes, native.codec_variants()),
        ("forms", forms, ["all"]),
        ("score4", partial(score, weights="int4"), scores),
        ("score8", partial(score, weights="int8"), scores),
        ("score16", partial(score, weights="bfloat16"), widening),
        ("score32", partial(score, weights="float32"), scores),
    ):
        for variant in variants:
            random, digest = np.random.default_rng(5), hashlib.sha256()
            for _ in range(count):
                digest.update(case(random, variant))
            found[f"{name} {variant}"] = digest.hexdigest()
    return found


def attention(count: int) -> dict[str, np.ndarray]:
    """Return attention of random shapes in each number type that has native code here."""
    random, found = np.random.default_rng(6), {}
    for number in range(count):
        heads, size = int(random.integers(1, 4)), 16 * int(random.integers(1, 6))
        items, tokens = int(random.integers(1, 3)), int(random.integers(1, 70))
        reach = int(random.integers(1, 40)) if random.integers(2) else None
        qkv = floats(random, items, tokens, 3 * heads * size)
        qkv = (qkv.view(np.uint32) & 0xFFFF0000).view(np.float32)  # also bfloat16
        bias = floats(random, items, tokens) if random.integers(2) else None
        distances = floats(random, heads, 2 * tokens - 1) if random.integers(2) else None
        angles = floats(random, tokens, size // 2)
        rotation = (np.cos(angles), np.sin(angles)) if random.integers(2) else None
        for name in native.attention_types():
            given = qkv if name == "float32" else (qkv.view(np.uint32) >> 16).astype(np.uint16)
            out = np.empty((items, tokens, heads * size), given.dtype)
            native.attend(
                qkv=given,
                heads=heads,
                bias=bias,
                distances=distances,
                rotation=rotation,
                reach=reach,
                out=out,
                threads=1,
            )
            wide = out if name == "float32" else (out.astype(np.uint32) << 16).view(np.float32)
            found[f"{name} {number}"] = wide
    return found


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
    if what == "kernels":
        Path(target).write_text(json.dumps(kernels(int(of))))
    else:
        compute = {"attention": lambda: attention(int(of)), "encoders": lambda: encoders(Path(of))}
        np.savez(target, **compute.get(what, lambda: decoders(Path(of)))())


if __name__ == "__main__":
    main()
