#!/usr/bin/env python3
"""Compare GGUF files with llama.cpp: ``benchmarks/gguf.py --llama-cpp DIR``, or load them: ``--load FILE``.

    random model of a family ──> F32.gguf ──llama-quantize──> F16, BF16, Q8_0, Q4_0, Q4_K_M, Q5_K_M, Q6_K
                                                 │
                         llama-server ───────────┼── LocalDecoder in float32 (exact) and in the file's type

Each file is read by both. What is compared is the distribution of the next token behind random prompts. The
yardstick is llama.cpp's own rounding: how far it is, on average, from the same file computed in float32,
which differs from the weights of the file by nothing. Ours must not be much farther from it.

Divergences (KL) are in thousandths, means over prompts; ``largest`` is the largest difference of a log
probability; ``loss`` is how far the weights of our type are from those of the file, relative to their size.

``--load``: seconds from the name of a file that is in the page cache to a decoder that can compute, in a
process that has imported everything and has read one layer; the median of five processes, the fastest and the
slowest. Before each, another process writes to twice as much memory as the file has bytes, in large pages,
and ends: the host of a virtual machine takes back memory that lies idle, and needs up to several seconds a
gigabyte to hand it out again, which is not our time.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from gguf_writing import save_gguf
from models_oracle import scramble

from pipeedge import _native as native
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.weights.file_kinds import open_weights
from pipeedge.models.weights.gguf_files import GgufFile

HOW_TO_BUILD = (
    "no llama-server and llama-quantize in {}: build llama.cpp (its source is in the sdist of "
    "llama-cpp-python; cmake --build DIR --target llama-server llama-quantize) and give --llama-cpp DIR"
)
FORMS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
EXACT = ("F32",)
"""Forms for which llama.cpp does not round rows: nothing but the order of sums may differ."""
VOCAB = 512
LARGEST_EXACT, LARGEST_GELU = 1e-3, 0.03
"""Largest difference of a log probability for the exact forms; llama.cpp has a table of GELU in float16."""
GELU = ("gemma", "gemma2", "gemma3", "gpt2")
MOST_ROUNDING, LEAST_ROUNDING = 2.0, 0.01
"""Largest divergence from the exact computation, as a multiple of llama.cpp's, where codes are taken over."""
TAKEN_OVER = ("Q8_0", "Q4_0")
MOST_KEPT = 2.5
"""The same for files in which forms of 5 and 6 bits are rounded to 8, and zeros of 4 bits to eighths."""
KEPT = ("Q4_K_M", "Q5_K_M", "Q6_K")
MOST_SECONDS = 2.0
"""Longest time to load a gigabyte."""
GIGABYTE = 1e9
LOADS = 5
LOAD = """
import os, subprocess, sys, time
import torch
from pipeedge.base.heap import share_one_heap
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype

share_one_heap()
model = find_decoder(sys.argv[1])
dtype = find_dtype(model.stored_dtype)
model.stage(LayerRange(0, 1), dtype, pages=1)
subprocess.run([sys.executable, "-c", sys.argv[2], str(2 * os.stat(sys.argv[1]).st_size)], check=True)
begin = time.perf_counter()
LocalDecoder(find_decoder(sys.argv[1]), dtype, context=512)
print(model.stored_dtype, torch.get_num_threads(), time.perf_counter() - begin)
"""
TOUCH = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]))
memory.madvise(mmap.MADV_HUGEPAGE)
for place in range(0, len(memory), mmap.PAGESIZE):
    memory[place] = 1
"""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 64, "sliding_window": 32}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64, "sliding_window": 32}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0}),
    "granite": (
        "GraniteForCausalLM",
        {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 256,
            "n_inner": 512,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 512,
            "vocab_size": VOCAB,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}


def make_model(name: str) -> transformers.PreTrainedModel:
    """Return a random model of a family."""
    cls = getattr(transformers, FAMILIES[name][0])
    options = FAMILIES[name][1]
    model = cls(cls.config_class(**(options if name == "gpt2" else {**SIZES, **options})))
    scramble(model, 7)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)  # scores of order one, where the head is this table
    return model.eval()


def vocabulary() -> dict[str, Any]:
    """Return a vocabulary of ASCII letters and of pairs of them: the server holds back halves of others."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space and end of line
    pairs = [first + second for first in letters[:30] for second in letters[:30]][: VOCAB - len(letters)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters + pairs,
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": [f"{pair[0]} {pair[1]}" for pair in pairs],
        "tokenizer.ggml.add_bos_token": False,
    }


@contextmanager
def llama_server(binaries: Path, model: Path) -> Iterator[str]:
    """Run llama-server on a free port; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binaries / "llama-server", "-m", model, "--port", port, "-c", 512, "-np", 1, "-t", 1]
    exact_cache = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]
    log = model.with_suffix(".log").open("wb")
    process = subprocess.Popen([*map(str, command), *exact_cache], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"gguf: llama-server ended: {model.with_suffix('.log').read_text()[-800:]}")
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()  # noqa: S310
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def their_scores(address: str, prompt: list[int]) -> torch.Tensor:
    """Return llama.cpp's log probabilities of the next token."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(  # noqa: S310
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        (first,) = json.load(answer)["completion_probabilities"]
    found = torch.full((VOCAB,), -torch.inf)
    for one in first["top_logprobs"]:
        found[one["id"]] = one["logprob"]
    return found


