"""Parse the command lines of the profiler into requests. Imports nothing heavy, so ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.profile.request import (
    DEFAULT_DEVICE_TYPES,
    DEFAULT_MODELS,
    Command,
    DeviceTypeCommand,
    EmitRequest,
    LinkCommand,
    MeasureRequest,
    ModelsCommand,
    ProfileCommand,
    SensitivityCommand,
    ServeCommand,
    SyntheticCommand,
)
from pipeedge.request.config import ModelRequest
from pipeedge.request.declared import (
    Option,
    Section,
    add_sections,
    given,
    given_options,
    option_of,
    options_of,
)
from pipeedge.request.parsing import OneLineParser, add_common

__all__ = [
    "SECTIONS",
    "device_types_parser",
    "models_parser",
    "parse_device_types",
    "parse_models",
    "parse_profiler",
    "profiler_parser",
]

OWN_FILES = {DEFAULT_MODELS: Path("my-models.yml"), DEFAULT_DEVICE_TYPES: Path("my-types.yml")}
"""Files to write by default, if the file in this directory is a worked example."""

_FROM_RESULTS = Option(
    ("--from-results",), "use the existing results file", dest="from_results", default=False
)
_NO_WARMUP = Option(("--no-warmup",), "run no warm-up pass", dest="no_warmup", default=False)

SECTIONS = (
    Section(
        "what to measure",
        (
            option_of(ModelRequest, "name"),
            replace(
                option_of(ModelRequest, "weights"),
                help="weights (the model's default file in this directory)",
            ),
            option_of(ModelRequest, "device"),
            option_of(ModelRequest, "kernels"),
            *options_of(MeasureRequest, "random_weights", "first", "last", "shapes", "tokens", "dtypes"),
            option_of(MeasureRequest, "batch_sizes"),
        ),
    ),
    Section("how", (option_of(MeasureRequest, "warmup"), _NO_WARMUP), exclusive=True),
    Section("how", options_of(MeasureRequest, "iterations", "by_block", "like")),
    Section(
        "agreement of another number type, or of fewer bits, with float32",
        options_of(MeasureRequest, "agreement_items", "input", "max_image_pixels"),
    ),
    Section("output", (option_of(ProfileCommand, "results"), *options_of(EmitRequest))),
    Section(
        "instead of measuring layers",
        (
            *options_of(SensitivityCommand, "items", "widths"),
            _FROM_RESULTS,
            *options_of(SyntheticCommand),
            *options_of(ServeCommand),
        ),
    ),
)
"""Options of ``profiler.py`` in the order of ``--help``."""
_EMITTING = {"--dev-type", "--mem-MB", "--bw-Mbps", "--measure-link", "--sched-dev-types-file", "--overwrite"}
"""Options that describe the device type to add."""


def parse_profiler(argv: Sequence[str]) -> Command:
    """Parse the command line of ``profiler.py``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = profiler_parser().parse_args(argv)
    flags = {one.flags[-1] for one, _ in given_options(arguments, SECTIONS)}
    model, emitted = given(arguments, ModelRequest), given(arguments, EmitRequest)
    results, synthetic = given(arguments, ProfileCommand), given(arguments, SyntheticCommand)
    if "--serve-link" in flags:
        _refuse_others("--serve-link", flags)
        return ServeCommand(**given(arguments, ServeCommand))
    if flags == {"--measure-link"}:
        return LinkCommand(emitted["measure_link"])
    if "--sensitivity" in flags:
        return _sensitivity(arguments, flags, ModelRequest(**model))
    if "--widths" in flags:
        raise RequestError("--widths has an effect only with --sensitivity N; give that too")
    emit = _emit_request(emitted)
    files = {"--results-yml", "--sched-models-file"}
    if "--synthetic" in flags:
        _refuse_others("--synthetic", flags - {"--from", "--model"} - files - _EMITTING)
        return SyntheticCommand(emit, **synthetic, **results, model_name=model.get("name"))
    if "--from" in flags:
        raise RequestError("--from has an effect only with --synthetic FACTOR; give that too")
    if "--from-results" in flags:
        _refuse_others("--from-results", flags - {"--plot"} - files - _EMITTING)
        return ProfileCommand(None, emit, **results)
    measured = given(arguments, MeasureRequest)
    if "--no-warmup" in flags:
        measured["warmup"] = False
    return ProfileCommand(MeasureRequest(ModelRequest(**model), **measured), emit, **results)


def _sensitivity(arguments: argparse.Namespace, flags: set[str], model: ModelRequest) -> SensitivityCommand:
    allowed = {one.flags[-1] for one in options_of(SensitivityCommand)} - {"--sensitivity"}
    _refuse_others("--sensitivity", flags - allowed - {"--model", "--model-file", "--device"})
    items, files = given(arguments, MeasureRequest), given(arguments, EmitRequest)
    shared = {"models_file": _own_file(DEFAULT_MODELS)} | items | files
    return SensitivityCommand(model=model, **shared, **given(arguments, SensitivityCommand))


