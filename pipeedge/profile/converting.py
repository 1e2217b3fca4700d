"""Convert a results file to an entry of ``models.yml`` or ``device_types.yml``. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from pipeedge.base.files import InputPath, OutputFile, check_outputs
from pipeedge.plan.specs import BYTES_PER_MB, BYTES_PER_SECOND_PER_MBPS
from pipeedge.profile import emitting
from pipeedge.profile.request import DeviceTypeCommand, EmitRequest, ModelsCommand
from pipeedge.profile.result_files import load_results

__all__ = ["convert_to_device_type", "convert_to_model", "given_figures"]

Tell = Callable[[str], None]


def convert_to_model(command: ModelsCommand, tell: Tell) -> None:
    """Add the profiled model to a models file.

    Raises:
        SpecError: A file is invalid, or the model differs from the one there; nothing was written.
        RequestError: The output is the input.
    """
    check_outputs(
        [OutputFile("-o/--output", command.models_file)], [InputPath("-i/--input", command.results)]
    )
    results = load_results(command.results)
    spec = emitting.model_spec(results, str(command.results))
    path, name = command.models_file, results.model_name
    written = emitting.add_model(path, name, spec, overwrite=command.overwrite, lenient=False)
    tell(f"{path}: {name} {'added' if written else 'unchanged, it exists already'}")


def convert_to_device_type(command: DeviceTypeCommand, tell: Tell) -> None:
    """Add the profile to a device type of a device types file.

    Raises:
        SpecError: A file is invalid, or the type has such a profile already; nothing was written.
        RequestError: The output is the input.
    """
    emit = command.emit
    check_outputs(
        [OutputFile("-o/--output", emit.dev_types_file)], [InputPath("-i/--input", command.results)]
    )
    results = load_results(command.results)
    profiles = [(results.model_name, emitting.model_profile(results, str(command.results)))]
    type_name = emit.type_name or ""
    emitting.add_profiles(
        emit.dev_types_file, type_name, profiles, given_figures(emit), overwrite=emit.overwrite
    )
    tell(f"{emit.dev_types_file}: profile of {results.model_name} added to {type_name}")


def given_figures(emit: EmitRequest) -> emitting.Figures:
    """Return the user's figures of a device type, in bytes and bytes per second."""
    return emitting.Figures(
        None if emit.mem_mb is None else emit.mem_mb * BYTES_PER_MB,
        None if emit.bw_mbps is None else emit.bw_mbps * BYTES_PER_SECOND_PER_MBPS,
    )
