"""Compare number types on a wide decoder with random weights and channels with outliers.

The norms in front of the products make one channel in a hundred 20 times as large as the others, as trained
models have them. Each token of some texts is scored by the model in float32 and in the other type.
``int8, a scale a row`` is the same model in transformers whose products see weights rounded to 8 bits with a
scale for each output and rows with a scale for each token; ``int8, groups of 32`` has scales for each 32 of
both. The latter is what PipeEdge computes as int8, so both ways of getting it should be about as good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from random_decoders import SHAPES, write_directory
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

__all__ = ["measure_outliers"]

SHAPE = replace(
    SHAPES["smollm2-135m"],
    name="outliers",
    blocks=8,
    vocab=8192,
    hidden=1536,
    inner=4096,
    heads=24,
    kv_heads=8,
)
PART, TIMES = 100, 20
"""One channel in so many is so many times as large."""
TEXTS, TOKENS = 4, 128
GROUP = 32


@dataclass(frozen=True)
class Likeness:
    """How scores agree with those in float32."""

    top1: float
    """Part of the tokens with the same most probable next token."""
    divergence: float
    """Mean divergence (KL) of the next token's distribution."""
    error: float
    """Size of the difference, relative to the size of the scores."""


def likeness(found: torch.Tensor, exact: torch.Tensor) -> Likeness:
    """Compare scores [tokens, V] with those in float32."""
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(1), exact.log_softmax(1), log_target=True, reduction="batchmean"
    )
    same = (found.argmax(1) == exact.argmax(1)).float().mean()
    return Likeness(float(same), float(divergence), float((found - exact).norm() / exact.norm()))


def write_model(directory: Path) -> torch.Tensor:
    """Write the model unless it is there, and return texts for it [texts, tokens]."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.randperm(SHAPE.hidden, generator=generator)[: SHAPE.hidden // PART]
    if not (directory / "config.json").exists():
        write_directory(SHAPE, directory)
        tensors = load_file(directory / "model.safetensors")
        for name, values in tensors.items():
            if "layernorm" in name:
                values[channels] *= TIMES
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return torch.randint(0, SHAPE.vocab, (TEXTS, TOKENS), generator=generator)


def ours(directory: Path, dtype: str, texts: torch.Tensor, threads: int) -> torch.Tensor:
    """Return PipeEdge's scores of all tokens."""
    from pipeedge.decoding.loop import LocalDecoder
    from pipeedge.models.decoder import find_decoder
    from pipeedge.models.dtypes import find_dtype

    decoder = LocalDecoder(find_decoder(directory), find_dtype(dtype), context=TOKENS, threads=threads)
    found = []
    for text in texts.tolist():
        lists = decoder.begin()
        found.append(decoder.score(decoder.step([(lists, 0, text)])))
        lists.give_back()
    return torch.cat(found)


def rounded(values: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return values [rows, width] as 8 bits keep them, with a scale for each ``group`` or whole row."""
    parts = values.unflatten(-1, (-1, group or values.shape[-1]))
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((parts / scales).round() * scales).flatten(-2)


def as_rounded(directory: Path, group: int | None, texts: torch.Tensor) -> torch.Tensor:
    """Return transformers' scores of all tokens, with the weights and rows of its products rounded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(rounded(layer.weight.detach(), group), requires_grad=False)
            layer.register_forward_pre_hook(lambda _, given: (rounded(given[0], group),))
    with torch.inference_mode():
        scores: torch.Tensor = model(texts).logits
    return scores.flatten(0, 1)


def measure_outliers(files: Path, threads: int, console: Console) -> None:
    """Compare all types and ways, and print a table."""
    directory = files / SHAPE.name
    texts = write_model(directory)
    exact = ours(directory, "float32", texts, threads)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "bfloat16": lambda: ours(directory, "bfloat16", texts, threads),
        "int8": lambda: ours(directory, "int8", texts, threads),
        "int4": lambda: ours(directory, "int4", texts, threads),
        f"int8, groups of {GROUP}": lambda: as_rounded(directory, GROUP, texts),
        "int8, a scale a row": lambda: as_rounded(directory, None, texts),
    }
    table = Table(box=box.SIMPLE)
    for column in (f"{SHAPE.blocks} blocks of {SHAPE.hidden}", "same token", "divergence", "error"):
        table.add_column(column, justify="right")
    for name, score in sides.items():
        found = likeness(score(), exact)
        table.add_row(name, f"{found.top1:.3f}", f"{found.divergence:.4f}", f"{found.error:.4f}")
    console.print(table)
