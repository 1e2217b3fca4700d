"""``pipeedge-key``: make the membership file of a cluster, and let machines join it."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.files import write_secret
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end, print_notice, print_result
from pipeedge.base.wording import printable
from pipeedge.nodes.inviting import invite, make_default_key
from pipeedge.nodes.options import invite_sections, parse_invite
from pipeedge.request.declared import add_sections
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.request.parsing import OneLineParser, add_common, path
from pipeedge.transport.authority import make_cluster_key

__all__ = ["key_parser", "main"]

PROGRAM = "pipeedge-key"


def key_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-key``."""
    parser = OneLineParser(
        prog=program_name(PROGRAM),
        description="Make a membership file: a private key and its certificate. Ranks that are given the "
        "same file accept each other and nobody else, and encrypt what they send. Whoever can read the file "
        "is a member.",
        epilog="Copy the file to every machine (scp -p), and start every rank with '--key FILE'. To replace "
        "a key, make another file; to exclude a machine, give the new file to the others only. Without FILE, "
        "or with --code, it prints a code instead, with which another machine joins the cluster ('pipeedge "
        "join CODE') and gets a key of its own.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        type=path,
        nargs="?",
        metavar="FILE",
        help="new file, which only you can read, and never replaced; with --code, the cluster's key "
        "(~/.config/pipeedge/cluster.pem, which is made if it is missing)",
    )
    add_sections(parser, invite_sections())
    add_common(parser)
    program = program_name(PROGRAM)
    parser.examples = (
        f"{program}                 # print a code, with which another machine joins",
        f"{program} --count 3       # print codes for three machines, one after another",
        f"{program} cluster.pem     # make a key for ranks that are started by hand",
    )
    return parser


def main() -> NoReturn:
    """Make the file that the command line asks for, and end the process."""
    program = program_name(PROGRAM)
    end(program, guard(program, _make, verbose=is_verbose(sys.argv)))


def _make() -> None:
    request = parse_invite(key_parser().parse_args(sys.argv[1:]))
    file = request.file
    if file == STANDARD_INPUT:  # as it would be for --key
        raise RequestError("FILE -: a key is not printed; name a new file, such as cluster.pem")
    if file is None or request.code:
        make_default_key(file, print_notice)
        invite(file, request.count, request.port, print_notice, print_result)
        return
    write_secret(file, make_cluster_key(), "FILE")
    print_notice(
        f"{printable(file)}: a new key. Copy it to every machine (scp -p), and start every rank with --key"
    )
