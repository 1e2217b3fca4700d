"""Plot results: seconds and memory of each layer, bytes of each cut.

The plot is a ``.png`` file, or a self-contained ``.html`` page with the plot as SVG and the numbers as a
table. matplotlib is an extra (``pip install pipeedge[plot]``) and is imported only here.
"""

from __future__ import annotations

import html
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

from pipeedge.base.errors import RequestError
from pipeedge.base.files import replace_file
from pipeedge.base.wording import count, figure
from pipeedge.plan.specs import BYTES_PER_MB, short_dtype
from pipeedge.profile.results import ProfileResults, elements

__all__ = ["FORMATS", "check_plot", "save_plot"]

FORMATS = (".html", ".png")


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn.

    Raises:
        RequestError: The format is unknown, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise RequestError(f"--plot {path}: name it FILE.html or FILE.png")
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib: pip install 'pipeedge[plot]'")


def save_plot(path: Path, results: ProfileResults) -> None:
    """Plot ``results`` into a file, completely or not at all.

    Raises:
        RequestError: The plot cannot be drawn, as in ``check_plot``, or the file cannot be written.
    """
    check_plot(path)
    content = _page(results) if path.suffix == ".html" else _drawn(results, "png")
    try:
        replace_file(path, content)
    except OSError as error:
        raise RequestError(f"--plot {path}: cannot be written ({error.strerror})") from error


def _title(results: ProfileResults) -> str:
    conditions = f"microbatches of {results.batch_size}, {short_dtype(results.dtype)}"
    if results.device is not None:
        conditions += f", {results.device}"
    if results.threads is not None:
        conditions += f", {count(results.threads, 'thread')}"
    return f"{results.model_name}: {conditions}"


def cut_bytes(results: ProfileResults) -> list[float]:
    """Return the bytes of a microbatch at the cut after each layer."""
    size = getattr(torch, short_dtype(results.dtype), torch.float32).itemsize
    return [elements(layer.measured.shape_out) * results.batch_size * size for layer in results.profile_data]


def _drawn(results: ProfileResults, kind: str) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no window system, no state

    layers = results.profile_data
    numbers = [layer.layer for layer in layers]
    # The four layers of a block have fixed colours, so that the blocks are visible.
    shades = ["#1f4e79", "#5b9bd5", "#c55a11", "#f4b183"]
    colours = [shades[(number - 1) % 4] for number in numbers]
    drawing = Figure(figsize=(max(8.0, 0.2 * len(layers)), 9.0), layout="constrained")
    drawing.suptitle(_title(results))
    time, memory, cut = drawing.subplots(3, 1, sharex=True)
    spreads = [1e3 * (layer.measured.time_spread_s or 0.0) / 2 for layer in layers]
    bars: dict[str, Any] = {"yerr": spreads, "ecolor": "#404040"} if any(spreads) else {}
    time.bar(numbers, [1e3 * layer.measured.time_s for layer in layers], color=colours, **bars)
    total = sum(layer.measured.time_s for layer in layers)
    time.set_ylabel("ms per microbatch")
    time.set_title(
        f"time: {figure(total)} s in total; error bars span the quartiles", loc="left", fontsize=10
    )
    weights = [layer.memory_bytes / BYTES_PER_MB for layer in layers]
    memory.bar(numbers, weights, color=colours)
    if all(layer.measured.activations_bytes is not None for layer in layers):
        peaks = [(layer.measured.activations_bytes or 0.0) / BYTES_PER_MB for layer in layers]
        memory.step(numbers, peaks, where="mid", color="#404040", label="peak of activations")
        memory.legend()
    memory.set_ylabel("MB")
    memory.set_title(f"memory: {figure(sum(weights))} MB of weights in total", loc="left", fontsize=10)
    cut.bar(numbers, [value / BYTES_PER_MB for value in cut_bytes(results)], color=colours)
    cut.set_ylabel("MB per microbatch")
    cut.set_title("data at a cut after the layer", loc="left", fontsize=10)
    cut.set_xlabel("layer (four per block)")
    stream = io.BytesIO()
    drawing.savefig(stream, format=kind, dpi=120)
    return stream.getvalue()


def _page(results: ProfileResults) -> bytes:
    picture = _drawn(results, "svg").decode()
    picture = picture[picture.index("<svg") :]
    title = html.escape(_title(results))
    heads = ("layer", "time, ms", "spread, ms", "weights, MB", "activations, MB", "cut, MB")
    rows = []
    for layer, size in zip(results.profile_data, cut_bytes(results), strict=True):
        spread, activations = layer.measured.time_spread_s, layer.measured.activations_bytes
        cells = (
            str(layer.layer),
            f"{1e3 * layer.measured.time_s:.3f}",
            "" if spread is None else f"{1e3 * spread:.3f}",
            f"{layer.memory_bytes / BYTES_PER_MB:.3f}",
            "" if activations is None else f"{activations / BYTES_PER_MB:.3f}",
            f"{size / BYTES_PER_MB:.3f}",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    style = "body{font-family:sans-serif}td,th{text-align:right;padding:0 1em}svg{max-width:100%;height:auto}"
    table = (
        "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>" + "".join(rows) + "</table>"
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}</style></head><body>{picture}{table}</body></html>\n"
    ).encode()