def our_scores(path: Path, dtype: str, prompts: list[list[int]]) -> torch.Tensor:
    """Return our log probabilities of the next tokens."""
    decoder = LocalDecoder(find_decoder(path), find_dtype(dtype), context=128, threads=1)
    found = []
    for prompt in prompts:
        lists = decoder.begin()
        found.append(decoder.score(decoder.step([(lists, 0, prompt)])[-1:])[0])
        lists.give_back()
    return torch.stack(found).log_softmax(1)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean divergence of the next token's distribution in thousandths."""
    return 1e3 * float((exact.exp() * (exact - other)).sum(1).mean())


def weight_loss(path: Path, dtype: str) -> float:
    """Return the error of the matrices of blocks in our type, relative to the size of those in the file."""
    error = size = 0.0
    with open_weights(path) as file:
        for name in file.names:
            entry = file.entry(name)
            if not name.startswith("blk.") or len(entry.shape) != 2 or dtype not in ("int8", "int4"):
                continue
            exact = torch.cat([part.float().clone() for part in file.read_rows(name, 1 << 20)]).numpy()
            coding = file.coding(name)
            codes = np.concatenate([part.numpy().copy() for part in file.read_coded(name, 1 << 20)])
            head = native.DecoderHead(
                weights="int8" if file.is_wide(name) else dtype,
                stream="float32",
                hidden=exact.shape[1],
                tokens=len(exact),
                norm_centred=False,
                eps=0,
                scale=1,
                cap=0,
            )
            head.fill("weight", 0, codes, coding=coding)
            found = np.empty((exact.shape[1], len(exact)), np.float32)
            head.score(np.eye(exact.shape[1], dtype=np.float32), found, threads=1)
            error += float(((found.T - exact) ** 2).sum())
            size += float((exact**2).sum())
    return (error / size) ** 0.5 if size else 0.0


def compare(family: str, binaries: Path, root: Path, forms: list[str], count: int) -> list[str]:
    """Print a row for each form of a family's file; return what missed its target."""
    drawn = np.random.default_rng(3)
    prompts = [drawn.integers(0, VOCAB, int(length)).tolist() for length in drawn.integers(4, 100, count)]
    source = save_gguf(make_model(family), root / f"{family}.F32.gguf", vocabulary=vocabulary())
    missed = []
    for form in forms:
        path = root / f"{family}.{form}.gguf"
        if not path.exists():
            command = [binaries / "llama-quantize", source, path, form, "1"]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
        with llama_server(binaries, path) as address:
            theirs = torch.stack([their_scores(address, prompt) for prompt in prompts])
        exact = our_scores(path, "float32", prompts)
        dtype = GgufFile(path).stored_dtype
        ours = exact if dtype == "float32" else our_scores(path, dtype, prompts)
        largest = float((exact - theirs).abs().max())
        rounding, own = divergence(exact, theirs), divergence(exact, ours)
        same = float((ours.argmax(1) == theirs.argmax(1)).float().mean())
        loss = weight_loss(path, dtype)
        print(
            f"{family:9} {form:7} {dtype:9} {largest:9.5f} {rounding:10.4f} {own:10.4f} {100 * same:6.1f} % "
            f"{100 * loss:6.2f} %",
            flush=True,
        )
        if form in EXACT and largest > (LARGEST_GELU if family in GELU else LARGEST_EXACT):
            missed.append(f"{family} {form}: log probabilities differ by {largest:.5f}")
        most = MOST_ROUNDING if form in TAKEN_OVER else MOST_KEPT if form in KEPT else np.inf
        if own > most * max(rounding, LEAST_ROUNDING):
            missed.append(f"{family} {form}: {own / rounding:.2f} times the rounding of llama.cpp")
    return missed


def load(paths: list[Path]) -> list[str]:
    """Print the time that loading each file takes; return what missed its target."""
    missed = []
    print(f"{'file':32} {'MB':>7} {'type':>8} {'threads':>7} {'seconds':>8} {'of':>12} {'a gigabyte':>11}")
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
        found = []
        for _ in range(LOADS):
            command = [sys.executable, "-c", LOAD, str(path), TOUCH]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            dtype, threads, seconds = done.stdout.split()
            found.append(float(seconds))
        median, size = statistics.median(found), path.stat().st_size
        rate = median / size * GIGABYTE
        span = f"{min(found):.2f} to {max(found):.2f}"
        print(
            f"{path.name:32} {size / 1e6:7.0f} {dtype:>8} {threads:>7} {median:8.2f} {span:>12} {rate:11.2f}",
            flush=True,
        )
        if rate > MOST_SECONDS:
            missed.append(f"{path.name}: {rate:.2f} s a gigabyte")
    return missed


def main() -> int:
    """Compare the files that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--llama-cpp", type=Path, metavar="DIR", help="where llama.cpp was built")
    what.add_argument(
        "--load", type=Path, nargs="+", metavar="FILE", help="measure how long these files load"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--prompts", type=int, default=24)
    args = parser.parse_args()
    if args.load:
        return finish(load(args.load))
    binaries = args.llama_cpp / "bin"
    if not all((binaries / name).exists() for name in ("llama-server", "llama-quantize")):
        sys.exit("gguf: " + HOW_TO_BUILD.format(binaries))
    torch.set_num_threads(1)
    missed = []
    print("family    form    ours      largest  llama.cpp KL   our KL   same token   loss")
    with tempfile.TemporaryDirectory() as root:
        for family in args.families:
            missed += compare(family, binaries, Path(root), args.forms, args.prompts)
    return finish(missed)


def finish(missed: list[str]) -> int:
    """Print what was missed; return the exit status."""
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
