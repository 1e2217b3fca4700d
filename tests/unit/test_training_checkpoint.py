"""Checkpoints: complete or absent, readable for any cut, and only for the same training."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mutations import document_bytes, mutate_bytes, mutate_document, refused, rounds
from safetensors.torch import load_file, save_file

from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.train.checkpoint import CheckpointWriter, latest
from pipeedge.train.exporting import export
from pipeedge.train.networks import find_network

DESCRIPTION = {"model": "small", "seed": 3}
NAMES = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")


def parameters(value: float) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.full((3,) if name.endswith("bias") else (3, 2), value + place))
        for place, name in enumerate(NAMES)
    }


def trained(named: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return an optimizer that has made a step, and so has state."""
    optimizer = torch.optim.AdamW(named.values(), lr=0.01)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter) * 0.5
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def write(
    directory: Path,
    step: int,
    named: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    parts: int = 2,
    description: dict[str, object] = DESCRIPTION,
) -> None:
    writer = CheckpointWriter(directory, description)
    writer.make_directory()
    share = len(NAMES) // parts
    for part in range(parts):
        mine = {name: named[name] for name in NAMES[part * share : (part + 1) * share]}
        writer.write_part(step, f"worker-{part}", mine, optimizer)
    writer.finish(step)


def test_another_number_of_workers_can_read_a_checkpoint(tmp_path: Path) -> None:
    named = parameters(0.0)
    optimizer = trained(named)
    write(tmp_path, 7, named, optimizer)
    found = latest(tmp_path)
    assert (found.step, found.path.name) == (7, "step-00000007")
    found.check(DESCRIPTION)
    for names in (NAMES, NAMES[:1], NAMES[1:3]):
        read = {name: value for name, value in parameters(100.0).items() if name in names}
        state = torch.optim.AdamW(read.values(), lr=0.01)
        found.restore(read, state)
        for name in names:
            assert torch.equal(read[name], named[name])
            for key, value in optimizer.state[named[name]].items():
                assert torch.equal(state.state[read[name]][key], value)


