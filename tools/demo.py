#!/usr/bin/env python3
"""Run real models on two ranks of ``runtime.py`` on this machine, in a few seconds.

    python tools/demo.py [DIRECTORY]     write predictions, answers and report to DIRECTORY (demo-out/)

``vit-digits`` classifies its 360 held-out images, then ``llama-puzzles`` answers a few puzzles; half of the
layers of each are on each rank. The exit status is 0 if the accuracy is the one that was measured in
training, and the answers are right.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "pipeedge" / "assets" / "vit-digits" / "training.json"
ITEMS = 360
RANKS = 2
PUZZLES = {
    "What is 47 + 85?": "132",
    "Sort 5 2 9 1.": "1 2 5 9",
    "Reverse melon.": "nolem",
    "Spell house.": "h-o-u-s-e",
    "How many e in cheese?": "3",
}
"""Puzzles and their answers."""


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(arguments: list[str]) -> int:
    """Run every rank with ``arguments``, and return the first exit status that is not 0, or 0.

    Ranks detect by themselves that another one has failed, so it is enough to wait for each.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(RANKS):
        command = ["runtime.py", str(rank), str(RANKS), *arguments]
        print("$", shlex.join(["python", *command]), flush=True)
        ranks.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment))
    try:
        statuses = [process.wait() for process in ranks]
    except KeyboardInterrupt:
        for process in ranks:
            process.terminate()
        for process in ranks:
            process.wait()
        return 130
    return next((status for status in statuses if status), 0)


def main() -> int:
    """Run the demonstration and return its exit status."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    shown = directory.relative_to(ROOT) if directory.is_relative_to(ROOT) else directory
    report = directory / "report.json"
    arguments = ["-m", "vit-digits", "-pt", "1,8,9,16", "-b", str(ITEMS), "--port", str(free_port())]
    arguments += ["--output", str(shown / "predictions.csv"), "--report", str(shown / "report.json")]
    status = run_ranks(arguments)
    if status:
        print(f"demo: failed with exit status {status}; the reason is above", file=sys.stderr)
        return status
    found = json.loads(report.read_text(encoding="utf-8"))["accuracy"]
    trained = json.loads(TRAINING.read_text(encoding="utf-8"))["held_out"]
    of_training = f"{trained['top1']:.4f} ({trained['correct']}/{trained['labelled']})"
    if (found["correct"], found["labelled"]) != (trained["correct"], trained["labelled"]):
        print(f"demo: the accuracy is not that of training, {of_training}", file=sys.stderr)
        return 1
    print(f"The accuracy is that of training, {of_training}.")
    return answer_puzzles(directory, shown)


def answer_puzzles(directory: Path, shown: Path) -> int:
    """Let a decoder answer the puzzles, print what it says, and return the exit status."""
    prompts = directory / "puzzles.txt"
    prompts.write_text("".join(f"{puzzle}\n" for puzzle in PUZZLES), encoding="utf-8")
    arguments = ["-m", "llama-puzzles", "-pt", "1,8,9,16", "--port", str(free_port())]
    arguments += ["--input", str(shown / "puzzles.txt"), "--output", str(shown / "answers.jsonl")]
    status = run_ranks(arguments)
    if status:
        print(f"demo: failed with exit status {status}; the reason is above", file=sys.stderr)
        return status
    lines = (directory / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    wrong = 0
    for (puzzle, right), line in zip(PUZZLES.items(), lines, strict=True):
        text = json.loads(line)["text"]
        wrong += text != right
        print(f"{puzzle:24}{text}" + ("" if text == right else f" (right is {right})"))
    if wrong:
        print(f"demo: {wrong} of {len(PUZZLES)} answers are wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
