"""Measure the energy of this machine, with the first of several sources that works.

    energymon    the package with its native library, for whatever sensors that supports
    RAPL         /sys/class/powercap: counters of processor packages and their memory; they wrap around
    INA sensors  /sys/class/hwmon: watts, integrated over time
    battery      /sys/class/power_supply: watts while it discharges, integrated over time
    none         with the reason for each of them

All of them measure the machine, not a process: ranks on one host read the same joules, which count once.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.observe.metrics import EnergyUse

__all__ = ["EnergyMeter", "Source", "Unavailable", "open_source"]

SYSFS = Path("/sys")


class Unavailable(Exception):  # noqa: N818 - an answer, not a failure of the run
    """A source that this machine lacks or that may not be read; the message gives the reason."""


class Source(ABC):
    """A source of energy measurements."""

    name: str
    """Name for reports."""

    @abstractmethod
    def joules(self, now_s: float) -> float:
        """Return the joules used since opening, at ``now_s``. Never decreases.

        Raises:
            OSError, ValueError: The source can no longer be read.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the source."""


class _Energymon(Source):
    """The ``energymon`` package with its native "default" library."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        try:
            module = load("energymon.context")
            self._monitor: Any = module.EnergyMon()
            self._monitor.init()
        except ImportError:
            raise Unavailable("energymon: the package is not installed") from None
        except (OSError, AttributeError) as error:
            raise Unavailable(f"energymon: {error.args[-1] if error.args else error}") from None
        self.name = f"energymon ({self._monitor.get_source()})"
        self._began_uj = self._monitor.get_uj()

    def joules(self, now_s: float) -> float:
        del now_s
        return float(self._monitor.get_uj() - self._began_uj) * 1e-6

    def close(self) -> None:
        with suppress(OSError):
            self._monitor.finish()


class _Counter:
    """A counter of microjoules that wraps around to 0 at the end of its range."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range_uj = int((zone / "max_energy_range_uj").read_text())
        self._last_uj = self._read()
        self._used_uj = 0

    def joules(self) -> float:
        """Return the joules used since opening. Must be called more often than the counter wraps around."""
        now_uj = self._read()
        if now_uj < self._last_uj:
            self._used_uj += self._range_uj
        self._used_uj += now_uj - self._last_uj
        self._last_uj = now_uj
        return self._used_uj * 1e-6

    def _read(self) -> int:
        return int(self._file.read_text())


class _Rapl(Source):
    """Counters of all processor packages, and of their memory if it has its own."""

    def __init__(self, sysfs: Path) -> None:
        zones = sorted((sysfs / "class" / "powercap").glob("intel-rapl:*"))
        # Subzones (core, uncore) are parts of their package; only memory is not. The same packages show up
        # again under "intel-rapl-mmio", and "psys" is the whole platform, which few machines have.
        wanted = [zone for zone in zones if _text(zone / "name").startswith(("package", "dram"))]
        if not wanted:
            raise Unavailable("RAPL: no counters here")
        try:
            self._counters = [_Counter(zone) for zone in wanted]
        except PermissionError:
            raise Unavailable("RAPL: only root may read energy_uj here") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"RAPL: {error}") from None
        names = [_text(zone / "name") for zone in wanted]
        self.name = f"RAPL ({', '.join(names)})"

    def joules(self, now_s: float) -> float:
        del now_s
        return sum(counter.joules() for counter in self._counters)


class _Integrated(Source):
    """Watts, integrated over time by the trapezoidal rule."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    @abstractmethod
    def watts(self) -> float:
        """Return the present power in watts."""

    def joules(self, now_s: float) -> float:
        now = now_s, self.watts()
        if self._last is not None:
            (then_s, then_w), (_, now_w) = self._last, now
            self._joules += (now_s - then_s) * (then_w + now_w) / 2
        self._last = now
        return self._joules


@dataclass(frozen=True)
class _Channel:
    """A channel of an INA sensor."""

    label: str
    files: tuple[Path, ...]
    """File of microwatts, or files of millivolts and milliamperes."""

    def watts(self) -> float:
        values = [int(file.read_text()) for file in self.files]
        return values[0] * 1e-6 if len(values) == 1 else values[0] * values[1] * 1e-6


_WHOLE_BOARD = ("VDD_IN", "POM_5V_IN", "VIN", "5V_IN", "VDD_5V_IN", "SYS_IN")
"""Labels of channels that measure the whole board, and so include all other channels."""


class _Ina(_Integrated):
    """Texas Instruments' INA sensors, as on many boards."""

    def __init__(self, sysfs: Path) -> None:
        super().__init__()
        sensors = [
            sensor
            for sensor in sorted((sysfs / "class" / "hwmon").glob("hwmon*"))
            if _text(sensor / "name").startswith("ina")
        ]
        channels = [channel for sensor in sensors for channel in _channels(sensor)]
        whole = [channel for channel in channels if channel.label.upper() in _WHOLE_BOARD]
        self._channels = whole[:1] or channels
        if not self._channels:
            raise Unavailable("hwmon: no INA power sensor here")
        try:
            self.watts()
        except (OSError, ValueError) as error:
            raise Unavailable(f"hwmon: {error}") from None
        self.name = f"hwmon ({', '.join(channel.label for channel in self._channels)})"

    def watts(self) -> float:
        return sum(channel.watts() for channel in self._channels)


