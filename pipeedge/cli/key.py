"""``pipeedge-key``: make the membership file of a cluster."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.files import write_secret
from pipeedge.base.guard import guard
from pipeedge.base.program import program_name
from pipeedge.base.streams import end, print_notice
from pipeedge.base.wording import printable
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.request.parsing import OneLineParser, add_common, path
from pipeedge.transport.new_key import make_key

__all__ = ["key_parser", "main"]

PROGRAM = "pipeedge-key"


def key_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-key``."""
    parser = OneLineParser(
        prog=program_name(PROGRAM),
        description="Make a membership file: a private key and its certificate. Ranks that are given the "
        "same file accept each other and nobody else, and encrypt what they send. Whoever can read the file "
        "is a member.",
        epilog=f"Example: '{program_name(PROGRAM)} cluster.pem', then copy the file to every machine "
        "(scp -p) and start every rank with '--key cluster.pem'. To replace a key, make another file; to "
        "exclude a machine, give the new file to the others only.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", type=path, metavar="FILE", help="new file, which only you can read; never replaced"
    )
    add_common(parser)
    return parser


def main() -> NoReturn:
    """Make the file that the command line asks for, and end the process."""
    program = program_name(PROGRAM)
    end(program, guard(program, _make, verbose="--verbose" in sys.argv))


def _make() -> None:
    file = key_parser().parse_args(sys.argv[1:]).file
    if file == STANDARD_INPUT:  # as it would be for --key
        raise RequestError("FILE -: a key is not printed; name a new file, such as cluster.pem")
    write_secret(file, make_key(), "FILE")
    print_notice(
        f"{printable(file)}: a new key. Copy it to every machine (scp -p), and start every rank with --key"
    )
