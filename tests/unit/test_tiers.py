"""What the tiers allow: the rule itself, and that it is enforced while a test runs."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
import tiers


@pytest.mark.parametrize(
    ("tier", "event", "program", "belongs"),
    [
        ("unit", "subprocess.Popen", "/x/bin/python", "tests/ranks"),
        ("unit", "subprocess.Popen", "/x/bin/sched-pipeline", "tests/contract"),
        ("unit", "socket.__new__", "", "tests/contract"),
        ("unit", "os.fork", "", "tests/ranks"),
        ("unit", "open", "a.yml", None),
        ("contract", "subprocess.Popen", "/x/bin/python", "tests/ranks"),
        ("contract", "subprocess.Popen", "/x/bin/sched-pipeline", None),
        ("contract", "subprocess.Popen", "fc-list", None),
        ("contract", "socket.__new__", "", None),
        ("ranks", "subprocess.Popen", "/x/bin/python", None),
        ("ranks", "os.fork", "", None),
    ],
)
def test_what_a_test_may_do_depends_on_its_tier(
    tier: str, event: str, program: str, belongs: str | None
) -> None:
    wrong = tiers.offence(tier, event, (program,) if program else ())
    if belongs is None:
        assert wrong is None
    else:
        assert wrong is not None
        assert wrong.endswith(f"it belongs to {belongs}")


def test_a_unit_test_can_start_no_process_and_open_no_socket() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process \(true\); it belongs to tests/ranks"):
        subprocess.run(["true"], check=False)
    with pytest.raises(pytest.fail.Exception, match="opens a socket"):
        socket.socket()


def test_every_test_file_is_in_a_tier() -> None:
    root = Path(__file__).resolve().parents[1]
    files = {path.relative_to(root).parts[0] for path in root.rglob("test_*.py")}
    assert files == {"unit", "contract", "ranks"}
