"""How the tokens of an answer are chosen: the options, by OpenAI's names where it has them. Pure.

    {"temperature": 0.7, "top_p": 0.9, "stop": ["END"], "seed": 3}    a line of a file, or a request
    {"do_sample": true, "temperature": 0.6, "eos_token_id": [3, 7]}    generation_config.json of a model

Options that a line leaves out are those of the model, which are greedy unless its file says ``do_sample``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pipeedge.base.errors import ModelError, RequestError
from pipeedge.base.json_types import ValueKind, is_kind, mismatch
from pipeedge.base.wording import excerpt
from pipeedge.decoding.structure import Structure, read_structure

__all__ = [
    "MAX_CHOICES",
    "MAX_TOP_LOGPROBS",
    "SAMPLING_FIELDS",
    "GenerationDefaults",
    "Sampling",
    "read_generation_config",
    "read_sampling",
]

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 1000
_MAX_BIASES = 10_000
_LARGEST_SEED = (1 << 63) - 1
_LARGEST_COUNT = (1 << 31) - 1
_LEAST_TEMPERATURE = 1e-5
"""Temperature below which no token but the best has a chance that float32 could tell from none."""
_TRANSFORMERS_TOP_K = 50
"""Best tokens that transformers chooses from where a configuration samples and does not say."""


@dataclass(frozen=True)
class Sampling:
    """Options of one answer.

    Raises:
        RequestError: A value is out of range. The message names the field, the value, and what would do.
    """

    temperature: float = 1.0
    """Divisor of the scores; 0 takes the best token each time."""
    top_k: int = 0
    """Number of best tokens to choose from; 0 for all."""
    top_p: float = 1.0
    """Probability of the smallest set of best tokens to choose from."""
    min_p: float = 0.0
    """Least probability of a token, as a fraction of that of the best one."""
    repetition_penalty: float = 1.0
    """Divisor of positive scores, and factor of negative ones, of tokens of the prompt and the answer."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens of the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the scores of tokens of the answer, once for each time they occur."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the scores, by token."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Words, or sequences of tokens, that the answer must not contain."""
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Whether the answer goes on behind the model's own end."""
    seed: int | None = None
    """Seed of the random numbers; None: that of the run."""
    n: int = 1
    """Number of answers to one prompt."""
    logprobs: int | None = None
    """Number of best alternatives that are told for each token with their log probabilities; None for no log
    probabilities at all. They are those of the model, before any of these options."""
    max_tokens: int | None = None
    """Number of tokens after which the answer ends; None: as many as fit the context."""
    min_tokens: int = 0
    """Number of tokens before which it does not end by itself."""
    structure: Structure | None = None
    """What the answer has to look like, or None for any text."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise RequestError(f"{name} is {excerpt(value)}; {rule.needed}")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken each time."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1

    @property
    def keeps_all(self) -> bool:
        """Whether a token is drawn from all of them."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


@dataclass(frozen=True)
class _Rule:
    holds: Callable[[Any], bool]
    needed: str


def _between(least: float, most: float, needed: str) -> _Rule:
    return _Rule(lambda value: least <= value <= most, needed)


_RULES: Mapping[str, _Rule] = {
    "temperature": _between(0, 100, "0 to 100 are possible"),
    "top_k": _between(0, _LARGEST_COUNT, "0 (all tokens) or more are possible"),
    "top_p": _Rule(lambda value: 0 < value <= 1, "above 0 and up to 1 are possible"),
    "min_p": _between(0, 1, "0 to 1 are possible"),
    "repetition_penalty": _Rule(lambda value: 0 < value <= 100, "above 0 and up to 100 are possible"),
    "presence_penalty": _between(-2, 2, "-2 to 2 are possible"),
    "frequency_penalty": _between(-2, 2, "-2 to 2 are possible"),
    "logit_bias": _Rule(
        lambda value: (
            len(value) <= _MAX_BIASES
            and all(token >= 0 and -100 <= bias <= 100 for token, bias in value.items())
        ),
        f"up to {_MAX_BIASES} tokens, with -100 to 100 for each, are possible",
    ),
    "bad_words": _Rule(
        lambda value: len(value) <= _MAX_BIASES and all(value),
        f"up to {_MAX_BIASES} words, none of them empty, are possible",
    ),
    "stop": _Rule(
        lambda value: len(value) <= _MAX_STOPS and all(0 < len(one) <= _MAX_STOP_LENGTH for one in value),
        f"up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters are possible",
    ),
    "stop_token_ids": _Rule(
        lambda value: len(value) <= _MAX_BIASES and all(token >= 0 for token in value),
        f"up to {_MAX_BIASES} tokens from 0 are possible",
    ),
    "seed": _between(-_LARGEST_SEED, _LARGEST_SEED, "a whole number of 64 bits is needed"),
    "n": _between(1, MAX_CHOICES, f"1 to {MAX_CHOICES} are possible"),
    "logprobs": _between(0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS} are possible"),
    "max_tokens": _between(1, _LARGEST_COUNT, "1 or more are possible"),
    "min_tokens": _between(0, _LARGEST_COUNT, "0 or more are possible"),
}


