"""Files of a run: input, output and metrics, as part of its request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeedge.base.errors import InputError, RequestError
from pipeedge.request.declared import PORT, Check, ObeyedBy, at_least, check_options, option
from pipeedge.request.parsing import nonempty, path
from pipeedge.request.scheduling import DEFAULT_WINDOW_SIZE

__all__ = [
    "CSV_FILE_MODES",
    "DATASET_NAMES",
    "DEFAULT_ITEMS",
    "DEFAULT_MAX_IMAGE_PIXELS",
    "STANDARD_INPUT",
    "STANDARD_OUTPUT",
    "InputRequest",
    "MetricsRequest",
    "OutputRequest",
]

DEFAULT_ITEMS = 64
STANDARD_INPUT = STANDARD_OUTPUT = Path("-")
DEFAULT_MAX_IMAGE_PIXELS = 89_478_485
"""Largest image to decode, in pixels; decoding one of this size takes up to a gigabyte of memory."""
DATASET_NAMES = ("CoLA", "ImageNet")
CSV_FILE_MODES = ("x", "w", "a")

_REPORT_SUFFIXES = (".json", ".html")
_ROWS_OF_A_REPORT = 400
"""Rows of activities kept for a report: more than a screen can show."""
_ROWS_OF_A_PAGE = 4000
"""Rows of activities kept for a page, which can be zoomed."""
_ROWS_OF_A_TRACE = 20_000


@dataclass(frozen=True)
class InputRequest:
    """The items to run; without ``paths`` and ``dataset_name``, the input that ships with the package."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.DATA_RANK

    paths: tuple[Path, ...] = option(
        (),
        "--input",
        type=path,
        nargs="+",
        metavar="PATH",
        help="image files or folders, a .txt with one sentence per line, a .csv, .tsv or .jsonl, a .npz of "
        "the model's inputs, or - for standard input; all items are run (the shipped input, repeated)",
    )
    """Files, folders or patterns, all of one kind. ``STANDARD_INPUT`` alone means text, or one image."""
    text_column: str | None = option(
        None,
        "--text-column",
        type=nonempty,
        metavar="NAME|N",
        help="column of a .csv or .tsv, or key of a .jsonl, that holds the sentences: its name, or its "
        "number in a file without a header (text or sentence, or the only one)",
    )
    text_pair_column: str | None = option(
        None,
        "--text-pair-column",
        type=nonempty,
        metavar="NAME|N",
        help="column that holds the second sentence of each pair, for models that compare two (the usual one "
        "beside text, sentence1, query, question or premise)",
    )
    dataset_name: str | None = option(
        None,
        "--dataset-name",
        choices=DATASET_NAMES,
        help="run items of a data set",
    )
    dataset_root: Path | None = option(
        None,
        "--dataset-root",
        type=path,
        metavar="DIR",
        help="directory of its files",
    )
    """Directory of the data set's files (for ImageNet, its archives or an image folder)."""
    dataset_split: str | None = option(
        None,
        "--dataset-split",
        metavar="NAME",
        help="part of it to run (train)",
    )
    """Split: ``train``, ``val``/``validation`` or ``test``; None means ``train``, as in the original."""
    dataset_indices_file: Path | None = option(
        None,
        "--dataset-indices-file",
        type=path,
        help="items to run, one index per line",
    )
    dataset_shuffle: bool = option(False, "--dataset-shuffle", help="take the items in random order")
    seed: int = option(
        0,
        "--seed",
        type=int,
        check=Check(lambda seed: seed >= 0, "must not be negative"),
        help="seed of the random order, and of the tokens of answers ({default})",
    )
    max_items: int | None = option(
        None,
        "-b/--batch-size",
        type=int,
        check=at_least(1),
        help="total number of items to run (64, or all of --input)",
    )
    """Largest number of items; None means all of ``paths``, all of ``dataset_indices_file``, or 64."""
    skip_bad_input: bool = option(
        False,
        "--skip-bad-input",
        help="skip and report images that cannot be read, and rows with an empty sentence or another mistake",
    )
    max_image_pixels: int = option(
        DEFAULT_MAX_IMAGE_PIXELS,
        "--max-image-pixels",
        type=int,
        check=at_least(1),
        help="refuse larger images, which would fill the memory ({default})",
    )
    companion_directory: Path | None = None
    """Additional directory that may hold a tokenizer or image processor: that of the weights file."""

    def __post_init__(self) -> None:
        check_options(self, InputError)
        if STANDARD_INPUT in self.paths and len(self.paths) > 1:
            raise InputError("--input -: standard input cannot be combined with files")
        if self.text_column is not None and not self.paths:
            raise InputError("--text-column needs --input FILE.csv")
        if self.text_pair_column is not None and self.text_column is None:
            raise InputError("--text-pair-column needs --text-column, for the first sentence of each pair")
        numbers = [column.isdecimal() for column in self.text_columns]
        if any(numbers) and not all(numbers):
            raise InputError("--text-column and --text-pair-column: give two names or two numbers")
        if self.paths and self.dataset_name is not None:
            raise InputError("give either --input or --dataset-name, not both")
        if self.dataset_name is None:
            self._refuse_without_dataset()

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns of the sentences, and of second sentences, as far as the user named them."""
        return tuple(column for column in (self.text_column, self.text_pair_column) if column is not None)

    def _refuse_without_dataset(self) -> None:
        set_without_effect = {
            "--dataset-root": self.dataset_root is not None,
            "--dataset-split": self.dataset_split is not None,
            "--dataset-indices-file": self.dataset_indices_file is not None,
            "--dataset-shuffle": self.dataset_shuffle,
        }
        for flag, is_set in set_without_effect.items():
            if is_set:
                raise InputError(f"{flag} needs --dataset-name {{{','.join(DATASET_NAMES)}}}")


@dataclass(frozen=True)
class OutputRequest:
    """Files that a run writes, and what it prints."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.DATA_RANK

    results: Path | None = option(
        None,
        "--output",
        type=path,
        help="predictions, one row per item: .csv, .jsonl, .npz or .parquet; or - for lines of JSON on "
        "standard output (-, if --input is standard input)",
    )
    """Path of the results, or ``STANDARD_OUTPUT``; see ``RunRequest.results``."""
    resume: bool = option(
        False,
        "--resume",
        help="go on from the rows that a run with the same --output, which ended early, has left",
    )
    report: Path | None = option(
        None,
        "--report",
        type=path,
        check=Check(
            lambda file: file.suffix in _REPORT_SUFFIXES,
            "a report is FILE.json, for programs, or FILE.html, for people",
        ),
        help="report of what ran, how fast, and where the time went: .json, or .html for a page",
    )
    trace: Path | None = option(
        None,
        "--trace",
        type=path,
        metavar="FILE.json",
        check=Check(lambda file: file.suffix == ".json", "a trace is JSON; name it FILE.json"),
        help="activities of every thread of every rank, for ui.perfetto.dev or chrome://tracing",
    )
    quiet: bool = option(False, "--quiet", obeyed_by=ObeyedBy.EACH, help="print neither progress nor tables")
    check_items: int = option(
        0,
        "--check",
        type=int,
        check=Check(lambda items: items >= 0, "the number of items must not be negative"),
        help="afterwards, compute the first N items or answers in float32 on the data rank, one block at a "
        "time, and print how often the class or token is the same and how far the values differ",
    )

    @property
    def record_rows(self) -> int:
        """Number of activities to keep on record for each thread."""
        if self.trace is not None:
            return _ROWS_OF_A_TRACE
        is_page = self.report is not None and self.report.suffix == ".html"
        return _ROWS_OF_A_PAGE if is_page else _ROWS_OF_A_REPORT

    def __post_init__(self) -> None:
        check_options(self)
        if self.resume and self.results in (None, STANDARD_OUTPUT):
            raise RequestError("--resume needs --output FILE, which an earlier run was to write")
        if self.resume and self.check_items:
            raise RequestError("--resume cannot be combined with --check, whose items may be written already")


@dataclass(frozen=True)
class MetricsRequest:
    """Measurements for each microbatch, and where they are written."""

    directory: Path | None = option(
        None,
        "--metrics-dir",
        type=path,
        metavar="DIR",
        help="write a CSV file for each of shard, recv, send, quant_encode, quant_decode, output: a line "
        "for each microbatch, with its time, work, energy and accuracy, and those of the last window and of "
        "the whole run",
    )
    csv_file_mode: str = option(
        "x",
        "--csv-file-mode",
        choices=CSV_FILE_MODES,
        variable="CSV_FILE_MODE",
        help="what to do with existing files: x refuse, w replace, a append ({default}, or CSV_FILE_MODE)",
    )
    prometheus_port: int | None = option(
        None,
        "--prometheus-port",
        type=int,
        metavar="PORT",
        check=PORT,
        help="serve the same metrics to Prometheus, at the address of the links' interface",
    )
    window_size: int = DEFAULT_WINDOW_SIZE
    """Number of microbatches in a window: that of ``CompressionRequest``."""

    def __post_init__(self) -> None:
        check_options(self)
