"""Plans of decoders by trying all of them, with costs from the files as docs/scheduler.md states them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MB = 2**20
ELEMENT = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}
PAGE = 32


@dataclass(frozen=True)
class Case:
    """Contents of the scheduler's files, and what is asked."""

    models: dict[str, Any]
    types: dict[str, Any]
    devices: dict[str, list[str]]
    neighbors: dict[str, Any]
    data_host: str
    streams: int
    context: int
    prompt: int
    answer: int
    objective: str
    joint: bool
    limits: Mapping[str, float]
    """Largest seconds of ``token`` and ``first``, and least ``rate``, where they are limited."""

    @property
    def model(self) -> dict[str, Any]:
        return self.models["m"]

    @property
    def layers(self) -> int:
        return self.model["layers"]

    def options(self) -> list[str]:
        """Return the command line, without the files."""
        found = [
            f"--streams={self.streams}",
            f"--context={self.context}",
            f"--prompt-tokens={self.prompt}",
            f"--answer-tokens={self.answer}",
            f"--objective={self.objective}",
            f"--data-host={self.data_host}",
            "--transport=tcp",
        ]
        names = {"token": "--max-latency", "first": "--max-first-token", "rate": "--min-throughput"}
        found += [f"{names[name]}={value!r}" for name, value in self.limits.items()]
        return [*found, "--plan=auto", "--min-agreement=0", "--widths=0,8"] if self.joint else found


@dataclass(frozen=True)
class Stage:
    host: str
    first: int
    last: int
    dtype: str
    bits: int = 0
    """Of the link behind it; 0: uncompressed."""


@dataclass
class Passing:
    """Seconds of a step through a plan, one part after the other."""

    parts: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    """Of a stage with the data rank's own work, on its host."""

    @property
    def latency(self) -> float:
        return sum(self.parts)

    @property
    def longest(self) -> float:
        return max(self.parts + self.together)


@dataclass(frozen=True)
class Figures:
    tokens_per_s: float
    groups: int
    token_s: float
    first_s: float
    limited_first_s: float
    """The same with chunks for as many stages as there could be, which is what a limit counts."""


