#!/usr/bin/env python3
"""Show where the time of one block goes, beside transformers' own block; takes seconds.

    benchmarks/blocks.py                                   ViT-Base, 8 images, each number type
    benchmarks/blocks.py -m facebook/deit-tiny-distilled-patch16-224 -u 1
    benchmarks/blocks.py --dtypes int8 --kernels native onednn torch

One thread; milliseconds of processor time, medians of passes in turn. A linear layer includes the norm,
activation and residual that are computed with it. int8 is compared with torch's dynamic quantisation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import DTYPES, KERNELS, LayerRange
from pipeedge.models import find_model
from pipeedge.models.architecture import TextInput
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.kernels import choose
from pipeedge.models.shard import Shard

FIRST, STOP = 4, 8
"""Layers of the second block."""
TOKENS = 128
CPU = torch.device("cpu")

OTHER = "attention and calls"


class Clock:
    """Times of a block's modules, without those of the modules that they call.

    Args:
        shard: Shard of one block to observe.
    """

    def __init__(self, shard: Shard) -> None:
        self.times: dict[str, list[float]] = {}
        """Milliseconds of each pass, by the name of a module in the block."""
        self._running: list[list[float]] = []
        """For each module that is running: when it began, and the time of those it has called."""
        self._watch(shard, OTHER)
        for name, module in shard.parts.named_modules():
            if "." in name:
                self._watch(module, name.rpartition(".")[2])

    def _watch(self, module: torch.nn.Module, name: str) -> None:
        def begin(*_: object) -> None:
            self._running.append([time.thread_time(), 0.0])

        def end(*_: object) -> None:
            began, called = self._running.pop()
            took = time.thread_time() - began
            self.times.setdefault(name, []).append(1e3 * (took - called))
            if self._running:
                self._running[-1][1] += took

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def medians(self) -> dict[str, float]:
        """Return the milliseconds of each module, and of the block."""
        found = {name: statistics.median(times) for name, times in self.times.items()}
        return {**found, "block": sum(found.values())}


def reference_block(model: str, dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    """Return transformers' block of the same size."""
    config = find_model(model).config
    sizes = {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": 1,
    }
    if config.family == "bert":
        whole = transformers.BertModel(transformers.BertConfig(**sizes))
    elif config.family == "deit":
        whole = transformers.DeiTModel(transformers.DeiTConfig(**sizes))
    else:
        whole = transformers.ViTModel(transformers.ViTConfig(**sizes))
    block = next(
        module for name, module in whole.named_modules() if name.endswith((".layer.0", "layers.0"))
    ).eval()
    if dtype is not torch.int8:
        return block.to(dtype)
    torch.backends.quantized.engine = "x86"
    quantised: torch.nn.Module = torch.ao.quantization.quantize_dynamic(block, {torch.nn.Linear}, torch.qint8)
    return quantised


def measure(model: str, dtype: torch.dtype, kernels: list[str], ubatch: int, passes: int) -> dict[str, Any]:
    """Return the medians by kernels, and under ``transformers`` the reference's."""
    known = find_model(model)
    tokens = TOKENS if isinstance(known.config.input, TextInput) else None
    shards = {name: known.random(LayerRange(FIRST, STOP), 0, CPU, dtype, name) for name in kernels}
    clocks = {name: Clock(shard) for name, shard in shards.items()}
    theirs = reference_block(model, dtype)
    reference: list[float] = []
    specs = known.payload_specs(FIRST, items=ubatch, tokens=tokens, dtype=dtype)
    payload = tuple(
        (torch.randn(spec.shape) if spec.dtype.is_floating_point else torch.ones(spec.shape)).to(spec.dtype)
        for spec in specs
    )
    given = payload[0].float() if dtype is torch.int8 else payload[0]
    with torch.inference_mode():
        for number in range(passes + 1):
            for shard in shards.values():
                shard(payload)
            began = time.thread_time()
            theirs(given)
            reference.append(1e3 * (time.thread_time() - began))
            if number == 0:
                reference.clear()
                for clock in clocks.values():
                    clock.times.clear()
    found: dict[str, Any] = {name: clock.medians() for name, clock in clocks.items()}
    return {**found, "transformers": statistics.median(reference)}


def kernels_for(dtype: torch.dtype, wanted: list[str]) -> list[str]:
    """Return those of the kernels that compute in ``dtype``, each once."""
    found = []
    for name in wanted:
        try:
            found.append(choose(name, dtype, CPU))
        except RequestError:
            continue
    return list(dict.fromkeys(found))


def main() -> None:
    """Print a column for each number type and kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="google/vit-base-patch16-224", metavar="NAME")
    parser.add_argument("-u", "--ubatch", type=int, default=8, metavar="N", help="items (8)")
    parser.add_argument("-n", "--passes", type=int, default=15, metavar="N", help="timed passes (15)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "int8"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["auto"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(box=box.SIMPLE, title=f"{args.model}, {args.ubatch} items, ms")
    table.add_column("")
    columns: list[dict[str, float]] = []
    for name in args.dtypes:
        dtype = find_dtype(name)
        found = measure(args.model, dtype, kernels_for(dtype, args.kernels), args.ubatch, args.passes)
        theirs = found.pop("transformers")
        for kernels, times in found.items():
            table.add_column(f"{name}\n{kernels}", justify="right")
            columns.append({**times, "transformers": theirs, "ratio": theirs / times["block"]})
    for row in dict.fromkeys(row for column in columns for row in column):
        table.add_row(row, *(f"{column[row]:.2f}" if row in column else "" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
