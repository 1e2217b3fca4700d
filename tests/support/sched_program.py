"""Run sched-pipeline on the files of a small cluster."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml
from places import ROOT
from waiting import LIMIT_S

from pipeedge.plan.sched_pipeline import find_executable

MIB = 2**20


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Last line on standard error; an error must be one line after the warnings."""
        lines = self.err.splitlines()
        assert lines, "nothing on standard error"
        assert all(line.startswith("sched-pipeline: warning: ") for line in lines[:-1]), self.err
        assert lines[-1].startswith("sched-pipeline: error: "), self.err
        assert self.out == ""
        return lines[-1].removeprefix("sched-pipeline: error: ")


def run(*arguments: str, cwd: Path = ROOT, text: str = "") -> Run:
    done = subprocess.run(
        [find_executable(), *arguments],
        cwd=cwd,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


MODELS = {"m": {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}}
TYPES = {
    "fast": {
        "bw_Mbps": 80,
        "mem_MB": 100,
        "model_profiles": {"m": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}]},
    },
    "slow": {
        "bw_Mbps": 8,
        "mem_MB": 50,
        "model_profiles": {"m": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [2, 4, 2, 4]}]},
    },
    "unprofiled": {"bw_Mbps": 8, "mem_MB": 50, "model_profiles": None},
}
DEVICES = {"fast": ["f0", "f1"], "slow": ["s0"], "unprofiled": []}


@dataclass(frozen=True)
class Cluster:
    """A folder with the three files under their default names."""

    folder: Path

    def write(self, name: str, content: object) -> None:
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> Run:
        return run("-m", "m", *arguments, cwd=self.folder)


def written(folder: Path) -> Cluster:
    """Write the three files to ``folder``."""
    made = Cluster(folder)
    made.write("models.yml", MODELS)
    made.write("device_types.yml", TYPES)
    made.write("devices.yml", DEVICES)
    return made


def with_types(cluster: Cluster, **changes: object) -> None:
    cluster.write("device_types.yml", {"fast": {**TYPES["fast"], **changes}})
    cluster.write("devices.yml", {"fast": ["f0", "f1"]})
