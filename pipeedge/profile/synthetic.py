"""Add a device type whose times are a multiple of another's (``--synthetic``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.errors import SpecError
from pipeedge.base.files import InputPath, OutputFile, check_outputs
from pipeedge.base.wording import figure
from pipeedge.plan.spec_files import load_device_types
from pipeedge.plan.specs import ModelProfile
from pipeedge.profile import emitting
from pipeedge.profile.products import chosen_figures
from pipeedge.profile.request import SyntheticCommand
from pipeedge.profile.result_files import load_results

__all__ = ["synthesize"]


@dataclass(frozen=True)
class _Origin:
    """Profiles to scale."""

    name: str
    """Device type or results file that they come from."""
    profiles: Mapping[str, Sequence[ModelProfile]]
    """Profiles by model."""
    figures: emitting.Figures
    """Figures for a new device type whose own are not given."""


def synthesize(command: SyntheticCommand, tell: Callable[[str], None]) -> None:
    """Add a device type whose times are a multiple of another's.

    Raises:
        PipeEdgeError: The request cannot be carried out; nothing was written.
    """
    emit = command.emit
    path, factor = emit.dev_types_file, command.factor
    if command.base is None:
        check_outputs(
            [OutputFile("-sdt/--sched-dev-types-file", path)], [InputPath("--synthetic", command.results)]
        )
    figures = chosen_figures(emit, tell)
    origin = _from_results(command) if command.base is None else _from_type(command, command.base)
    known = origin.profiles
    if command.model_name is not None:
        if command.model_name not in known:
            there = ", ".join(known) or "none"
            raise SpecError(f"{origin.name} has no profile of {command.model_name}; it has {there}")
        known = {command.model_name: known[command.model_name]}
    if not any(known.values()):
        raise SpecError(f"{path}: {origin.name} has no profile to scale")
    emitting.add_profiles(
        path,
        emit.type_name or "",
        [
            (model, _marked(emitting.scaled(profile, factor), origin.name, factor))
            for model, each in known.items()
            for profile in each
        ],
        emitting.Figures(
            origin.figures.mem_bytes if figures.mem_bytes is None else figures.mem_bytes,
            origin.figures.bw_bytes_per_s if figures.bw_bytes_per_s is None else figures.bw_bytes_per_s,
        ),
        overwrite=emit.overwrite,
    )
    tell(
        f"device type  {path}: {emit.type_name}, {figure(factor, 6)} times as long as {origin.name} "
        f"({', '.join(known)})"
    )


def _from_results(command: SyntheticCommand) -> _Origin:
    source = str(command.results)
    if not command.results.exists():
        raise SpecError(
            f"{source}: no such file; name a device type of {command.emit.dev_types_file} with --from, or "
            "profile first"
        )
    results = load_results(command.results)
    profile = emitting.model_profile(results, source)
    return _Origin(source, {results.model_name: (profile,)}, emitting.Figures())


def _from_type(command: SyntheticCommand, base: str) -> _Origin:
    path = command.emit.dev_types_file
    types = load_device_types(path)
    if base not in types:
        raise SpecError(f"{path}: no device type {base}; the file has {', '.join(types)}")
    kind = types[base]
    new = command.emit.type_name not in types
    figures = emitting.Figures(kind.mem_bytes, kind.bw_bytes_per_s) if new else emitting.Figures()
    return _Origin(base, kind.profiles, figures)


def _marked(profile: ModelProfile, source: str, factor: float) -> ModelProfile:
    """Return a profile that says where it comes from."""
    return replace(profile, extra={**profile.extra, "synthetic": {"from": source, "factor": factor}})
