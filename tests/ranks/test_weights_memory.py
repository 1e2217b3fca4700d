"""Memory that loading weights takes, measured in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from dialects import Arrays, as_google
from quick_python import run_text
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
def test_peak_memory_is_the_weights_and_little_more(
    kind: str, half_a_vit: Arrays, tmp_path: Path, quick_python: Path
) -> None:
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
    result = run_text(LOAD, tmp_path, quick_python, str(file))
    before, peak, weights = map(int, result.stdout.split())
    assert weights > 150 * 2**20
    assert peak - before <= 1.15 * weights
    assert peak - before >= 0.9 * weights, "the measurement misses the weights"


# The table of words -------------------------------------------------------------------------------------

WORDS, WIDTH = 250_002, 256
LOOK_UP = """
import sys
import torch
from pipeedge.models import find_model
from pipeedge.base.schedule import LayerRange

def resident():
    # Its own memory and the pages of the file, but no pages of libraries, which come as code runs
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    bytes_, counts = 1024 * int(status["RssAnon"].split()[0]), False
    for line in open("/proc/self/smaps"):
        name, *values = line.split()
        if not name.endswith(":"):
            counts = line.rstrip().endswith(".safetensors")
        elif counts and name == "Rss:":
            bytes_ += 1024 * int(values[0])
    return bytes_

model = find_model(sys.argv[1])
layers, dtype = LayerRange(0, 1), getattr(torch, sys.argv[2])
payload = tuple(torch.ones(2, 4, dtype=torch.int64) for _ in model.input_names)
with torch.inference_mode():
    model.random(LayerRange(1, 2), dtype=dtype)
    before = resident()
    shard = model.load(layers, dtype=dtype)
    shard(payload)
    loaded = resident()
    shard(tuple(torch.randint(250_000, (2, 4)) for _ in payload))
    touched = resident()
    shard.word_table.sum()
    print(loaded - before, touched - loaded, resident() - before)
"""


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small XLM-R with the table of words of a large one."""
    directory = tmp_path_factory.mktemp("multilingual")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    config = transformers.XLMRobertaConfig(**sizes, vocab_size=WORDS, type_vocab_size=1)
    transformers.XLMRobertaModel(config).save_pretrained(directory)
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_words_are_looked_up_in_the_file(
    dtype: str, multilingual: Path, tmp_path: Path, quick_python: Path
) -> None:
    """The system may map pages beside those that are touched, up to a huge page for each end of a word."""
    result = run_text(LOOK_UP, tmp_path, quick_python, str(multilingual), dtype)
    loaded, touched, whole = map(int, result.stdout.split())
    table = 4 * WORDS * WIDTH
    huge_page = 2 << 20
    assert loaded < 4 * huge_page
    assert touched < 8 * 2 * huge_page
    assert whole > 0.9 * table, "the measurement misses the table"