def _refuse_others(mode: str, flags: set[str]) -> None:
    stray = sorted(flags - {mode})
    if stray:
        raise RequestError(f"{mode} measures no layers, so it excludes {', '.join(stray)}; leave that out")


def parse_models(argv: Sequence[str]) -> ModelsCommand:
    """Parse the command line of ``profiler_results_to_models.py``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help``.
    """
    fields = given(models_parser().parse_args(argv), ModelsCommand)
    return ModelsCommand(**{"models_file": _own_file(DEFAULT_MODELS)} | fields)


def parse_device_types(argv: Sequence[str]) -> DeviceTypeCommand:
    """Parse the command line of ``profiler_results_to_device_types.py``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help``.
    """
    arguments = device_types_parser().parse_args(argv)
    converted = given(arguments, ModelsCommand)
    overwrite = converted.pop("overwrite", False)
    emit = given(arguments, EmitRequest) | {"type_name": arguments.dev_type, "overwrite": overwrite}
    return DeviceTypeCommand(_emit_request(emit), **converted)


def models_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler_results_to_models.py``."""
    parser = _converter("profiler_results_to_models.py", "Add the profiled model to models.yml.")
    option_of(ModelsCommand, "models_file").add_to(parser)
    parser.examples = (
        parser.prog,
        f"{parser.prog} -i int8.yml",
        f"{parser.prog} -i int8.yml -o models.yml --overwrite     # in place of what is there",
    )
    return parser


def device_types_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler_results_to_device_types.py``."""
    parser = _converter(
        "profiler_results_to_device_types.py", "Add the profile to a device type of device_types.yml."
    )
    parser.add_argument("dev_type", metavar="DEV_TYPE", help="name of the device type that was profiled")
    for name, flags, text in (
        (
            "dev_types_file",
            ("-o", "--output"),
            "device types file to write (device_types.yml, or my-types.yml if that is a worked example)",
        ),
        ("mem_mb", ("-dtm", "--dev-type-mem"), "its memory; required if the type is new"),
        ("bw_mbps", ("-dtb", "--dev-type-bw"), "its bandwidth; required if the type is new"),
    ):
        replace(option_of(EmitRequest, name), flags=flags, help=text).add_to(parser)
    parser.examples = (
        f"{parser.prog} my-board",
        f"{parser.prog} my-board -i int8.yml",
        f"{parser.prog} my-board -o device_types.yml -dtm 4096 -dtb 940     # a new type",
    )
    return parser


def _converter(program: str, description: str) -> OneLineParser:
    parser = OneLineParser(prog=program_name(program), description=description, allow_abbrev=False)
    for one in options_of(ModelsCommand, "results", "overwrite"):
        one.add_to(parser)
    add_common(parser)
    return parser


def _emit_request(fields: dict[str, Any]) -> EmitRequest:
    """Return the request; files that it does not name are the user's own."""
    own: dict[str, Any] = {
        "models_file": _own_file(DEFAULT_MODELS),
        "dev_types_file": _own_file(DEFAULT_DEVICE_TYPES),
    }
    return EmitRequest(**own | fields)


def _own_file(default: Path) -> Path:
    """Return ``default``, or a file of the user's own if that is a worked example in this directory."""
    from pipeedge.plan.spec_writing import EXAMPLE  # takes a while, and --help does without

    try:
        with default.open(encoding="utf-8", errors="replace") as file:
            example = file.readline(len(EXAMPLE)) == EXAMPLE
    except OSError:
        example = False
    return OWN_FILES[default] if example else default


def profiler_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler.py``."""
    program = program_name("profiler.py")
    parser = OneLineParser(
        prog=program,
        description="Measure the layers of a model on this kind of device, for the scheduler.",
        epilog=f"Example: '{program} -m google/vit-base-patch16-224 -dt my-board --bw-Mbps 940' measures "
        "all layers and adds the device type my-board. Exit status: 0 done, 2 the request is wrong, 4 the "
        "other host did not answer, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    add_sections(parser, SECTIONS)
    parser.common = (
        *(
            "--model",
            "--random-weights",
            "--batch-size",
            "--dtype",
            "--tokens",
            "--iterations",
        ),
        *(
            "--dev-type",
            "--bw-Mbps",
            "--mem-MB",
            "--results-yml",
            "--agreement",
            "--sensitivity",
        ),
    )
    parser.examples = (
        f"{program} -m google/vit-base-patch16-224 --random-weights -dt my-board --bw-Mbps 940",
        f"{program} -m MODEL -dt my-board --dtype float32,int8 --agreement 200",
        f"{program} --measure-link pi2     # while pi2 runs it with --serve-link",
    )
    return parser
