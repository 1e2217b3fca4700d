"""Whole runs of one rank, in the test's process: input of every kind, results, requests that are refused."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from models_oracle import save, scramble
from ports import free_port
from rich.console import Console
from runs import DIGITS, Inputs, nothing_is_left, outputs, write_cluster, write_pictures
from small_models import VOCABULARY
from waiting import until

from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.control.forms import Forms
from pipeedge.control.hub_client import Callbacks
from pipeedge.control.session import Session
from pipeedge.models import find_model
from pipeedge.request.config import WorldRequest
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline
from pipeedge.run.preview import show_schedule

# --- one rank, in this process ----------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        return self.err


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Call]:
    """``runtime.py 0 1`` with more options, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*options: object, place: tuple[int, int] = (0, 1)) -> Call:
        console = io.StringIO()
        warnings: list[str] = []

        def main() -> None:
            words = [str(word) for word in (*place, "--port", free_port(), "--timeout", 20, *options)]
            command = parse_runtime(words, Environment())
            if command.dry_run:
                show_schedule(command.request, lambda line: print(line, file=console))
            else:
                pipeline.run(command.request, lambda: Console(file=console, width=120), warnings.append)

        status = guard("runtime.py", main, verbose=False)
        out, err = capsys.readouterr()
        assert out == ""
        return Call(status, console.getvalue(), "".join(line + "\n" for line in warnings) + err)

    return run


def forward(name: Path | str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the unsplit model makes of ``inputs``."""
    with torch.inference_mode():
        (result,) = find_model(name).load()(inputs)
    return result


@pytest.mark.parametrize(
    ("options", "items"),
    [
        (("-b", 1, "-u", 1), 1),
        (("-b", 5, "-u", 64), 5),
        (("-b", 7, "-u", 3), 7),
        (("-u", 1), 50),
        (("-b", 1000), 50),
    ],
)
def test_any_batch_and_microbatch(
    call: Callable[..., Call], inputs: Inputs, options: tuple[object, ...], items: int
) -> None:
    done = call(*DIGITS, "--input", inputs.digits, "--output", "o.npz", "--report", "r.json", *options)
    assert (done.status, done.err) == (0, "")
    with np.load(inputs.digits) as arrays:
        expected = forward("vit-digits", (torch.from_numpy(arrays["pixel_values"][:items]),))
    np.testing.assert_allclose(outputs(Path("o.npz")), expected, atol=1e-5, rtol=0)
    report = json.loads(Path("r.json").read_text())
    assert report["items"] == items
    assert report["microbatches"] == -(-items // report["ubatch_size"])


SENTENCES = ("the cat sat", "a mat .", "the cat sat on a mat and slept all day", "day")


@pytest.mark.parametrize("family", ["roberta", "distilbert", "mpnet", "albert"])
def test_text_families_run_in_eight_bits_near_float32(
    call: Callable[..., Call], model_dirs: dict[str, Path], family: str
) -> None:
    Path("in.txt").write_text("\n".join(SENTENCES))
    options = ("-m", model_dirs[family], "--input", "in.txt", "-u", 3)
    done = call(*options, "--dtype", "int8", "--check", 4, "--output", "o.npz", "--report", "r.json")
    assert done.status == 0, done.err
    check = json.loads(Path("r.json").read_text())["check"]
    assert check["items"] == 4
    assert check["largest_deviation"] < 0.5
    exact = call(*options, "--output", "exact.npz")
    assert exact.status == 0, exact.err
    assert np.abs(outputs(Path("o.npz")) - outputs(Path("exact.npz"))).max() == pytest.approx(
        check["largest_deviation"], rel=1e-4
    )


def test_every_token_is_classified_as_without_padding(call: Callable[..., Call], tmp_path: Path) -> None:
    """The reference computes each sentence by itself; RoBERTa's positions must not depend on padding."""
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    config = transformers.RobertaConfig(
        vocab_size=len(VOCABULARY), max_position_embeddings=16, type_vocab_size=1, num_labels=3, **size
    )
    reference = transformers.RobertaForTokenClassification(config).eval()
    scramble(reference, 5)
    save(reference, tmp_path / "tagger")
    (tmp_path / "tagger" / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    Path("in.txt").write_text("\n".join(SENTENCES))
    done = call("-m", "tagger", "--input", "in.txt", "-u", 3, "--check", 4, "--output", "o.npz")
    assert done.status == 0, done.err
    ids = [[VOCABULARY.index(word) for word in ("[CLS]", *text.split(), "[SEP]")] for text in SENTENCES]
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([each])).logits[0] for each in ids]
    with np.load("o.npz") as arrays:
        assert arrays["tokens"].tolist() == [len(each) for each in ids]
        np.testing.assert_allclose(arrays["outputs"], torch.cat(expected), atol=1e-5, rtol=0)

    # The same as arrays with padding, in another order of their lengths.
    lengths = [len(each) for each in ids]
    padded, mask = np.zeros((2, len(ids), 14), np.int64)
    for row, each in enumerate(ids):
        padded[row, : len(each)], mask[row, : len(each)] = each, 1
    np.savez("in.npz", input_ids=padded, attention_mask=mask)
    done = call("-m", "tagger", "--input", "in.npz", "-u", 3, "--check", 4, "--output", "o.jsonl")
    assert done.status == 0, done.err
    rows = [json.loads(line)["tokens"] for line in Path("o.jsonl").read_text().splitlines()]
    assert [len(row) for row in rows] == lengths
    assert [token["class"] for row in rows for token in row] == torch.cat(expected).argmax(dim=1).tolist()


