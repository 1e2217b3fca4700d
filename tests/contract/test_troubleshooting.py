"""Test that the programs print what docs/troubleshooting.md quotes, by provoking each message.

Every case is registered under its quote, exactly as on the page, in one of the modules ``trouble_*`` of
``support``. In a quote, ``…`` stands for omitted text, also at its ends; everything else must match,
including names and figures.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trouble_commands
import trouble_data
import trouble_meeting
import trouble_nodes
import trouble_planning
import trouble_running
import trouble_serving
import trouble_starting
import trouble_text
import trouble_weights
from places import ROOT
from trouble import DIGITS, OTHER_KEY, Patch

from pipeedge.transport.new_key import make_key

PAGE = ROOT / "docs" / "troubleshooting.md"
PARTS = (
    trouble_commands,
    trouble_data,
    trouble_meeting,
    trouble_nodes,
    trouble_planning,
    trouble_running,
    trouble_serving,
    trouble_starting,
    trouble_text,
    trouble_weights,
)
CASES = {quote: provoke for part in PARTS for quote, provoke in part.CASES.items()}


def quotes() -> Iterator[str]:
    """Yield the quotes of the page: text between backquotes in the first cell of a table row."""
    for line in PAGE.read_text("utf-8").splitlines():
        cell = re.match(r"\| *(`.*?`) *\| ", line)
        if cell is not None:
            yield from re.findall(r"`([^`]+)`", cell[1])


def fits(quote: str, said: str) -> bool:
    """Return whether ``said`` contains ``quote``."""
    parts = (re.escape(part.strip()) for part in quote.split("…"))
    return re.search(r".*".join(parts), said) is not None


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with many mistakes."""
    here = tmp_path_factory.mktemp("trouble")
    for folder in ("photos", "empty", "t5", "llama", "metrics", "model"):
        (here / folder).mkdir()
    for path in ROOT.glob("*.yml"):
        shutil.copy(path, here)
    (here / "photos" / "a.png").write_text("no picture")
    (here / "metrics" / "shard-rank0.csv").write_text("")
    (here / "t5" / "config.json").write_text('{"model_type": "t5"}')
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    (here / "llama" / "config.json").write_text(json.dumps(llama))
    for path in DIGITS.weights_path().parent.iterdir():
        shutil.copy(path, here / "model")
    (here / "s.txt").write_text("a sentence\n")
    key = make_key()
    certificate = key.index("-----BEGIN CERTIFICATE")
    keys = {
        "open.pem": key,
        "cut.pem": key[:-40],
        "half.pem": key[:certificate],
        "mixed.pem": key[:certificate] + OTHER_KEY[certificate:],
    }
    for name, text in keys.items():
        (here / name).touch(mode=0o644 if name == "open.pem" else 0o600)
        (here / name).write_text(text)
    (here / "a.csv").write_text("one,other\na,b\n")
    (here / "s.yml").write_text("- mb-0: [1, 8]\n- mb-7: [9, 16]\n")
    np.savez(here / "t.npz", input_ids=np.zeros((2, 4), np.int64))
    np.savez(here / "integers.npz", pixel_values=np.zeros((2, 1, 8, 8), np.int64))
    return here


@pytest.mark.parametrize("quote", list(quotes()), ids=lambda quote: re.sub(r"\W+", "-", quote)[:50])
def test_the_mistake_gives_the_quoted_message(quote: str, trouble: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(trouble)
    monkeypatch.setattr("sys.argv", ["pipeedge run"])  # so that messages name commands, as the page does
    assert quote in CASES, "nothing provokes this message: add a case, or correct the page"
    said = CASES[quote](monkeypatch)
    assert fits(quote, said), said


def test_every_case_is_on_the_page() -> None:
    assert set(CASES) <= set(quotes())
    assert len(CASES) == sum(len(part.CASES) for part in PARTS)
    assert len(list(quotes())) == len(set(quotes()))


def test_a_quote_omits_only_what_it_marks() -> None:
    assert fits("… is 7; use …, at least", "a.yml: x is 7; use 8 or 9, at least 2")
    assert not fits("… is 7; use …, at least", "a.yml: x is 8; use 8 or 9, at least 2")
    assert not fits("a (b) failed: …", "a failed: it")