class Cluster:
    """The costs of plans of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.type_of = {host: name for name, hosts in case.devices.items() for host in hosts}
        self.hosts = [host for hosts in case.devices.values() for host in hosts]
        self.positions = case.prompt + case.answer / 2

    def profile(self, host: str, dtype: str) -> dict[str, Any] | None:
        for one in self.case.types[self.type_of[host]]["model_profiles"].get("m", []):
            if one["dtype"] == dtype:
                return one
        return None

    def elements(self, cut: int) -> int:
        model = self.case.model
        return model["parameters_in"] if cut == 0 else model["parameters_out"][cut - 1]

    def link_s(self, a: str, b: str, nbytes: float) -> float:
        if a == b:
            return 0.0
        links = self.case.neighbors
        one = links.get(a, {}).get(b) or links.get(b, {}).get(a)
        if one is None:
            speed = min(self.case.types[self.type_of[host]]["bw_Mbps"] for host in (a, b))
            one = {"bw_Mbps": speed}
        rate = one["bw_Mbps"] * 2**20 / 8
        return (nbytes / rate if rate else math.inf) + one.get("latency_s", 0)

    def pause(
        self,
        before: list[Stage],
        after: list[Stage],
        *,
        keeps: bool,
        outputs: bool = False,
        copies: bool = False,
    ) -> float:
        """Return the seconds from the loss of a host until all texts have a token again.

        Args:
            before: Plan with the lost host.
            after: Plan without it.
            keeps: Whether the layers behind the last one that has moved keep their caches.
            outputs: Whether hosts have kept the outputs of their stages.
            copies: Whether others have copies of weights and full pages, where that is faster.
        """
        had = {
            (stage.host, stage.dtype, layer) for stage in before for layer in range(stage.first, stage.last)
        }
        load_s, lost, begin = 0.0, 0, 0
        for stage in after:
            profile = self.profile(stage.host, stage.dtype)
            assert profile is not None
            missing = [n for n in range(stage.first, stage.last) if (stage.host, stage.dtype, n) not in had]
            megabytes = sum(profile["weights_MB"][layer] for layer in missing)
            load_s = max(load_s, megabytes * profile["steps"]["load_s_per_MB"])
            if missing and not lost and outputs:
                begin = max([stage.last for stage in before if stage.last <= missing[0]], default=0)
            lost = max([lost, *(layer + 1 for layer in missing)])
        tokens = self.case.streams * self.positions
        rows = self.chunk_rows(tokens, len(after))
        every = self.passing(after, rows, self.positions / 2, chunk=True)
        whole = 0.15 + load_s + every.latency + (tokens / rows - 1) * every.longest + self.head_s()
        if not keeps or any(self.case.model.get("windows", ())):
            return whole
        chunk = self.passing(after, rows, self.positions / 2, chunk=True, begin=begin, until=lost)
        rest = min(tokens, self.case.streams * 16)  # in pages that are not full
        again = chunk.latency + max(0.0, (tokens - rest) / rows - 1) * chunk.longest
        whole = min(whole, 0.15 + load_s + again + rest / rows * every.longest + self.head_s())
        if not copies:
            return whole
        steps = max(0.0, rest / rows - 1)
        return min(whole, 0.15 + every.latency + steps * every.longest + self.head_s())

    def head_s(self) -> float:
        """Return the seconds in which the head decides one token."""
        dtypes = ("float32", "int8") if self.case.joint else ("float32",)
        found = [
            one["steps"]["ends"] for dtype in dtypes if (one := self.profile(self.case.data_host, dtype))
        ]
        return max((max(ends["fixed_s"], ends["start_s"] + ends["row_s"]) for ends in found), default=0.0)

    def passing(
        self,
        plan: list[Stage],
        rows: float,
        positions: float,
        *,
        chunk: bool,
        begin: int = 0,
        until: int | None = None,
    ) -> Passing:
        """Return what a step takes: feeding, links, stages, and the head unless it is a chunk.

        The layers from ``begin`` to the one before ``until`` compute; None for all from there on.
        """
        case, data, found = self.case, self.case.data_host, Passing()
        feed = collect = both = feed_link = collect_link = 0.0
        dtypes = {"float32", "int8"} if case.joint else {"float32"}
        for dtype in sorted(dtypes):
            one = self.profile(data, dtype)
            if one is None:
                continue
            ends, tcp = one["steps"]["ends"], one["handling"]["tcp"]
            nbytes = [rows * self.elements(cut) * ELEMENT[dtype] for cut in (0, case.layers)]
            feeds = ends["feed_s"] + (1 if chunk else rows) * ends["feed_row_s"]
            collects = 0.0 if chunk else max(ends["fixed_s"], ends["start_s"] + rows * ends["row_s"])
            feed, collect, both = max(feed, feeds), max(collect, collects), max(both, feeds + collects)
            feed_link = max(feed_link, tcp["send_s"] + tcp["send_s_per_MB"] * nbytes[0] / MB)
            if not chunk:
                received = tcp["receive_s"] + tcp["receive_s_per_MB"] * nbytes[1] / MB
                collect_link = max(collect_link, received)
        first_away, last_away = plan[0].host != data, plan[-1].host != data
        feeding = feed + feed_link * first_away
        collecting = collect + collect_link * last_away
        found.parts += [feeding, collecting]
        before, bits, sender = data, 0, plan[0].dtype
        for stage in plan:
            width = bits if bits and bits < 8 * ELEMENT[sender] else 8 * ELEMENT[sender]
            found.parts.append(self.link_s(before, stage.host, rows * self.elements(stage.first) * width / 8))
            until = case.layers if until is None else until
            layers = range(max(stage.first, begin), min(stage.last, until))
            computes = self.stage_s(stage, layers, rows, positions, chunk=chunk)
            found.parts.append(computes)
            if stage.host == data:
                own = both
                own += feed_link * (stage.first > 0) + collect_link * (stage.last < case.layers)
                found.together.append(computes + own)
            before, bits, sender = stage.host, stage.bits, stage.dtype
        out = rows * self.elements(case.layers) * ELEMENT[plan[-1].dtype]
        found.parts.append(self.link_s(plan[-1].host, data, out))
        return found

    def stage_s(self, stage: Stage, layers: range, rows: float, positions: float, *, chunk: bool) -> float:
        profile = self.profile(stage.host, stage.dtype)
        assert profile is not None
        steps, tcp = profile["steps"], profile["handling"]["tcp"]
        total = profile["overhead_s"]
        for layer in layers:
            window = self.case.model["windows"][layer] if "windows" in self.case.model else 0
            seen = positions + 1 if not window else min(positions + 1, window)
            each = steps["chunk_position_s" if chunk else "position_s"][layer]
            total += self.rows_s(steps, layer, rows) + rows * seen * each
        on_data = stage.host == self.case.data_host
        if not (on_data and stage.first == 0):
            nbytes = rows * self.elements(stage.first) * ELEMENT[stage.dtype]
            total += (
                profile["receive_s"][stage.first] + tcp["receive_s"] + tcp["receive_s_per_MB"] * nbytes / MB
            )
        if not (on_data and stage.last == self.case.layers):
            nbytes = rows * self.elements(stage.last) * ELEMENT[stage.dtype]
            total += profile["send_s"][stage.last - 1] + tcp["send_s"] + tcp["send_s_per_MB"] * nbytes / MB
        return total

    @staticmethod
    def rows_s(steps: dict[str, Any], layer: int, rows: float) -> float:
        """Return the seconds of a layer for some rows, without what they attend to."""
        seconds = steps["start_s"][layer] + rows * steps["row_s"][layer]
        if "many_row_s" in steps:
            many = steps["many_start_s"][layer] + rows * steps["many_row_s"][layer]
            seconds = min(seconds, many)
        return max(steps["fixed_s"][layer], seconds)

    def needed_bytes(self, stage: Stage, before: Stage | None) -> float:
        case, profile = self.case, self.profile(stage.host, stage.dtype)
        assert profile is not None
        total = 0.0
        for layer in range(stage.first, stage.last):
            total += profile["weights_MB"][layer] * MB
            pages = -(-case.context // PAGE)
            window = case.model["windows"][layer] if "windows" in case.model else 0
            if window:
                pages = min(pages, 1 + -(-(window - 1) // PAGE))
            total += case.streams * pages * PAGE * profile["steps"]["cache_bytes"][layer]
        rows = case.streams + min(256, case.context)
        arrives = ELEMENT[before.dtype if before else stage.dtype]
        total += 2 * rows * self.elements(stage.first) * arrives
        total += 2 * rows * self.elements(stage.last) * ELEMENT[stage.dtype]
        if stage.host == case.data_host:
            total += profile["steps"]["ends"]["mem_MB"] * MB
        return total

    def fits(self, plan: list[Stage]) -> bool:
        pairs = zip(plan, [None, *plan[:-1]], strict=True)
        return all(
            self.needed_bytes(stage, before)
            <= self.case.types[self.type_of[stage.host]]["mem_MB"] * MB * (1 + 1e-9)
            for stage, before in pairs
        )

    def figures(self, plan: list[Stage]) -> Figures:
        """Return what a plan means for texts, in the number of groups that has the most tokens a second."""
        case = self.case
        rate, groups = 0.0, 0
        for count in range(1, min(case.streams, len(self.hosts) + 1) + 1):
            rows = case.streams / count
            step = self.passing(plan, rows, self.positions, chunk=False)
            found = min(rows / (step.longest * self.waiting(count)), case.streams / step.latency)
            if found > rate * (1 + 1e-12):
                rate, groups = found, count
        token_s = self.passing(plan, 1, self.positions, chunk=False).latency
        most = min(len(self.hosts), case.layers, 8)
        firsts = [self.prompt_s(plan, stages) for stages in (min(len(plan), most), most)]
        return Figures(rate, groups, token_s, *firsts)

    def waiting(self, groups: int) -> float:
        """Return how many times as long a step takes as the longest stage, as groups wait for each other."""
        if groups == 1:
            return 1.0
        kinds = [self.case.types[self.type_of[host]] for host in self.hosts]
        steps = [one["steps"] for kind in kinds for one in kind["model_profiles"]["m"]]
        return 1 + max(one.get("variation", 0.0) for one in steps) / math.sqrt(math.pi)

    def prompt_s(self, plan: list[Stage], stages: int) -> float:
        """Return the seconds to the first token, with chunks for so many stages."""
        rows = self.chunk_rows(self.case.prompt, stages)
        chunk = self.passing(plan, rows, self.case.prompt / 2, chunk=True)
        return chunk.latency + (self.case.prompt / rows - 1) * chunk.longest + self.head_s()

    def chunk_rows(self, tokens: float, stages: int) -> float:
        """Return the rows of equal chunks that so many equal stages have computed soonest."""
        if stages == 1:
            return min(256, tokens)
        dtypes = ("float32", "int8") if self.case.joint else ("float32",)
        profile = next(filter(None, (self.profile(self.case.data_host, dtype) for dtype in dtypes)), None)
        steps = {"fixed_s": []} if profile is None else profile["steps"]

        def ends_s(chunks: float) -> float:
            layers = range(len(steps["fixed_s"]))
            step_s = sum(self.rows_s(steps, layer, tokens / chunks) for layer in layers)
            return float((chunks + stages - 1) * step_s)

        most = max(1, math.floor(tokens / 64))
        counts = {min(math.ceil(tokens / rows), most) for rows in range(64, 257, 8)}
        return tokens / min(sorted(counts, reverse=True), key=ends_s)

    def keeps(self, figures: Figures, slack: float = 1e-9) -> bool:
        limits = self.case.limits
        return (
            figures.token_s <= limits.get("token", math.inf) * (1 + slack)
            and figures.limited_first_s <= limits.get("first", math.inf) * (1 + slack)
            and figures.tokens_per_s >= limits.get("rate", 0) * (1 - slack)
        )

    def value(self, figures: Figures) -> float:
        """Return the objective, which is to be small."""
        if self.case.objective == "latency":
            return figures.token_s
        return 1 / figures.tokens_per_s if figures.tokens_per_s else math.inf

    def plans(self) -> Iterator[list[Stage]]:
        """Yield all plans that fit."""
        for plan in self._chains([], 0):
            if self.fits(plan):
                yield plan

    def _chains(self, so_far: list[Stage], cut: int) -> Iterator[list[Stage]]:
        if cut == self.case.layers:
            inner = len(so_far) - 1
            widths = (0, 8) if self.case.joint else (0,)
            for bits in itertools.product(widths, repeat=inner):
                yield [
                    Stage(stage.host, stage.first, stage.last, stage.dtype, more)
                    for stage, more in zip(so_far, (*bits, 0), strict=True)
                ]
            return
        used = {stage.host for stage in so_far}
        for host in self.hosts:
            for dtype in ("float32", "int8") if self.case.joint else ("float32",):
                if host in used or self.profile(host, dtype) is None:
                    continue
                for last in range(cut + 1, self.case.layers + 1):
                    yield from self._chains([*so_far, Stage(host, cut, last, dtype)], last)

    def best(self) -> tuple[float, int]:
        """Return the smallest objective within the limits, and the number of plans that keep them."""
        values = [self.value(found) for plan in self.plans() if self.keeps(found := self.figures(plan))]
        values = [value for value in values if math.isfinite(value)]
        return min(values, default=math.inf), len(values)


def random_case(rng: np.random.Generator) -> Case:
    """Draw a small cluster and a request."""
    layers = int(rng.integers(2, 6))
    joint = bool(rng.random() < 0.4)
    kinds = int(rng.integers(1, 3))
    hosts = int(rng.integers(2, 4))
    devices: dict[str, list[str]] = {f"t{kind}": [] for kind in range(kinds)}
    for host in range(hosts):
        devices[f"t{rng.integers(kinds)}"].append(f"h{host}")
    devices = {name: each for name, each in devices.items() if each}
    wide = int(rng.integers(20, 400))
    model: dict[str, Any] = {
        "layers": layers,
        "mem_MB": rng.integers(1, 9, layers).tolist(),
        "parameters_in": wide,
        "parameters_out": [wide * int(rng.integers(1, 4)) for _ in range(layers)],
        "context": 1024,
    }
    if rng.random() < 0.4:
        model["windows"] = [int(rng.choice([0, 40, 300])) for _ in range(layers)]
    types = {name: _random_type(rng, layers, joint=joint) for name in devices}
    names = [host for each in devices.values() for host in each]
    neighbors: dict[str, Any] = {}
    for a, b in itertools.combinations(names, 2):
        if rng.random() < 0.3:
            neighbors.setdefault(a, {})[b] = {
                "bw_Mbps": float(rng.choice([0, 1, 10, 100])),
                "latency_s": float(rng.choice([0, 0.001, 0.02])),
            }
    context = int(rng.integers(2, 1025))
    prompt = int(rng.integers(1, context))
    case = Case(
        models={"m": model},
        types=types,
        devices=devices,
        neighbors=neighbors,
        data_host=str(rng.choice(names)),
        streams=int(rng.integers(1, 9)),
        context=context,
        prompt=prompt,
        answer=int(rng.integers(1, context - prompt + 1)),
        objective=str(rng.choice(["throughput", "latency"])),
        joint=joint,
        limits={},
    )
    return _limited(rng, case)


def _limited(rng: np.random.Generator, case: Case) -> Case:
    """Add limits that some plans keep and others do not."""
    cluster = Cluster(case)
    some = [cluster.figures(plan) for plan in itertools.islice(cluster.plans(), 0, 4000, 7)]
    if not some or rng.random() < 0.3:
        return case
    drawn = some[int(rng.integers(len(some)))]
    limits = {}
    if rng.random() < 0.6 and math.isfinite(drawn.limited_first_s):
        limits["first"] = float(drawn.limited_first_s * rng.uniform(0.9, 1.2))
    if case.objective == "throughput" and rng.random() < 0.6 and math.isfinite(drawn.token_s):
        limits["token"] = float(drawn.token_s * rng.uniform(0.9, 1.2))
    if case.objective == "latency" and rng.random() < 0.6 and drawn.tokens_per_s > 0:
        limits["rate"] = float(drawn.tokens_per_s * rng.uniform(0.8, 1.1))
    return Case(**{**vars(case), "limits": limits})


def _random_type(rng: np.random.Generator, layers: int, *, joint: bool) -> dict[str, Any]:
    profiles = []
    for dtype in ("float32", "int8") if joint else ("float32",):
        if dtype == "int8" and rng.random() < 0.3:
            continue
        fixed = rng.uniform(1e-4, 1e-2, layers)
        row = fixed * rng.uniform(0.05, 1.5, layers)
        many = {
            "many_start_s": (fixed * rng.uniform(0, 4, layers)).tolist(),
            "many_row_s": (row * rng.uniform(0.3, 1.2, layers)).tolist(),
        }
        profiles.append(
            {
                "batch_size": 1,
                "dtype": dtype,
                "time_s": (fixed + row).tolist(),
                "receive_s": rng.uniform(0, 1e-3, layers).tolist(),
                "send_s": rng.uniform(0, 1e-3, layers).tolist(),
                "weights_MB": rng.uniform(0.5, 8, layers).tolist(),
                "overhead_s": float(rng.uniform(0, 1e-3)),
                "handling": {
                    "tcp": {
                        "receive_s": float(rng.uniform(0, 1e-3)),
                        "receive_s_per_MB": float(rng.uniform(0, 1e-2)),
                        "send_s": float(rng.uniform(0, 1e-3)),
                        "send_s_per_MB": float(rng.uniform(0, 1e-2)),
                    }
                },
                "steps": {
                    "fixed_s": fixed.tolist(),
                    "start_s": (fixed * rng.uniform(0, 1, layers)).tolist(),
                    "row_s": row.tolist(),
                    **(many if rng.random() < 0.5 else {}),
                    **({"variation": float(rng.uniform(0, 0.4))} if rng.random() < 0.5 else {}),
                    "position_s": rng.uniform(0, 1e-6, layers).tolist(),
                    "chunk_position_s": rng.uniform(0, 1e-6, layers).tolist(),
                    "cache_bytes": rng.integers(0, 2000, layers).tolist(),
                    "ends": {
                        "fixed_s": float(rng.uniform(1e-4, 1e-2)),
                        "start_s": float(rng.uniform(0, 1e-3)),
                        "row_s": float(rng.uniform(0, 2e-3)),
                        "feed_s": float(rng.uniform(1e-6, 1e-4)),
                        "feed_row_s": float(rng.uniform(0, 1e-4)),
                        "mem_MB": float(rng.uniform(0, 10)),
                    },
                },
            }
        )
    return {
        "mem_MB": float(rng.uniform(10, 60)),
        "bw_Mbps": float(rng.choice([1, 10, 100, 1000])),
        "model_profiles": {"m": profiles},
    }