def test_rows_keep_their_numbers_and_labels_have_names(call: Callable[..., Call], inputs: Inputs) -> None:
    model = Path("model")
    shutil.copytree(inputs.models["bert"], model)
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {"0": "low", "1": "middle", "2": "high"}
    (model / "config.json").write_text(json.dumps(config))
    Path("in.csv").write_text("text,label\nthe cat,low\n,high\na mat,\nday,2\nsat,7\n")
    refused = call("-m", model, "--input", "in.csv", "--output", "o.npz")
    assert refused.status == 2
    assert "in.csv:3: the sentence is empty; --skip-bad-input leaves such rows out" in refused.line
    options = ("-m", model, "--input", "in.csv", "--skip-bad-input", "-u", 2)
    done = call(*options, "--output", "o.npz")
    assert (done.status, done.err) == (0, "")
    assert "skipped     2 inputs that cannot be used:" in done.out
    with np.load("o.npz") as arrays:
        assert arrays["items"].tolist() == [0, 2, 3]
        assert arrays["labels"].tolist() == [0, -1, 2]
        assert arrays["outputs"].shape == (3, 3)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_for_people_and_programs(call: Callable[..., Call], inputs: Inputs, suffix: str) -> None:
    done = call(*DIGITS, "--input", inputs.digits, "-b", 11, "--output", f"o.{suffix}")
    assert done.status == 0
    text = Path(f"o.{suffix}").read_text()
    if suffix == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        best = [int(row["class_1"]) for row in rows]
        labels = [int(row["label"]) for row in rows]
    else:
        documents = [json.loads(line) for line in text.splitlines()]
        best = [document["top"][0]["class"] for document in documents]
        labels = [document["label"] for document in documents]
    with np.load(inputs.digits) as arrays:
        expected = forward("vit-digits", (torch.from_numpy(arrays["pixel_values"][:11]),))
        assert labels == arrays["labels"][:11].tolist()
    assert best == expected.argmax(dim=1).tolist()


def test_folders_of_pictures_and_bad_ones_among_them(
    call: Callable[..., Call], inputs: Inputs, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "pictures", 5)
    (tmp_path / "pictures" / "002.png").write_bytes(b"no picture")
    options = ("-m", inputs.models["vit"], "--input", "pictures", "-u", 2)
    # Results that arrived before the bad picture was read stay in refused.npz.part: each run has its own.
    refused = call(*options, "--output", "refused.npz")
    assert refused.status == 2
    assert "pictures/002.png" in refused.line
    nothing_is_left(tmp_path)
    assert not Path("refused.npz").exists()
    done = call(*options, "--output", "o.npz", "--skip-bad-input", "--report", "r.json")
    assert (done.status, done.err) == (0, "")
    assert "002.png" in done.out
    with np.load("o.npz") as arrays:
        assert arrays["outputs"].shape == (4, 7)
        assert arrays["items"].tolist() == [0, 1, 3, 4]
    (skipped,) = json.loads(Path("r.json").read_text())["skipped"]
    assert "002.png" in skipped


def test_the_default_input_is_repeated(call: Callable[..., Call], inputs: Inputs) -> None:
    done = call("-m", inputs.models["vit"], "-b", 5, "--output", "o.npz")
    assert done.status == 0
    found = outputs(Path("o.npz"))
    assert found.shape == (5, 7)
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-6)


def test_a_dry_run_shows_the_schedule_and_starts_nothing(call: Callable[..., Call], tmp_path: Path) -> None:
    done = call(*DIGITS, "-pt", "1,5,6,16", "-r", "1,0", "--dry-run", "--output", "o.npz", place=(0, 2))
    assert (done.status, done.err) == (0, "")
    assert done.out == "stage 0: layers 1-5 on rank 1\nstage 1: layers 6-16 on rank 0\n"
    assert list(tmp_path.iterdir()) == []
    refused = call(*DIGITS, "-pt", "1,5,6,17", "--dry-run", place=(0, 2))
    assert (refused.status, refused.out) == (2, "")
    files = write_cluster(tmp_path, ("0", "1", "2"))
    done = call(*DIGITS, "--dry-run", *files, place=(0, 3))
    assert done.status == 0
    assert "predicted throughput" in done.out
    infeasible = tmp_path / "t.yml"
    infeasible.write_text(infeasible.read_text().replace("1024", "1"))
    refused = call(*DIGITS, "--dry-run", *files, place=(0, 3))
    assert refused.status == 3
    assert "sched-pipeline: " in refused.line


