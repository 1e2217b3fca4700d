#!/usr/bin/env python3
"""Draw the pictures of docs/concepts.md from the cluster in docs/examples/.

    python tools/draw_pictures.py [DIRECTORY]     write to DIRECTORY (docs/pictures/)

Every number is computed: cuts and times by the scheduler and the simulator, bytes from models.yml. The same
input gives the same files, and ``tests/contract/test_docs.py`` compares them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipeedge.observe.timeline import Span
from pipeedge.plan.spec_files import load_device_types, load_models
from pipeedge.plan.specs import BYTES_PER_MB
from pipeedge.report.gantt import shade
from pipeedge.simulate.options import SimulationRequest
from pipeedge.simulate.session import FinishedSimulation, simulate_request

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PICTURES = ROOT / "docs" / "pictures"
MODEL = "google/vit-base-patch16-224"
UBATCH = 8
HOSTS = ("shed", "desk", "sofa")
EVEN = {"shed": (1, 16), "desk": (17, 32), "sofa": (33, 48)}
ALONE = {"desk": (1, 48)}
DRAWN = 6
"""Number of microbatches in the Gantt chart."""

INK, SOFT, LINE, BACK = "#1c2024", "#59636e", "#d9dee4", "#ffffff"
OF_HOST = {"shed": "#d55e00", "desk": "#0072b2", "sofa": "#009e73"}
LINK = "#cc79a7"
WIDTH = 760
FONTS = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Drawing:
    """An SVG of fixed width, drawn from top to bottom.

    Args:
        title: Description for those who cannot see the picture.
        height: Height of the picture.
    """

    def __init__(self, title: str, height: float) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}" width="{WIDTH}" '
            f'height="{_n(height)}" role="img" font-family="{FONTS}" font-size="13">'
        )
        self._body = [f"<title>{escape(title)}</title>"]
        self._patterns: dict[str, str] = {}
        self.box(0.5, 0.5, WIDTH - 1, height - 1, BACK, edge=LINE, radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        edge: str | None = None,
        radius: float = 2,
    ) -> None:
        """Add a rectangle."""
        stroke = f' stroke="{edge}"' if edge else ""
        self._body.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'fill="{fill}"{stroke}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = INK,
        size: int | None = None,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Add a line of text with its baseline at ``y``."""
        more = f' font-size="{size}"' if size else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="600"' if bold else ""
        self._body.append(f'<text x="{_n(x)}" y="{_n(y)}" fill="{colour}"{more}>{escape(text)}</text>')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = SOFT, dashed: bool = False
    ) -> None:
        """Add a thin line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._body.append(
            f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{colour}"{dash}/>'
        )

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, *, faint: bool = False) -> None:
        """Add a filled polygon."""
        opacity = ' fill-opacity="0.18"' if faint else ""
        joined = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._body.append(f'<polygon points="{joined}" fill="{fill}"{opacity}/>')

    def arrow(self, x1: float, x2: float, y: float, thickness: float, colour: str) -> None:
        """Add a filled arrow to the right, with a shaft of ``thickness`` pixels."""
        half, head = thickness / 2, max(8.0, 0.5 * thickness + 4)
        neck = x2 - min(head, 0.6 * (x2 - x1))
        wide = half + 5
        self.polygon(
            [
                *((x1, y - half), (neck, y - half), (neck, y - wide), (x2, y)),
                *((neck, y + wide), (neck, y + half), (x1, y + half)),
            ],
            colour,
        )

    def hatched(self, doing: str) -> str:
        """Return the fill for a box of this activity; waits are hatched, as on the page."""
        drawn = shade(doing)
        if not drawn.pattern:
            return drawn.colour
        stroke = {
            "/": '<path d="M0 8L8 0" stroke="#fff" stroke-opacity="0.5" stroke-width="2"/>',
            "\\": '<path d="M0 0L8 8" stroke="#fff" stroke-opacity="0.5" stroke-width="2"/>',
            ".": '<circle cx="4" cy="4" r="1.3" fill="#fff" fill-opacity="0.7"/>',
        }[drawn.pattern]
        self._patterns[drawn.key] = (
            f'<pattern id="{drawn.key}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{drawn.colour}"/>{stroke}</pattern>'
        )
        return f"url(#{drawn.key})"

    def save(self, path: Path) -> None:
        """Write the file."""
        patterns = [f"<defs>{''.join(self._patterns.values())}</defs>"] if self._patterns else []
        path.write_text("\n".join([self._head, *patterns, *self._body, "</svg>"]) + "\n", encoding="utf-8")


def _n(value: float) -> str:
    """Format a coordinate to a tenth of a pixel, so that the files are the same on every machine."""
    return f"{value:.1f}".removesuffix(".0")


# --- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A schedule of the example's cluster, simulated."""

    found: FinishedSimulation

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """First and last layer of each host, in the order of stages."""
        stages = self.found.schedule.stages
        return {str(plan.host): (plan.layers.first, plan.layers.last) for plan in stages}

    @property
    def compute_s(self) -> dict[str, float]:
        """Return the compute seconds of a microbatch on each host."""
        stats = self.found.report().stages
        return {host: found.compute_s_mean for host, found in zip(self.layers, stats, strict=True)}

    @property
    def wire_s(self) -> list[float]:
        """Return the seconds of a microbatch on each link between stages."""
        return [link.wire_s for link in self.found.outcome.model.links[1:-1]]

    @property
    def period_s(self) -> float:
        """Return the period of the slowest stage or link in seconds."""
        return max([*self.compute_s.values(), *self.wire_s])

    @property
    def items_per_s(self) -> float:
        """Return the items per second once the pipeline is full."""
        return UBATCH / self.period_s


