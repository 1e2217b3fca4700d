"""Test ``pipeedge.Pipeline`` with ranks in other processes, and the examples of the documentation."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from documents import Page
from places import ROOT
from processes import Programs, World
from waiting import LIMIT_S, until

from pipeedge import Pipeline
from pipeedge.base.errors import PeerError
from pipeedge.data.defaults import default_digits

DIGITS = default_digits()
PICTURES = [(item.tensors[0][0] * 15).numpy() for item in DIGITS.items]


def children() -> list[psutil.Process]:
    """Return the ranks that this process has started; what other tests started may end meanwhile."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "pipeedge.run.main" in each.cmdline():
                found.append(each)
    return found


def listeners() -> set[int]:
    """Return the ports at which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return {entry.laddr.port for entry in sockets if entry.status == psutil.CONN_LISTEN}


def test_examples_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = 0
    for path in (ROOT / "README.md", ROOT / "docs" / "serving.md"):
        (tmp_path / path.stem).mkdir()
        monkeypatch.chdir(tmp_path / path.stem)  # with no file but those that the page makes
        blocks = [block for block in Page.read(path).blocks if block.language == "python"]
        text = next(block.text for block in blocks if "with Pipeline" in block.text)
        with (tmp_path / "printed").open("w") as stream, contextlib.redirect_stdout(stream):
            exec(compile(text, str(path), "exec"), {})  # noqa: S102 - our own pages
        printed += len((tmp_path / "printed").read_text().splitlines())
    assert printed >= 5
    assert not children()


def test_a_lost_rank_fails_what_was_asked_in_one_line() -> None:
    earlier = listeners()

    def ask() -> None:
        with Pipeline("vit-digits", ranks=2, options=["--timeout", "20"]) as pipeline:
            assert pipeline(PICTURES[0]).best.number == DIGITS.items[0].label
            (process,) = children()
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the kill")
            pipeline.submit(PICTURES[0]).result(LIMIT_S)

    with pytest.raises(PeerError, match=r"rank 1 .*(lost|killed)") as failure:
        ask()
    assert "\n" not in str(failure.value)
    assert not children()
    until(lambda: not listeners() - earlier, "the listening sockets are closed")


def test_ranks_that_were_started_elsewhere_are_joined(tmp_path: Path) -> None:
    with World(tmp_path, 2, "-m", "vit-digits", "-u", "8", "-c", "tcp", "--timeout", "30") as world:
        world.start(1)
        options = ["--port", str(world.port), "--timeout", "30"]
        with Pipeline("vit-digits", ranks=2, joins=True, options=options) as pipeline:
            found = [answer.best.number for answer in pipeline(PICTURES[:50])]
        ended = world.wait(1)[1]
    assert (ended.status, ended.err) == (0, "")
    assert np.mean([number == item.label for number, item in zip(found, DIGITS.items, strict=False)]) > 0.9


@pytest.mark.parametrize(
    ("fresh", "ranks", "more"),
    [
        # As a worker of multiprocessing, which ends without ``atexit`` before Python 3.13.
        (False, 2, ""),
        # Python ends while threads prepare pictures, read what the user gives, and wait for that.
        (
            True,
            2,
            "large = pipeline([Image.new('L', (800, 800))] * 1000); next(large)\n"
            "read = pipeline(Image.new('L', (800, 800)).rotate(9) for _ in range(1000)); next(read)\n"
            "queue = SimpleQueue(); queue.put(tiny); live = pipeline(iter(queue.get, 0)); next(live)",
        ),
    ],
)
def test_a_pipeline_that_is_never_closed_ends_with_python(
    fresh: bool, ranks: int, more: str, tmp_path: Path
) -> None:
    (tmp_path / "forgets.py").write_text(
        "from queue import SimpleQueue\n"
        "import psutil\n"
        "from PIL import Image\n"
        "from pipeedge import Pipeline\n"
        f"pipeline = Pipeline('vit-digits', ranks={ranks}).start()\n"
        "tiny = Image.new('L', (8, 8))\n"
        "first = pipeline([tiny] * 100_000)\n"
        "next(first)\n"
        f"{more}\n"
        "print(*(rank.pid for rank in psutil.Process().children()))\n"
    )
    with Programs(tmp_path) as programs:
        programs.launch(0, str(tmp_path / "forgets.py"), fresh=fresh)
        ended = programs.wait(0)[0]
    others = list(map(int, ended.out.split()))
    assert len(others) == ranks - 1
    # They would write to the same standard error.
    assert not any(map(psutil.pid_exists, others))
    assert (ended.status, ended.err) == (0, ""), ended
