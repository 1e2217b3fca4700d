"""What only a process of its own shows: imports, limits, a full disk, exit statuses."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from models_oracle import scramble
from places import ROOT
from ports import free_port
from processes import Programs, run_program
from quick_python import run_text
from waiting import LIMIT_S

import pipeedge
from pipeedge.base.machine import process_age_s


def test_a_full_disk_behind_standard_output_gets_one_line() -> None:
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("/dev/full is not here")
    command = [sys.executable, "runtime.py", "0", "1", "-m", "vit-digits", "--dry-run"]
    with device.open("w") as full:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "runtime.py: standard output cannot be written: no space left on device\n"


def test_a_script_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "revauct.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, f"pipeedge {pipeedge.__version__}\n")


HELP = """
import runpy, sys
sys.argv = ["runtime.py", "--help"]
try:
    runpy.run_path("runtime.py", run_name="__main__")
except SystemExit as end:
    status = end.code
heavy = {"torch", "numpy", "transformers", "rich", "safetensors", "PIL"} & set(sys.modules)
print("status", status, "heavy", sorted(heavy))
"""


def test_help_is_there_before_anything_heavy_is_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert "--partition" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "status 0 heavy []"


def test_a_process_is_younger_than_its_parent_has_waited() -> None:
    began = time.monotonic()
    code = "from pipeedge.base.machine import process_age_s; print(process_age_s())"
    age_s = float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert 0 <= age_s <= time.monotonic() - began + tick_s
    assert process_age_s() > age_s


@pytest.mark.parametrize("argument", ["--unknown", "python0.0"])
def test_pin_dependencies_refuses_a_program_that_is_not_python(argument: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/pin-dependencies"), argument]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ("scripts/pin-dependencies PYTHON..." if argument[0] == "-" else repr(argument)) in ended.stderr


def test_shards_are_built_without_importing_transformers(tmp_path: Path) -> None:
    """Importing it would cost each rank seconds, and memory that a board does not have."""
    built = transformers.ViTForImageClassification(
        transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    scramble(built, 0)
    built.save_pretrained(tmp_path)
    script = (
        "import sys\n"
        "from pipeedge.models import find_model\n"
        "find_model(sys.argv[1]).load()\n"
        "print([m for m in ('transformers', 'safetensors', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert result.stdout.strip() == "[]"


MEET = """
import os, resource, socket
from pipeedge.transport.base import Rendezvous
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rendezvous import StoreEndpoint
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
endpoint = StoreEndpoint(0, "127.0.0.1", lambda end_store: P2PTransport(4, end_store))
place = endpoint.listen("127.0.0.1")
port = place.port
socket.create_connection(("127.0.0.1", port)).close()
transport = endpoint.transport()
transport.open(Rendezvous("127.0.0.1", (4,), {0: place}, 20.0))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
try:
    socket.create_connection(("127.0.0.1", port)).close()
except ConnectionRefusedError:
    print("closed")
transport.close()
print("done")
"""


def test_open_links_need_no_rendezvous(tmp_path: Path, quick_python: Path) -> None:
    ended = run_text(MEET, tmp_path, quick_python)
    soft, *rest = ended.stdout.split()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(soft) == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)), ended.stderr
    assert rest == ["closed", "done"], ended.stderr


def test_the_script_of_weights_ends_with_one_line_and_2_for_a_wrong_request(
    tmp_path: Path, logs: Path
) -> None:
    for arguments in (["-m", "bert-base-uncasd"], ["-m", "vit-digits"], ["--seed", "3"]):
        ended = run_program(tmp_path, logs, "save_model_weights.py", *arguments)
        assert ended.status == 2
        assert ended.line.startswith("save_model_weights.py: ")
    assert list(tmp_path.iterdir()) == []


def test_the_script_writes_random_weights_where_it_stands(tmp_path: Path, logs: Path) -> None:
    options = ("--random", "--seed", 2, "-m", "facebook/deit-tiny-distilled-patch16-224")
    ended = run_program(tmp_path, logs, "save_model_weights.py", *options)
    assert ended.status == 0, ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["DeiT_T_distilled.npz"]
    assert "seed 2" in ended.out


@pytest.mark.parametrize("script", ["runtime.py", "train.py", "profiler.py", "save_model_weights.py"])
def test_interrupt_during_imports_is_status_130(script: str, tmp_path: Path) -> None:
    """The interpreter is interrupted as it reads the first module of the program."""
    module = re.findall(r'start\("pipeedge\.(\w+)\.(\w+)"', (ROOT / script).read_text())[0]
    for name in ("base", module[0]):
        (tmp_path / "pipeedge" / name).mkdir(parents=True)
    started = Path("pipeedge", "base", "interrupt.py")
    for kept in (Path(script), started):
        (tmp_path / kept).write_bytes((ROOT / kept).read_bytes())
    (tmp_path / "pipeedge" / module[0] / f"{module[1]}.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", script], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_a_forked_program_is_gone_when_its_test_ends_however_soon(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        programs.launch(0, "runtime.py", 0, 2, "-m", "vit-digits", "--port", free_port())
    assert programs.wait(within=LIMIT_S)[0].status == -signal.SIGKILL