def planned(layers: Mapping[str, tuple[int, int]] | None = None) -> Plan:
    """Simulate a few microbatches with the given schedule, or with the one the scheduler chooses."""
    with tempfile.TemporaryDirectory() as directory:
        schedule = None
        if layers is not None:
            schedule = Path(directory) / "schedule.yml"
            lines = [f"- {host}: [{first}, {last}]\n" for host, (first, last) in layers.items()]
            schedule.write_text("".join(lines), encoding="utf-8")
        return Plan(
            simulate_request(
                SimulationRequest(
                    models_file=ROOT / "models.yml",
                    dev_types_file=EXAMPLES / "device_types.yml",
                    dev_file=EXAMPLES / "devices.yml",
                    schedule_file=schedule,
                    model_name=MODEL,
                    items=DRAWN * UBATCH,
                    microbatch_size=UBATCH,
                )
            )
        )


def cut_bytes(layer: int) -> float:
    """Return the bytes of a microbatch at the cut after ``layer``, in float32."""
    return 4.0 * UBATCH * load_models(ROOT / "models.yml")[MODEL].elements_out[layer - 1]


def mb(size: float) -> str:
    """Format a number of bytes for people."""
    return f"{size / BYTES_PER_MB:.1f} MB"


# --- the pictures -----------------------------------------------------------------------------------

PARTS = (
    ("1", "norm, Q/K/V,", "attention"),
    ("2", "projection,", "+ skip"),
    ("3", "norm, up,", "GELU"),
    ("4", "down,", "+ skip"),
)


def draw_cuts(path: Path) -> None:
    """Draw one block: its four layers, and the bytes at the cut after each."""
    drawing = Drawing("A block has four layers; the data at the cut after each differs", 222)
    drawing.text(20, 30, "One block of ViT-Base: four layers, four places to cut", bold=True)
    drawing.text(20, 50, f"thickness of an arrow: bytes of a microbatch of {UBATCH} at that cut", colour=SOFT)
    left, width, gap, middle = 62.0, 92.0, 74.0, 122.0
    scale = 56.0 / cut_bytes(3)
    drawing.arrow(left - 44, left - 4, middle, cut_bytes(4) * scale, LINK)
    for index, (number, first, second) in enumerate(PARTS):
        x = left + index * (width + gap)
        drawing.box(x, middle - 42, width, 84, "#eef4f9", edge=OF_HOST["desk"], radius=6)
        drawing.text(x + width / 2, middle - 16, f"layer {number}", anchor="middle", bold=True)
        drawing.text(x + width / 2, middle + 6, first, anchor="middle", size=12)
        drawing.text(x + width / 2, middle + 22, second, anchor="middle", size=12)
        size = cut_bytes(index + 1)
        drawing.arrow(x + width + 4, x + width + gap - 4, middle, size * scale, LINK)
        drawing.text(x + width + gap / 2, middle + 66, mb(size), anchor="middle", bold=True)
        values = ("2 D", "D", "5 D", "D")[index]
        drawing.text(
            x + width + gap / 2, middle + 82, f"{values} per token", anchor="middle", size=11, colour=SOFT
        )
    drawing.save(path)