def _channels(sensor: Path) -> Iterator[_Channel]:
    chip = _text(sensor / "name")
    powers = sorted(sensor.glob("power*_input"))
    for power in powers:
        yield _Channel(_text(sensor / f"{power.name.split('_')[0]}_label") or chip, (power,))
    if powers:
        return
    # A sensor with several channels reports no power, but the voltage and current of each channel.
    for current in sorted(sensor.glob("curr*_input")):
        number = current.name.removeprefix("curr").removesuffix("_input")
        voltage = sensor / f"in{number}_input"
        if voltage.exists():
            yield _Channel(_text(sensor / f"in{number}_label") or f"{chip}.{number}", (voltage, current))


class _Battery(_Integrated):
    """The battery of an unplugged machine, while it discharges."""

    def __init__(self, sysfs: Path) -> None:
        super().__init__()
        supplies = sorted((sysfs / "class" / "power_supply").glob("*"))
        self._batteries = [supply for supply in supplies if _text(supply / "type") == "Battery"]
        if not self._batteries:
            raise Unavailable("battery: none here")
        try:
            self.watts()
        except (OSError, ValueError) as error:
            raise Unavailable(f"battery: {error}") from None
        self.name = f"battery ({', '.join(battery.name for battery in self._batteries)})"

    def watts(self) -> float:
        return sum(_battery_watts(battery) for battery in self._batteries)


def _battery_watts(battery: Path) -> float:
    status = _text(battery / "status")
    if status != "Discharging":
        raise ValueError(f"{battery.name} is {status.lower() or 'in an unknown state'}, not discharging")
    power = battery / "power_now"
    if power.exists():
        return abs(int(power.read_text())) * 1e-6
    microamperes = abs(int((battery / "current_now").read_text()))
    return microamperes * int((battery / "voltage_now").read_text()) * 1e-12


def open_source(
    sysfs: Path = SYSFS, load: Callable[[str], Any] = importlib.import_module
) -> tuple[Source | None, tuple[str, ...]]:
    """Open the first source that works; also return why those before it do not.

    Args:
        sysfs: Directory where the kernel exposes its sensors.
        load: Function that imports a module by its name.
    """
    kinds: tuple[Callable[[], Source], ...] = (
        lambda: _Energymon(load),
        lambda: _Rapl(sysfs),
        lambda: _Ina(sysfs),
        lambda: _Battery(sysfs),
    )
    why_not: list[str] = []
    for kind in kinds:
        try:
            return kind(), tuple(why_not)
        except Unavailable as error:
            why_not.append(" ".join(str(error).split()))
    return None, tuple(why_not)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


_SAMPLES = 4096


class EnergyMeter:
    """Samples of an energy source, between which the energy of any moment is interpolated.

    Args:
        source: Source to read; None measures nothing.
        why_not: Reasons why other sources do not work.
    """

    def __init__(self, source: Source | None, why_not: Sequence[str] = ()) -> None:
        self._source = source
        self._why_not = tuple(why_not)
        self._samples: list[tuple[float, float]] = []

    @property
    def measures(self) -> bool:
        """Whether there is anything to read."""
        return self._source is not None

    def sample(self, now_s: float) -> None:
        """Read the source. If that fails, stop measuring and discard all samples."""
        if self._source is None:
            return
        try:
            joules = self._source.joules(now_s)
        except (OSError, ValueError) as error:
            self._why_not = (*self._why_not, f"{self._source.name}: lost during the run ({error})")
            self.close()
            return
        self._samples.append((now_s, joules))
        if len(self._samples) == _SAMPLES:
            # Keep the first and the last sample, and every other one between them.
            self._samples = [*self._samples[:-1:2], self._samples[-1]]

    def joules_at(self, moment_s: float) -> float:
        """Return the joules used by ``moment_s``, interpolated between samples; 0 if nothing is measured."""
        samples = self._samples
        if not samples:
            return 0.0
        place = bisect_left(samples, (moment_s,))
        if place == 0:
            return samples[0][1]
        if place == len(samples):
            return samples[-1][1]
        (then_s, then_j), (next_s, next_j) = samples[place - 1], samples[place]
        return then_j + (moment_s - then_s) / (next_s - then_s) * (next_j - then_j)

    def use(self) -> EnergyUse:
        """Return the energy used between the first sample and the last."""
        if self._source is None or len(self._samples) < 2:
            return EnergyUse(None, None, None, self._why_not)
        (began_s, began_j), (ended_s, ended_j) = self._samples[0], self._samples[-1]
        return EnergyUse(self._source.name, ended_j - began_j, ended_s - began_s, self._why_not)

    def close(self) -> None:
        """Close the source and discard all samples."""
        if self._source is not None:
            self._source.close()
        self._source = None
        self._samples = []
