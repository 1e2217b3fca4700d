"""Cases of test_troubleshooting.py: nodes, joining, and options from a file."""

from __future__ import annotations

from pathlib import Path

from ports import free_port
from trouble import Cases, Patch, refused

from pipeedge.nodes import commands
from pipeedge.nodes.identity import own_membership, read_key
from pipeedge.nodes.node import _Slot
from pipeedge.nodes.options import parse_status
from pipeedge.nodes.pairing import join_at, new_code, read_code
from pipeedge.nodes.store import NodeStore
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.transport.authority import Authority, check_name, make_cluster_key, make_node_key
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

CASES = Cases()
says = CASES.says


@says(
    "…: no key yet: 'pipeedge key' makes one for a new cluster, and 'pipeedge join CODE' joins that of "
    "another machine"
)
def no_key_yet(patch: Patch) -> str:
    return refused(lambda: read_key(Path("none.pem")))


@says(
    "127.0.0.1:… is not there (Connection refused): start 'pipeedge node' on this machine, or name another "
    "with --node"
)
def no_node_here(patch: Patch) -> str:
    request = parse_status(["--node", f"127.0.0.1:{free_port()}"], Environment())
    key = Membership.from_text(make_cluster_key(), "k")
    return refused(lambda: commands._called(request, key))


@says("'abcd' is not a code: it has 3 groups of 4 letters and digits, as 'pipeedge key' prints it")
def no_code(patch: Patch) -> str:
    return refused(lambda: read_code("abcd"))


@says(
    "no cluster to join at 127.0.0.1:… (Connection refused): run 'pipeedge key' there, and use its code "
    "within ten minutes"
)
def nobody_to_join(patch: Patch) -> str:
    return refused(lambda: join_at(("127.0.0.1", free_port()), new_code(), "pi2", make_node_key()))


@says(
    "'my board' cannot be the name of a node: use up to 63 letters, digits, dots and hyphens, and not "
    "pipeedge"
)
def no_name(patch: Patch) -> str:
    return refused(lambda: check_name("my board"))


@says(
    "--key old.pem: this key is of an earlier version and cannot sign those of nodes: make another with "
    "pipeedge key"
)
def old_key(patch: Patch) -> str:
    return refused(lambda: Authority.of(Membership.from_text(make_key(), "--key old.pem")))


@says("--name pi3: --key pi2.pem is the key of pi2: leave out --name, or join again")
def another_name(patch: Patch) -> str:
    cluster = Membership.from_text(make_cluster_key(), "k")
    authority = Authority.of(cluster)
    assert authority is not None
    private, public = make_node_key()
    text = f"{private}\n{authority.sign('pi2', public)}\n{cluster.certificate}\n"
    key = Membership.from_text(text, "--key pi2.pem")
    return refused(lambda: own_membership(key, NodeStore(Path("nodes").resolve()), "pi3"))


@says(
    "this node works for bert on pi1 already, as pi1 has asked: end that first with 'pipeedge down'",
)
def second_run(patch: Patch) -> str:
    slot = _Slot()

    def ask_again() -> None:
        with slot.taken("vit on pi2", "pi2"):
            pass

    with slot.taken("bert on pi1", "pi1"):
        return refused(ask_again)


@says(
    "pipeedge.toml: no program has the section rum; did you mean run?; options stand below [run], [node] and "
    "so on"
)
def wrong_option_in_file(patch: Patch) -> str:
    Path("pipeedge.toml").write_text("[rum]\nubatch-size = 4\n")
    try:
        return refused(lambda: parse_runtime(["0", "1"], Environment()))
    finally:
        Path("pipeedge.toml").unlink()
