"""Both ends of a decoder: the embedding of tokens, and the scores of the next token.

The data rank holds them, so that tied weights exist once in the whole pipeline, and what returns from the
last stage is a hidden state rather than the scores of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeedge import _native as native
from pipeedge.models.architecture import Architecture
from pipeedge.models.dtypes import INT4, dtype_name, stream_dtype
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.layers.decoder import (
    as_array,
    finite_codes,
    in_readers,
    one_at_a_time,
    read_rows,
    reader_shares,
)
from pipeedge.models.weights.coded_writing import HEAD
from pipeedge.models.weights.comparing import Placeholder, check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import Filling, stored_name
from pipeedge.models.weights.mapping import map_values
from pipeedge.models.weights.names import same
from pipeedge.models.words import WORD_TABLE, CodedWords, look_up

__all__ = ["DecoderEnds", "head_dtype"]

_POSITIONS = "embeddings.position"


def head_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the number type of the head for weights in ``dtype``: the scores of tokens need 8 bits."""
    return torch.int8 if dtype is INT4 else dtype


class DecoderEnds:
    """Embedding, last norm and head of a decoder, filled from a weights file.

    The table of words is mapped where the file allows it: its rows are looked up, and the head, packed for
    products, is what occupies memory.

    Args:
        architecture: Dimensions of the model.
        file: File of the weights.
        dtype: Number type of the weights, as for ``DecoderStage``.
        progress: Called with the number of values of each piece that is read.

    Raises:
        WeightsError: A tensor is missing or of another shape, or the data ends early.
    """

    def __init__(
        self,
        architecture: Architecture,
        file: WeightsFile,
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.architecture = architecture
        self.stream_dtype = stream_dtype(dtype)
        """Number type of hidden states."""
        options = self._options = architecture.own(DecoderOptions)
        self._native = native.DecoderHead(
            weights=dtype_name(head_dtype(dtype)),
            stream=dtype_name(self.stream_dtype),
            hidden=architecture.hidden,
            tokens=architecture.num_labels,
            norm_centred=options.layer_norm,
            eps=architecture.eps,
            scale=options.logit_scale,
            cap=options.logit_cap,
        )
        self._positions: torch.Tensor | None = None
        shapes: dict[str, Any] = {
            name: Placeholder(shape)
            for name, shape in family_of(architecture).shapes(architecture, 0).items()
            if not name.startswith("block.")
        }
        own_head = options.tied and _has_coded_head(architecture, file)
        if own_head:
            shapes[HEAD] = Placeholder(shapes[WORD_TABLE].shape)
        fillings = check_tensors(shapes, architecture, file)
        file.announce(source.name for filling in fillings for source in filling.sources)
        for filling in fillings:
            name, shape = filling.parameter, shapes[filling.parameter].shape
            if name == WORD_TABLE:
                self._words = self._read_words(filling, shape, file)
            if name == HEAD or (name == WORD_TABLE and options.tied and not own_head):
                self._read_head(filling, shape, file, progress)
            elif name == _POSITIONS:
                self._positions = torch.empty(shape, dtype=self.stream_dtype)
                for name, view in filling.views(self._positions, 1):
                    file.read_into(name, view)
            elif name != WORD_TABLE:
                first = architecture.hidden if name == "head.norm.bias" else 0
                offset = options.norm_offset and name == "head.norm.weight"
                for part in read_rows(filling, shape, file, progress):
                    values = part.values + 1 if offset else part.values
                    self._native.fill("norm", first + part.row, as_array(values))

    def _read_head(
        self,
        filling: Filling,
        shape: Sequence[int],
        file: WeightsFile,
        progress: Callable[[int], object],
    ) -> None:
        advance = one_at_a_time(progress)

        def read(within: range, threads: int) -> None:
            with finite_codes(filling, file):
                for part in read_rows(filling, shape, file, advance, within):
                    array = part.array
                    self._native.fill("weight", part.row, array, threads=threads, coding=part.coding)

        in_readers(reader_shares(filling, shape[0], file), read)

    def _read_words(
        self, filling: Filling, shape: Sequence[int], file: WeightsFile
    ) -> torch.Tensor | CodedWords:
        """Return the table of words, mapped if that is possible."""
        source, entry = filling.sources[0], file.entry(filling.sources[0].name)
        place = file.place(source.name) if source.layout is same and entry.dtype else None
        coding = file.coding(source.name)
        if coding is not None and place is not None:
            codes = map_values(place, torch.uint8)
            if codes is not None:
                return CodedWords(codes.view(shape[0], -1), coding, shape[1])
        mapped = None if place is None or entry.dtype is None else map_values(place, entry.dtype)
        if mapped is not None:
            return mapped.view(tuple(shape))
        table = torch.empty(tuple(shape), dtype=self.stream_dtype)
        for name, view in filling.views(table, 1):
            file.read_into(name, view)
        return table

    @property
    def weight_bytes(self) -> int:
        """Size of the packed head in bytes, all of which a step reads."""
        return self._native.weight_bytes

    def embed(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the hidden states [R, D] of tokens in front of the first block.

        Args:
            tokens: Numbers of the tokens, below the size of the vocabulary.
            positions: Position of each in its sequence, below the longest sequence.
        """
        found = look_up(self._words, torch.tensor(tokens, dtype=torch.int64), self.stream_dtype)
        if self._options.embedding_scale != 1:
            # As transformers does, the factor is rounded to the type of the embeddings first.
            found = found * torch.tensor(self._options.embedding_scale, dtype=self.stream_dtype)
        if self._positions is not None:
            found = found + self._positions[torch.tensor(positions, dtype=torch.int64)]
        return found.contiguous()

    def score(
        self, hidden: torch.Tensor, *, threads: int | None = None, variant: str | None = None
    ) -> torch.Tensor:
        """Return the scores of all tokens, float32 [R, V], for hidden states [R, D] behind the last block.

        Args:
            hidden: Contiguous, of the stream's type.
            threads: Number of threads, or None for torch's.
            variant: One of ``native.decoder_variants``, or None for the best.
        """
        scores = torch.empty((len(hidden), self.architecture.num_labels))
        self._native.score(
            as_array(hidden),
            scores.numpy(),
            threads=torch.get_num_threads() if threads is None else threads,
            variant=variant,
        )
        return scores


def _has_coded_head(architecture: Architecture, file: WeightsFile) -> bool:
    """Return whether a file has the head as codes besides the table of words, which is the same matrix."""
    name = stored_name(HEAD, architecture)
    return name in file.names and file.coding(name) is not None
