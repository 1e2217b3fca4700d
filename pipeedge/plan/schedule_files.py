"""Schedules in files.

A schedule file is what ``sched-pipeline`` prints. A stage whose link is compressed, or which computes in
another number type than float32, says so in further keys of its entry; without them the file is the
original's, byte for byte:

    - mb-0: [1, 24]
      quant_bits: 8
      dtype: int8
    - rcc-0: [25, 48]

A schedule names hosts, the runtime counts ranks. ``hosts`` (the runtime's ``-H``) joins the two: the
host at index r is rank r. Without it the hosts must be called by their ranks: ``0``, ``1``, ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipeedge.base.errors import ScheduleError
from pipeedge.base.schedule import DTYPES, LINK_BITS, LINK_BITS_RULE, LayerRange, Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.base.yamlfile import Field, read_document, write_text, yaml_name
from pipeedge.plan.specs import short_dtype

__all__ = ["format_schedule", "load_schedule", "save_schedule", "schedule_on"]

_QUANT_BITS = "quant_bits"
_DTYPE = "dtype"


def load_schedule(path: str | os.PathLike[str], *, hosts: Sequence[str] | None = None) -> Schedule:
    """Read a saved schedule.

    Args:
        path: The file.
        hosts: The host of each rank; None where the hosts are called by their ranks.

    Raises:
        SpecError: The file is not a schedule; names file, line and key.
        ScheduleError: The schedule is impossible: it misses layers, or a host has no rank or two stages.
    """
    document = read_document(path)
    stages = [_read_stage(entry) for entry in document.items()]
    if not stages:
        document.fail("holds no stage")
    try:
        return schedule_on(stages, hosts, document.file)
    except ScheduleError as error:
        where = "" if str(error).startswith(document.file) else f"{document.file}: "
        raise ScheduleError(f"{where}{error}") from error


def _read_stage(entry: Field) -> tuple[str, tuple[int, int], int, str]:
    fields = entry.entries()
    bits, dtype = fields.pop(_QUANT_BITS, None), fields.pop(_DTYPE, None)
    if len(fields) != 1:
        entry.fail("must have one host, as in '- host: [first, last]'")
    ((host, layers),) = fields.items()
    bounds = [bound.whole_number() for bound in layers.items()]
    if len(bounds) != 2:
        layers.fail(f"has {count(len(bounds), 'number')}; the first and the last layer are expected")
    if not 1 <= bounds[0] <= bounds[1]:
        layers.fail(f"[{bounds[0]}, {bounds[1]}] is not a range of layers: use 1 <= first <= last")
    quant_bits = 0 if bits is None else bits.whole_number()
    if bits is not None and quant_bits not in LINK_BITS:
        bits.fail(f"is {quant_bits}; {LINK_BITS_RULE}")
    name = "float32" if dtype is None else short_dtype(dtype.text())
    if dtype is not None and name not in DTYPES:
        dtype.fail(f"is {name!r}; a stage computes in one of {', '.join(DTYPES)}")
    return host, (bounds[0], bounds[1]), quant_bits, name


def format_schedule(schedule: Schedule) -> str:
    """Return ``schedule`` as ``load_schedule`` reads it; a stage without a host is named by its rank."""
    lines = []
    for stage in schedule.stages:
        name = str(stage.rank) if stage.host is None else yaml_name(stage.host)
        lines.append(f"- {name}: [{stage.layers.first}, {stage.layers.last}]\n")
        if stage.quant_bits:
            lines.append(f"  {_QUANT_BITS}: {stage.quant_bits}\n")
        if stage.dtype != "float32":
            lines.append(f"  {_DTYPE}: {stage.dtype}\n")
    return "".join(lines)


def save_schedule(path: str | os.PathLike[str], schedule: Schedule) -> None:
    """Write a schedule file, whole or not at all.

    Raises:
        SpecError: The file cannot be written.
        ScheduleError: A host has the name of one of the keys of a stage.
    """
    for stage in schedule.stages:
        if stage.host in (_QUANT_BITS, _DTYPE):
            raise ScheduleError(f"a host called {stage.host} cannot be written to a schedule file")
    write_text(path, format_schedule(schedule))


def schedule_on(
    stages: Sequence[tuple[str, Sequence[int], int, str]], hosts: Sequence[str] | None, source: str
) -> Schedule:
    """Return a schedule of named hosts as one of ranks.

    Args:
        stages: Host, first and last layer, bits of the outgoing link, and dtype of each stage.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        source: Where the schedule comes from, for messages.

    Raises:
        ScheduleError: A host has no rank, or several stages.
    """
    names = [host for host, *_ in stages]
    for name in names:
        if names.count(name) > 1:
            raise ScheduleError(f"{source}: the host {name} is given {names.count(name)} stages; it runs one")
    if hosts is not None:
        for host in hosts:
            if list(hosts).count(host) > 1:
                raise ScheduleError(f"the list of hosts names {host} twice; each rank needs its own")
    plans = []
    for name, layers, quant_bits, dtype in stages:
        if hosts is None:
            if not (name.isascii() and name.isdecimal()):
                raise ScheduleError(
                    f"{source}: the host {name} is no rank; name the host of each rank with -H, or call the "
                    "hosts by their ranks"
                )
            rank = int(name)
        elif name not in hosts:
            raise ScheduleError(
                f"{source}: the host {name} has no rank; the hosts that have one are {', '.join(hosts)}"
            )
        else:
            rank = list(hosts).index(name)
        plans.append(
            StagePlan(
                layers=LayerRange.inclusive(*layers),
                rank=rank,
                host=None if hosts is None else name,
                quant_bits=quant_bits,
                dtype=dtype,
            )
        )
    return Schedule(tuple(plans))
