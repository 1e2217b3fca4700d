"""``revauct.py``: one rank of an auction, and of the run that may follow."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from pipeedge.auction.house import Auctioneer, attend
from pipeedge.auction.market import Bid, Call, Market, Seconds, check_profile, length_note
from pipeedge.auction.optimal import optimal
from pipeedge.auction.options import AuctionRequest, Selling, parse_auction
from pipeedge.auction.ordered import Outcome, greedy_host_count, latency_ordered, throughput_ordered
from pipeedge.auction.sale import Sale, Sold
from pipeedge.auction.tables import BidTables, read_tables
from pipeedge.base.errors import RequestError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable, named_output
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, module_words, program_name
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.base.streams import end, print_result, say
from pipeedge.base.wording import count, figure
from pipeedge.control.session import report_early_failure
from pipeedge.plan.schedule_files import format_schedule, save_schedule
from pipeedge.plan.spec_files import read_files
from pipeedge.plan.specs import ModelSpec, SpecFiles
from pipeedge.request.environment import Environment
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.transport.interfaces import is_loopback
from pipeedge.transport.membership import Membership, load_membership

__all__ = ["main"]

PROGRAM = "revauct.py"
_OPEN = (
    "the auction is open: whoever reaches rank 0 can take part, and whoever is on the way can read and "
    "change bids and schedule; --key FILE closes it"
)


def main() -> NoReturn:
    """Take part in the auction that the command line asks for, and end the process."""
    program = program_name(PROGRAM)

    def run() -> None:
        _take_part(parse_auction(sys.argv[1:], Environment.read()))

    end(program, guard(program, run, verbose=is_verbose(sys.argv)))


def _take_part(request: AuctionRequest) -> None:
    world = request.world
    membership = load_membership(world.keys)
    with report_early_failure(world, membership):
        replaced = _check_output(request)
        files = read_files(
            models=request.models_file,
            device_types=request.dev_types_file,
            neighbors=request.neighbors_file,
        )
        auctioneer = _auctioneer(request, files, replaced) if world.rank == 0 else None
    if membership is None and auctioneer is not None and world.size > 1 and not is_loopback(world.addr):
        _say(_OPEN)
    sold = attend(
        world,
        host=request.host,
        make_bid=functools.partial(_own_bid, request, files),
        auctioneer=auctioneer,
        membership=membership,
        notify=_say,
    )
    if auctioneer is None:
        _say(f"{request.host} gets {_share(sold, world.rank)}")
    if request.run is not None:
        _run(request, sold, membership)


def _check_output(request: AuctionRequest) -> frozenset[Path]:
    """Refuse a schedule file that cannot be written; return it if one is replaced."""
    if request.output is None:
        return frozenset()
    check_writable(request.output, "--output")
    inputs = [
        InputPath("-sm/--sched-models-file", request.models_file),
        InputPath("-sdt/--sched-dev-types-file", request.dev_types_file),
    ]
    if request.neighbors_file is not None:
        inputs.append(InputPath("-sdnw/--sched-dev-neighbors-world", request.neighbors_file))
    return check_outputs([OutputFile("--output", request.output)], inputs)


def _own_bid(request: AuctionRequest, files: SpecFiles, call: Call) -> Bid:
    """Return the bid of this device."""
    type_name, types = request.dev_type, files.device_types
    if type_name is None:
        if len(types) != 1:
            raise RequestError(
                f"{request.dev_types_file} has {count(len(types), 'device type')}: give this device's with "
                f"-dt/--dev-type, one of {', '.join(types)}"
                if types
                else f"{request.dev_types_file} has no device types: profile this device "
                f"({program_name('profiler.py')})"
            )
        (type_name,) = types
    if type_name not in types:
        raise RequestError(
            f"-dt/--dev-type {type_name}: {request.dev_types_file} has {', '.join(types) or 'no types'}"
        )
    links = files.neighbors.get(request.host, {})
    model, kind = _model(request, files.models, call), types[type_name]
    note = length_note(type_name, kind, call)
    if note is not None:
        _say(f"warning: {note}")
    check_profile(type_name, kind, model, call)
    stage_s = _tables(request, call).stage_s[type_name]
    return Bid(request.host, type_name, kind.bw_bytes_per_s, stage_s, links)


def _tables(request: AuctionRequest, call: Call) -> BidTables:
    return read_tables(request.models_file, request.dev_types_file, call)


def _model(request: AuctionRequest, models: Mapping[str, ModelSpec], call: Call) -> ModelSpec:
    if call.model_name not in models:
        raise RequestError(
            f"{request.models_file} does not list the model {call.model_name}; it lists {', '.join(models)}"
        )
    return models[call.model_name]


def _share(sold: Sold, rank: int) -> str:
    """Return the layers that ``rank`` gets, as text."""
    stages = zip(sold.partition[::2], sold.partition[1::2], sold.order, strict=True)
    for stage, (first, last, device) in enumerate(stages):
        if sold.ranks[device] == rank:
            return f"layers {first}-{last} (stage {stage})"
    return "no stage"


def _auctioneer(request: AuctionRequest, files: SpecFiles, replaced: frozenset[Path]) -> Auctioneer:
    selling, models = request.selling, files.models
    if request.model_name not in models:
        known = ", ".join(models)
        raise RequestError(
            f"-m {request.model_name}: {request.models_file} does not list this model; it lists {known}"
        )
    model = models[request.model_name]
    call = Call(
        request.model_name,
        model.layers,
        microbatch_size=request.microbatch_size,
        dtype=request.dtype,
        tokens=request.tokens,
        chunk=selling.chunk,
        largest=selling.largest,
        transport="tcp-tls" if request.world.keys.given else "p2p",
    )

    @functools.cache
    def tables() -> BidTables:
        return _tables(request, call)

    def expected(bid: Bid) -> Bid | None:
        kind = files.device_types.get(bid.type_name)
        if kind is None or call.model_name not in kind.profiles:
            return None
        check_profile(bid.type_name, kind, model, call)
        return Bid(bid.host, bid.type_name, kind.bw_bytes_per_s, tables().stage_s[bid.type_name])

    return Auctioneer(
        call=call,
        sale=Sale(call, expected),
        sell=lambda bids: _sell(request, bids, tables().cut_bytes, call, replaced),
        warn=lambda line: _say(f"warning: {line}"),
    )


def _sell(
    request: AuctionRequest,
    bids: Mapping[int, Bid],
    cut_bytes: Seconds,
    call: Call,
    replaced: frozenset[Path],
) -> Sold:
    """Schedule from the bids, print the schedule and write it, and return the result to announce."""
    ranks = _ordered_ranks(list(bids), request.selling)
    market = Market.of([bids[rank] for rank in ranks], cut_bytes, call, request.selling.data_host)
    found = _schedule(market, request.selling)
    schedule = Schedule(
        tuple(
            StagePlan(LayerRange(first, last), ranks[device], market.bids[device].host)
            for device, first, last in found.stages
        )
    )
    print_result(format_schedule(schedule), end="")
    for line in _summary(found, call, len(bids)):
        _say(line)
    if request.output is not None:
        save_schedule(request.output, schedule)
        _say(f"schedule written to {named_output(request.output, replaced)}")
    present = list(bids)
    data_rank = 0 if market.data_host is None else ranks[market.data_host]
    return Sold(
        hosts=tuple(bid.host for bid in bids.values()),
        ranks=tuple(present),
        partition=schedule.partition(),
        order=tuple(present.index(rank) for rank in schedule.ranks),
        data_rank=present.index(data_rank),
    )


def _ordered_ranks(ranks: list[int], selling: Selling) -> list[int]:
    """Return the ranks of the devices that take part, in the order of the devices."""
    if selling.seed is not None:
        random.Random(selling.seed).shuffle(ranks)
    if selling.dev_count is not None and selling.dev_count > len(ranks):
        raise RequestError(
            f"-d/--dev-count {selling.dev_count}: only {count(len(ranks), 'device')} made a bid"
        )
    return ranks[: selling.dev_count]


def _schedule(market: Market, selling: Selling) -> Outcome:
    if selling.scheduler == "latency_ordered":
        return latency_ordered(market, selling.order)
    if selling.scheduler == "throughput_ordered":
        return throughput_ordered(market, selling.order)
    if selling.scheduler == "greedy_host_count":
        return greedy_host_count(market)
    return optimal(market, time_limit_s=selling.time_limit_s)


def _summary(found: Outcome, call: Call, bidders: int) -> list[str]:
    rate = (
        f"{figure(call.microbatch_size / found.bottleneck_s)} items/s" if found.bottleneck_s else "any rate"
    )
    lines = [
        f"{figure(len(found.stages))} of {count(bidders, 'device')}: {rate}, a microbatch of "
        f"{call.microbatch_size} every "
        f"{figure(found.bottleneck_s, 6)} s; latency {figure(found.latency_s, 6)} s"
    ]
    if found.gap is not None:
        proven = "the optimum over all orders" if found.gap == 0 else f"within {found.gap:.2%} of the optimum"
        lines.append(proven)
    return lines


def _run(request: AuctionRequest, sold: Sold, membership: Membership | None) -> NoReturn:
    """Replace this process by a rank of the pipeline."""
    if membership is not None and request.world.keys.key == STANDARD_INPUT:
        _feed_standard_input(membership.to_text())
    world = request.world
    arguments: list[str] = [
        *sold.runtime_arguments(world.rank),
        *("--addr", world.addr, "--port", str(world.port), "-m", request.model_name),
        *("-u", str(request.microbatch_size)),
        *(("-s", world.socket_ifname) if world.socket_ifname else ()),
        *world.keys.arguments(),
        *(request.run or ()),
    ]
    _become([sys.executable, "-m", *module_words("runtime.py", "pipeedge.run.main"), *arguments])


def _feed_standard_input(text: str) -> None:
    """Make ``text`` the standard input of this process, and of the program that replaces it."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())  # a pipe holds more than any key
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)


def _become(command: list[str]) -> NoReturn:
    os.execv(command[0], command)  # noqa: S606


def _say(line: str) -> None:
    say(program_name(PROGRAM), line)
