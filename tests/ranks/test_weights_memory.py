"""Memory that loading weights takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dialects import Arrays, as_google
from safetensors.torch import save_file

from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.models.weights.locating import hub_tensors

# Memory -------------------------------------------------------------------------------------------------

LOAD = """
import sys
from pipeedge.models import find_model
from pipeedge.base.schedule import LayerRange

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

model = find_model("google/vit-base-patch16-224")
layers = LayerRange(12, 36)
model.random(LayerRange(13, 14))
before = peak()
shard = model.load(layers, sys.argv[1])
print(before, peak(), model.weight_bytes(layers))
"""


@pytest.fixture(scope="module")
def half_a_vit(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """Write the middle six blocks of ViT-Base in Google's layout, the hardest to read without a copy."""
    model = find_model("google/vit-base-patch16-224")
    tensors = hub_tensors(model.build(LayerRange(12, 36)), model.config)
    return {name: np.zeros(tuple(shape), "f4") for name, shape in tensors.items()}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
@pytest.mark.parametrize("kind", ["hub.npz", "hub.safetensors", "google.npz", "half.safetensors"])
def test_peak_memory_is_the_weights_and_little_more(kind: str, half_a_vit: Arrays, tmp_path: Path) -> None:
    file = tmp_path / kind
    if kind == "half.safetensors":
        save_file({n: torch.from_numpy(a).half() for n, a in half_a_vit.items()}, file)
    elif file.suffix == ".safetensors":
        save_file({n: torch.from_numpy(a) for n, a in half_a_vit.items()}, file)
    else:
        arrays = half_a_vit
        if kind == "google.npz":
            ends = {
                "embeddings.cls_token": (1, 1, 768),
                "embeddings.position_embeddings": (1, 197, 768),
                "embeddings.patch_embeddings.projection.weight": (768, 3, 16, 16),
                "embeddings.patch_embeddings.projection.bias": (768,),
                "layernorm.weight": (768,),
                "layernorm.bias": (768,),
                "classifier.weight": (1000, 768),
                "classifier.bias": (1000,),
            }
            moved = {n.replace("layer.3", "layer.0"): a for n, a in half_a_vit.items() if "layer.3." in n}
            hub = {**{n: np.zeros(shape, "f4") for n, shape in ends.items()}, **moved, **half_a_vit}
            for n in range(12):
                for key in [key for key in half_a_vit if "layer.3." in key]:
                    hub.setdefault(key.replace("layer.3.", f"layer.{n}."), half_a_vit[key])
            google = as_google(hub, 12, 12)
            arrays = {n: a for n, a in google.items() if any(f"block_{b}/" in n for b in range(3, 9))}
        np.savez(file, **arrays)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    before, peak, weights = map(int, result.stdout.split())
    assert weights > 150 * 2**20
    assert peak - before <= 1.15 * weights
    assert peak - before >= 0.9 * weights, "the measurement misses the weights"
