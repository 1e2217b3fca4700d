#!/usr/bin/env python3
"""Compare the peak memory of a rank with the size of its weights.

    loading     peak <= memory after importing the libraries + 1.15 x the shard's weights
    --dtypes    memory that loading adds, relative to float32: bfloat16 <= 0.55, int8 <= 0.35, int4 <= 0.2
    decoders    of a directory or a GGUF file, in each of --dtypes: memory that a stage with an equal share of
                the layers adds at its peak <= 1.02 x the bytes of its weights, in a process that has had
                one before: the first one also brings 5 MB of the libraries' code into memory, once a machine
    running     peak <= the limit for loading + frames of its links + memory to compute one microbatch

Loading: each row is a separate process that loads an equal share of the model's layers from a file with
random weights. Running (``--run``): ranks of ``runtime.py`` with the same shares. Peaks are the kernel's
figure for resident memory (VmHWM), which needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from local_ranks import wait_for

from pipeedge.base.schedule import DTYPES, LayerRange
from pipeedge.launch.main import free_port
from pipeedge.models import Model, Outline, find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.registry import find_any
from pipeedge.models.weights.download import convert
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.writing import write_npz
from pipeedge.transport.frame import frame_capacity

ROOT = Path(__file__).resolve().parents[1]
UBATCH = 8
MICROBATCHES = 3
FRAMES_IN, FRAMES_OUT = 3, 2
"""Number of frames of a rank: two posted receives and one being computed; two in flight."""
TARGET = 1.15
STAGE_TARGET = 1.02
SHARES = {"float32": 1.0, "bfloat16": 0.55, "float16": 0.55, "int8": 0.35, "int4": 0.2}
"""Target for the memory that half of a model adds, relative to float32."""
MIB = 1 << 20

LOAD = """
import json, sys
from pipeedge.models import find_model
from pipeedge.models.dtypes import find_dtype
from pipeedge.base.heap import share_one_heap
from pipeedge.base.schedule import LayerRange

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

name, weights, start, stop, dtype = sys.argv[1:]
model, layers, dtype = find_model(name), LayerRange(int(start), int(stop)), find_dtype(dtype)
share_one_heap()
imported = peak()
shard = model.load(layers, weights, dtype=dtype)
print(json.dumps({"imported": imported, "peak": peak(), "weights": model.weight_bytes(layers, dtype)}))
"""

LOAD_STAGE = """
import json, sys
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.base.heap import share_one_heap
from pipeedge.base.schedule import LayerRange

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

name, start, stop, dtype = sys.argv[1:]
model, layers = find_decoder(name), LayerRange(int(start), int(stop))
share_one_heap()
model.stage(LayerRange(0, 1), find_dtype(dtype), pages=1)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
imported = resident("VmRSS")
stage = model.stage(layers, find_dtype(dtype), pages=1)
print(json.dumps({"imported": imported, "peak": resident("VmHWM"), "weights": stage.weight_bytes}))
"""


COMPUTE = """
import json, sys, torch
import pipeedge.run.pipeline, pipeedge.run.reporting
from pipeedge.base.machine import peak_rss_mb
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model

name, weights, start, stop, items = sys.argv[1:]
model, layers = find_model(name), LayerRange(int(start), int(stop))
imported = peak_rss_mb()
shard = model.load(layers, weights)
specs = model.payload_specs(layers.start, int(items), None)
payload = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs)
loaded = peak_rss_mb()
with torch.inference_mode():
    shard(payload)
print(json.dumps({"imported": imported, "scratch": peak_rss_mb() - loaded}))
"""


def write_safetensors(path: Path, source: RandomWeights) -> None:
    """Write ``source`` as float32, one tensor at a time."""
    header, offset = {}, 0
    for name in source.names:
        shape = source.entry(name).shape
        stop = offset + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in source.names:
            tensor = torch.empty(source.entry(name).shape)
            source.read_into(name, tensor)
            file.write(tensor.numpy().data)


def equal_shares(model: Outline, ranks: int) -> list[LayerRange]:
    """Divide the layers into ``ranks`` ranges, as evenly as possible."""
    bounds = [model.n_layers * rank // ranks for rank in range(ranks + 1)]
    return [LayerRange(*pair) for pair in pairwise(bounds)]


def measure(model: Model, weights: Path, layers: LayerRange, dtype: str = "float32") -> dict[str, int]:
    """Measure a process that loads ``layers``: bytes after its imports, at its peak, and of the weights."""
    place = [str(layers.start), str(layers.stop)]
    command = [sys.executable, "-c", LOAD, model.name, str(weights), *place, dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return dict(json.loads(result.stdout))


def measure_computing(model: Model, weights: Path, layers: LayerRange) -> dict[str, float]:
    """Measure the MB of a process without links after its imports, and those a microbatch adds."""
    command = [sys.executable, "-c", COMPUTE, model.name, str(weights)]
    command += [str(layers.start), str(layers.stop), str(UBATCH)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=one_thread()
    )
    return dict(json.loads(result.stdout))


def measure_running(model: Model, weights: Path, shares: list[LayerRange]) -> list[float]:
    """Run the ranks and return the peak of each in MB."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        partition = ",".join(f"{share.first},{share.last}" for share in shares)
        command = ["-m", model.name, "-M", str(weights), "-pt", partition, "-u", str(UBATCH)]
        command += ["-b", str(UBATCH * MICROBATCHES), "--port", str(port), "--report", str(report)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "runtime.py", str(rank), str(len(shares)), *command],
                cwd=ROOT,
                env=one_thread(),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(len(shares))
        ]
        wait_for(ranks)
        return [stage["rss_peak_mb"] for stage in json.loads(report.read_text("utf-8"))["stages"]]


