"""Make the files that the user asked for from results: models, device types and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeedge.base.errors import RequestError
from pipeedge.base.files import OutputFile, check_writable, named_output
from pipeedge.base.machine import MemoryBudget
from pipeedge.base.program import program_name
from pipeedge.plan.spec_files import load_device_types
from pipeedge.plan.specs import ModelProfile, ModelSpec
from pipeedge.profile import emitting
from pipeedge.profile.converting import given_figures
from pipeedge.profile.network import measure_link, parse_place
from pipeedge.profile.plotting import check_plot, save_plot
from pipeedge.profile.request import DEFAULT_DEVICE_TYPES, DEFAULT_MODELS, EmitRequest
from pipeedge.profile.results import ProfileResults

__all__ = ["Products", "chosen_figures"]

Tell = Callable[[str], None]


def chosen_figures(emit: EmitRequest, tell: Tell) -> emitting.Figures:
    """Return the figures that the user gave, with the bandwidth measured if requested."""
    figures = given_figures(emit)
    if emit.measure_link is None:
        return figures
    link = measure_link(*parse_place(emit.measure_link))
    tell(f"link         {emit.measure_link}: {link}")
    return replace(figures, bw_bytes_per_s=link.bw_bytes_per_s)


@dataclass(frozen=True)
class Products:
    """Files to make from results."""

    emit: EmitRequest
    tell: Tell
    """Called with each line for the user."""
    warn: Tell
    """Called with each warning."""

    def outputs(self) -> Iterator[OutputFile]:
        """Yield the files; all but the plot may exist and are then updated."""
        emit = self.emit
        if emit.plot is not None:
            yield OutputFile("--plot", emit.plot)
        if emit.type_name is not None:
            yield OutputFile("-sm/--sched-models-file", emit.models_file)
            yield OutputFile("-sdt/--sched-dev-types-file", emit.dev_types_file)

    def check(self, results: Mapping[Path, ProfileResults]) -> str | None:
        """Check that the files can be made; return a line about an entry that will be kept, if any.

        Args:
            results: The results to come, whose times do not matter, by their files.

        Raises:
            PipeEdgeError: A file cannot be made.
        """
        emit = self.emit
        if emit.plot is not None:
            check_plot(emit.plot)
            check_writable(emit.plot, "--plot")
        if emit.type_name is None:
            return None
        check_writable(emit.models_file, "-sm/--sched-models-file")
        check_writable(emit.dev_types_file, "-sdt/--sched-dev-types-file")
        name, spec = _model(results)
        kept = emitting.check_model(emit.models_file, name, spec, overwrite=emit.overwrite, lenient=True)
        old = emitting.check_profile(
            emit.dev_types_file,
            emit.type_name,
            _profiles(results),
            given_figures(emit),
            overwrite=emit.overwrite,
        )
        if old is None and emit.bw_mbps is None and emit.measure_link is None:
            raise RequestError(
                f"{emit.dev_types_file}: device type {emit.type_name} is new; give its bandwidth (--bw-Mbps) "
                "or have it measured (--measure-link)"
            )
        return kept

    def write(
        self,
        results: Mapping[Path, ProfileResults],
        figures: emitting.Figures,
        free_bytes: int,
        replaced: frozenset[Path],
    ) -> None:
        """Write the files, after checking again that they may be written.

        Args:
            results: Complete results, by their files.
            figures: Figures of the device type.
            free_bytes: Free memory of this machine.
            replaced: Outputs that exist and are replaced.
        """
        emit = self.emit
        if emit.type_name is not None:
            kept = self.check(results)
            if kept is not None:
                self.warn(kept)
            self._add_model(results)
            self._add_device_type(emit.type_name, results, figures, free_bytes)
        if emit.plot is not None:
            save_plot(emit.plot, next(iter(results.values())))
            self.tell(f"plot         {named_output(emit.plot, replaced)}")

    def _add_model(self, results: Mapping[Path, ProfileResults]) -> None:
        path = self.emit.models_file
        name, spec = _model(results)
        written = emitting.add_model(path, name, spec, overwrite=self.emit.overwrite, lenient=True)
        self.tell(f"model        {path}: {name} {'added' if written else 'unchanged'}")

    def _add_device_type(
        self,
        type_name: str,
        results: Mapping[Path, ProfileResults],
        figures: emitting.Figures,
        free_bytes: int,
    ) -> None:
        path = self.emit.dev_types_file
        if figures.mem_bytes is None and type_name not in (load_device_types(path) if path.exists() else ()):
            one = next(iter(results.values()))
            figures = replace(figures, mem_bytes=self._usable_bytes(one, free_bytes))
        idle_w = max((each.idle_w for each in results.values() if each.idle_w is not None), default=None)
        figures = replace(figures, idle_w=idle_w)
        emitting.add_profiles(path, type_name, _profiles(results), figures, overwrite=self.emit.overwrite)
        self.tell(f"device type  {path}: {type_name}")
        options = [
            f"{option} {file}"
            for option, file, default in (
                ("-sm", self.emit.models_file, DEFAULT_MODELS),
                ("-sdt", path, DEFAULT_DEVICE_TYPES),
            )
            if file != default
        ]
        if options:
            programs = f"{program_name('sched-pipeline')} and {program_name('runtime.py')}"
            self.tell(f"use          {programs} with {' '.join(options)}")

    def _usable_bytes(self, results: ProfileResults, free_bytes: int) -> float:
        """Return the memory that this machine can spare for a stage.

        Raises:
            RequestError: There is none.
        """
        budget = MemoryBudget(
            free_bytes=_free_bytes(results.device, free_bytes),
            process_bytes=int(results.process_bytes or 0),
        )
        if not budget.usable_bytes:
            raise RequestError(
                f"this machine has no memory to spare ({budget}); give the memory with --mem-MB"
            )
        self.tell(f"mem_MB       {budget}")
        return float(budget.usable_bytes)


def _model(results: Mapping[Path, ProfileResults]) -> tuple[str, ModelSpec]:
    """Return the name and the entry of the model; the largest microbatch looks up most words of a table."""
    path, largest = max(results.items(), key=lambda item: item[1].batch_size)
    return largest.model_name, emitting.model_spec(largest, str(path))


def _profiles(results: Mapping[Path, ProfileResults]) -> list[tuple[str, ModelProfile]]:
    """Return the profile of each results file, with the name of its model."""
    return [(each.model_name, emitting.model_profile(each, str(path))) for path, each in results.items()]


def _free_bytes(device: str | None, host_bytes: int) -> int:
    """Return the free memory of the device that holds the weights of a stage."""
    if device is not None and device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    return host_bytes
