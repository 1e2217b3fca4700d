"""Test ``profiler.py --sensitivity``: against stages that run one after the other, and what it writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from shipped_model import DIGITS
from stages_in_memory import run

from pipeedge.base.errors import RequestError, SpecError
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.data import open_input
from pipeedge.plan.sched_pipeline import find_executable
from pipeedge.plan.spec_files import load_models
from pipeedge.profile.options import parse_profiler
from pipeedge.profile.request import SensitivityCommand
from pipeedge.profile.sensitivity import ITEMS_AT_ONCE, add_sensitivity
from pipeedge.request.files import InputRequest

ITEMS = 40


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def measured(options: str) -> list[str]:
    command = parse_profiler(["-m", "vit-digits", "--sensitivity", str(ITEMS), *options.split()])
    assert isinstance(command, SensitivityCommand)
    told: list[str] = []
    add_sensitivity(command, told.append)
    return told


def test_sensitivity_is_that_of_a_run_with_one_compressed_link() -> None:
    told = measured("--widths 8,2")
    assert told[0].startswith(f"sensitivity  15 cuts at 8, 2 bits with {ITEMS} items, ")
    found = load_models("models.yml")["vit-digits"].agreement_at_bits
    assert [len(parts) for parts in (found[8], found[2])] == [DIGITS.n_layers - 1] * 2
    source = open_input(InputRequest(max_items=ITEMS), DIGITS)
    images = (torch.cat([batch.payload[0] for batch in source.microbatches(ITEMS)]),)
    lost = 0
    for cut in (2, 3, 11):
        answers = {}
        for bits in (0, 8, 2):
            ranges = (LayerRange(0, cut), LayerRange(cut, DIGITS.n_layers))
            stages = [
                StagePlan(each, rank, quant_bits=bits * (rank == 0)) for rank, each in enumerate(ranges)
            ]
            answers[bits] = run(DIGITS, Schedule(tuple(stages)), images, size=ITEMS_AT_ONCE).argmax(1)
        for bits in (8, 2):
            same = int((answers[bits] == answers[0]).sum())
            assert found[bits][cut - 1] == same / ITEMS
            lost += ITEMS - same
    assert lost > 0  # two bits change some of the classes


def test_other_bits_of_the_model_stay_and_known_ones_are_replaced_only_on_request() -> None:
    entry = {
        "layers": DIGITS.n_layers,
        "mem_MB": [0.5] * DIGITS.n_layers,
        "parameters_in": 64,
        "parameters_out": [*[10] * DIGITS.n_layers],
        "agreement_at_bits": {4: [0.25] * 15, 8: [0.5] * 15},
    }
    Path("models.yml").write_text(yaml.safe_dump({"vit-digits": entry}))
    before = Path("models.yml").read_text()
    with pytest.raises(SpecError, match=r"models\.yml: vit-digits has agreement_at_bits of 8 already"):
        measured("--widths 16,8")
    assert Path("models.yml").read_text() == before
    measured("--widths 8 --overwrite")
    written = load_models("models.yml")["vit-digits"]
    assert written.agreement_at_bits == {4: (0.25,) * 15, 8: (1.0,) * 15}
    assert written.mem_bytes[0] == 0.5 * 2**20


def test_planner_reads_what_was_measured() -> None:
    measured("--widths 16,8")
    profile = {"batch_size": 8, "dtype": "float32", "time_s": [1] * DIGITS.n_layers}
    board = {"bw_Mbps": 0.01, "mem_MB": 100, "model_profiles": {"vit-digits": [profile]}}
    Path("device_types.yml").write_text(yaml.safe_dump({"board": board}))
    Path("devices.yml").write_text("board: [a, b]\n")
    asked = [find_executable(), "--plan=auto", "-m", "vit-digits", "--widths=0,16,8"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "quant_bits: 8" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--widths 9", "--widths 9: give each number once: "),
        ("-i 3", "--sensitivity measures no layers, so it excludes --iterations"),
        ("--max-image-pixels 5", "--max-image-pixels has an effect only with --input"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        measured(options)


def test_bits_need_a_measurement() -> None:
    with pytest.raises(RequestError, match="--widths has an effect only with --sensitivity"):
        parse_profiler(["--widths", "8"])
