"""Save weights and optimizer state by layer, not by stage, so that training can resume on any partition.

    DIR/step-00000012/            exists only when complete
        checkpoint.json           the step, and settings that must match: model, seed, ...; a checksum
        worker-0.safetensors      layers.0.weight, layers.0.weight/exp_avg, ...; a checksum of each
        worker-1.safetensors

Every worker writes its stages into ``DIR/.step-00000012.part``; when all have, the first worker writes the
description and renames the directory. Then older checkpoints are removed, except the previous one.

A checksum covers a tensor's name, type, shape and values, so a worker that reads some of the tensors checks
those. Checkpoints of earlier versions have none, and are read without.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeedge.base.errors import RequestError, one_line
from pipeedge.base.files import make_writable_directory
from pipeedge.base.wording import excerpt

__all__ = ["Checkpoint", "CheckpointWriter", "is_checkpoint_file", "latest"]

_NAME = re.compile(r"step-(\d{8,})")
_DESCRIPTION = "checkpoint.json"
_SEPARATOR = "/"
_CHECKSUM = "crc32"
"""Key of a checksum, in the description and, followed by the name of a tensor, in a file's metadata."""
_KEPT = 2
_LONGEST_REASON = 200
_KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
)
"""Names in a ``.safetensors`` file of the types that parameters and optimizers have."""


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file of this name in a checkpoint's directory is part of it."""
    return name == _DESCRIPTION or name.endswith(".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of batches trained."""
    description: Mapping[str, Any]
    """Settings that must match when training resumes."""

    def check(self, description: Mapping[str, Any]) -> None:
        """Check that the checkpoint is of a training with these settings.

        Raises:
            RequestError: A setting differs; the first is named.
        """
        for key, wanted in description.items():
            found = self.description.get(key)
            if found != wanted:
                shown = excerpt(found)
                raise RequestError(f"{self.path}: was made with {key} {shown}, but this run has {wanted}")

    def restore(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Fill ``parameters`` and the state that ``optimizer`` keeps for them.

        All names, shapes and types are compared before the first value is read.

        Raises:
            RequestError: A tensor is missing, stored twice or does not match, or a file is damaged.
        """
        states = _state_of_one(optimizer)
        wanted = {
            key: spec
            for name, value in parameters.items()
            for key, spec in _specs(name, value, states).items()
        }
        with ExitStack() as stack:
            places = self._places(wanted, stack)
            for key, (shape, dtype) in wanted.items():
                self._check(key, shape, dtype, places)
            for name, parameter in parameters.items():
                with torch.no_grad():
                    parameter.copy_(self._values(name, places))
                for state in states:
                    optimizer.state[parameter][state] = self._values(f"{name}{_SEPARATOR}{state}", places)

    def names(self) -> frozenset[str]:
        """Return the names of all stored parameters.

        Raises:
            RequestError: A file is damaged.
        """
        names: set[str] = set()
        for file in self._files():
            with _readable(file), safe_open(file, framework="pt") as stored:
                names.update(key for key in stored.keys() if _SEPARATOR not in key)  # noqa: SIM118
        return frozenset(names)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.safetensors") if path.is_file())

    def _places(self, wanted: Collection[str], stack: ExitStack) -> dict[str, Any]:
        """Return the open file that contains each of the ``wanted`` tensors."""
        places: dict[str, Any] = {}
        for file in self._files():
            with _readable(file):
                stored = stack.enter_context(safe_open(file, framework="pt"))
                for key in stored.keys():  # noqa: SIM118 - it is not a mapping
                    if key in places:
                        raise RequestError(
                            f"{self.path}: {key} is stored in two files; resume from another checkpoint"
                        )
                    if key in wanted:
                        places[key] = stored
        return places

    def _check(self, key: str, shape: torch.Size, dtype: torch.dtype, places: Mapping[str, Any]) -> None:
        if key not in places:
            raise RequestError(
                f"{self.path}: lacks {key}, so it is damaged or of another model; "
                "resume from another checkpoint"
            )
        with _readable(self.path):
            stored = places[key].get_slice(key)
            found, kind = list(stored.get_shape()), str(stored.get_dtype())
        if found != list(shape):
            raise RequestError(f"{self.path}: {key} has shape {found}, but the model needs {list(shape)}")
        if kind != _KINDS[dtype]:
            raise RequestError(f"{self.path}: {key} has type {kind}, but {_KINDS[dtype]} is needed")

    def _values(self, key: str, places: Mapping[str, Any]) -> torch.Tensor:
        with _readable(self.path):
            tensor: torch.Tensor = places[key].get_tensor(key)
            stored = (places[key].metadata() or {}).get(f"{_CHECKSUM} {key}")
        if stored is not None and stored != _checksum(key, tensor):
            raise RequestError(
                f"{self.path}: {key} is damaged: its checksum is wrong; resume from another checkpoint"
            )
        if not bool(tensor.isfinite().all()):
            raise RequestError(f"{self.path}: {key} has values that are not finite")
        if _SEPARATOR in key and tensor.dim() == 0 and tensor.item() < 0:
            raise RequestError(f"{self.path}: {key} is {tensor.item():g}, which is negative")
        return tensor


def _checksum(key: str, tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor, with all that the header of its file says of it."""
    head = f"{key} {tensor.dtype} {list(tensor.shape)}".encode()
    return f"{zlib.crc32(tensor.reshape(-1).numpy().data, zlib.crc32(head)):08x}"


def _described(description: Mapping[str, Any]) -> str:
    """Return the checksum of a description."""
    return f"{zlib.crc32(json.dumps(description, sort_keys=True).encode()):08x}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert exceptions of the file system and safetensors into a ``RequestError``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path}: cannot be read ({excerpt(one_line(error), _LONGEST_REASON)})") from error


def _state_of_one(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state that an optimizer of this kind keeps for a parameter of two values.

    It is found by trying, because an optimizer creates its state in its first step.
    """
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    twin = kind([parameter])
    twin.param_groups[0].update(optimizer.defaults)
    twin.step()
    return {key: value for key, value in twin.state[parameter].items() if isinstance(value, torch.Tensor)}


def _specs(
    name: str, parameter: torch.nn.Parameter, states: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and type of everything that a checkpoint stores for a parameter, by name in the file."""
    specs = {name: (parameter.shape, parameter.dtype)}
    for state, value in states.items():
        shape = value.shape if value.dim() == 0 else parameter.shape
        specs[f"{name}{_SEPARATOR}{state}"] = (shape, value.dtype if value.dim() == 0 else parameter.dtype)
    return specs


def latest(directory: Path) -> Checkpoint:
    """Return the last complete checkpoint in ``directory``.

    Raises:
        RequestError: There is none, or it cannot be read.
    """
    found = _whole(directory)
    if not found:
        raise RequestError(f"--checkpoint-dir {directory}: contains no checkpoint to --resume from")
    step, path = found[-1]
    try:
        description = json.loads((path / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path / _DESCRIPTION}: cannot be read ({error})") from error
    if not isinstance(description, dict):
        raise RequestError(
            f"{path / _DESCRIPTION}: does not describe a checkpoint; resume from another checkpoint"
        )
    stored = description.pop(_CHECKSUM, None)
    if stored is not None and stored != _described(description):
        raise RequestError(
            f"{path / _DESCRIPTION}: is damaged: its checksum is wrong; resume from another checkpoint"
        )
    if description.get("step") != step:
        said = excerpt(description.get("step"))
        raise RequestError(
            f"{path / _DESCRIPTION}: says batch {said}, but its directory says {step}; "
            "resume from another checkpoint"
        )
    return Checkpoint(path, step, description)


class CheckpointWriter:
    """Writes checkpoints together with the other workers.

    Args:
        directory: Directory of the checkpoints.
        description: Settings that must match when training resumes.
    """

    def __init__(self, directory: Path, description: Mapping[str, Any]) -> None:
        self._directory = directory
        self._description = dict(description)

    def make_directory(self) -> None:
        """Make the directory, if it is not there.

        Raises:
            RequestError: It cannot be made, or not be written to.
        """
        make_writable_directory(self._directory, "--checkpoint-dir", parents=True)

    def clear(self) -> None:
        """Remove unfinished checkpoints of interrupted runs; one worker does it before any writes."""
        for left in self._directory.glob(".step-*.part"):
            shutil.rmtree(left, ignore_errors=True)

    def write_part(
        self,
        step: int,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Write this worker's part of the checkpoint after ``step`` batches.

        Raises:
            RequestError: The disk is full.
        """
        tensors = {key: parameter.detach() for key, parameter in parameters.items()}
        for key, parameter in parameters.items():
            for state, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}{_SEPARATOR}{state}"] = value
        part = self._part(step)
        try:
            part.mkdir(exist_ok=True)
            stored = {key: value.contiguous().cpu() for key, value in tensors.items()}
            checksums = {f"{_CHECKSUM} {key}": _checksum(key, value) for key, value in stored.items()}
            save_file(stored, part / f"{name}.safetensors", metadata=checksums)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{part}: cannot be written ({error})") from error

    def finish(self, step: int) -> Path:
        """Give the checkpoint its name, after all workers have written their parts.

        Raises:
            RequestError: The disk is full.
        """
        part, whole = self._part(step), self._directory / f"step-{step:08d}"
        try:
            described = {**self._description, "step": step}
            text = json.dumps({**described, _CHECKSUM: _described(described)}, indent=2)
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
    """Return the complete checkpoints, sorted by step."""
    if not directory.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in named if match)
