"""Test that sched-pipeline and Python read damaged files of the scheduler alike."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import mutate_text, refused, rounds
from places import ROOT

from pipeedge.plan import spec_files, spec_writing
from pipeedge.plan.scheduler import find_executable

ROUNDS = 20

MODELS = """\
# Sizes of a model of text
m: &base
  layers: 4
  mem_MB: [1, 2.5, 1e0, 2]
  parameters_in: 1000
  parameters_out: [1000, 2000]
  tokens: 64
  parameters_in_per_token: 2
  parameters_out_per_token: [3, 4, 3, 4]
"other one":
  <<: *base
  layers: 4
"""
TYPES = """\
fast:
  bw_Mbps: 80
  mem_MB: 100
  model_profiles:
    m:
    - batch_size: 8
      dtype: torch.float32
      time_s: &times [1, 2, 1, 2]
      receive_s: [0.1, 0.1, 0.1, 0.1]
      send_s: [0.1, 0.1, 0.1, 0.1]
      activations_MB: [0.5, 1, 0.5, 1]
      weights_MB: [0.5, 1, 0.5, 1]
      feed_s: 0.25
      collect_s: 0.125
      tokens: 64
      lengths:
      - tokens: 32
        time_s: [0.5, 1, 0.5, 1]
      - {tokens: 16, time_s: [0.25, 0.5, 0.25, 0.5]}
slow:
  bw_Mbps: 8
  mem_MB: 50
  model_profiles: {m: [{batch_size: 8, dtype: 'torch.float32', time_s: *times}]}
unused:
  bw_Mbps: 8
  mem_MB: 50
  model_profiles:
"""
DEVICES = """\
# hosts
fast: [f0]
slow:
- s0
- s1   # the old one
unused: []
"""
NEIGHBORS = """\
f0:
  s0: {bw_Mbps: 40, latency_s: 0.001}
  s1:
    bw_Mbps: 1
s0: {}
"""
FILES: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path, Any], None]]] = {
    "models.yml": (MODELS, spec_files.load_models, spec_writing.save_models),
    "device_types.yml": (TYPES, spec_files.load_device_types, spec_writing.save_device_types),
    "devices.yml": (DEVICES, spec_files.load_devices, spec_writing.save_devices),
    "neighbors.yml": (NEIGHBORS, spec_files.load_neighbors, spec_writing.save_neighbors),
}


def schedule(folder: Path, model: str) -> tuple[int, str, str]:
    """Return exit code, schedule with all its costs, and messages of sched-pipeline for a folder's files."""
    done = subprocess.run(
        [find_executable(), "-m", model, "--format", "json", "--dev-neighbors-file", "neighbors.yml"],
        cwd=folder, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False,
    )  # fmt: skip
    answer = "".join(line for line in done.stdout.splitlines(keepends=True) if "elapsed_s" not in line)
    return done.returncode, answer, done.stderr


@pytest.mark.parametrize(
    ("name", "source"),
    [*((name, "small") for name in FILES), *((name, "example") for name in FILES if (ROOT / name).exists())],
)
def test_damaged_files_mean_the_same_to_both_readers(name: str, source: str, tmp_path: Path) -> None:
    model = "m" if source == "small" else "google/vit-base-patch16-224"
    for other, (small, _, _) in FILES.items():
        example = ROOT / other
        text = example.read_text() if source == "example" and example.exists() else small
        (tmp_path / other).write_text(text)
    file = tmp_path / name
    text = file.read_text()
    _, load, save = FILES[name]
    chance = random.Random(f"{name} {source}")
    for _ in range(rounds(ROUNDS)):
        damaged = mutate_text(text, chance)
        file.write_bytes(damaged.encode())
        found: list[Any] = []

        def read(found: list[Any] = found) -> None:
            found.append(load(file))

        if refused(read):
            code, _, _ = schedule(tmp_path, model)
            assert code == 2, f"only Python refuses\n{damaged}"
            continue
        answer = schedule(tmp_path, model)
        save(file, found[0])
        clean = schedule(tmp_path, model)
        assert answer[:2] == clean[:2], f"{answer}\n{clean}\n{damaged}"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("fast: [f0]\nslow", None, id="key without colon at the end"),
        pytest.param("fast: [f0]\nslow\n", None, id="key without colon in the last line"),
        pytest.param("fast: [f0]\n'slow'\n", None, id="quoted key without colon"),
        pytest.param("fast: [f0]\n? slow\n", ["f0"], id="explicit key"),
        pytest.param("fast: [f0]\nslow:", ["f0"], id="key without value"),
        pytest.param("fast: [f0]\n?", None, id="explicit key without a name"),
        pytest.param('fast: [f0]\nslow: "s0\n', None, id="unended quotes"),
        pytest.param('fast: [f0]\nslow:\n- "s0\n  ', None, id="unended quotes before blanks"),
        pytest.param("fast: [f0]\rslow:\r- s0\r", ["f0", "s0"], id="lone carriage returns"),
        pytest.param("fast: [f0]\nslow:\n- s0\u2028", None, id="break of YAML 1.1"),
        pytest.param("fast: [f0]\nslow: [s\ufeff0]", None, id="late byte order mark"),
        pytest.param("# head\n\n%YAML 1.1\n---\nfast: [f0]\n", ["f0"], id="directive"),
        pytest.param("fast: [f0]\n%TAG\n", None, id="late directive"),
        pytest.param("fast:\n-\tf0\n", None, id="tab behind a dash"),
        pytest.param("fast:\n- \tf0\n", None, id="tab behind a dash and a blank"),
        pytest.param("fast: [f0,\tf1]\n", ["f0", "f1"], id="tab between values"),
        pytest.param('fast: ["\\_f\\N", "\\xe9"]\n', ["\xa0f\x85", "\xe9"], id="escapes"),
        pytest.param('fast: ["f\\t0"]\n', None, id="escaped control character"),
        pytest.param("fast: [f0, f?]\n", None, id="question mark between brackets"),
        pytest.param("fast: [f0]\n~: [s0]\n", None, id="key that is nothing"),
    ],
)
def test_both_readers_agree_where_parsers_differ(text: str, hosts: list[str] | None, tmp_path: Path) -> None:
    for name, (small, _, _) in FILES.items():
        (tmp_path / name).write_text(small)
    (tmp_path / "devices.yml").write_bytes(text.encode())
    (tmp_path / "neighbors.yml").write_text("{}\n")
    code, answer, message = schedule(tmp_path, "m")
    if hosts is None:
        assert refused(lambda: spec_files.load_devices(tmp_path / "devices.yml"))
        assert (code, answer) == (2, "")
        assert message.count("\n") == 1
        return
    read = spec_files.load_devices(tmp_path / "devices.yml")
    assert [host for listed in read.values() for host in listed] == hosts
    known = json.loads(answer)
    assert code == 0
    used = {stage["host"] for stage in known["schedule"]} | {each["host"] for each in known["unused_hosts"]}
    assert used == set(hosts)
