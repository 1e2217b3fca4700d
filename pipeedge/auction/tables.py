"""The seconds that device types bid, and the bytes at each cut, as ``sched-pipeline`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct

from pipeedge.auction.market import Call, Seconds
from pipeedge.base.fields import MALFORMED, reader
from pipeedge.plan.sched_pipeline import not_understood, run_program

__all__ = ["BidTables", "read_tables"]


@dataclass(frozen=True)
class BidTables:
    """What device types bid, and what crosses the cuts."""

    stage_s: Mapping[str, Seconds]
    """Seconds of each possible stage, ``[layers + 1, layers + 1]``, infinite where it does not fit, by device
    type."""
    cut_bytes: Seconds
    """Bytes of a microbatch at each cut, ``[layers + 1]``; first the input, last the output."""


class _TypeBids(Struct):
    type: str
    stage_s: tuple[tuple[float | None, ...], ...]


class _Printed(Struct):
    bids: tuple[_TypeBids, ...]
    cut_bytes: tuple[float, ...]


_decode = reader(_Printed)


def read_tables(models_file: Path, dev_types_file: Path, call: Call) -> BidTables:
    """Return what the device types of a file would bid.

    Raises:
        RequestError: The files are wrong, or no type has a profile under the conditions of the call.
        PipeEdgeError: The program failed.
    """
    options = {
        "--models-file": models_file,
        "--dev-types-file": dev_types_file,
        "--model-name": call.model_name,
        "--batch-size": call.microbatch_size,
        "--dtype": call.dtype,
        "--buffers-in": call.buffers_in,
        "--buffers-out": call.buffers_out,
        "--transport": call.transport,
        "--tokens": call.tokens,
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    try:
        printed: _Printed = _decode(run_program(["--format=bids", *given]))
    except MALFORMED as error:
        raise not_understood(error) from error
    return BidTables({one.type: _table(one.stage_s) for one in printed.bids}, np.array(printed.cut_bytes))


def _table(rows: tuple[tuple[float | None, ...], ...]) -> Seconds:
    table = np.full((len(rows) + 1, len(rows) + 1), np.inf)
    for first, row in enumerate(rows):
        table[first, first + 1 :] = [np.inf if cell is None else cell for cell in row]
    return table
