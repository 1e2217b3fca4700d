"""Shared set-up of all tests: no network, markers, and small models on disk.

A test's folder is its tier: ``unit`` (no process, no socket), ``contract`` (hub, members, links and workers
in one process) and ``ranks`` (real programs, for what only a process can show). They share ``support``.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiers
from effort import cases
from hypothesis import HealthCheck, Phase, settings
from small_models import save_small_models

if TYPE_CHECKING:
    from file_server import Site
    from runs import Inputs
    from stored_weights import Saved

# What is imported and collected lasts to the end: the collector of cycles would look through all of it for
# nothing, over and over, in a third of the time that a worker needs until its first test.
gc.disable()
# Before anything imports the hub's library, here or in a process that a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell starts what it runs in the background with Ctrl-C ignored, and the programs that tests start inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ranks are forked from a server that has imported torch, too late for them to say it themselves.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long campaigns too")


def pytest_configure(config: pytest.Config) -> None:
    tiers.install()
    # How long an example takes says something of the machine alone. What fails is printed to be tried again,
    # not kept for later runs, which shall not depend on earlier ones. Examples are not explained: tracing
    # takes minutes where a model computes, and the failure would end as a timeout without its example.
    settings.register_profile(
        "any machine",
        max_examples=cases(100, 2),
        deadline=None,
        database=None,
        print_blob=True,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")
    config.addinivalue_line("markers", "slow: a long campaign, run with --slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with tiers.watched(item.path):
        return (yield)


LONGEST = (
    *("test_runtime.py", "test_train_cli.py", "test_testbed.py", "test_training.py", "test_page_browser.py"),
    "test_node_programs.py",
    *("test_docs_commands.py", "test_launch.py", "test_imports.py", "test_rpc.py", "test_serving_ranks.py"),
    *("test_doctor.py", "test_failover.py", "test_bidders.py", "test_family_ranks.py", "test_tcp.py"),
    *("test_doctor_ranks.py", "test_control.py", "test_observing.py", "test_transports.py"),
    *("test_programs.py", "test_dtype_ranks.py", "test_processors.py", "test_keyed_runs.py"),
    *("test_failover_rules.py", "test_models_towers.py", "test_dtypes.py", "test_page.py"),
    *("test_profiler_session.py", "test_models_numerics.py", "test_compressed.py", "test_layout.py"),
    *("test_weights.py", "test_mutations.py", "test_spec_files.py", "test_hub_ranks.py"),
    *("test_python_api_ranks.py", "test_weights_memory.py", "test_digits.py", "test_models_download.py"),
)
"""Files whose tests take longest. They run first, so that no worker ends with one of them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="a long campaign: run with --slow"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return Hugging Face directories of one small random model of each family."""
    return save_small_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that gives a small reference of a class, and its Hugging Face directory."""
    from stored_weights import saved_in

    return saved_in(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, model_dirs: dict[str, Path]) -> Inputs:
    """Files that several runs read."""
    from runs import Inputs

    return Inputs(tmp_path_factory.mktemp("inputs"), model_dirs)


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A command like ``python`` that starts programs with torch imported."""
    from quick_python import command_in

    with command_in(tmp_path_factory.mktemp("quick")) as command:
        yield command


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Start web servers with the files that a test gives them."""
    from file_server import Site, serving

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(Site(**options)))


@pytest.fixture
def hub_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the hub's client away from the user's cache and token; return the cache that it has instead."""
    from file_server import use_hub
    from huggingface_hub import constants

    home = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub is a server of the test's own
    use_hub("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return home


@pytest.fixture
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the output of programs, beside the one where they run."""
    return tmp_path_factory.mktemp("logs")