def draw_cluster(path: Path, best: Plan) -> None:
    """Draw the model as a bar with its cuts, and below it the hosts that hold the parts."""
    drawing = Drawing("Three unequal hosts, and the part of the model that each one holds", 308)
    drawing.text(20, 30, "ViT-Base, 48 layers, over three unequal hosts", bold=True)
    drawing.text(20, 50, "widths show layers: a faster host gets more of them", colour=SOFT)
    types = load_device_types(EXAMPLES / "device_types.yml")
    alone = {host: planned({host: (1, 48)}).period_s for host in HOSTS}
    left, unit, top = 20.0, (WIDTH - 40) / 48, 66.0
    boxes = {"shed": 20.0, "desk": 285.0, "sofa": 550.0}
    for host, (first, last) in best.layers.items():
        x, width = left + (first - 1) * unit, (last - first + 1) * unit
        drawing.box(x, top, width - 2, 34, OF_HOST[host])
        label = f"{first}-{last}"
        drawing.text(x + width / 2 - 1, top + 22, label, colour=BACK, anchor="middle", bold=True)
        below = boxes[host]
        drawing.polygon(
            [(x, top + 36), (x + width - 2, top + 36), (below + 190, 150), (below, 150)],
            OF_HOST[host],
            faint=True,
        )
    kinds = {str(host): kind for kind in types for host in _hosts_of(kind)}
    for index, (host, (first, last)) in enumerate(best.layers.items()):
        x, kind = boxes[host], types[kinds[host]]
        drawing.box(x, 150, 190, 104, BACK, edge=OF_HOST[host], radius=6)
        drawing.text(x + 12, 172, f"stage {index}: {host}", bold=True)
        drawing.text(
            x + 12, 191, f"{kinds[host]}, {_memory(kind.mem_bytes)}, {_rate(kind.bw_bytes_per_s)}", size=12
        )
        drawing.text(x + 12, 210, f"alone {alone[host]:.1f} s per microbatch", size=12, colour=SOFT)
        took = best.compute_s[host]
        drawing.text(x + 12, 229, f"its {last - first + 1} layers {took:.2f} s", size=12)
        drawing.text(x + 12, 246, f"{took / best.period_s:.0%} busy", size=12, colour=SOFT)
        if index < len(best.wire_s):
            size = cut_bytes(last)
            drawing.arrow(x + 194, x + 261, 202, 5, LINK)
            drawing.text(x + 227, 190, mb(size), anchor="middle", size=11)
            drawing.text(x + 227, 224, f"{best.wire_s[index]:.2f} s", anchor="middle", size=11)
    drawing.text(
        20,
        286,
        f"together {best.items_per_s:.2f} items/s; the fastest alone "
        f"{UBATCH / min(alone.values()):.2f} items/s",
    )
    drawing.save(path)


def _hosts_of(kind: str) -> list[str]:
    return {"board": ["shed"], "laptop": ["sofa"], "desktop": ["desk"]}[kind]


def _memory(size: float) -> str:
    return f"{size / BYTES_PER_MB / 1024:.0f} GB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 2**20:.0f} Mbps"


