"""The tokenizer of a decoder: texts and conversations to tokens, and tokens to text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeedge.base.errors import InputError, one_line
from pipeedge.base.wording import excerpt
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.structure import Structure
from pipeedge.decoding.structure_matching import StructureCompiler, StructureMatcher
from pipeedge.decoding.template import TemplateRenderer

__all__ = ["Message", "Vocabulary"]

Message = Mapping[str, Any]
"""A message of a conversation: ``{"role": "user", "content": "..."}``."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that templates have for what a model thought before it answered."""


@dataclass(frozen=True)
class Vocabulary:
    """A transformers tokenizer with the model it serves.

    Raises:
        InputError: On use, if the tokenizer does not fit the model.
    """

    backend: Any
    """Tokenizer of transformers."""
    path: Path
    """File that it was read from."""
    model_name: str
    tokens: int
    """Number of tokens of the model; the tokenizer may know fewer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts before it."""
        return self._checked(self._ids(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a conversation that ``render`` has made a text."""
        return self._checked(self._plain(text))

    @property
    def has_template(self) -> bool:
        """Whether the model knows conversations."""
        return bool(self.backend.chat_template)

    @property
    def template(self) -> str:
        """Chat template of the model with all its forms, empty without one."""
        found = self.backend.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the text that the model was trained on, up to where the answer begins.

        Args:
            messages: The conversation.
            tools: Functions that the model may call, as JSON schemas.
            options: Further variables of the template, such as ``enable_thinking`` of some models.

        Raises:
            InputError: The model has no chat template, or the template refuses these messages.
        """
        if not self.has_template:
            raise InputError(
                f"{self.model_name} has no chat template, so it takes no messages: give --prompt, or a file "
                "with prompt instead of messages"
            )
        template = self.backend.get_chat_template(None, tools)
        variables = {
            **self.backend.special_tokens_map,
            **(options or {}),
            "messages": [_for_template(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._renderer.render(template, variables)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(
            self.backend.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def is_silent(self, token: int) -> bool:
        """Return whether a token has no text: a special one, or one that the tokenizer does not know."""
        return token in self._special or token >= len(self.backend)

    def is_byte(self, token: int) -> bool:
        """Return whether a token is a byte whose text depends on the bytes after it, as sentencepiece has."""
        return token in self._bytes

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, special or not; a part of a character for some."""
        if token >= len(self.backend):
            return b""
        piece = str(self.backend.convert_ids_to_tokens(token))
        if token in self._bytes:
            return bytes([int(piece[3:-1], 16)])
        if self._letters and token not in self.backend.added_tokens_decoder:
            return bytes(self._letters[letter] for letter in piece)
        return str(
            self.backend.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ).encode()

    def unlike_token(self, other: Vocabulary) -> int | None:
        """Return the first token that stands for different pieces in both vocabularies, or None."""
        mine, its = (
            {number: piece for piece, number in one.backend.get_vocab().items()} for one in (self, other)
        )
        common = mine.keys() & its.keys()
        return min((number for number in common if mine[number] != its[number]), default=None)

    def matcher(self, structure: Structure, end_tokens: Collection[int]) -> StructureMatcher:
        """Return what follows an answer through a structure.

        Raises:
            InputError: The structure cannot be used, or the package for it is not installed.
        """
        return self._structures.matcher(structure, end_tokens)

    def with_tokens(self, sampling: Sampling) -> Sampling:
        """Return the options with words that are forbidden as tokens.

        Raises:
            InputError: A token is beyond the model's.
        """
        words: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            if isinstance(word, str):
                # At the beginning of a text and behind a blank, a word has tokens of its own.
                ways = {tuple(self._plain(word)), tuple(self._plain(f" {word.lstrip()}"))}
                words += sorted(way for way in ways if way)
            else:
                words.append(word)
        numbers: Collection[int] = {
            *sampling.logit_bias,
            *sampling.stop_token_ids,
            *(n for w in words for n in w),
        }
        strange = next((token for token in numbers if token >= self.tokens), None)
        if strange is not None:
            raise InputError(f"token {strange} is beyond the model's, which are 0 to {self.tokens - 1}")
        return replace(sampling, bad_words=tuple(words))

    def _plain(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> list[int]:
        try:
            return list(self.backend(text, verbose=False, **options)["input_ids"])
        except Exception as error:  # tokenizers has no class of its own
            raise InputError(f"{self.path} does not encode {excerpt(text)}: {one_line(error)}") from error

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        highest = max(tokens, default=0)
        if highest >= self.tokens:
            raise InputError(
                f"{self.path} has token ids up to {highest}, but {self.model_name} has a vocabulary of "
                f"{self.tokens}: it is the tokenizer of another model"
            )
        return list(tokens)

    @cached_property
    def _renderer(self) -> TemplateRenderer:
        return TemplateRenderer()

    @cached_property
    def _structures(self) -> StructureCompiler:
        inner = getattr(self.backend, "backend_tokenizer", None)
        if inner is None:
            raise InputError(f"{self.path}: this kind of tokenizer has no structured answers")
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(inner.to_str())
        copy.no_padding()
        copy.no_truncation()
        end = self.backend.eos_token_id
        end = min(self._special, default=self.tokens - 1) if end is None else end
        return StructureCompiler(copy.to_str(), self.tokens, end)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.backend.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _bytes(self) -> frozenset[int]:
        found = self.backend.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        return frozenset(found) - {self.backend.unk_token_id, None}

    @cached_property
    def _letters(self) -> Mapping[str, int]:
        """Bytes by the letters that stand for them in pieces of a byte-level tokenizer; empty for others."""
        inner = getattr(self.backend, "backend_tokenizer", None)
        if inner is None or "ByteLevel" not in str(inner.decoder):
            return {}
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _for_template(message: Message) -> Message:
    """Return a message as transformers shows it to templates: without keys of null."""
    given = {key: value for key, value in message.items() if value is not None}
    thought = next((given[key] for key in _REASONING if key in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}