def _number(name: str, value: Any) -> float:
    if not is_kind(value, ValueKind.NUMBER) or not math.isfinite(value):
        raise RequestError(mismatch(name, value, ValueKind.NUMBER))
    return float(value)


def _whole(name: str, value: Any) -> int:
    if not is_kind(value, ValueKind.WHOLE):
        raise RequestError(mismatch(name, value, ValueKind.WHOLE))
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not is_kind(value, ValueKind.FLAG):
        raise RequestError(mismatch(name, value, ValueKind.FLAG))
    return bool(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise RequestError(f"{name} is {excerpt(repr(value))}; a text or a list of texts is needed")
    return tuple(values)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {excerpt(repr(value))}; a list of whole numbers is needed")
    return tuple(_whole(name, one) for one in value)


def _words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise RequestError(
            f"{name} is {excerpt(repr(value))}; a list of texts or of lists of tokens is needed"
        )
    return tuple(one if isinstance(one, str) else _tokens(name, one) for one in value)


def _biases(name: str, value: Any) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f'{name} is {excerpt(repr(value))}; an object as {{"50256": -100}} is needed')
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not token.isascii() or not token.isdigit():
            raise RequestError(f"{name} has the key {excerpt(token)}; the number of a token is needed")
        found[int(token)] = _number(f"{name} of token {token}", bias)
    return MappingProxyType(found)


def _alternatives(name: str, value: Any) -> int | None:
    """Return the number of alternatives for a number, or for ``true`` or ``false``, as chats have it."""
    if isinstance(value, bool):
        return 0 if value else None
    return _whole(name, value)


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _biases,
    "bad_words": _words,
    "stop": _texts,
    "stop_token_ids": _tokens,
    "ignore_eos": _flag,
    "seed": _whole,
    "n": _whole,
    "logprobs": _alternatives,
    "top_logprobs": _whole,
    "max_tokens": _whole,
    "max_completion_tokens": _whole,
    "min_tokens": _whole,
}
SAMPLING_FIELDS = frozenset({*_READERS, "response_format", "structured_outputs"})
"""Names of the options in files and requests."""


def read_sampling(document: Mapping[str, Any], base: Sampling) -> Sampling:
    """Return the options that an object of JSON has, and those of ``base`` where it has none or null.

    Args:
        document: Values by the names of ``SAMPLING_FIELDS``; other keys are left alone.
        base: Options that are not given.

    Raises:
        RequestError: A value is of another kind, or out of range; two names of one option differ.
    """
    found: dict[str, Any] = {
        name: read(name, document[name]) for name, read in _READERS.items() if document.get(name) is not None
    }
    for name, other in (("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs")):
        if other not in found:
            continue
        value = found.pop(other)
        if name == "logprobs" and document.get(name) is not True:
            raise RequestError("top_logprobs needs logprobs to be true")
        if name != "logprobs" and found.get(name, value) != value:
            raise RequestError(f"{name} is {found[name]} and {other} is {value}: give one of them")
        found[name] = value
    structure = read_structure(document)
    if structure is not None:
        found["structure"] = structure
    return dataclasses.replace(base, **found)


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's own ``generation_config.json`` says of its answers."""

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end an answer."""


_CONFIG_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_CONFIG_COUNTS = ("top_k",)


def read_generation_config(
    document: Mapping[str, Any], config: Mapping[str, Any], source: str, vocab: int
) -> GenerationDefaults:
    """Return what a ``generation_config.json`` says, as transformers understands it.

    Without ``do_sample``, answers are greedy; the other options then count as soon as a temperature is given.

    Args:
        document: Contents of the file, empty without one.
        config: Contents of ``config.json``, which may have the tokens that end an answer instead.
        source: Name of the file, for messages.
        vocab: Number of tokens of the model.

    Raises:
        ModelError: A value is nonsense.
    """
    try:
        given: dict[str, Any] = {
            name: document[name]
            for name in (*_CONFIG_NUMBERS, *_CONFIG_COUNTS)
            if document.get(name) is not None
        }
        flag = document.get("do_sample")
        samples = flag is not None and _flag("do_sample", flag)
        if samples and "top_k" not in given and "top_k" not in document:
            given["top_k"] = _TRANSFORMERS_TOP_K
        sampling = read_sampling(given, Sampling())
        if not samples:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        ends = document.get("eos_token_id")
        if ends is None:
            ends = config.get("eos_token_id")
        tokens = () if ends is None else _tokens("eos_token_id", ends if isinstance(ends, list) else [ends])
        strange = next((token for token in tokens if not 0 <= token < vocab), None)
        if strange is not None:
            raise RequestError(f"eos_token_id is {strange}; the model's tokens are 0 to {vocab - 1}")
    except RequestError as error:
        raise ModelError(f"{source}: {error}; correct it, or remove the file") from None
    return GenerationDefaults(sampling, frozenset(tokens))
