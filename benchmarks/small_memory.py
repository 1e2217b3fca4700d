#!/usr/bin/env python3
"""Run ranks over TCP with little memory each, and compare the peak of each with what it has to hold.

    peak <= what Python and torch take + weights + frames of its links, or cache of keys and values + 60 MB

An encoder over four ranks (ViT-Base) and a decoder (the shape of Qwen2.5-0.5B), both with random weights. As
root, where control groups are mounted, each rank is confined to ``--limit`` MB, in which its pages of files
count, too. What Python and torch take is the peak of a process that only imports them. Peaks are the kernel's
figure for resident memory (VmHWM). MB are 2^20 bytes. The data rank of the decoder is not confined. It holds
the tokenizer besides, with 150,000 words, which counts as its weights do: what a process that only reads the
tokenizer takes more than one that reads a tokenizer of a few words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_ranks import wait_for
from memory import MIB, ROOT, equal_shares, one_thread, write_safetensors
from random_decoders import SHAPES, write_directory
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT, LINK_WINDOW
from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import LayerRange
from pipeedge.launch.main import free_port
from pipeedge.models import find_model
from pipeedge.models.decoder import DecoderModel, find_runnable
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.testbed.groups import GroupSettings, Hierarchy, find_hierarchies, kill_all
from pipeedge.transport.frame import frame_capacity

ALLOWED_MB = 60
RANKS = 4
MICROBATCHES = 3
CACHE_MB = 32
TOKENS = 24
PROMPT = 200
ENCODER, DECODER = "google/vit-base-patch16-224", "qwen2.5-0.5b"
GROUP = "pipeedge-small-memory"

PEAK = """
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
BARE = f"import numpy, torch{PEAK}"
READS_TOKENIZER = f"""
import sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1]){PEAK}
"""


@dataclass(frozen=True)
class Case:
    """A run whose ranks are measured."""

    model: str
    """Name, or directory."""
    dtype: str
    options: tuple[str, ...]
    """Options of all ranks."""
    input: tuple[str, ...]
    """Options of the data rank."""
    ubatch: int


def process_mb(program: str, *arguments: str) -> float:
    """Return the peak of a process that runs a program of Python."""
    said = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=one_thread(),
    )
    return int(said.stdout) / 1024


def write_tokenizer(path: Path, words: int) -> Path:
    """Write a tokenizer of that many words."""
    Tokenizer(WordLevel({f"w{number}": number for number in range(words)})).save(str(path))
    return path


def tokenizer_mb(directory: Path) -> float:
    """Return what the tokenizer of a model takes."""
    few = write_tokenizer(directory / "few.json", 8)
    large = process_mb(READS_TOKENIZER, str(directory / "tokenizer.json"))
    return large - process_mb(READS_TOKENIZER, str(few))


@contextmanager
def confined(ranks: int, limit_mb: int) -> Iterator[list[list[str]]]:
    """Yield what begins the command of each rank: it runs in a group of its own, if that is possible."""
    try:
        trees = find_hierarchies(Path("/proc/mounts").read_text("utf-8"))
        with ExitStack() as stack:
            words = [_confine(stack, trees, f"{GROUP}/{rank}", limit_mb) for rank in range(ranks)]
            print(f"each rank is confined to {limit_mb} MB")
            yield words
    except RequestError as error:
        print(f"the ranks are not confined: {error}")
        yield [[] for _ in range(ranks)]


def _confine(stack: ExitStack, trees: Sequence[Hierarchy], group: str, limit_mb: int) -> list[str]:
    for tree in trees:
        tree.create(group)
        stack.callback(tree.remove, group)
        tree.limit(group, GroupSettings(None, limit_mb * MIB))
    stack.callback(kill_all, trees, group)
    places = " ".join(str(tree.mount / group / "cgroup.procs") for tree in trees)
    return ["sh", "-c", f'for place in {places}; do echo $$ >"$place"; done; exec "$@"', "confined"]


