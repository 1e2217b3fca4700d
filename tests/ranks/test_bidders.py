"""revauct.py as several processes: bidders, a silent one, one with a mistake."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
import yaml
from ports import free_port
from processes import Programs

from pipeedge.control.messages import Hello, frame


def write_files(directory: Path) -> None:
    times = [0.01, 0.02, 0.01, 0.02] * 4
    kinds = {
        name: {
            "bw_Mbps": 1000,
            "mem_MB": 100,
            "model_profiles": {
                "vit-digits": [
                    {"dtype": "torch.float32", "batch_size": 8, "time_s": [factor * time for time in times]}
                ]
            },
        }
        for name, factor in (("quick", 1), ("slow", 2))
    }
    spec = {"layers": 16, "mem_MB": [1.0] * 16, "parameters_in": 64, "parameters_out": [100] * 16}
    (directory / "models.yml").write_text(yaml.safe_dump({"vit-digits": spec}))
    (directory / "device_types.yml").write_text(yaml.safe_dump(kinds))


class Auction(Programs):
    """Bidders, of which rank 0 is the auctioneer too."""

    def __init__(self, directory: Path, world: int) -> None:
        super().__init__(directory)
        write_files(directory)
        self.port = free_port()
        self._world = world

    def bid(self, rank: int, *options: object) -> None:
        place = (rank, self._world, "--port", self.port)
        self.launch(rank, "revauct.py", *place, "-m", "vit-digits", *options)


def test_bids_become_a_schedule_that_runs(tmp_path: Path) -> None:
    common = ("--output", "schedule.yml", "-sch", "optimal", "--run", "-b", "24", "--report", "report.json")
    with Auction(tmp_path, 3) as auction:
        for rank, kind in enumerate(("slow", "quick", "quick")):
            auction.bid(rank, "-H", f"h{rank}", "-dt", kind, *common)
        ended = auction.wait()
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    schedule = yaml.safe_load((tmp_path / "schedule.yml").read_text())
    assert ended[0].out.startswith((tmp_path / "schedule.yml").read_text())
    layers = {host: last - first + 1 for stage in schedule for host, (first, last) in stage.items()}
    # 240 ms in total: with 90 on each quick device, 60 are left, which take the slow one 120.
    assert "a microbatch of 8 every 0.1 s" in ended[0].err
    assert layers["h1"] > layers["h0"] < layers["h2"]
    report = (tmp_path / "report.json").read_text()
    assert '"items": 24' in report


def test_a_silent_bidder_is_left_out_and_named(tmp_path: Path) -> None:
    with Auction(tmp_path, 4) as auction, contextlib.ExitStack() as stack:
        for rank in range(2):
            auction.bid(rank, "--deadline", "10", "-dt", "quick", "-H", f"h{rank}")

        def connected() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                silent = stack.enter_context(socket.create_connection(("127.0.0.1", auction.port), timeout=1))
                silent.sendall(frame(Hello(2, 4, "h2")))
                return True
            return False

        auction.until(connected, "the auctioneer listens")
        ended = auction.wait()
    assert [end.status for end in ended.values()] == [0, 0], ended
    assert "rank 2 (on h2) made no bid within 10 s, and is left out" in ended[0].err
    assert "rank 3 never appeared within 10 s, and is left out" in ended[0].err
    assert [*yaml.safe_load(ended[0].out)] == [{"h0": [1, 8]}, {"h1": [9, 16]}]
    assert "h1 gets layers 9-16 (stage 1)" in ended[1].err


@pytest.mark.parametrize(
    ("own", "status", "said"),
    [
        (("-H", "h0", "-dt", "quick"), 2, "both named h0"),
        (("-H", "h1", "-dt", "none"), 2, "device_types.yml has quick, slow"),
        (("-H", "h1"), 2, "has 2 device types: give this device's with -dt/--dev-type, one of quick, slow"),
    ],
)
def test_a_bidders_mistake_is_reported_on_both_sides(
    tmp_path: Path, own: tuple[str, ...], status: int, said: str
) -> None:
    with Auction(tmp_path, 2) as auction:
        auction.bid(0, "-H", "h0", "-dt", "quick", "--output", "schedule.yml")
        auction.bid(1, *own)
        ended = auction.wait()
    for end in ended.values():
        assert (end.status, end.out) == (status, "")
        assert said in end.line
    assert not (tmp_path / "schedule.yml").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--filter-bids-chunk", "17"), "must be 1 to 16"),
        (("-d", "0"), "-d/--dev-count 0: must be at least 1"),
        (("-d", "2"), "only 1 device made a bid"),
        (("-D", "elsewhere"), "-D/--data-host elsewhere made no bid"),
        (("--deadline", "0"), "--deadline 0"),
        (("-u", "4"), "has no profile of vit-digits with microbatches of 4"),
        (("--output", "no/where.yml"), "the directory no does not exist"),
        (("-sch", "luck"), "invalid choice"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    with Auction(tmp_path, 1) as auction:
        auction.bid(0, "-H", "h0", "-dt", "quick", *options)
        end = auction.wait()[0]
    assert (end.status, end.out) == (2, "")
    assert said in end.line
