"""Weights in a file of a model and in those of modules behind it, as one file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipeedge.models.weights.files import FilePlace, TensorEntry, WeightsFile

if TYPE_CHECKING:
    import torch

__all__ = ["JoinedWeights"]


class JoinedWeights(WeightsFile):
    """A file and further ones, whose tensors have a prefix.

    Args:
        main: File whose names stay as they are.
        others: Further files by the prefix of their names.
    """

    def __init__(self, main: WeightsFile, others: Mapping[str, WeightsFile]) -> None:
        super().__init__(main.path)
        self.source = main.source
        self._files = {"": main, **others}
        self._places = {
            f"{prefix}{name}": (file, name) for prefix, file in self._files.items() for name in file.names
        }

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, with their prefixes."""
        return self._places.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor."""
        file, own = self._places[name]
        return file.entry(own)

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``."""
        file, own = self._places[name]
        file.read_into(own, out, progress)

    def announce(self, names: Iterable[str]) -> None:
        """Have tensors fetched that are not on this machine yet."""
        by_file: dict[WeightsFile, list[str]] = {}
        for name in names:
            file, own = self._places[name]
            by_file.setdefault(file, []).append(own)
        for file, wanted in by_file.items():
            file.announce(wanted)

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of so many rows."""
        file, own = self._places[name]
        return file.read_rows(own, rows)

    def place(self, name: str) -> FilePlace | None:
        """Return where the values of a tensor are, or None if they are not in order."""
        file, own = self._places[name]
        return file.place(own)

    def coding(self, name: str) -> str | None:
        """Return the form of a matrix of codes, or None for plain numbers."""
        file, own = self._places[name]
        return file.coding(own)

    def is_wide(self, name: str) -> bool:
        """Return whether a matrix has more than 4 bits in a file that has most of its weights in 4 bits."""
        file, own = self._places[name]
        return file.is_wide(own)

    def read_coded(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a matrix of codes in parts of about so many rows."""
        file, own = self._places[name]
        return file.read_coded(own, rows)

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content of all files."""
        for file in self._files.values():
            yield from file.identity()
