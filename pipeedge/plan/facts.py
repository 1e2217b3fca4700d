"""Facts that each rank states before a run, and the disagreements between those of several ranks."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import pipeedge
from pipeedge.base.payload import PixelTable
from pipeedge.base.text_lengths import InputSizes
from pipeedge.base.wording import plural

if TYPE_CHECKING:
    from pipeedge.models.outline import Outline
    from pipeedge.request.config import RunRequest

__all__ = ["OLDEST_TORCH", "disagreement", "disagreements", "rank_facts", "software_facts", "unlikeness"]

OLDEST_TORCH = (2, 9)
"""Oldest version of torch with which a rank can take part, as in pyproject.toml."""

_COMMON_OPTION = "common option "
"""How the names of facts begin that are options on which all ranks must agree."""
_SCHEDULE_OPTION = "schedule option "
_DATA_OPTION = "data option "
"""How the names of facts begin that are options of one rank."""


def rank_facts(
    request: RunRequest,
    model: Outline,
    *,
    weights: str | None,
    items: int | None,
    sizes: InputSizes | None = None,
    pixels: PixelTable | None = None,
    memory_bytes: int | None = None,
) -> dict[str, Any]:
    """Return what one rank was asked to do, for comparison with the other ranks.

    Args:
        request: Request of the rank.
        model: Model of the run.
        weights: Fingerprint of the weights, or None if they are random.
        items: Number of items of the input, on the data rank.
        sizes: Sizes of the input, on the data rank; None if nothing is known of them.
        pixels: Values that the bytes of pictures stand for, on the data rank; None if none are sent.
        memory_bytes: Memory that the rank can allocate, or None if that is unknown.
    """
    config, sizes = model.config, sizes or InputSizes()
    own_name = model.name if model.directory is None else None
    digest = hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode()).hexdigest()
    return {
        **software_facts(),
        "architecture": f"{config.family} of {config.blocks} blocks of {config.hidden} ({digest[:8]})",
        "weights": weights,
        "memory_bytes": memory_bytes,
        "data_rank": request.schedule.data_rank,
        "items": items,
        "max_tokens": sizes.tokens,
        "lengths": sizes.lengths,
        "texts": None if sizes.texts is None else sizes.texts.to_text(),
        "pixel_table": None if pixels is None else pixels.to_text(),
        "record_rows": request.output.record_rows,
        **{f"{_COMMON_OPTION}{name}": value for name, value in request.agreed(own_name).items()},
        **{f"{_SCHEDULE_OPTION}{name}": value for name, value in request.given.schedule.items()},
        **{f"{_DATA_OPTION}{name}": value for name, value in request.given.data.items()},
    }


def software_facts() -> dict[str, str]:
    """Return the facts about a rank that do not depend on the model."""
    return {
        "version": pipeedge.__version__,
        "torch": str(torch.__version__).split("+")[0],
        "processor": platform.machine(),
    }


def disagreement(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the first thing on which two ranks disagree, or return None if they agree."""
    return next(iter(disagreements(facts)), None)


def unlikeness(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe how ranks that work together differ in torch or kind of processor; None if they are alike.

    Frames and codes are defined to the byte, whatever computes them. But torch rounds sums in another order
    on another processor, and sometimes in another version.
    """
    kinds: dict[str, list[int]] = {}
    for rank, told in sorted(facts.items()):
        kinds.setdefault(f"torch {told.get('torch')} on {told.get('processor')}", []).append(rank)
    if len(kinds) < 2:
        return None
    listed = "; ".join(
        f"{kind}: {plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}" for kind, ranks in kinds.items()
    )
    return (
        f"the ranks are not alike ({listed}): the last bits of results depend on which computes which layer"
    )


def _old_torch(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each rank whose torch is too old to take part."""
    for rank, told in sorted(facts.items()):
        numbers = re.match(r"(\d+)\.(\d+)", str(told.get("torch")))
        if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            yield f"rank {rank} has torch {told['torch']}: install {oldest} or newer"


def disagreements(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Everything on which two ranks disagree, a line each."""
    keys = dict.fromkeys(key for told in facts.values() for key in told)
    options = {
        key: (key.removeprefix(_COMMON_OPTION), "start all with the same")
        for key in keys
        if key.startswith(_COMMON_OPTION)
    }
    what = {
        "version": ("the version of PipeEdge", "install the same"),
        **options,
        "architecture": ("the configuration of the model", "give all the same config.json"),
        "weights": ("the weights (-M)", "copy the same file to all"),
    }
    for key, (name, remedy) in what.items():
        mute = [rank for rank in sorted(facts) if key not in facts[rank]]
        if mute and len(mute) < len(facts):
            yield f"rank {mute[0]} does not state {name}: install the same version of PipeEdge on all"
            continue
        known = {rank: facts[rank].get(key) for rank in sorted(facts) if facts[rank].get(key) is not None}
        for rank, value in known.items():
            first = next(iter(known))
            if value != known[first]:
                yield f"ranks {first} and {rank} disagree on {name}: {known[first]} and {value}; {remedy}"
                break
    yield from _old_torch(facts)
    yield from _lost_options(facts, _SCHEDULE_OPTION, 0, "decides the schedule")
    data_ranks = {told["data_rank"] for told in facts.values() if "data_rank" in told}
    if len(data_ranks) == 1:
        yield from _lost_options(facts, _DATA_OPTION, data_ranks.pop(), "is the data rank")


def _lost_options(
    facts: Mapping[int, Mapping[str, Any]], prefix: str, obeys: int, role: str
) -> Iterator[str]:
    """Yield a line for each option that a rank was given and that would have no effect.

    Args:
        facts: What each rank was asked to do.
        prefix: Beginning of the options' names.
        obeys: The rank that obeys these options; the others may be given the same, or none.
        role: Why that rank obeys them.
    """
    if obeys not in facts:
        return
    for rank, told in sorted(facts.items()):
        for key, value in told.items():
            if not key.startswith(prefix) or facts[obeys].get(key) == value:
                continue
            option = key.removeprefix(prefix)
            if key in facts[obeys]:
                first, second = sorted((obeys, rank))
                yield (
                    f"ranks {first} and {second} disagree on {option}: {facts[first][key]} and "
                    f"{facts[second][key]}; rank {obeys} {role}: "
                    f"give rank {rank} the same, or leave it out there"
                )
            else:
                yield (
                    f"rank {rank} was given {f'{option} {value}'.rstrip()}, rank {obeys} was not; "
                    f"rank {obeys} {role}: give it to rank {obeys}"
                )
