"""Test beds for benchmarks: define hosts, profile them, and run pipelines on them.

    kinds ──> CLUSTER.yml ──> test bed ──> a profiler on each host, at once ──> the scheduler's files
                                 `───────> a rank on each host of a schedule ──> report of the data rank

All hosts are profiled at the same time, because emulated hosts share the memory bandwidth of the machine, as
they do in the run. The times of a type are the medians of its hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeedge.models import find_model
from pipeedge.models.weights.writing import write_random
from pipeedge.report import read_run
from pipeedge.simulate.options import SimulationRequest
from pipeedge.simulate.session import simulate_request
from pipeedge.testbed.bed import TestBed, TestBeds
from pipeedge.testbed.cluster_file import load_cluster

__all__ = [
    "Bed",
    "Kind",
    "Pipeline",
    "Promise",
    "Workload",
    "even_split",
    "make_small_models",
    "raised",
    "steady_items_per_s",
]

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800
_POLL_S = 0.1
MEM_MB = 2048
TOKENS = 128
"""Number of tokens of every sentence; a microbatch is as long as its longest sentence."""


@dataclass(frozen=True)
class Kind:
    """A kind of equal hosts."""

    name: str
    hosts: int
    cpu_fraction: float
    bw_mbps: float

    @property
    def names(self) -> list[str]:
        """Return the names of the hosts of this kind."""
        return [f"{self.name}{number}" for number in range(self.hosts)]


@dataclass(frozen=True)
class Workload:
    """A model to run. Its weights are random, which does not change its speed."""

    model: str
    """Name of a known model, or a model directory."""
    ubatch: int
    directory: Path
    """Directory for its weights and inputs."""

    @property
    def is_text(self) -> bool:
        """Whether the input is sentences rather than images."""
        return find_model(self.model).takes_text

    @property
    def name(self) -> str:
        """Return a name for tables and messages."""
        return self.model.rstrip("/").split("/")[-1]

    def weights(self) -> Path:
        """Return the weights file, creating it on first use."""
        path = self.directory / f"weights-{self.name}.npz"
        if not path.exists():
            model = find_model(self.model)
            write_random(path, model.build(), model.config, seed=0)
        return path

    def inputs(self, items: int) -> Path:
        """Return the input, created on first use: noise or one repeated token, which is read in no time."""
        path = self.directory / f"inputs-{self.name}-{items}.npz"
        if not path.exists():
            if self.is_text:
                ids = np.ones((items, TOKENS), np.int64)
                np.savez(path, input_ids=ids, attention_mask=ids, token_type_ids=0 * ids)
            else:
                size = find_model(self.model).config.image_size
                pixels = np.random.default_rng(0).standard_normal((items, 3, *size), np.float32)
                np.savez(path, pixel_values=pixels)
        return path


@dataclass(frozen=True)
class Pipeline:
    """Stages on hosts, as in a schedule file."""

    stages: tuple[Mapping[str, Any], ...]
    """Entries of a schedule file: host -> first and last layer, and optionally ``quant_bits``."""
    data_host: str

    @property
    def hosts(self) -> list[str]:
        """Return the hosts by rank; rank 0 has the data."""
        found = [
            next(name for name, value in stage.items() if isinstance(value, list)) for stage in self.stages
        ]
        return [self.data_host, *(host for host in found if host != self.data_host)]

    def __str__(self) -> str:
        return " ".join(
            f"{name}:{value[0]}-{value[1]}"
            + (f" ({stage['quant_bits']} bits)" if "quant_bits" in stage else "")
            for stage in self.stages
            for name, value in stage.items()
            if isinstance(value, list)
        )


@dataclass(frozen=True)
class Promise:
    """Pipeline and throughput that ``sched-pipeline`` reports."""

    pipeline: Pipeline
    items_per_s: float


@dataclass(frozen=True)
class Bed:
    """A running test bed and its files."""

    bed: TestBed
    kinds: tuple[Kind, ...]
    directory: Path

    @property
    def hosts(self) -> list[str]:
        """Return the hosts in the order of the scheduler's files."""
        return [name for kind in self.kinds for name in kind.names]

    @property
    def files(self) -> Mapping[str, Path]:
        """Return the scheduler's input files by name."""
        return {name: self.directory / f"{name}.yml" for name in ("models", "device_types", "devices")}

    def profile(
        self, load: Workload, iterations: int, sizes: Sequence[int] = (), dtypes: Sequence[str] = ("float32",)
    ) -> None:
        """Profile the model on all hosts at once and write the scheduler's input files.

        Args:
            load: The workload to profile.
            iterations: Number of iterations on the slowest kind of host.
            sizes: Microbatch sizes; that of the workload by default.
            dtypes: Number types.
        """
        options = ["-m", load.model, "--random-weights", "--dtype", ",".join(dtypes)]
        options += ["-b", ",".join(map(str, sizes or [load.ubatch]))]
        options += ["-s", str(TOKENS)] if load.is_text else []
        slowest = min(kind.cpu_fraction for kind in self.kinds)
        # Profile all kinds for the same time, so that a slow minute of the machine affects all alike.
        self._profile(
            load.name,
            lambda kind: [*options, "-i", str(round(iterations * kind.cpu_fraction / slowest))],
        )

    def profile_decoder(self, model: Path, dtype: str, *, alone: bool = False) -> None:
        """Profile a decoder on all hosts at once and write the scheduler's input files.

        Args:
            model: Directory of the model.
            dtype: Number type.
            alone: Whether to profile one host of each kind instead, one after the other.
        """

        def options(kind: Kind) -> list[str]:
            return ["-m", str(model), "--dtype", dtype]

        if alone:
            self._profile(f"{model.name}-alone", options, [(kind.names[0],) for kind in self.kinds])
        else:
            self._profile(model.name, options)

    def _profile(
        self, name: str, options: Callable[[Kind], list[str]], rounds: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Profile on hosts and write the scheduler's input files.

        Hosts of one kind get medians of what was found on them.

        Args:
            name: Name of the directories.
            options: Options of the profiler, by kind.
            rounds: Hosts that are profiled at once, and those that are after them; all at once by default.
        """
        script = Path(__file__).with_name("profile_together.py")
        kind_of = {host: kind for kind in self.kinds for host in kind.names}
        found: dict[str, list[Any]] = {}
        for number, hosts in enumerate(rounds or [self.hosts]):
            meeting = self.directory / f"profile-{name}-{number}"
            meeting.mkdir()
            jobs, places = [], {}
            for host in hosts:
                kind = kind_of[host]
                places[host] = self.directory / f"profile-{name}-{host}"
                places[host].mkdir()
                emit = ["-dt", kind.name, "--mem-MB", str(MEM_MB), "--bw-Mbps", str(kind.bw_mbps)]
                together = [str(script), str(meeting), str(len(hosts)), host]
                jobs.append((host, places[host], [*together, *options(kind), *emit]))
            self._all(jobs)
            for host, place in places.items():
                kind_name = kind_of[host].name
                found.setdefault(kind_name, []).append(_read(place / "device_types.yml")[kind_name])
        types = {name: median_document(documents) for name, documents in found.items()}
        _write(self.files["device_types"], types)
        _write(self.files["devices"], {kind.name: kind.names for kind in self.kinds})
        _write(self.files["models"], _read(next(iter(places.values())) / "models.yml"))

    def schedule(self, load: Workload, hosts: Sequence[str], *options: str, alike: bool = False) -> Promise:
        """Return the best schedule.

        Args:
            load: The workload to schedule.
            hosts: Names of the hosts that may take part; the first one has the data.
            options: Further options of ``sched-pipeline``.
            alike: Whether to treat all hosts as being of the first type.
        """
        types = {self.kinds[0].name: list(hosts)}
        if not alike:
            types = {kind.name: [name for name in kind.names if name in hosts] for kind in self.kinds}
        chosen = self.directory / "chosen.yml"
        _write(chosen, {name: found for name, found in types.items() if found})
        files = self.files
        command = [str(Path(sys.executable).with_name("sched-pipeline")), "--format", "json"]
        command += ["-m", load.model, "-b", str(load.ubatch), "--data-host", hosts[0]]
        command += ["-sm", str(files["models"]), "-sdt", str(files["device_types"]), "-sd", str(chosen)]
        done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
        body = json.loads(done.stdout)
        stages = [
            {stage["host"]: stage["layers"]}
            | ({"quant_bits": stage["quant_bits"]} if stage["quant_bits"] else {})
            for stage in body["schedule"]
        ]
        return Promise(Pipeline(tuple(stages), hosts[0]), body["throughput_items_per_s"])

    def run(self, load: Workload, pipelines: Sequence[Pipeline], items: Sequence[int]) -> list[Any]:
        """Run pipelines at the same time, each on its own hosts with its items; return their reports."""
        weights, inputs = load.weights(), load.inputs(max(items))
        jobs, reports = [], []
        for number, pipeline in enumerate(pipelines):
            place = self.directory / f"run-{number}"
            place.mkdir(exist_ok=True)
            _write(place / "schedule.yml", list(pipeline.stages))
            reports.append(place / "report.json")
            reports[-1].unlink(missing_ok=True)
            hosts = pipeline.hosts
            options = ["-m", load.model, "-M", str(weights), "-u", str(load.ubatch), "--timeout", "300"]
            options += ["--addr", hosts[0], "-H", ",".join(hosts), "--quiet", "--input", str(inputs)]
            options += ["-b", str(items[number])]
            options += ["--schedule-file", "schedule.yml"]
            for rank, host in enumerate(hosts):
                own = ["--report", "report.json"] if rank == 0 else []
                jobs.append(
                    (host, place, [str(ROOT / "runtime.py"), str(rank), str(len(hosts)), *options, *own])
                )
        self._all(jobs)
        return [json.loads(report.read_text()) for report in reports]

    def simulate(self, load: Workload, pipeline: Pipeline, microbatches: int) -> float:
        """Return the items per second of the full pipeline, according to ``pipeedge-simulate``."""
        schedule = self.directory / "simulated.yml"
        _write(schedule, list(pipeline.stages))
        files = self.files
        request = SimulationRequest(
            models_file=files["models"],
            dev_types_file=files["device_types"],
            dev_file=files["devices"],
            schedule_file=schedule,
            model_name=load.model,
            items=microbatches * load.ubatch,
            microbatch_size=load.ubatch,
            data_host=pipeline.data_host,
        )
        return steady_items_per_s(simulate_request(request).to_body(["pipeedge-simulate"]))

    def slowness(self, load: Workload, pipeline: Pipeline, body: Mapping[str, Any]) -> float:
        """Return the processor time of layers in a run, as a multiple of that in the profile."""
        types = _read(self.files["device_types"])
        kinds = {name: kind for kind in self.kinds for name in kind.names}
        profiled = spent = 0.0
        for stage, ran in zip(pipeline.stages, body["stages"], strict=True):
            host, (first, last) = next(entry for entry in stage.items() if isinstance(entry[1], list))
            kind = kinds[host]
            times = types[kind.name]["model_profiles"][load.model][0]["time_s"]
            profiled += kind.cpu_fraction * sum(times[first - 1 : last])
            spent += ran["compute_cpu_s_mean"]
        return spent / profiled

    def _all(self, jobs: Sequence[tuple[str, Path, Sequence[str]]]) -> None:
        """Run Python on hosts at the same time, until all have succeeded or one has failed.

        After a failure, the others may wait for that one; they end with the test bed.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        running = [
            subprocess.Popen(
                self.bed.command(host, [sys.executable, *command]),
                cwd=place,
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for host, place, command in jobs
        ]
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        for (host, _, command), process in zip(jobs, running, strict=True):
            if process.poll():
                raise SystemExit(f"{host}: {command[0]} failed with exit status {process.returncode}")
        if any(process.poll() is None for process in running):
            raise SystemExit(f"the hosts did not finish within {LIMIT_S} s")


@contextlib.contextmanager
def raised(name: str, kinds: Sequence[Kind], directory: Path) -> Iterator[Bed]:
    """Set up a test bed for as long as the block runs. Needs root."""
    directory.mkdir(parents=True)
    _write(
        directory / "cluster.yml",
        {
            "device_types": {
                kind.name: {
                    "bw_Mbps": kind.bw_mbps,
                    "mem_MB": MEM_MB,
                    "cpu_fraction": kind.cpu_fraction,
                    "model_profiles": {},
                }
                for kind in kinds
            },
            "devices": {kind.name: kind.names for kind in kinds},
        },
    )
    with TestBeds().lent(name, load_cluster(directory / "cluster.yml")) as bed:
        yield Bed(bed, tuple(kinds), directory)


def even_split(layers: int, hosts: Sequence[str]) -> Pipeline:
    """Return a pipeline with equally many layers on each host, in order; the first has the data."""
    bounds = [round(stage * layers / len(hosts)) for stage in range(len(hosts) + 1)]
    stages = [{host: [bounds[stage] + 1, bounds[stage + 1]]} for stage, host in enumerate(hosts)]
    return Pipeline(tuple(stages), hosts[0])


def steady_items_per_s(body: Mapping[str, Any]) -> float:
    """Return the throughput of the full pipeline, in items per second, from a report's timeline.

    It is measured between the ends of the first and the last microbatch in the last stage.
    """
    run = read_run(body, "report")
    if run.timeline is None:
        raise SystemExit("the report has no timeline")
    lane = f"stage {len(run.stages) - 1}"
    ends = [span.end_s for span in run.timeline.spans if span.lane == lane and span.doing.value == "compute"]
    return float((run.figures["microbatches"] - 1) * run.figures["ubatch_size"] / (ends[-1] - ends[0]))


def make_small_models(directory: Path) -> list[str]:
    """Create directories of a ViT and a BERT with 12 blocks but a ninth of the work; return them."""
    shared = {
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "hidden_act": "gelu",
    }
    vit = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "layer_norm_eps": 1e-12}
    vit |= {"image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True}
    bert = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 30522}
    bert |= {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    made = []
    for name, own in (("small-vit", vit), ("small-bert", bert)):
        place = directory / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(own | shared))
        made.append(str(place))
    return made


def median_document(found: Sequence[Any]) -> Any:
    """Return a document whose floating point numbers are medians of those in documents that are alike."""
    first = found[0]
    if isinstance(first, dict):
        return {key: median_document([one[key] for one in found]) for key in first}
    if isinstance(first, list):
        return [median_document(each) for each in zip(*found, strict=True)]
    return statistics.median(found) if isinstance(first, float) else first


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _write(path: Path, body: object) -> None:
    path.write_text(yaml.safe_dump(body, sort_keys=False))
