#!/usr/bin/env python3
"""Kill a host under eight texts, in a test bed of three emulated hosts, and compare the pause. Needs root.

The scheduler says beforehand how long texts pause when a host is lost. It plans for a moment at which half of
each answer is written. The pause depends on the tokens so far, so the prediction that counts is the one for
as many tokens as there were when the host was killed. Each round kills a host three times: with nothing more,
with ``--keep-outputs``, and with ``--replicate``, under which no pause may be longer than a second.

Takes six minutes for each round on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beds import Bed, Kind, raised
from decoder_failover import write_larger
from decoder_replan import Run, Texts

KINDS = (Kind("host", 3, 0.5, 1000),)
CONTEXT, PROMPT = 1024, 6
GOAL = 0.2
"""Largest difference between the measured and the predicted pause, as a part of the latter."""
COPIES_GOAL_S = 1.0
"""Longest pause with copies."""
PREDICTED = {
    None: "pause_s",
    "--keep-outputs": "pause_with_outputs_s",
    "--replicate": "pause_with_copies_s",
}
"""What the scheduler calls the pause with each option."""


def predict(bed: Bed, model: Path, texts: Texts, prompt: float, answer: int) -> dict[str, Any]:
    """Return the plan with its losses, for texts with prompts and answers of so many tokens."""
    command = [str(Path(sys.executable).with_name("sched-pipeline")), "--format", "json", "--losses"]
    command += ["-m", str(model), "--transport", "tcp", "--data-host", bed.hosts[0]]
    command += ["--streams", str(texts.count), "--context", str(CONTEXT)]
    command += ["--prompt-tokens", str(round(prompt)), "--answer-tokens", str(answer)]
    for option, name in (("-sm", "models"), ("-sdt", "device_types"), ("-sd", "devices")):
        command += [option, str(bed.files[name])]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def measure(bed: Bed, model: Path, name: str, texts: Texts, option: str | None) -> tuple[float, float]:
    """Kill a host when about half of the tokens are written; return the pause and the predicted one.

    It is that of the second stage, unless that is the data host: then that of the next one.
    """
    before = predict(bed, model, texts, PROMPT, texts.tokens)
    rate = before["text"]["tokens_per_s"]
    victims = [stage["host"] for stage in before["schedule"][1:] if stage["host"] != bed.hosts[0]]
    if not victims:
        sys.exit("decoder_pauses: the best plan has no host to lose; measure again while nothing else runs")
    victim = victims[0]
    more = ("--context", str(CONTEXT), *([] if option is None else [option]))
    run = Run(bed, model, name, texts, "off", more=more)
    run.wait_for("a context of")
    time.sleep(texts.count * texts.tokens / 2 / rate)
    run.kill(bed.hosts.index(victim))
    report, _ = run.finish()
    text, epoch = report["text"], report["epochs"][1]
    again = text["repeated_tokens"] + text["kept_tokens"]
    plan = predict(bed, model, texts, again / texts.count, 1)
    loss = next(one for one in plan["losses"] if one["host"] == victim)
    cuts = [
        " | ".join("{}-{}".format(*stage["layers"]) for stage in one["schedule"]) for one in report["epochs"]
    ]
    measured, predicted = text["longest_pause_s"], loss[PREDICTED[option]]
    print(
        f"{option or 'nothing more'}: {cuts[0]} -> {cuts[1]}, with {again:,} tokens, "
        f"{text['partly_repeated_tokens']:,} of them computed "
        f"again by a part of the layers, {text['kept_tokens']:,} by none: pause {measured:.2f} s; predicted "
        f"{predicted:.2f} s ({loss['pause_without_cache_s']:.2f} s without any cache); planned in "
        f"{epoch['waiting_s']:.2f} s, loaded in {epoch['preparing_s']:.2f} s ({loss['load_s']:.2f} s)",
        flush=True,
    )
    return measured, predicted


def main() -> None:
    """Measure, and exit with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=600, help="length of each text (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of kills (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model, texts = write_larger(directory / "model"), Texts(arguments.tokens)
        with raised(f"dp{os.getpid()}", KINDS, directory / "bed") as bed:
            bed.profile_decoder(model, texts.dtype)
            found: dict[str | None, list[tuple[float, float]]] = {option: [] for option in PREDICTED}
            for number in range(arguments.rounds):
                for option, pauses in found.items():
                    pauses.append(measure(bed, model, f"run{number}{option}", texts, option))
    ratios = {
        option: statistics.median(pause / predicted for pause, predicted in pauses)
        for option, pauses in found.items()
    }
    longest = max(pause for pause, _ in found["--replicate"])
    for option in (None, "--keep-outputs"):
        name = option or "nothing more"
        print(f"pause against the predicted one, {name}: {ratios[option]:.2f} (goal 1 +- {GOAL})")
    print(f"longest pause with copies: {longest:.2f} s (goal {COPIES_GOAL_S})")
    hits = all(abs(ratios[option] - 1) <= GOAL for option in (None, "--keep-outputs"))
    sys.exit(0 if hits and longest <= COPIES_GOAL_S else 1)


if __name__ == "__main__":
    main()
