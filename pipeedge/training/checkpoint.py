"""Checkpoints: weights and the optimizer's state, by layer and not by stage, so that any partition can go on.

    DIR/step-00000012/            whole, or not under this name
        checkpoint.json           model, optimizer, seed, ...: what must be the same; the step
        worker-0.safetensors      layers.0.weight, layers.0.weight/momentum, ...
        worker-1.safetensors

Every worker writes its stages into ``DIR/.step-00000012.part``; when all have, the first worker writes the
description and renames the directory. Older ones are removed then, but for the last before it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeedge.errors import RequestError

__all__ = ["Checkpoint", "CheckpointWriter", "is_checkpoint_file", "latest"]

_NAME = re.compile(r"step-(\d{8,})")
_DESCRIPTION = "checkpoint.json"
_SEPARATOR = "/"
_KEPT = 2


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file of this name in a checkpoint's directory is part of it."""
    return name == _DESCRIPTION or name.endswith(".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    step: int
    """Batches that were trained."""
    description: Mapping[str, Any]

    def check(self, description: Mapping[str, Any]) -> None:
        """Refuse one of another training.

        Raises:
            RequestError: something differs; the first is named.
        """
        for key, wanted in description.items():
            found = self.description.get(key)
            if found != wanted:
                raise RequestError(f"{self.path}: was made with {key} {found}, this run has {wanted}")

    def restore(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Fill ``parameters`` and the state that ``optimizer`` keeps of them.

        Raises:
            RequestError: a tensor is missing or of another shape, a file is damaged.
        """
        missing = set(parameters)
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as stored:
                    for key in stored.keys():  # noqa: SIM118 - it is no mapping
                        name, _, state = key.partition(_SEPARATOR)
                        if name in parameters:
                            self._place(stored.get_tensor(key), parameters[name], state, optimizer, key)
                            missing.discard(name)
            except (OSError, SafetensorError) as error:
                raise RequestError(f"{file}: cannot be read ({error})") from error
        if missing:
            raise RequestError(f"{self.path}: has no {min(missing)}; is it of another model?")

    def _place(
        self,
        tensor: torch.Tensor,
        parameter: torch.nn.Parameter,
        state: str,
        optimizer: torch.optim.Optimizer,
        key: str,
    ) -> None:
        if state:
            optimizer.state[parameter][state] = tensor
            return
        if tensor.shape != parameter.shape:
            raise RequestError(
                f"{self.path}: {key} is {list(tensor.shape)}, the model's is {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(tensor)


def latest(directory: Path) -> Checkpoint:
    """The last whole checkpoint in ``directory``.

    Raises:
        RequestError: there is none, or it cannot be read.
    """
    found = _whole(directory)
    if not found:
        raise RequestError(f"--checkpoint-dir {directory}: holds no checkpoint to --resume from")
    step, path = found[-1]
    try:
        description = json.loads((path / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path / _DESCRIPTION}: cannot be read ({error})") from error
    if not isinstance(description, dict):
        raise RequestError(f"{path / _DESCRIPTION}: is no description of a checkpoint")
    return Checkpoint(path, step, description)


class CheckpointWriter:
    """Writes one checkpoint after the other, together with the other workers.

    Args:
        directory: where.
        description: what must be the same when one is resumed from.
    """

    def __init__(self, directory: Path, description: Mapping[str, Any]) -> None:
        self._directory = directory
        self._description = dict(description)

    def make_directory(self) -> None:
        """Make the directory, if it is not there.

        Raises:
            RequestError: it cannot be made, or not be written to.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--checkpoint-dir {self._directory}: cannot be made ({error.strerror})"
            ) from error
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise RequestError(f"--checkpoint-dir {self._directory}: cannot be written to")

    def clear(self) -> None:
        """Remove what an interrupted run has left half; one worker does it before any writes."""
        for left in self._directory.glob(".step-*.part"):
            shutil.rmtree(left, ignore_errors=True)

    def write_part(
        self,
        step: int,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """This worker's part of the checkpoint after ``step`` batches.

        Raises:
            RequestError: the disk is full.
        """
        tensors = {key: parameter.detach() for key, parameter in parameters.items()}
        for key, parameter in parameters.items():
            for state, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}{_SEPARATOR}{state}"] = value
        part = self._part(step)
        try:
            part.mkdir(exist_ok=True)
            save_file(
                {key: value.contiguous() for key, value in tensors.items()}, part / f"{name}.safetensors"
            )
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{part}: cannot be written ({error})") from error

    def finish(self, step: int) -> Path:
        """All workers have written their parts: give the checkpoint its name.

        Raises:
            RequestError: the disk is full.
        """
        part, whole = self._part(step), self._directory / f"step-{step:08d}"
        try:
            text = json.dumps({**self._description, "step": step}, indent=2)
            (part / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")
            if whole.exists():
                shutil.rmtree(whole)
            part.rename(whole)
        except OSError as error:
            raise RequestError(f"{part}: cannot be written ({error})") from error
        for _, path in _whole(self._directory)[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
        return whole

    def _part(self, step: int) -> Path:
        return self._directory / f".step-{step:08d}.part"


def _whole(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step."""
    if not directory.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in named if match)
