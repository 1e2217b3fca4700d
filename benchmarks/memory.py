#!/usr/bin/env python3
"""Peak memory of loading a shard, one process a rank, against what its weights take.

    peak <= what importing the libraries takes + 1.15 x the shard's weights

Each row is a process of its own that loads one equal share of the model's layers from a file with random
weights; its peak is the kernel's own account of resident memory (VmHWM), so Linux is needed.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from pipeedge.models import Model, find_model
from pipeedge.models.fill import hub_tensors
from pipeedge.models.random_weights import RandomWeights
from pipeedge.models.writing import write_npz
from pipeedge.schedule import LayerRange

TARGET = 1.15
MIB = 1 << 20

LOAD = """
import json, sys
from pipeedge.models import find_model
from pipeedge.schedule import LayerRange

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

name, weights, start, stop = sys.argv[1:]
model, layers = find_model(name), LayerRange(int(start), int(stop))
imported = peak()
shard = model.load(layers, weights)
print(json.dumps({"imported": imported, "peak": peak(), "weights": model.weight_bytes(layers)}))
"""


def write_safetensors(path: Path, source: RandomWeights) -> None:
    """Write ``source`` as float32, a tensor at a time."""
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


def equal_shares(model: Model, ranks: int) -> list[LayerRange]:
    """``ranks`` ranges of as equal a number of layers as can be."""
    bounds = [model.n_layers * rank // ranks for rank in range(ranks + 1)]
    return [LayerRange(*pair) for pair in pairwise(bounds)]


def measure(model: Model, weights: Path, layers: LayerRange) -> dict[str, int]:
    """Bytes in a process that loads ``layers``: after its imports, at its peak, and of the weights."""
    command = [sys.executable, "-c", LOAD, model.name, str(weights), str(layers.start), str(layers.stop)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return dict(json.loads(result.stdout))


def main() -> int:
    """Print the table; 1 if a rank is above the target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model-name", default="google/vit-large-patch16-224", metavar="NAME")
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="N")
    parser.add_argument("-M", "--model-file", type=Path, metavar="FILE", help="instead of random weights")
    args = parser.parse_args()
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
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
