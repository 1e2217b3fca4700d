"""Test energy sources on a fake sysfs, and their figures."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.observe.energy import EnergyMeter, Source, open_source


def missing(name: str) -> Any:
    """Hide the native library, which this machine may have."""
    raise ImportError(name)


def write(root: Path, **files: object) -> None:
    for name, value in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def zone(sysfs: Path, number: str, name: str, microjoules: int, range_uj: int = 1_000_000) -> Path:
    directory = sysfs / "class" / "powercap" / f"intel-rapl:{number}"
    write(directory, name=name, energy_uj=microjoules, max_energy_range_uj=range_uj)
    return directory


def opened(sysfs: Path) -> Source:
    source, _ = open_source(sysfs, missing)
    assert source is not None
    return source


def test_without_any_source_each_says_why(tmp_path: Path) -> None:
    source, why_not = open_source(tmp_path, missing)
    assert source is None
    assert [why.split(":")[0] for why in why_not] == ["energymon", "RAPL", "hwmon", "battery"]
    use = EnergyMeter(source, why_not).use()
    assert (use.source, use.joules, use.mean_watts) == (None, None, None)
    assert use.why_not == why_not


def test_packages_and_memory_count_but_not_the_parts_of_a_package(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 500_000)
    other = zone(tmp_path, "1", "package-1", 0)
    core = zone(tmp_path, "0:0", "core", 0)
    memory = zone(tmp_path, "0:1", "dram", 100)
    platform = zone(tmp_path, "2", "psys", 0)
    source = opened(tmp_path)
    assert source.name == "RAPL (package-0, dram, package-1)"
    assert source.joules(0) == 0
    write(package, energy_uj=700_000)
    write(other, energy_uj=50_000)
    write(core, energy_uj=150_000)
    write(platform, energy_uj=999_999)
    write(memory, energy_uj=10_100)
    assert source.joules(1) == pytest.approx(0.2 + 0.05 + 0.01)


@given(st.lists(st.integers(0, 999_999), min_size=1, max_size=30), st.integers(0, 999_999))
def test_counters_wrap_around(tmp_path_factory: pytest.TempPathFactory, steps: list[int], start: int) -> None:
    sysfs = tmp_path_factory.mktemp("sys")
    package = zone(sysfs, "0", "package-0", start, range_uj=1_000_000)
    source = opened(sysfs)
    total = start
    for step in steps:
        total += step
        write(package, energy_uj=total % 1_000_000)
        assert source.joules(0) == pytest.approx((total - start) * 1e-6)


def test_counters_that_only_root_may_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "0", "package-0", 0)
    read_text = Path.read_text

    def refuse(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    source, why_not = open_source(tmp_path, missing)
    assert source is None
    assert "RAPL: only root may read energy_uj here" in why_not


def sensor(sysfs: Path, number: int, **files: object) -> Path:
    directory = sysfs / "class" / "hwmon" / f"hwmon{number}"
    write(directory, **files)
    return directory


def test_watts_of_sensors_are_integrated(tmp_path: Path) -> None:
    first = sensor(tmp_path, 0, name="ina226", power1_input=2_000_000)
    sensor(tmp_path, 1, name="coretemp", power1_input=99_000_000)
    second = sensor(
        tmp_path, 2, name="ina3221", in1_input=5000, curr1_input=200, in2_input=3300, curr2_input=0
    )
    source = opened(tmp_path)
    assert source.name.startswith("hwmon (")
    assert source.joules(10.0) == 0
    assert source.joules(12.0) == pytest.approx(2 * (2 + 1))
    write(first, power1_input=4_000_000)
    assert source.joules(14.0) == pytest.approx(6 + 2 * (3 + 5) / 2)
    write(second, curr1_input=400)
    assert source.joules(15.0) == pytest.approx(14 + (5 + 6) / 2)


def test_a_channel_of_the_whole_board_goes_before_its_parts(tmp_path: Path) -> None:
    sensor(
        tmp_path,
        0,
        name="ina3221",
        in1_input=5000,
        curr1_input=1000,
        in1_label="VDD_CPU",
        in2_input=19000,
        curr2_input=1000,
        in2_label="VDD_IN",
    )
    source = opened(tmp_path)
    assert source.name == "hwmon (VDD_IN)"
    source.joules(0.0)
    assert source.joules(1.0) == pytest.approx(19)


def battery(sysfs: Path, **files: object) -> Path:
    directory = sysfs / "class" / "power_supply" / "BAT0"
    write(directory, type="Battery", **files)
    return directory


@pytest.mark.parametrize(
    "files", [{"power_now": 7_500_000}, {"current_now": -500_000, "voltage_now": 15_000_000}]
)
def test_a_battery_counts_while_it_discharges(tmp_path: Path, files: dict[str, int]) -> None:
    write(tmp_path / "class" / "power_supply" / "AC", type="Mains", online=0)
    directory = battery(tmp_path, status="Discharging", **files)
    source = opened(tmp_path)
    assert source.name == "battery (BAT0)"
    meter = EnergyMeter(source)
    meter.sample(0.0)
    meter.sample(2.0)
    assert meter.use().joules == pytest.approx(15)
    assert meter.use().mean_watts == pytest.approx(7.5)
    write(directory, status="Charging")
    meter.sample(4.0)
    use = meter.use()
    assert (use.source, use.joules) == (None, None)
    assert "lost during the run (BAT0 is charging" in use.why_not[-1]
    assert not meter.measures


def test_charging_battery_gives_no_energy_reading(tmp_path: Path) -> None:
    battery(tmp_path, status="Full", power_now=0)
    source, why_not = open_source(tmp_path, missing)
    assert source is None
    assert why_not[-1] == "battery: BAT0 is full, not discharging"


def test_the_native_library_goes_before_all_others(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)

    class Monitor:
        microjoules = 1_000_000
        finished = False

        def init(self) -> None:
            pass

        def get_source(self) -> str:
            return "an instrument"

        def get_uj(self) -> int:
            return self.microjoules

        def finish(self) -> None:
            Monitor.finished = True

    module = types.SimpleNamespace(EnergyMon=Monitor)
    source, why_not = open_source(tmp_path, lambda name: module)
    assert source is not None
    assert why_not == ()
    assert source.name == "energymon (an instrument)"
    Monitor.microjoules = 3_500_000
    assert source.joules(0) == pytest.approx(2.5)
    source.close()
    assert Monitor.finished


def test_a_native_library_that_fails_makes_room_for_the_next(tmp_path: Path) -> None:
    def refuse() -> None:
        raise FileNotFoundError("Failed to find library by name: energymon-default")

    module = types.SimpleNamespace(EnergyMon=refuse)
    zone(tmp_path, "0", "package-0", 0)
    source, why_not = open_source(tmp_path, lambda name: module)
    assert source is not None
    assert source.name == "RAPL (package-0)"
    assert why_not == ("energymon: Failed to find library by name: energymon-default",)


class Ramp(Source):
    """3 watts."""

    name = "ramp"

    def joules(self, now_s: float) -> float:
        return 3 * now_s


def test_between_samples_energy_is_interpolated() -> None:
    meter = EnergyMeter(Ramp())
    assert meter.joules_at(5.0) == 0
    for second in range(10_000):
        meter.sample(float(second))
    assert meter.joules_at(-1.0) == 0
    assert meter.joules_at(1234.5) == pytest.approx(3 * 1234.5)
    assert meter.joules_at(1e9) == pytest.approx(3 * 9999)
    use = meter.use()
    assert (use.joules, use.seconds) == (pytest.approx(29997), 9999)
