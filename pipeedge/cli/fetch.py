"""``pipeedge fetch`` and ``save_model_weights.py``: the weights of the known models, as files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.schedule import DTYPES
from pipeedge.base.streams import end
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.registry import MODEL_NAMES, SHIPPED
from pipeedge.models.weights.download import save_weights
from pipeedge.request.parsing import OneLineParser, add_common, nonempty, path

__all__ = ["fetch_parser", "main", "parse_fetch"]

PROGRAM = "save_model_weights.py"


def fetch_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge fetch``."""
    parser = OneLineParser(
        prog=program_name(PROGRAM),
        description="Fetch the weights of the known models, or write random ones, under their default file "
        "names; or fetch repositories of the Hugging Face hub.",
    )
    parser.add_argument(
        "-m",
        "--model",
        "--model-name",
        dest="model_name",
        type=nonempty,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="models to save (default: all): "
        + ", ".join(name for name in MODEL_NAMES if name not in SHIPPED)
        + "; or ORG/NAME, repositories of the Hugging Face hub",
    )
    parser.add_argument(
        "-o",
        "--output-dir",
        type=path,
        metavar="DIR",
        help="directory to save in (default: the current one; for repositories, the hub's local cache alone)",
    )
    parser.add_argument(
        "--random", action="store_true", help="write random weights of the right shapes; needs no network"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the random weights (default: 0)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES[1:],
        help="also store the weights in this number type, next to the originals: a device that runs with the "
        "same --dtype then only needs that file",
    )
    add_common(parser)
    program = program_name(PROGRAM)
    parser.examples = (
        f"{program} -m google/vit-base-patch16-224",
        f"{program} -m google/vit-base-patch16-224 --dtype int8     # a file that is a quarter as large, too",
        f"{program} -m ORG/NAME                                     # of the Hugging Face hub",
    )
    return parser


def parse_fetch(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line of ``pipeedge fetch``.

    Raises:
        RequestError: An option or a value is wrong.
        SystemExit: After ``--help`` or ``--version``.
    """
    parser = fetch_parser()
    args = parser.parse_args(argv)
    if args.seed is not None and not args.random:
        parser.error("--seed has an effect only with --random; give that too")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must be at least 0")
    return args


def main() -> NoReturn:
    """Save the files that the command line asks for, and end the process."""
    program = program_name(PROGRAM)
    end(program, guard(program, _fetch, verbose=is_verbose(sys.argv)))


def _fetch() -> None:
    args = parse_fetch(sys.argv[1:])
    seed = (args.seed or 0) if args.random else None
    dtype = None if args.dtype is None else find_dtype(args.dtype)
    try:
        save_weights(args.model_name, args.output_dir, random_seed=seed, dtype=dtype)
    except KeyboardInterrupt:
        print("interrupted; the downloaded part is kept, and the same command continues", file=sys.stderr)
        raise
