#!/usr/bin/env python3
"""Measure one side of ``decoding.py`` in a process of its own, and print the figures as JSON.

decoder_sides.py memory THREADS                         bytes a second of reading
decoder_sides.py ours DIR DTYPE THREADS PROMPT TOKENS   PipeEdge, all layers in one process
decoder_sides.py transformers DIR DTYPE THREADS PROMPT TOKENS
decoder_sides.py products DIR DTYPE THREADS ROWS        products of a block beside those of libraries
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

REPEATS = 3
WARM_TOKENS = 4
READ_BYTES = 1 << 30
SETTLE_S = 0.1


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def resident(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def shared_pages() -> int:
    """Return the bytes of files that are mapped and resident, such as the table of words."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


def memory(threads: int) -> dict[str, float]:
    """Measure how fast all threads together read an array that no cache holds."""
    torch.set_num_threads(threads)
    array = torch.ones(READ_BYTES // 8, dtype=torch.float64)
    best = min(seconds_of(array.sum) for _ in range(8))
    return {"bytes_per_s": READ_BYTES / best}


def ours(directory: str, dtype: str, threads: int, prompt: int, tokens: int) -> dict[str, float]:
    """Measure the loop of one process: loading, memory, prefill and decode."""
    from pipeedge.base.heap import share_one_heap
    from pipeedge.decoding.loop import LocalDecoder
    from pipeedge.models.decoder import find_decoder
    from pipeedge.models.dtypes import find_dtype

    torch.set_num_threads(threads)
    share_one_heap()
    model = find_decoder(directory)
    imported = resident("VmRSS")
    began = time.perf_counter()
    decoder = LocalDecoder(model, find_dtype(dtype), context=prompt, threads=threads)
    load_s = time.perf_counter() - began
    loaded, peak = resident("VmRSS"), resident("VmHWM")
    weights = sum(stage.weight_bytes for stage in decoder.stages) + decoder.ends.weight_bytes
    cache = sum(stage.cache_bytes for stage in decoder.stages)
    words = torch.randint(0, model.config.vocab, (prompt,)).tolist()

    def prefill() -> None:
        lists = decoder.begin()
        decoder.score(decoder.step([(lists, 0, words)])[-1:])
        lists.give_back()

    def decode(count: int) -> None:
        lists = decoder.begin()
        token = words[0]
        for position in range(count):
            token = int(decoder.score(decoder.step([(lists, position, [token])]))[0].numpy().argmax())
        lists.give_back()

    decode(WARM_TOKENS)
    decode_s = statistics.median(seconds_of(lambda: decode(tokens)) for _ in range(REPEATS))
    prefill()
    prefill_s = statistics.median(seconds_of(prefill) for _ in range(REPEATS))
    return {
        "load_s": load_s,
        "imported": imported,
        "loaded": loaded,
        "peak": peak,
        "weights": weights,
        "cache": cache,
        "read_per_token": weights,
        "decode": tokens / decode_s,
        "prefill": prompt / prefill_s,
    }


def transformers(directory: str, dtype: str, threads: int, prompt: int, tokens: int) -> dict[str, float]:
    """Measure transformers: prefill and decode."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    words = torch.randint(0, model.config.vocab_size, (1, prompt))

    def prefill() -> None:
        model(words, use_cache=True, logits_to_keep=1)

    def decode(count: int) -> None:
        token, cache = words[:, :1], None
        for _ in range(count):
            output = model(token, past_key_values=cache, use_cache=True)
            token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values

    with torch.inference_mode():
        decode(WARM_TOKENS)
        decode_s = statistics.median(seconds_of(lambda: decode(tokens)) for _ in range(REPEATS))
        prefill()
        prefill_s = statistics.median(seconds_of(prefill) for _ in range(REPEATS))
    return {"decode": tokens / decode_s, "prefill": prompt / prefill_s}


def products(directory: str, dtype: str, threads: int, rows: int) -> dict[str, Any]:
    """Measure products of a block for many rows: seconds of ours, and of the fastest library's."""
    from pipeedge import _native as native
    from pipeedge.models.decoder import find_decoder
    from pipeedge.models.families.decoder import DecoderOptions

    torch.set_num_threads(threads)
    config = find_decoder(directory).config
    options = config.own(DecoderOptions)
    queries, keys = config.heads * config.width_of_head, options.kv_heads * config.width_of_head
    sizes = [
        (queries + 2 * keys, config.hidden),
        (config.hidden, queries),
        (2 * config.intermediate, config.hidden),
        (config.hidden, config.intermediate),
    ]
    stream = torch.float32 if dtype == "float32" else torch.bfloat16
    own_s, others_s = 0.0, 0.0
    for outputs, inputs in sizes:
        weight, x = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(rows, inputs).to(stream)
        head = native.DecoderHead(
            weights=dtype,
            stream=str(stream).removeprefix("torch."),
            hidden=inputs,
            tokens=outputs,
            norm_centred=False,
            eps=0.0,
            scale=1.0,
            cap=0.0,
        )
        head.fill("weight", 0, weight.numpy())
        scores = torch.empty(rows, outputs)
        given = (x.view(torch.uint16) if stream is torch.bfloat16 else x).numpy()
        calls: list[Callable[[], object]] = [
            lambda head=head, given=given, scores=scores: head.score(given, scores.numpy(), threads=threads),  # type: ignore[misc]
            *library_products(weight, x, dtype),
        ]
        times = alternate(calls)
        own_s += times[0]
        others_s += min(times[1:])
    work = 2.0 * rows * sum(outputs * inputs for outputs, inputs in sizes)
    return {"ours": work / own_s, "library": work / others_s}


def library_products(weight: torch.Tensor, x: torch.Tensor, dtype: str) -> list[Callable[[], object]]:
    """Return products of libraries in a number type: oneDNN's packed, and torch's own."""
    if dtype in ("float32", "bfloat16"):
        typed = weight.to(x.dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(typed, None)
        return [
            lambda: torch.nn.functional.linear(x, typed),
            lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        ]
    codes = (weight * 127 / weight.abs().amax(1, keepdim=True)).round().to(torch.int8)
    scales = (weight.abs().amax(1) / 127).bfloat16()
    return [lambda: torch._weight_int8pack_mm(x, codes, scales)]


def alternate(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each call; the calls are made in turn, each behind another of its kind.

    Cores that have rested take some milliseconds to reach their full speed.
    """
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(8):
        for call, found in zip(calls, times, strict=True):
            time.sleep(SETTLE_S)  # OpenMP's threads wait busily for a while after a product of a library
            call()
            elapsed = seconds_of(call)
            if turn:
                found.append(elapsed)
    return [statistics.median(found) for found in times]


SIDES = {"memory": memory, "ours": ours, "transformers": transformers, "products": products}

if __name__ == "__main__":
    side, *arguments = sys.argv[1:]
    typed = [int(word) if word.isdigit() else word for word in arguments]
    print(json.dumps(SIDES[side](*typed)))  # type: ignore[operator]
