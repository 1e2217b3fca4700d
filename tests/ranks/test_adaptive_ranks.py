"""Ranks whose links adapt their bits to the bandwidth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import run_world

# --- real ranks -------------------------------------------------------------------------------------------

DIGITS = ("-m", "vit-digits", "-b", 96, "-u", 4)


@pytest.mark.parametrize("comm", ["p2p", "rpc", "tcp"])
def test_adaptive_ranks_deliver_all_results(comm: str, tmp_path: Path) -> None:
    """No link reaches the target, so the fewest bits are used from the first measurement on."""
    options = ("-c", comm, "-pt", "1,6,7,11,12,16", "-q", "0,16,8", "--report", tmp_path / "r.json")
    policy = ("--adaptive", "heuristic", "--send-constraint", "1e15", "--min-bits", 4, "--window-size", 4)
    ended = run_world(tmp_path, 3, *DIGITS, *options, *policy)
    assert [one.status for one in ended.values()] == [0, 0, 0], [one.err for one in ended.values()]
    for stage in (0, 1):
        lines = ended[stage].err.splitlines()
        assert len(lines) == 1
        told = re.fullmatch(
            rf"runtime.py: rank {stage}: stage {stage}: 4 bits from microbatch (\d+) on, "
            rf"{('uncompressed values', '16 bits')[stage]} before: 4 bits carry .* wanted",
            lines[0],
        )
        assert told is not None, lines
        assert 3 <= int(told[1]) < 24
    assert ended[2].err == ""
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["items"] == 96
    assert report["accuracy"]["top1"] > 0.9
    assert [one["quant_bits"] for one in report["schedule"]] == [0, 16, 8]
    for stage, begins in ((0, 32), (1, 16)):
        series = report["series"][stage]
        assert series["bits"][0] == begins
        assert series["bits"][-1] == 4
        change = next(one for one in series["decided"] if one["bits"] == 4)
        assert change["bytes_per_s"] > 0
        assert 0 < change["time_s"] < report["elapsed_s"]
        assert "wanted" in change["reason"]
    assert "decided" not in report["series"][2]


def test_one_stage_has_nothing_to_adapt(tmp_path: Path) -> None:
    ended = run_world(tmp_path, 1, "-m", "vit-digits", "-b", 8, "--adaptive", "auto")
    assert ended[0].status == 0
    assert ended[0].line.endswith("--adaptive auto changes nothing: with one stage there is no link to adapt")