def print_dtypes(model: Model, files: list[Path], dtypes: list[str]) -> bool:
    """Print the memory of half of the model in each number type, from each file and from converted ones."""
    half = equal_shares(model, 2)[0]
    print(f"\nlayers {half}: memory that loading adds, in MB and relative to float32")
    print(f"{'file':28} {'dtype':>9} {'weights':>9} {'added':>9} {'share':>6} {'target':>7}")
    good = True
    base = 0
    for dtype in dtypes:
        stored = model.converted_path(find_dtype(dtype), files[-1])
        if dtype != "float32":
            convert(model, files[-1], stored, find_dtype(dtype), say=lambda _line: None)
        for file in [*files, *([stored] if stored.exists() else [])]:
            found = measure(model, file, half, dtype)
            added = found["peak"] - found["imported"]
            base = base or added
            good = good and added <= SHARES[dtype] * base * (1.02 if dtype == "float32" else 1)
            sizes = f"{found['weights'] / MIB:9.1f} {added / MIB:9.1f} {added / base:6.3f}"
            print(f"{file.name:28} {dtype:>9} {sizes} {SHARES[dtype]:7.2f}")
    return good


def print_stages(name: str, ranks: int, dtypes: list[str]) -> bool:
    """Print the memory of the stages of a decoder; return whether all are within their targets."""
    model = find_decoder(name)
    print(f"{name} over {ranks} ranks; MB are 2^20 bytes, target {STAGE_TARGET}")
    print(f"{'dtype':>9} {'rank':>4} {'layers':>8} {'weights':>9} {'import':>9} {'peak':>9} {'ratio':>6}")
    good = True
    for dtype in dtypes:
        for rank, layers in enumerate(equal_shares(model, ranks)):
            words = [name, str(layers.start), str(layers.stop), dtype]
            command = [sys.executable, "-c", LOAD_STAGE, *words]
            result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            found = json.loads(result.stdout)
            ratio = (found["peak"] - found["imported"]) / found["weights"]
            good = good and ratio <= STAGE_TARGET
            sizes = " ".join(f"{found[key] / MIB:9.1f}" for key in ("weights", "imported", "peak"))
            print(f"{dtype:>9} {rank:4} {layers!s:>8} {sizes} {ratio:6.3f}")
    return good


def one_thread() -> dict[str, str]:
    """Return the environment with one thread per process."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def print_running(model: Model, weights: Path, ranks: int) -> bool:
    """Print the table of running ranks; return whether all are within their targets."""
    shares = equal_shares(model, ranks)
    peaks = measure_running(model, weights, shares)
    print(f"\nrunning, microbatches of {UBATCH}")
    print(f"{'rank':>4} {'layers':>8} {'weights':>9} {'import':>9} {'frames':>9} {'compute':>9}", end="")
    print(f" {'allowed':>9} {'peak':>9}")
    good = True
    for rank, (layers, peak) in enumerate(zip(shares, peaks, strict=True)):
        alone = measure_computing(model, weights, layers)
        held = model.weight_bytes(layers) / MIB
        frame_in, frame_out = (
            frame_capacity(model.payload_specs(cut, UBATCH, None)) / MIB
            for cut in (layers.start, layers.stop)
        )
        frames = FRAMES_IN * frame_in + FRAMES_OUT * frame_out
        allowed = alone["imported"] + TARGET * held + frames + alone["scratch"]
        good = good and peak <= allowed
        sizes = (held, alone["imported"], frames, alone["scratch"], allowed, peak)
        print(f"{rank:4} {layers!s:>8} " + " ".join(f"{size:9.1f}" for size in sizes))
    return good


def main() -> int:
    """Print the tables; return 1 if a rank exceeds its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model-name", default="google/vit-large-patch16-224", metavar="NAME")
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="N")
    parser.add_argument(
        "-M", "--model-file", type=Path, metavar="FILE", help="weights to use instead of random ones"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES[1:],
        default=[],
        help="compare half of the model in these number types with float32",
    )
    parser.add_argument("--run", action="store_true", help="also measure the ranks of a run")
    args = parser.parse_args()
    if find_any(args.model_name).family.decodes:
        return 0 if print_stages(args.model_name, args.ranks, args.dtypes or ["int8", "int4"]) else 1
    model = find_model(args.model_name)
    with tempfile.TemporaryDirectory() as directory:
        files = [args.model_file] if args.model_file else []
        if not files:
            source = RandomWeights(hub_tensors(model.build(), model.config), seed=0)
            files = [Path(directory) / "weights.safetensors", Path(directory) / "weights.npz"]
            write_safetensors(files[0], source)
            write_npz(files[1], source.names, source)
        worst = 0.0
        print(f"{model.name} over {args.ranks} ranks; MB are 2^20 bytes, target {TARGET}")
        print(f"{'file':20} {'rank':>4} {'layers':>8} {'weights':>9} {'import':>9} {'peak':>9} {'ratio':>6}")
        for file in files:
            for rank, layers in enumerate(equal_shares(model, args.ranks)):
                found = measure(model, file, layers)
                ratio = (found["peak"] - found["imported"]) / found["weights"]
                worst = max(worst, ratio)
                sizes = " ".join(f"{found[key] / MIB:9.1f}" for key in ("weights", "imported", "peak"))
                print(f"{file.name:20} {rank:4} {layers!s:>8} {sizes} {ratio:6.3f}")
        good = worst <= TARGET
        if args.dtypes:
            good = print_dtypes(model, files, ["float32", *args.dtypes]) and good
        if args.run:
            good = print_running(model, files[-1], args.ranks) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