def peaks_mb(case: Case, shares: Sequence[LayerRange], limit_mb: int, *, spare_first: bool) -> list[float]:
    """Run the ranks, and return the peak of each. With ``spare_first``, rank 0 is not confined."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as directory, confined(len(shares), limit_mb) as beginnings:
        report = Path(directory) / "report.json"
        partition = ",".join(f"{share.first},{share.last}" for share in shares)
        common = ["-m", case.model, "-c", "tcp", "-pt", partition, "--port", str(port), *case.options]
        ranks = [
            subprocess.Popen(
                [*beginning, sys.executable, "runtime.py", str(rank), str(len(shares)), *common]
                + ([*case.input, "--report", str(report)] if rank == 0 else []),
                cwd=ROOT,
                env=one_thread(),
                stdout=subprocess.DEVNULL,
            )
            for rank, beginning in enumerate([[], *beginnings[1:]] if spare_first else beginnings)
        ]
        wait_for(ranks)
        return [stage["rss_peak_mb"] for stage in json.loads(report.read_text("utf-8"))["stages"]]


def held_mb(case: Case, share: LayerRange) -> tuple[float, float]:
    """Return the size of the weights of a rank, or of all that it holds, and that of its frames, or cache."""
    model, dtype = find_runnable(case.model), find_dtype(case.dtype)
    weights = model.weight_bytes(share, dtype)
    if isinstance(model, DecoderModel):
        if share.start > 0:
            return weights / MIB, CACHE_MB
        return (weights + model.end_bytes(dtype)) / MIB + tokenizer_mb(Path(case.model)), CACHE_MB
    into, out = (
        frame_capacity(model.payload_specs(cut, case.ubatch, None)) for cut in (share.start, share.stop)
    )
    return weights / MIB, ((LINK_WINDOW + 1) * into + FRAMES_IN_FLIGHT * out) / MIB


def show(case: Case, bare: float, limit_mb: int) -> bool:
    """Print the ranks of a run; return whether all are within what they may take."""
    model = find_runnable(case.model)
    shares = equal_shares(model, RANKS)
    is_decoder = isinstance(model, DecoderModel)
    what = "cache" if is_decoder else "frames"
    print(
        f"\n{Path(case.model).name}, {case.dtype}, over {RANKS} ranks"
        + ("" if is_decoder else f", -u {case.ubatch}")
    )
    peaks = peaks_mb(case, shares, limit_mb, spare_first=is_decoder)
    print(f"{'rank':>4} {'layers':>8} {'torch':>8} {'weights':>8} {what:>8} {'beyond':>8} {'peak':>8}")
    worst = 0.0
    for rank, (share, peak) in enumerate(zip(shares, peaks, strict=True)):
        weights, held = held_mb(case, share)
        beyond = peak - bare - weights - held
        worst = max(worst, beyond)
        sizes = " ".join(f"{size:8.1f}" for size in (bare, weights, held, beyond, peak))
        print(f"{rank:4} {share!s:>8} {sizes}")
    print(f"at most {worst:.1f} MB beyond, of {ALLOWED_MB}")
    return worst <= ALLOWED_MB


def main() -> int:
    """Print the tables; return 1 if a rank exceeds its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=600, metavar="MB", help="memory of a rank (600)")
    parser.add_argument(
        "-u", "--ubatch-size", type=int, nargs="+", default=[1, 8], metavar="N", help="microbatches (1 8)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of the encoder (float32)")
    parser.add_argument("--decoder-dtypes", nargs="*", default=["bfloat16", "int4"], help="(bfloat16 int4)")
    args = parser.parse_args()
    os.chdir(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as directory:
        encoder = find_model(ENCODER)
        weights = Path(directory) / "weights.safetensors"
        write_safetensors(weights, RandomWeights(hub_tensors(encoder.build(), encoder.config), seed=0))
        cases = [
            Case(
                ENCODER,
                dtype,
                ("-M", str(weights), "-u", str(size), "--dtype", dtype),
                ("-b", str(size * MICROBATCHES)),
                size,
            )
            for dtype in args.dtypes
            for size in args.ubatch_size
        ]
        if args.decoder_dtypes:
            decoder = Path(directory) / DECODER
            write_directory(SHAPES[DECODER], decoder)
            write_tokenizer(decoder / "tokenizer.json", SHAPES[DECODER].vocab)
            prompts = Path(directory) / "prompts.jsonl"
            prompts.write_text(json.dumps({"prompt_token_ids": list(range(1, PROMPT + 1))}) + "\n")
            texts = ("--input", str(prompts), "--max-tokens", str(TOKENS), "--greedy")
            cases += [
                Case(str(decoder), dtype, ("--dtype", dtype, "--cache-mb", str(CACHE_MB)), texts, 1)
                for dtype in args.decoder_dtypes
            ]
        bare = process_mb(BARE)
        good = [show(case, bare, args.limit) for case in cases]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