BAD_REQUESTS: dict[str, tuple[tuple[object, ...], str]] = {
    "beyond the model": ((*DIGITS, "-pt", "1,17"), "1-17 goes beyond the model: its layers are 1 to 16"),
    "uncovered": ((*DIGITS, "-pt", "1,15"), "layer 16 is covered by no stage"),
    "too many stages": ((*DIGITS, "-pt", "1,8,9,16"), "2 stages need as many ranks, the world has 1"),
    "unknown model": (("-m", "vit-digit"), "did you mean vit-digits"),
    "misspelt model": (("-m", "google/vit-base-patch16-225"), "did you mean google/vit-base-patch16-224"),
    "no weights": (("-m", "facebook/deit-tiny-distilled-patch16-224"), "save_model_weights.py"),
    "weights that are not there": ((*DIGITS, "-M", "no.safetensors"), "no.safetensors"),
    "weights that are none": ((*DIGITS, "-M", "junk.npz"), "junk.npz"),
    "truncated weights": (("-m", "{damaged}"), "model.safetensors"),
    "another model's weights": ((*DIGITS, "-M", "{vit}/model.safetensors"), r"\[.*\]|\(.*\)"),
    "no such input": ((*DIGITS, "--input", "nowhere.npz"), "nowhere.npz: no such file or folder"),
    "empty folder": (("-m", "{vit}", "--input", "empty"), "no image below this folder"),
    "empty text": (("-m", "{bert}", "--input", "empty.txt"), r"empty\.txt"),
    "the wrong kind": ((*DIGITS, "--input", "empty.txt"), "takes images"),
    "a picture that is none": (("-m", "{vit}", "--input", "junk.png"), r"junk\.png"),
    "a npz that is none": ((*DIGITS, "--input", "junk.npz"), r"junk\.npz is not a complete"),
    "arrays of another size": ((*DIGITS, "--input", "{images}"), "pixel_values"),
    "no such interface": ((*DIGITS, "-s", "nope0"), r"nope0: the interface does not exist; there are .*lo"),
    "no such name": ((*DIGITS, "--addr", "no-such-host.invalid"), "cannot resolve this name"),
    "not this machine": ((*DIGITS, "--addr", "203.0.113.5"), "not an address of this machine"),
    "an unknown device": ((*DIGITS, "-d", "tpu"), "use cpu, cuda or cuda:N"),
    "no GPU": ((*DIGITS, "-d", "cuda:77"), "CUDA"),
    "an unknown suffix": ((*DIGITS, "--output", "o.txt"), "unknown suffix"),
    "nowhere to write": ((*DIGITS, "--output", "nowhere/o.npz"), "does not exist"),
    "nowhere to report": ((*DIGITS, "--report", "nowhere/r.json"), "does not exist"),
    "no schedule file": ((*DIGITS, "--schedule-file", "no.yml"), r"no\.yml"),
    "no scheduler files": (
        (*DIGITS, "-sm", "a.yml", "-sdt", "b.yml", "-sd", "c.yml"),
        r"[abc]\.yml: no such file",
    ),
    "bits for more stages": ((*DIGITS, "-q", "8,0"), r"2 bit widths \(-q\) for 1 stage;"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_gets_one_line_and_leaves_nothing(
    name: str, call: Callable[..., Call], inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    for junk in ("junk.npz", "junk.png"):
        (tmp_path / junk).write_bytes(b"\x00\x01junk" * 50)
    before = sorted(tmp_path.iterdir())
    options, says = BAD_REQUESTS[name]
    places = {"damaged": inputs.damaged, "images": inputs.images, **inputs.models}
    done = call("--output", "o.npz", *(str(option).format(**places) for option in options))
    assert done.status == 2
    assert re.search(says, done.line), done.line
    assert sorted(tmp_path.iterdir()) == before


def test_port_in_use_is_reported_and_a_single_rank_needs_none(call: Callable[..., Call]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as stack:
        port = taken.getsockname()[1]
        assert call(*DIGITS, "-b", 8, "--port", port).status == 0
        world = WorldRequest(rank=0, size=2, addr="127.0.0.1", port=port)
        session = stack.enter_context(Session(world, Forms(dict, dict, dict), Callbacks()))
        with pytest.raises(RequestError, match=f"--port {port} is in use on 127.0.0.1"):
            session.open()


def test_a_run_leaves_no_thread_behind(call: Callable[..., Call]) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        assert call(*DIGITS, "-b", 8).status == 0
    assert call(*DIGITS, "-b", 8, "-M", "nowhere.npz").status == 2
    until(lambda: set(threading.enumerate()) <= before, "all threads have ended")
