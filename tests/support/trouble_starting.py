"""Cases of test_troubleshooting.py: training, launching, the auction, and the test bed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from msgspec import Raw
from ports import free_port
from rich.console import Console
from safetensors.torch import save_file
from trouble import KIND, MBPS, MIB, MODEL, Cases, Patch, refused

from pipeedge.auction import main as auction
from pipeedge.auction.options import parse_auction
from pipeedge.control.admission import Terms
from pipeedge.control.messages import Facts, Hello
from pipeedge.control.rules import HubState
from pipeedge.launch.main import parse_launch, plan_launch
from pipeedge.launch.supervisor import RankExit
from pipeedge.request.environment import Environment
from pipeedge.testbed.bed import TestBeds
from pipeedge.testbed.cluster import Cluster, EmulatedHost
from pipeedge.train.checkpoint import Checkpoint, CheckpointWriter, latest
from pipeedge.train.costs import LayerCosts
from pipeedge.train.options import parse_train
from pipeedge.train.orders import make_order
from pipeedge.train.partition import find_partition
from pipeedge.train.session import train

CASES = Cases()
says = CASES.says


# --- training -------------------------------------------------------------------------------------


@says(
    "no partition of 44 layers into 4 parts fits into the 500 MB that a worker has besides the program "
    "itself; about 1200 MB are needed: use more workers, smaller microbatches or schedule 1f1b, or allow "
    "more with --memory"
)
def layers_too_large(patch: Patch) -> str:
    layers, parts = 44, 4
    # Gradients double the memory of the parameters.
    parameters = [1200 * MIB * parts // layers // 2] * layers
    costs = LayerCosts([1.0] * layers, parameters, [0] * layers, [0] * layers)
    order = make_order("gpipe", stages=parts, workers=parts, microbatches=4)
    return refused(lambda: find_partition(costs, order, optimizer="sgd", memory_bytes=500 * MIB))


@says("--batch-size 64 is not divisible by --microbatch-size 5")
def microbatches_do_not_fit(patch: Patch) -> str:
    return refused(
        lambda: parse_train(["--batch-size", "64", "--microbatch-size", "5"], Environment(), cores=2)
    )


@says(
    "schedule 1f1b needs at least as many microbatches as workers, but there are 2 for 4 workers; make "
    "the microbatches smaller"
)
def too_few_microbatches(patch: Patch) -> str:
    return refused(lambda: make_order("1f1b", stages=4, workers=4, microbatches=2))


@says("--checkpoint-dir kept: contains no checkpoint to --resume from")
def no_checkpoint(patch: Patch) -> str:
    return refused(lambda: latest(Path("kept")))


@says("… was made with seed 0, but this run has 1")
def another_seed(patch: Patch) -> str:
    return refused(lambda: Checkpoint(Path("kept/step-1"), 1, {"seed": 0}).check({"seed": 1}))


@says("… lacks layers.0.weight/exp_avg, so it is damaged or of another model; resume from another checkpoint")
def the_optimizers_state_is_missing(patch: Patch) -> str:
    Path("half").mkdir()
    named = {"layers.0.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    stored = {"layers.0.weight": torch.zeros(2, 2), "layers.0.weight/step": torch.zeros(())}
    save_file(stored, "half/worker-0.safetensors")
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    return refused(lambda: Checkpoint(Path("half"), 1, {}).restore(named, optimizer))


@says(
    "… layers.0.weight is damaged: its checksum is wrong; resume from another checkpoint",
    "…/checkpoint.json: is damaged: its checksum is wrong; resume from another checkpoint",
)
def a_checkpoint_is_damaged(patch: Patch) -> str:
    named = {"layers.0.weight": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    writer = CheckpointWriter(Path("damaged"), {"seed": 3})
    writer.make_directory()
    writer.write_part(1, "worker-0", named, optimizer)
    file = writer.finish(1) / "worker-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x41")
    values = refused(lambda: latest(Path("damaged")).restore(named, optimizer))
    description = file.with_name("checkpoint.json")
    description.write_text(description.read_text().replace('"seed": 3', '"seed": 4'))
    return f"{values}\n{refused(lambda: latest(Path('damaged')))}"


@says("the loss of batch 3 is not a number: try a smaller --lr")
def the_loss_diverges(patch: Patch) -> str:
    place = Environment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_port=free_port())
    line = "--model vit-digits --schedule sequential --batches 3 --batch-size 4 --lr 1e5"
    notices: list[str] = []
    train(parse_train(line.split(), place, cores=1).request, Console(file=io.StringIO()), notices.append)
    return "\n".join(notices)


# --- launching ------------------------------------------------------------------------------------


@says("rank 1 is lost: ssh could not connect or lost its connection (see its output above)")
def ssh_fails(patch: Patch) -> str:
    return RankExit(1, 255, remote=True).words()


@says("nothing says where to start the ranks: give one of --local N, --hosts a,b,c or -sd devices.yml")
def launched_nowhere(patch: Patch) -> str:
    return refused(lambda: parse_launch(["--", "-m", "vit-digits"]))


@says("host pi1 is named twice; each host runs one rank")
def a_host_is_named_twice(patch: Patch) -> str:
    return refused(lambda: plan_launch(parse_launch(["--hosts", "pi1,pi1", "--", "-m", "vit-digits"])))


# --- the auction and the test bed -----------------------------------------------------------------


def take_part(*options: str, types: Mapping[str, Any]) -> str:
    """Return the output of ``pipeedge auction`` on rank 0."""
    Path("am.yml").write_text(yaml.safe_dump({"m": MODEL}))
    Path("at.yml").write_text(yaml.safe_dump(types))
    line = ["0", "1", "-m", "m", "-sm", "am.yml", "-sdt", "at.yml", "--host", "a"]
    return refused(lambda: auction._take_part(parse_auction([*line, *options], Environment())))


@says("rank 2 (on pi3) is too late, and the others go on without it: start all ranks within 60 s")
def a_bidder_comes_late(patch: Patch) -> str:
    terms = Terms(appear_s=60.0, required=frozenset({0}))
    state = HubState(world_size=3, timeout_s=70.0, now=0.0, terms=terms)
    state.received(0, Hello(0, 3, "pi1"), 0.0)
    state.received(0, Facts(Raw(b"{}")), 0.0)
    state.tick(61.0)
    ((_, verdict),) = state.received(1, Hello(2, 3, "pi3"), 62.0)
    return verdict.failure.line


@says("device type board has no profile of …; profile it (pipeedge profile)")
def a_bidder_without_a_profile(patch: Patch) -> str:
    return take_part("-u", "2", types={"board": KIND})


@says("at.yml has 2 device types: give this device's with -dt/--dev-type, one of board, desktop")
def a_bidder_of_two_types(patch: Patch) -> str:
    return take_part(types={"board": KIND, "desktop": KIND})


@says("the test bed needs root, because only root can set up network namespaces and control groups")
def no_rights(patch: Patch) -> str:
    patch.setattr(os, "geteuid", lambda: 1000)
    return refused(lambda: TestBeds().up("mine", Cluster(())))


@says("test bed mine is up already; take it down first, or use another --name")
def a_test_bed_is_up(patch: Patch) -> str:
    patch.setattr(TestBeds, "_features", lambda self: ())
    shelf = SimpleNamespace(locked=contextlib.nullcontext, find=lambda name: SimpleNamespace(left_over=False))
    return refused(lambda: TestBeds(shelf=shelf).up("mine", Cluster(())))  # type: ignore[arg-type]


@says(
    "the hosts need 3 processors together, but this machine has 2, so they would slow each other down; lower "
    "cpu_fraction"
)
def too_few_processors(patch: Patch) -> str:
    hosts = (EmulatedHost(f"pi{n}", "board", f"10.213.0.{n}", MBPS, 1.0, MIB) for n in (1, 2, 3))
    cluster = Cluster(tuple(hosts))
    return refused(lambda: cluster.check(processors=2, mem_bytes=1 << 30))
