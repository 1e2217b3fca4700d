"""What compression costs in accuracy: ``python benchmarks/accuracy.py [--csv FILE]``.

    held-out digits ──layers 1 to c──> payload ──LinkEncoder, LinkDecoder──> layers c + 1 to 16 ──> classes

Every cut c of the shipped model, every width, every clamp; one link compressed at a time, and then all
of them, a stage for each layer. Microbatches of 8 in input order, as in a run. Measured against the same
model without compression: the classes that differ, the accuracy lost, and the relative error of the
payload itself.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import pipeedge
from pipeedge.config import CLAMPS
from pipeedge.models import find_model
from pipeedge.payload import Payload
from pipeedge.quantization import LinkDecoder, LinkEncoder
from pipeedge.schedule import BIT_WIDTHS, LayerRange

CPU = torch.device("cpu")
ALL_CUTS = 0
DIGITS = Path(pipeedge.__file__).parent / "assets" / "digits.npz"


@dataclass(frozen=True)
class Row:
    """One cut, width and clamp."""

    cut: int
    """Layers before it; 0: all cuts at once."""
    bits: int
    clamp: str
    accuracy: float
    """Part of the held-out images."""
    lost_points: float
    """Accuracy without compression minus this, in percent of the images."""
    changed: int
    """Images whose class differs from the one without compression."""
    relative_error: float
    """Of the values of the payload, in the Euclidean norm; of all cuts, of the model's output."""


def through_link(payload: Payload, bits: int, clamp: str, size: int) -> Payload:
    """``payload`` after a compressed link, in microbatches of ``size``."""
    encoder, decoder = LinkEncoder(clamp), LinkDecoder()
    parts = []
    for start in range(0, payload[0].shape[0], size):
        microbatch = tuple(tensor[start : start + size] for tensor in payload)
        parts.append(decoder.decode(encoder.encode(microbatch, bits)))
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def measure(cuts: Sequence[int], size: int) -> Iterator[Row]:
    """All of it."""
    model = find_model("vit-digits")
    with np.load(DIGITS, allow_pickle=False) as arrays:
        pixels = (arrays["images_heldout"][:, None].astype(np.float32) / 16 - 0.5) / 0.5
        labels = torch.from_numpy(arrays["labels_heldout"].astype(np.int64))
    images = (torch.from_numpy(pixels),)
    with torch.inference_mode():
        outputs = model.load(LayerRange(0, model.n_layers), None, CPU)(images)[0]
        expected = outputs.argmax(1)
        right = float((expected == labels).float().mean())

        def row(cut: int, bits: int, clamp: str, came: Payload, sent: Payload, logits: torch.Tensor) -> Row:
            accuracy = float((logits.argmax(1) == labels).float().mean())
            error = sum(float((a - b).pow(2).sum()) for a, b in zip(came, sent, strict=True))
            norm = sum(float(b.pow(2).sum()) for b in sent)
            return Row(
                cut,
                bits,
                clamp,
                accuracy,
                100 * (right - accuracy),
                int((logits.argmax(1) != expected).sum()),
                (error / norm) ** 0.5,
            )

        for cut in cuts:
            payload = model.load(LayerRange(0, cut), None, CPU)(images)
            rest = model.load(LayerRange(cut, model.n_layers), None, CPU)
            for bits in BIT_WIDTHS:
                for clamp in CLAMPS:
                    came = through_link(payload, bits, clamp, size)
                    yield row(cut, bits, clamp, came, payload, rest(came)[0])
        layers = [model.load(LayerRange(n, n + 1), None, CPU) for n in range(model.n_layers)]
        for bits in BIT_WIDTHS:
            for clamp in CLAMPS:
                values: Payload = images
                for layer in layers[:-1]:
                    values = through_link(layer(values), bits, clamp, size)
                (logits,) = layers[-1](values)
                yield row(ALL_CUTS, bits, clamp, (logits,), (outputs,), logits)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """A Markdown table: each width and clamp, over single cuts and with all cuts compressed at once."""
    titles = (
        "bits",
        "clamp",
        "relative error, mean",
        "points lost, mean",
        "points lost, worst cut",
        "images changed, worst cut",
        "accuracy, all cuts at once",
        "images changed, all cuts at once",
    )
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for bits in BIT_WIDTHS:
        for clamp in CLAMPS:
            found = [row for row in rows if (row.bits, row.clamp) == (bits, clamp)]
            single = [row for row in found if row.cut != ALL_CUTS]
            (every,) = (row for row in found if row.cut == ALL_CUTS)
            lost = [row.lost_points for row in single]
            yield (
                f"| {bits} | {clamp} | {statistics.mean(row.relative_error for row in single):.4f} "
                f"| {statistics.mean(lost):.2f} | {max(lost):.2f} | {max(row.changed for row in single)} "
                f"| {every.accuracy:.4f} | {every.changed} |"
            )


def missed(rows: Sequence[Row], clamp: str) -> Iterator[str]:
    """What the default clamp does not reach, a line each."""
    for row in rows:
        where = f"cut {row.cut or 'all'}, {row.bits} bits, {row.clamp}"
        if row.clamp == clamp and row.bits == 8 and row.changed > 1:
            yield f"{where}: {row.changed} images change their class, at most 1 may"
        if row.clamp == clamp and row.bits == 4 and row.cut and row.lost_points > 0.5:
            yield f"{where}: {row.lost_points:.2f} points lost, at most 0.5 may be"
    at_two = {(row.cut, row.clamp): row for row in rows if row.bits == 2}
    for (cut, name), plain in at_two.items():
        if name != "none" or plain.lost_points < 5:
            continue
        best = max(at_two[cut, other].accuracy for other in ("mse", "ds-aciq"))
        gained = 100 * (best - plain.accuracy)
        if gained < 5:
            yield f"cut {cut or 'all'}, 2 bits: mse or ds-aciq gains {gained:.2f} points over none, not 5"


def main() -> int:
    """Print the summary; the status says whether the targets are reached."""
    parser = argparse.ArgumentParser(description="Accuracy of vit-digits over one compressed link.")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("-u", "--ubatch-size", type=int, default=8, metavar="N", help="of a microbatch (8)")
    parser.add_argument("--cuts", type=int, nargs="+", metavar="LAYER", help="cuts to measure (all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers = find_model("vit-digits").n_layers
    cuts = arguments.cuts or range(1, layers)
    total = (len(cuts) + 1) * len(BIT_WIDTHS) * len(CLAMPS)
    rows = list(track(measure(cuts, arguments.ubatch_size), total=total, transient=True))
    for line in summary(rows):
        print(line)
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(Row.__dataclass_fields__)
            writer.writerows([getattr(row, name) for name in Row.__dataclass_fields__] for row in rows)
    lines = list(missed(rows, "mse"))
    for line in lines:
        Console(stderr=True).print(f"missed: {line}", highlight=False)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
