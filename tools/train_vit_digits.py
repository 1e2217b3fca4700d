#!/usr/bin/env python3
"""Train ``vit-digits``, the small ViT that PipeEdge ships, on the UCI handwritten digits.

    python tools/train_vit_digits.py                 train on the shipped split, write the model directory
    python tools/train_vit_digits.py --rebuild-data  first write the split again, from scikit-learn's copy

The split is fixed by ``SPLIT_SEED`` and shipped as ``pipeedge/assets/digits.npz``. The number of epochs
and all other settings are constants, and the held-out images are only used once, after the last step.
One thread and one seed make the run reproducible on one kind of processor; elsewhere the last digits of
the weights may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

ASSETS = Path(__file__).resolve().parents[1] / "pipeedge" / "assets"
DATA_FILE = ASSETS / "digits.npz"
MODEL_DIRECTORY = ASSETS / "vit-digits"

SPLIT_SEED = 1797
HELD_OUT_PER_CLASS = 36
LEVELS = 16  # a pixel counts the ink in a 4x4 field of the scan: 0 to 16

SEED = 0
EPOCHS = 200
BATCH = 64
PEAK_RATE = 2e-3
WARMUP_EPOCHS = 5
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.1
MAX_SHIFT = 1.0  # pixels
MAX_TURN = math.radians(12)
MAX_SCALE = 0.12
MAX_SHEAR = 0.15


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the vit-digits model that PipeEdge ships.")
    parser.add_argument("--output", type=Path, default=MODEL_DIRECTORY, help="model directory to write")
    parser.add_argument("--data", type=Path, default=DATA_FILE, help="the split, as .npz")
    parser.add_argument("--rebuild-data", action="store_true", help="write --data from scikit-learn first")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the training images")
    parser.add_argument("--seed", type=int, default=SEED, help="initial weights, order and augmentation")
    return parser.parse_args(arguments)


def split_digits(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Split the digits: hold out ``HELD_OUT_PER_CLASS`` images of every class, and shuffle both parts.

    ``images`` is [items, 8, 8] with values 0 to 16, ``labels`` [items]; both come back as uint8.
    """
    generator = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    order = generator.permutation(len(labels))
    rank_in_class = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank_in_class[members] = np.arange(len(members))
    held_out = rank_in_class[order] < HELD_OUT_PER_CLASS
    parts = {"train": order[~held_out], "heldout": order[held_out]}
    return {
        f"{kind}_{part}": values[chosen].astype(np.uint8)
        for part, chosen in parts.items()
        for kind, values in (("images", images), ("labels", labels))
    }


def rebuild_data(path: Path) -> None:
    """Write the split of scikit-learn's copy of the digits to ``path``."""
    from sklearn.datasets import load_digits  # only here: training from the shipped arrays needs none of it

    digits = load_digits()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".npz")
    with os.fdopen(descriptor, "wb") as stream:
        np.savez_compressed(stream, **split_digits(digits.images, digits.target))
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)


def pixel_values(images: np.ndarray) -> torch.Tensor:
    """Convert uint8 [items, 8, 8] with values 0 to 16 to float32 [items, 1, 8, 8] from -1 to 1."""
    return (torch.from_numpy(images).float().unsqueeze(1) / LEVELS - 0.5) / 0.5


def augment(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rotate, scale, shear and shift every image of [items, 1, 8, 8] a little, each by its own amount."""

    def uniform(limit: float) -> torch.Tensor:
        return (torch.rand(len(pixels), generator=generator) * 2 - 1) * limit

    turn, shear = uniform(MAX_TURN), uniform(MAX_SHEAR)
    scale_x, scale_y = 1 + uniform(MAX_SCALE), 1 + uniform(MAX_SCALE)
    # The grid of grid_sample spans -1 to 1, so a pixel is 2 / 8 of it.
    shift_x, shift_y = uniform(MAX_SHIFT * 2 / 8), uniform(MAX_SHIFT * 2 / 8)
    top = torch.stack([turn.cos() * scale_x, shear - turn.sin(), shift_x], dim=1)
    bottom = torch.stack([turn.sin(), turn.cos() * scale_y, shift_y], dim=1)
    grid = F.affine_grid(torch.stack([top, bottom], dim=1), list(pixels.shape), align_corners=False)
    # grid_sample pads with zeros but paper is -1, so convert to ink from 0 to 1 and back.
    return F.grid_sample((pixels + 1) / 2, grid, align_corners=False) * 2 - 1


def learning_rate(step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then half a cosine to zero."""
    warmup = min(WARMUP_EPOCHS, epochs) * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, epochs * steps_per_epoch - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def build_model() -> torch.nn.Module:
    """Return a newly initialised ViT of 4 blocks for 8x8 greyscale images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=8,
        patch_size=2,
        num_channels=1,
        # The usual 0.02 is meant for a width of 768; with 64, training would take ten times as long.
        initializer_range=0.08,
        id2label={index: str(index) for index in range(10)},
        label2id={str(index): index for index in range(10)},
    )
    return ViTForImageClassification(config)


def train(model: torch.nn.Module, pixels: torch.Tensor, labels: torch.Tensor, epochs: int, seed: int) -> None:
    """Fit ``model`` in place to ``pixels`` [items, 1, 8, 8] and ``labels`` [items]."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE,
    )
    steps_per_epoch = math.ceil(len(pixels) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, steps_per_epoch, epochs)
    )
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(pixels), generator=generator).split(BATCH):
            logits = model(pixel_values=augment(pixels[chosen], generator)).logits
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        if (epoch + 1) % 10 == 0 or epoch + 1 == epochs:
            print(f"epoch {epoch + 1:4d}/{epochs}  training loss {total / len(pixels):.4f}", file=sys.stderr)
    model.eval()


def count_correct(model: torch.nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many of ``pixels`` [items, 1, 8, 8] are classified as their label in ``labels`` [items]."""
    with torch.inference_mode():
        return int((model(pixel_values=pixels).logits.argmax(dim=1) == labels).sum())


def write_model(model: torch.nn.Module, directory: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``preprocessor_config.json`` to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # transformers writes it for the owner alone
    # With these values, grey levels from 0 to 255 are normalised like 0 to 16 by pixel_values().
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": False,
        "do_resize": True,
        "size": {"height": 8, "width": 8},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5],
        "image_std": [0.5],
    }
    write_json(directory / "preprocessor_config.json", processor)


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write ``document`` to ``path`` in one step."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Train, measure once on the held-out images, and write the model."""
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if options.rebuild_data:
        rebuild_data(options.data)
    with np.load(options.data, allow_pickle=False) as arrays:
        part = {name: arrays[name] for name in arrays.files}
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    model = build_model()
    labels = torch.from_numpy(part["labels_train"]).long()
    train(model, pixel_values(part["images_train"]), labels, options.epochs, options.seed)
    elapsed = time.perf_counter() - started
    held_out = torch.from_numpy(part["labels_heldout"]).long()
    correct = count_correct(model, pixel_values(part["images_heldout"]), held_out)
    accuracy = correct / len(held_out)
    write_model(model, options.output)
    write_json(
        options.output / "training.json",
        {
            "held_out": {"correct": correct, "labelled": len(held_out), "top1": round(accuracy, 6)},
            "training_items": len(labels),
            "epochs": options.epochs,
            "seed": options.seed,
            "torch": torch.__version__,
        },
    )
    print(f"trained in {elapsed:.0f} s", file=sys.stderr)
    print(f"held-out accuracy {accuracy:.4f} ({correct}/{len(held_out)})")


if __name__ == "__main__":
    main()
