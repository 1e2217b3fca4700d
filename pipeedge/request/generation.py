"""The request for text: what is asked of a decoder, how tokens are chosen, and the size of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeedge.base.errors import RequestError
from pipeedge.request.declared import Check, ObeyedBy, at_least, between, check_options, option
from pipeedge.request.parsing import nonempty

__all__ = ["CacheRequest", "GenerationRequest"]

_MOST = 1 << 31
_MOST_LOGPROBS = 20
_MOST_PROPOSALS = 64


def _number(least: float, most: float, *, above: bool = False) -> Check:
    """Return the check of a number from ``least``, or above it, to ``most``."""
    rule = f"must be above {least} and up to {most}" if above else f"must be {least} to {most}"
    return Check(lambda value: least <= value <= most and not (above and value == least), rule)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and options of the answers to all prompts that have none of their own.

    None stands for what the model's generation_config.json says.
    """

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.DATA_RANK

    prompt: str | None = option(
        None,
        "--prompt",
        type=nonempty,
        metavar="TEXT",
        help="a single prompt, whose answer is printed as it grows; a model with a chat template takes it as "
        "a message",
    )
    raw: bool = option(
        False,
        "--raw",
        help="take prompts of --prompt and .txt files as the beginning of a text, without the chat template",
    )
    max_tokens: int | None = option(
        None,
        "--max-tokens",
        type=int,
        check=at_least(1),
        help="most tokens of an answer (as many as fit the context)",
    )
    greedy: bool = option(False, "--greedy", help="take the most probable token each time")
    temperature: float | None = option(
        None,
        "--temperature",
        type=float,
        metavar="T",
        check=_number(0, 100),
        help="divisor of the scores of tokens: below 1 for likelier tokens, above 1 for rarer ones; 0 is "
        "--greedy",
    )
    top_k: int | None = option(
        None,
        "--top-k",
        type=int,
        metavar="K",
        check=between(0, _MOST - 1, "must be 0, for all, or more"),
        help="choose among the K most probable tokens",
    )
    top_p: float | None = option(
        None,
        "--top-p",
        type=float,
        metavar="P",
        check=_number(0, 1, above=True),
        help="choose among the most probable tokens that make up this probability together",
    )
    min_p: float | None = option(
        None,
        "--min-p",
        type=float,
        metavar="P",
        check=_number(0, 1),
        help="choose among tokens that are at least this fraction as probable as the most probable one",
    )
    repetition_penalty: float | None = option(
        None,
        "--repetition-penalty",
        type=float,
        metavar="X",
        check=_number(0, 100, above=True),
        help="make tokens of the prompt and the answer less probable, with X above 1",
    )
    presence_penalty: float | None = option(
        None,
        "--presence-penalty",
        type=float,
        metavar="X",
        check=_number(-2, 2),
        help="lower the score of each token that the answer has",
    )
    frequency_penalty: float | None = option(
        None,
        "--frequency-penalty",
        type=float,
        metavar="X",
        check=_number(-2, 2),
        help="lower the score of each token of the answer for each time it occurs",
    )
    stop: tuple[str, ...] | None = option(
        None,
        "--stop",
        type=nonempty,
        nargs="+",
        metavar="TEXT",
        help="texts before which an answer ends",
    )
    logprobs: int | None = option(
        None,
        "--logprobs",
        type=int,
        check=between(0, _MOST_LOGPROBS, f"must be 0 to {_MOST_LOGPROBS}"),
        help="write the log probability of each token, and those of the N most probable ones",
    )
    speculate: int = option(
        16,
        "--speculate",
        type=int,
        metavar="N",
        check=between(0, _MOST_PROPOSALS, f"must be 0, for none, to {_MOST_PROPOSALS}"),
        help="most tokens that are proposed from earlier text and verified in one step, where that pays; 0 "
        "for none ({default})",
    )

    draft: str | None = option(
        None,
        "--draft",
        type=nonempty,
        metavar="MODEL",
        help="name, directory or GGUF file of a small decoder with the same tokens, which proposes tokens "
        "too, on the data rank",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.draft is not None and not self.speculate:
            raise RequestError("--draft proposes tokens: leave out --speculate 0")
        if self.greedy and self.temperature:
            raise RequestError("give either --greedy or --temperature, not both")


@dataclass(frozen=True)
class CacheRequest:
    """The size of the cache of keys and values."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.RANK_0

    context: int | None = option(
        None,
        "--context",
        type=int,
        check=at_least(1),
        help="longest prompt and answer together, in tokens (what the model and the memory of all ranks "
        "allow)",
    )
    cache_mb: float | None = option(
        None,
        "--cache-mb",
        type=float,
        metavar="MB",
        check=Check(lambda size: 0 < size < _MOST, "must be a size in MB above 0"),
        help="most memory that the cache of keys and values may take on any rank (up to half of what is free "
        "beside the weights)",
    )
    replicate: bool = option(
        False,
        "--replicate",
        help="copy the cache in the background to the ranks that would go on without another one, and load "
        "its layers there, too, so that texts hardly pause after a loss",
    )

    keep_outputs: bool = option(
        False,
        "--keep-outputs",
        help="keep on each rank what it has sent on, in memory beside the cache, so that after a loss fewer "
        "layers compute texts again",
    )

    def __post_init__(self) -> None:
        check_options(self)