def test_only_complete_checkpoints_count_and_two_are_kept(tmp_path: Path) -> None:
    named = parameters(0.0)
    optimizer = trained(named)
    for step in (2, 4, 6):
        write(tmp_path, step, named, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    half = CheckpointWriter(tmp_path, DESCRIPTION)
    half.write_part(8, "worker-0", named, optimizer)  # the worker was killed here
    assert latest(tmp_path).step == 6
    half.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_checkpoint_that_cannot_be_resumed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="contains no checkpoint"):
        latest(tmp_path / "nowhere")
    named = parameters(0.0)
    optimizer = trained(named)
    write(tmp_path, 5, named, optimizer)
    found = latest(tmp_path)
    with pytest.raises(RequestError, match="was made with seed 3, but this run has 4"):
        found.check({"model": "small", "seed": 4})
    strange = {"layers.2.weight": torch.nn.Parameter(torch.zeros(3, 2))}
    with pytest.raises(RequestError, match=r"lacks layers\.2\.weight"):
        found.restore(strange, torch.optim.SGD(strange.values(), lr=0.1))
    wrong = {NAMES[0]: torch.nn.Parameter(torch.zeros(2, 3))}
    with pytest.raises(
        RequestError, match=r"layers\.0\.weight has shape \[3, 2\], but the model needs \[2, 3\]"
    ):
        found.restore(wrong, torch.optim.SGD(wrong.values(), lr=0.1))
    (found.path / "worker-1.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(RequestError, match=r"worker-1\.safetensors: cannot be read"):
        found.restore(parameters(0.0), optimizer)
    (found.path / "checkpoint.json").write_text("{")
    with pytest.raises(RequestError, match=r"checkpoint\.json: cannot be read"):
        latest(tmp_path)
    (found.path / "checkpoint.json").write_text("[1]")
    with pytest.raises(RequestError, match="does not describe a checkpoint"):
        latest(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"--checkpoint-dir .*cannot be created"):
        CheckpointWriter(tmp_path / "file", DESCRIPTION).make_directory()


def test_exported_checkpoint_is_the_model_that_was_trained(tmp_path: Path) -> None:
    for name in ("vit-digits", "facebook/deit-tiny-distilled-patch16-224"):
        model = find_model(name)
        stage = find_network(name, seed=5, pretrained=False).build(LayerRange(0, model.n_layers)).eval()
        named = dict(stage.named_parameters())
        place = tmp_path / model.config.family
        writer = CheckpointWriter(place, {"model": name})
        writer.make_directory()
        writer.write_part(3, "worker-0", named, torch.optim.SGD(named.values()))
        writer.finish(3)
        assert "after batch 3" in export(place, tmp_path / f"{model.config.family}-out")
        exported = find_model(tmp_path / f"{model.config.family}-out")
        assert exported.config == model.config
        (spec,) = model.payload_specs(0, 2)
        images = torch.rand(spec.shape)
        with torch.inference_mode():
            assert torch.equal(exported.load(kernels="torch")((images,))[0], stage(images))
        with pytest.raises(RequestError, match="exists already"):
            export(place, tmp_path / f"{model.config.family}-out")
        # A stage whose weights have a pre_logits layer has more than the configuration says.
        pooler = torch.nn.Parameter(torch.zeros(2, 2))
        writer.write_part(4, "worker-1", {"shard.head.pooler.weight": pooler}, torch.optim.SGD([pooler]))
        writer.finish(4)
        with pytest.raises(RequestError, match=r"has shard\.head\.pooler\.weight, which"):
            export(place, tmp_path / f"{model.config.family}-other")
    write(tmp_path / "vgg", 1, *small_checkpoint(tmp_path / "other"), description={"model": "vgg19"})
    with pytest.raises(RequestError, match="vgg19 has no form"):
        export(tmp_path / "vgg", tmp_path / "x")


# --- damage -----------------------------------------------------------------------------------------


def small_checkpoint(directory: Path) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    named = parameters(0.0)
    optimizer = trained(named)
    write(directory, 7, named, optimizer)
    return named, optimizer


def restored(directory: Path) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    """Resume from the checkpoint, train a step, and return the parameters."""
    found = latest(directory)
    found.check(DESCRIPTION)
    named = parameters(100.0)
    optimizer = torch.optim.AdamW(named.values(), lr=0.01)
    found.restore(named, optimizer)
    return named, optimizer


def trained_on(named: dict[str, torch.nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


STORED = [f"{name}{state}" for name in NAMES for state in ("", "/step", "/exp_avg", "/exp_avg_sq")]


@pytest.mark.parametrize("key", STORED)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (None, "lacks {key}"),
        (lambda tensor: torch.zeros(5, 5), "{key} has shape [5, 5]"),
        (lambda tensor: tensor.half(), "{key} has type F16, but F32 is needed"),
        (lambda tensor: torch.full_like(tensor, torch.nan), "{key} has values that are not finite"),
    ],
    ids=("missing", "shape", "type", "not-a-number"),
)
def test_every_tensor_that_training_needs_must_exist_and_match(
    key: str, damage: Callable[[torch.Tensor], torch.Tensor] | None, words: str, tmp_path: Path
) -> None:
    small_checkpoint(tmp_path)
    for file in (tmp_path / "step-00000007").glob("*.safetensors"):
        tensors = load_file(file)
        if key in tensors:
            tensor = tensors.pop(key)
            save_file(tensors if damage is None else {**tensors, key: damage(tensor)}, file)
    with pytest.raises(RequestError, match=re.escape(words.format(key=key))):
        restored(tmp_path)


def test_checkpoint_with_a_tensor_in_two_files_is_rejected(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    shutil.copy(
        tmp_path / "step-00000007" / "worker-1.safetensors",
        tmp_path / "step-00000007" / "worker-2.safetensors",
    )
    with pytest.raises(RequestError, match="stored in two files"):
        restored(tmp_path)


def test_checkpoint_renamed_to_another_step_is_rejected(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000009")
    with pytest.raises(RequestError, match="says batch 7, but its directory says 9"):
        restored(tmp_path)


def test_mutated_checkpoints_are_rejected_in_one_line_or_usable(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "whole")
    chance = random.Random(16)
    seen = 0
    for _ in range(rounds(100)):
        directory = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", directory)
        files = sorted((directory / "step-00000007").iterdir())
        file = chance.choice(files)
        if file.suffix == ".json":
            document = mutate_document(json.loads(file.read_bytes()), chance)
            file.write_bytes(document_bytes(document, chance))
        elif chance.randrange(3) == 0:
            file.write_bytes(mutate_bytes(file.read_bytes(), chance))
        else:
            data = file.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header = json.dumps(mutate_document(json.loads(data[8 : 8 + length]), chance)).encode()
            file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        seen += refused(lambda: trained_on(*restored(tmp_path / "damaged")))
        shutil.rmtree(directory)
    assert seen > rounds(100) // 2


def values_at(file: Path) -> int:
    """Return where the values of a file begin."""
    return 8 + int(struct.unpack("<Q", file.read_bytes()[:8])[0])


def test_every_damaged_byte_of_the_values_is_noticed(tmp_path: Path) -> None:
    """Any number may be one that was trained, so only a checksum tells."""
    small_checkpoint(tmp_path)
    file = tmp_path / "step-00000007" / "worker-1.safetensors"
    whole = file.read_bytes()
    for place in range(values_at(file), len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(
            RequestError, match=r"layers\.1\S* is damaged: its checksum is wrong; resume from"
        ):
            restored(tmp_path)
    file.write_bytes(whole)
    restored(tmp_path)


def test_tensors_that_change_places_are_noticed(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    file = tmp_path / "step-00000007" / "worker-0.safetensors"
    data, (one, other) = file.read_bytes(), (b'"layers.0.weight/exp_avg"', b'"layers.0.weight/exp_avg_sq"')
    head = data[8 : values_at(file)].replace(other, b"?").replace(one, other).replace(b"?", one)
    assert head != data[8 : values_at(file)]
    file.write_bytes(struct.pack("<Q", len(head)) + head + data[values_at(file) :])
    with pytest.raises(RequestError, match="checksum is wrong"):
        restored(tmp_path)


def test_damaged_description_is_noticed(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    path = tmp_path / "step-00000007" / "checkpoint.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(RequestError, match=r"checkpoint\.json: is damaged: its checksum is wrong"):
        latest(tmp_path)


def test_checkpoint_of_an_earlier_version_has_no_checksums(tmp_path: Path) -> None:
    named, _ = small_checkpoint(tmp_path)
    directory = tmp_path / "step-00000007"
    for file in directory.glob("*.safetensors"):
        save_file(load_file(file), file)
    (directory / "checkpoint.json").write_text(json.dumps({**DESCRIPTION, "step": 7}))
    again, _ = restored(tmp_path)
    assert all(torch.equal(again[name], named[name]) for name in NAMES)
