"""Input and scheduler's files for runs of small models, and what runs leave behind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from places import ASSETS
from small_models import WORDS

from pipeedge.base.files import write_secret
from pipeedge.transport.new_key import make_key

DIGITS = ("-m", "vit-digits")


class Inputs:
    """Files that several runs read."""

    def __init__(self, root: Path, model_dirs: dict[str, Path]) -> None:
        self.models = model_dirs
        self.collected: dict[str, bytes] = {}
        """Outputs of every split, which must be the same."""
        with np.load(ASSETS / "digits.npz") as arrays:
            pixels = (arrays["images_heldout"][:50, None].astype(np.float32) / 16 - 0.5) / 0.5
            labels = arrays["labels_heldout"][:50].astype(np.int64)
        self.digits = root / "digits.npz"
        np.savez(self.digits, pixel_values=pixels, labels=labels)
        chance = np.random.default_rng(1)
        self.images = root / "images.npz"
        np.savez(self.images, pixel_values=chance.standard_normal((7, 3, 16, 16), dtype=np.float32))
        self.sentences = root / "sentences.txt"
        lengths = [1, 9, 3, 14, 2, 5, 7]
        words = random.Random(3)
        self.sentences.write_text(
            "".join(" ".join(words.choice(WORDS) for _ in range(length)) + "\n" for length in lengths)
        )
        self.key = root / "key.pem"
        write_secret(self.key, make_key(), "FILE")
        self.damaged = root / "damaged"
        shutil.copytree(model_dirs["vit"], self.damaged)
        weights = self.damaged / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        self.other = root / "other"
        shutil.copytree(model_dirs["vit"], self.other)
        _change_a_weight(self.other / "model.safetensors")

    def over(self, transport: str) -> tuple[object, ...]:
        """Return the options of a run over ``transport`` (p2p, rpc, tcp, TLS), which ends on a failure."""
        stop = ("--on-failure", "stop") if transport in ("tcp", "TLS") else ()
        return (*(("--key", self.key) if transport == "TLS" else ("-c", transport)), *stop)


def _change_a_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)


def outputs(path: Path) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays["outputs"]


def write_cluster(directory: Path, hosts: Sequence[str]) -> tuple[str, ...]:
    """Write the scheduler's three files for vit-digits, for one slow and two fast hosts."""
    layers = 16
    models = {
        "vit-digits": {
            "layers": layers,
            "parameters_in": 64,
            "parameters_out": [2080, 1040, 5200, 1040] * 4,
            "mem_MB": [1.0] * layers,
        }
    }
    profile = {"dtype": "torch.float32", "batch_size": 8}
    kinds = {
        kind: {
            "bw_Mbps": 1000,
            "mem_MB": 1024,
            "model_profiles": {"vit-digits": [{**profile, "time_s": [seconds] * layers}]},
        }
        for kind, seconds in (("slow", 0.02), ("fast", 0.01))
    }
    documents = {"m.yml": models, "t.yml": kinds, "d.yml": {"slow": [hosts[0]], "fast": [*hosts[1:]]}}
    for name, document in documents.items():
        (directory / name).write_text(yaml.safe_dump(document))
    return ("-sm", "m.yml", "-sdt", "t.yml", "-sd", "d.yml")


def nothing_is_left(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert not any(name.startswith(".") for name in names), names
    assert not names & {"rows.csv", "report.json", "o.npz"}


def write_pictures(folder: Path, count: int) -> None:
    from PIL import Image

    folder.mkdir()
    pixels = np.random.default_rng(5)
    for number in range(count):
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
            folder / f"{number:03}.png"
        )