def draw_gantt(path: Path, best: Plan) -> None:
    """Draw microbatches on their way through the stages, as simulated."""
    run = best.found.outcome
    timeline = run.timeline(best.found.schedule.ranks)
    lanes = [f"stage {stage}{kind}" for stage in range(len(best.layers)) for kind in ("", " link")][:-1]
    drawing = Drawing("Microbatches on their way through three stages", 272)
    drawing.text(20, 30, f"{DRAWN} microbatches through the three stages, simulated", bold=True)
    left, top = 118.0, 46.0
    scale = (WIDTH - left - 20) / timeline.length_s
    y = top
    for lane in lanes:
        stage = int(lane.split()[1])
        host = list(best.layers)[stage]
        is_link = lane.endswith("link")
        height = 14.0 if is_link else 32.0
        drawing.text(
            20,
            y + height / 2 + 4,
            "its link" if is_link else f"stage {stage}: {host}",
            colour=SOFT if is_link else INK,
            size=11 if is_link else None,
        )
        for span in timeline.spans:
            if span.lane == lane:
                _draw_span(drawing, span, left, y, scale, height)
        y += height + (14 if is_link else 4)
    for second in range(0, int(timeline.length_s) + 1, 2):
        x = left + second * scale
        drawing.line(x, y + 2, x, y + 7)
        drawing.text(x, y + 20, f"{second} s", anchor="middle", size=11, colour=SOFT)
    x = 20.0
    for doing, label in (
        ("compute", "computing, microbatch by number"),
        ("send", "on the link"),
        ("fill", "fill"),
        ("wait input", "waiting for input"),
        ("drain", "drain"),
    ):
        drawing.box(x, y + 34, 14, 12, drawing.hatched(doing))
        drawing.text(x + 20, y + 44, label, size=12, colour=SOFT)
        x += 34 + 6.7 * len(label)
    drawing.save(path)


def _draw_span(drawing: Drawing, span: Span, left: float, y: float, scale: float, height: float) -> None:
    doing = str(getattr(span.doing, "value", span.doing))
    width = (span.end_s - span.start_s) * scale
    if width < 0.05:
        return
    x = left + span.start_s * scale
    drawing.box(x, y, max(width - 0.8, 0.4), height, drawing.hatched(doing), radius=1)
    if span.microbatch is not None and doing in ("compute", "send") and width > 12:
        drawing.text(
            x + width / 2,
            y + height / 2 + 4,
            str(span.microbatch),
            colour=BACK,
            anchor="middle",
            size=None if doing == "compute" else 10,
            bold=doing == "compute",
        )


def draw_weighing(path: Path, best: Plan) -> None:
    """Draw the cost of each stage and link, for three ways to run the same model on the same hosts."""
    plans = (
        ("the fastest host alone", planned(ALONE)),
        ("an even split", planned(EVEN)),
        ("sched-pipeline", best),
    )
    longest = max(plan.period_s for _, plan in plans)
    left, scale = 150.0, (WIDTH - 150.0 - 110) / longest
    rows = sum(2 * len(plan.layers) - 1 for _, plan in plans)
    height = 64.0 + 3 * 40 + rows * 20
    drawing = Drawing("The slowest stage or link sets the pace", height)
    drawing.text(20, 30, "The slowest stage or link sets the pace", bold=True)
    drawing.text(20, 50, "seconds of a microbatch of 8 on each host and each link", colour=SOFT)
    y = 70.0
    for name, plan in plans:
        drawing.text(20, y + 14, f"{name}: {plan.items_per_s:.2f} items/s", bold=True)
        period = left + plan.period_s * scale
        drawing.line(period, y + 4, period, y + 26 + 20 * (2 * len(plan.layers) - 1), dashed=True)
        drawing.text(period + 5, y + 14, f"{plan.period_s:.2f} s", size=12, colour=SOFT)
        y += 24
        for index, (host, (first, last)) in enumerate(plan.layers.items()):
            drawing.text(30, y + 13, f"{host}, {first}-{last}", size=12)
            drawing.box(left, y + 2, plan.compute_s[host] * scale, 15, OF_HOST[host])
            y += 20
            if index < len(plan.wire_s):
                drawing.text(30, y + 13, "link", size=12, colour=SOFT)
                drawing.box(left, y + 5, plan.wire_s[index] * scale, 9, LINK)
                y += 20
        y += 16
    drawing.save(path)


def main() -> int:
    """Draw all pictures."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    draw_all(directory)
    return 0


def draw_all(directory: Path) -> list[Path]:
    """Draw all pictures into ``directory`` and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    best = planned()
    drawers: dict[str, Callable[[Path], None]] = {
        "cuts.svg": draw_cuts,
        "cluster.svg": lambda path: draw_cluster(path, best),
        "gantt.svg": lambda path: draw_gantt(path, best),
        "weighing.svg": lambda path: draw_weighing(path, best),
    }
    for name, draw in drawers.items():
        draw(directory / name)
    return [directory / name for name in drawers]


if __name__ == "__main__":
    sys.exit(main())
