"""Requests for a training, its models and its images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from pipeedge.base.errors import InputError, ModelError, RequestError
from pipeedge.request.environment import Environment
from pipeedge.train import main
from pipeedge.train.networks import Vgg, find_network
from pipeedge.train.options import parse_train
from pipeedge.train.request import TrainingRequest
from pipeedge.train.samples import open_samples


@pytest.mark.parametrize("first_speaks", [True, False])
def test_launcher_prints_a_failure_once(first_speaks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    cause = "rank 3 (stage (3)) failed: disk full"  # text that looks like a report is not taken for one
    line = f"rank 1 (stage 1, on pi1) failed: {cause}"
    output = main._Output()
    for _ in range(2):
        output.line(main.RelayedFailure(cause, line).to_text(), error=True)
    if first_speaks:
        output.line(f"train.py: {cause}\n", error=True)
    output.release()
    assert capsys.readouterr().err == f"train.py: {cause if first_speaks else line}\n"


# --- the request -------------------------------------------------------------------------------------


def parsed(*arguments: object, environ: Environment | None = None, cores: int = 2) -> TrainingRequest:
    return parse_train([str(a) for a in arguments], environ or Environment(), cores=cores).request


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", 64, "--microbatch-size", 5), "64 is not divisible by --microbatch-size 5"),
        (("--schedule", "pipedream"), "invalid choice: 'pipedream'"),
        (("--partition", "1,10,12,44"), "layer 11 is covered by no stage"),
        (("--partition", "1,10,11,44", "--stages", 3), "--partition has 2 stages, but --stages is 3"),
        (("--partition", "1,10,11"), "3 numbers were given"),
        (("--partition", "half"), "neither auto nor a list"),
        (("--stages", 4, "--workers", 4, "--batch-size", 6, "--microbatch-size", 2), "but there are 3 for 4"),
        (("--schedule", "interleaved", "--stages", 2, "--workers", 2), "at least 2"),
        (("--schedule", "sequential", "--workers", 2, "--stages", 2), "runs on 1 worker"),
        (("--stages", 0), "--stages 0"),
        (("--workers", 0), "--workers 0"),
        (("--workers", 5), "each worker needs at least one stage"),
        (("--threads", 0), "--threads 0"),
        (("--threads", 10**8), "1 to 1024"),
        (("--stages", 10**7, "--workers", 2), "more than 100000 steps"),
        (("--batch-size", 10**7, "--microbatch-size", 1), "more than 100000 steps"),
        (("--model", ""), "it is empty"),
        (("--data", " "), "it is empty"),
        (("--checkpoint-dir", ""), "it is empty"),
        (("--lr", 0), "--lr 0"),
        (("--lr", "nan"), "--lr nan"),
        (("--lr", "1e30"), "--lr above 10^18: must be above 0 and at most 1,000,000"),
        (("--batches", 0), "--batches 0"),
        (("--batch-size", 0), "--batch-size 0"),
        (("--seed", -1), "--seed -1"),
        (("--resume",), "--resume needs the directory of the checkpoint: give --checkpoint-dir"),
        (("--checkpoint-every", 0), "--checkpoint-every 0"),
        (("--report", "report.txt"), "FILE.json"),
        (("--memory", 0), "--memory 0"),
        (("--memory", "1e300"), "--memory above 10^18: must be megabytes above 0 and up to 1,000,000,000"),
        (("--memory", 100, "--partition", "1,10,11,44"), "--memory has no effect with a given --partition"),
    ],
)
def test_bad_requests_are_rejected(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        parsed(*arguments)


def test_defaults_follow_from_given_options() -> None:
    alone, four = parsed("--schedule", "sequential"), parsed()
    assert (alone.pipeline.stages, alone.pipeline.workers, alone.pipeline.threads) == (1, 1, 2)
    assert alone.microbatch_size == alone.batch_size == 64
    assert (four.pipeline.stages, four.pipeline.workers, four.pipeline.threads) == (4, 2, 1)
    assert (four.microbatch_size, four.microbatches) == (4, 16)
    elastic = Environment(rank=1, world_size=4, local_rank=1, local_world_size=2, master_port=1234)
    under = parse_train([], elastic, cores=8)
    assert under.is_worker
    assert (under.request.pipeline.workers, under.request.pipeline.threads, under.place) == (4, 4, 1)
    with pytest.raises(RequestError, match="leave it out under torchrun"):
        parsed("--workers", 2, environ=elastic)


# --- models and data ---------------------------------------------------------------------------------


def test_vgg19_has_the_seeds_layers_and_sizes() -> None:
    network = Vgg()
    assert network.n_layers == 44
    assert network.crossing(0, 4)[0].shape == (4, 3, 128, 128)
    assert network.crossing(10, 4)[0].shape == (4, 128, 32, 32)
    assert network.crossing(19, 4)[0].shape == (4, 256, 16, 16)
    assert network.crossing(28, 4)[0].shape == (4, 512, 8, 8)
    assert network.crossing(37, 4)[0].shape == (4, 512, 4, 4)
    assert network.crossing(44, 4)[0].shape == (4, 1000)


def test_models_that_cannot_be_trained_are_rejected() -> None:
    for name, pretrained in (("bert-base-uncased", False), ("vgg19", True), ("no-such-model", False)):
        with pytest.raises(ModelError):
            find_network(name, seed=0, pretrained=pretrained)


def test_a_folder_of_classes_gives_labelled_images(tmp_path: Path) -> None:
    for number, name in enumerate(("cat", "dog", "eel")):
        (tmp_path / name).mkdir()
        for place in range(number + 2):
            Image.new("RGB", (20, 30), (80 * number, 10 * place, 0)).save(tmp_path / name / f"{place}.png")
    network = Vgg(widths=(4, None), side=8, classes=3)
    samples = open_samples(str(tmp_path), network, batch_size=9, seed=1)
    assert samples.images(0).shape == (9, 3, 8, 8)
    assert sorted(samples.labels(0).tolist()) == [0, 0, 1, 1, 1, 2, 2, 2, 2]  # each item once
    red = (samples.images(1)[:, 0, 0, 0] + 1) / 2 * 255 / 80
    assert red.round().long().tolist() == samples.labels(1).tolist()
    assert samples.labels(0).tolist() != samples.labels(1).tolist()
    long = open_samples(str(tmp_path), network, batch_size=30, seed=1)
    assert long.labels(0).tolist()[:18] == [*samples.labels(0).tolist(), *samples.labels(1).tolist()]
    small = open_samples(str(tmp_path), network, batch_size=9, seed=1, max_image_pixels=599)
    with pytest.raises(InputError, match=r"more than 599, .* --max-image-pixels allows more"):
        small.images(0)
    with pytest.raises(InputError, match="has only 2"):
        open_samples(str(tmp_path), Vgg(widths=(4, None), side=8, classes=2), batch_size=1, seed=0)
    with pytest.raises(InputError, match="no such folder"):
        open_samples(str(tmp_path / "cow"), network, batch_size=1, seed=0)
    with pytest.raises(InputError, match="no folders with images"):
        open_samples(str(tmp_path / "cat"), network, batch_size=1, seed=0)
    with pytest.raises(InputError, match="--model vit-digits"):
        open_samples("digits", network, batch_size=1, seed=0)
