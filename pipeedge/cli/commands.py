"""The programs that the command ``pipeedge`` starts. Imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeedge.base.program import COMMAND

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True)
class Command:
    """One program."""

    name: str
    summary: str
    """One line for ``pipeedge --help``."""
    module: str
    """Module with the function that runs the program and ends the process."""
    parser: str
    """``module:function`` that builds its parser."""
    function: str = "main"
    """Name of that function, where one module has several programs."""

    @property
    def full_name(self) -> str:
        """Words that start the program."""
        return f"{COMMAND} {self.name}"

    def build_parser(self) -> argparse.ArgumentParser:
        """Import the program's options and return a new parser."""
        module, _, function = self.parser.partition(":")
        build: Any = getattr(importlib.import_module(module), function)
        parser: argparse.ArgumentParser = build()
        return parser


COMMANDS = (
    Command(
        "node",
        "let the cluster use this machine",
        "pipeedge.nodes.main",
        "pipeedge.nodes.options:node_parser",
    ),
    Command(
        "join",
        "join a cluster by a code",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:join_parser",
        "join_main",
    ),
    Command(
        "nodes",
        "list the nodes of the cluster, or remove one",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:members_parser",
        "members_main",
    ),
    Command(
        "up",
        "serve a model with the nodes that are here",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:up_parser",
        "up_main",
    ),
    Command(
        "status",
        "show the nodes and what runs on them",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:status_parser",
        "status_main",
    ),
    Command(
        "ask",
        "ask a model",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:ask_parser",
        "ask_main",
    ),
    Command(
        "down",
        "end what is served",
        "pipeedge.nodes.commands",
        "pipeedge.nodes.options:down_parser",
        "down_main",
    ),
    Command(
        "run", "run one rank of a pipeline", "pipeedge.run.main", "pipeedge.request.options:runtime_parser"
    ),
    Command(
        "chat",
        "have a conversation with a model that generates text",
        "pipeedge.cli.chat",
        "pipeedge.cli.chat:chat_parser",
    ),
    Command(
        "launch",
        "start every rank of a run, here or over ssh",
        "pipeedge.launch.main",
        "pipeedge.launch.main:launch_parser",
    ),
    Command(
        "doctor",
        "check whether a run would work",
        "pipeedge.doctor.main",
        "pipeedge.request.options:doctor_parser",
    ),
    Command(
        "key",
        "make the key that encrypts runs and admits their ranks",
        "pipeedge.cli.key",
        "pipeedge.cli.key:key_parser",
    ),
    Command(
        "fetch",
        "fetch the weights of the known models",
        "pipeedge.cli.fetch",
        "pipeedge.cli.fetch:fetch_parser",
    ),
    Command(
        "profile",
        "measure the layers of a model on this device",
        "pipeedge.profile.main",
        "pipeedge.profile.options:profiler_parser",
    ),
    Command(
        "profile-to-models",
        "add a profiled model to models.yml",
        "pipeedge.profile.main",
        "pipeedge.profile.options:models_parser",
        "main_models",
    ),
    Command(
        "profile-to-device-types",
        "add a profile to device_types.yml",
        "pipeedge.profile.main",
        "pipeedge.profile.options:device_types_parser",
        "main_device_types",
    ),
    Command(
        "schedule",
        "find the best partition (sched-pipeline)",
        "pipeedge.cli.schedule",
        "pipeedge.cli.schedule:schedule_parser",
    ),
    Command(
        "auction",
        "schedule from the bids of the devices themselves",
        "pipeedge.auction.main",
        "pipeedge.auction.options:auction_parser",
    ),
    Command(
        "simulate",
        "predict how a run would go, without its hosts",
        "pipeedge.simulate.main",
        "pipeedge.simulate.options:simulate_parser",
    ),
    Command(
        "report",
        "draw the page of a saved report, or compare two",
        "pipeedge.report.main",
        "pipeedge.report.main:report_parser",
    ),
    Command(
        "train",
        "train a model in a pipeline",
        "pipeedge.train.main",
        "pipeedge.train.options:train_parser",
    ),
    Command(
        "config",
        "print the options of a program, and where each comes from",
        "pipeedge.cli.config",
        "pipeedge.cli.config:config_parser",
    ),
    Command(
        "completion",
        "print the completion script of a shell",
        "pipeedge.cli.completion",
        "pipeedge.cli.completion:completion_parser",
    ),
)
"""In the order in which ``pipeedge --help`` lists them."""
