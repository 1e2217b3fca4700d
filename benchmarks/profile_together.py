"""Run ``profiler.py`` on several hosts that time their layers at the same time; used by ``beds.py``.

    host a   import, load │ time layers ......... │ go on computing │ write
    host b   import, load ......... │ time layers │                 │ write
                             all ready            all timed

Emulated hosts share the memory bandwidth of the machine. A fast host that is timed while slow ones still
import their libraries would seem faster than it is when all compute. The hosts meet for each of several
profiles.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeedge.profile import decoder_job, layer_work

LIMIT_S = 900
POLL_S = 0.05


def main() -> None:
    """Run the profiler. Arguments: shared directory, number of hosts, this host, arguments of profiler.py."""
    directory, hosts, host = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    deadline = time.monotonic() + LIMIT_S
    time_layers, measure, turns = layer_work.time_layers, decoder_job._Steps.measure, itertools.count()

    def all_have(stage: str) -> bool:
        if time.monotonic() > deadline:
            raise SystemExit(f"{host}: not all hosts have {stage} their layers within {LIMIT_S} s")
        return len(list(directory.glob(f"*.{stage}"))) == hosts

    def at_once(work: Callable[[], Any], go_on: Callable[[], object]) -> Any:
        turn = next(turns)
        (directory / f"{host}.{turn}-loaded").touch()
        while not all_have(f"{turn}-loaded"):
            time.sleep(POLL_S)
        found = work()
        (directory / f"{host}.{turn}-timed").touch()
        with torch.inference_mode():
            while not all_have(f"{turn}-timed"):
                go_on()
        return found

    def layers_at_once(shard: Any, payload: Any, *arguments: Any, **named: Any) -> Any:
        return at_once(lambda: time_layers(shard, payload, *arguments, **named), lambda: shard(payload))

    def steps_at_once(steps: Any, *arguments: Any) -> Any:
        return at_once(
            lambda: measure(steps, *arguments), lambda: measure(steps, 1, lambda part: None, *arguments[2:])
        )

    layer_work.time_layers = layers_at_once
    decoder_job._Steps.measure = steps_at_once  # type: ignore[method-assign, assignment]
    script = Path(__file__).resolve().parents[1] / "profiler.py"
    sys.argv = [str(script), *sys.argv[4:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
