"""Test which nodes of a cluster accept each other, by handshakes in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from certificates import shake_hands

from pipeedge.base.errors import RequestError
from pipeedge.transport.authority import Authority, make_cluster_key, make_node_key, name_in, read_removals
from pipeedge.transport.membership import Membership, describe_handshake_failure, refuse_revoked
from pipeedge.transport.new_key import make_key

CLUSTER = Membership.from_text(make_cluster_key(), "--key cluster.pem")


def authority(cluster: Membership = CLUSTER) -> Authority:
    found = Authority.of(cluster)
    assert found is not None
    return found


def node(name: str, cluster: Membership = CLUSTER) -> Membership:
    private, public = make_node_key()
    text = f"{private}\n{authority(cluster).sign(name, public)}\n{cluster.certificate}\n"
    return Membership.from_text(text, f"the key of {name}")


PI1, PI2 = node("pi1"), node("pi2")


def outcome(accepts: Membership, dials: Membership) -> dict[str, str]:
    """Return what each end says of the other; nothing if all is well."""
    server, client, errors = shake_hands(accepts.server_context(), dials.client_context())
    ends = {"server": server, "client": client}
    return {name: describe_handshake_failure(error, ends[name]) for name, error in errors.items()}


def test_nodes_of_a_cluster_accept_each_other_and_the_clusters_key() -> None:
    for pair in ((PI1, PI2), (PI1, CLUSTER), (CLUSTER, PI1)):
        assert outcome(*pair) == {}


def test_a_node_presents_its_name_and_serial_number() -> None:
    server, _, _ = shake_hands(PI1.server_context(), PI2.client_context())
    found = server.getpeercert()
    name, serial = name_in(PI2.certificate)
    assert name == "pi2"
    assert found is not None
    assert int(str(found["serialNumber"]), 16) == serial


def test_a_node_of_another_cluster_is_refused() -> None:
    other = node("pi1", Membership.from_text(make_cluster_key(), "another cluster"))
    assert outcome(PI1, other) == {"server": "has another key", "client": "has another key"}


def test_a_node_cannot_sign_keys() -> None:
    assert Authority.of(PI1) is None
    private, public = make_node_key()
    forger = Authority(PI1.certificate, PI1.private_key)
    forged = f"{forger.sign('pi9', public)}\n{PI1.certificate}"
    intruder = replace(PI1, certificate=forged, private_key=private)
    assert outcome(PI2, intruder)["server"] == "has another key"


def test_a_removed_node_is_refused_in_both_directions_and_the_others_are_not() -> None:
    removals = authority().remove([name_in(PI2.certificate)[1]])
    strict = replace(PI1, revoked=removals.text)
    assert outcome(strict, PI2)["server"] == "was removed from the cluster"
    assert outcome(PI2, strict)["client"] == "was removed from the cluster"
    assert outcome(strict, PI2)["client"] == "has removed this node from the cluster"
    assert outcome(strict, node("pi3")) == outcome(strict, CLUSTER) == {}


def test_a_context_in_use_takes_newer_lists_and_none_that_is_older() -> None:
    context = PI1.server_context()
    first = authority().remove([])
    second = authority().remove([name_in(PI2.certificate)[1]], first)
    for removals, refused in ((first, False), (second, True), (first, True)):
        refuse_revoked(context, removals.text)
        _, _, errors = shake_hands(context, PI2.client_context())
        assert bool(errors) is refused


def test_a_list_grows_and_is_read_as_it_was_signed() -> None:
    first = authority().remove([5])
    second = authority().remove([7], first)
    assert (second.number, second.serials) == (2, {5, 7})
    assert read_removals(second.text, CLUSTER.certificate) == second


def test_a_list_that_somebody_else_has_signed_is_refused() -> None:
    other = Membership.from_text(make_cluster_key(), "another cluster")
    text = authority(other).remove([1]).text
    for damaged in (text, "no list", ""):
        with pytest.raises(RequestError, match="list of removed nodes is not signed by the cluster's key"):
            read_removals(damaged, CLUSTER.certificate)


def test_a_key_of_a_single_run_cannot_sign() -> None:
    with pytest.raises(RequestError, match="make another"):
        Authority.of(Membership.from_text(make_key(), "--key old.pem"))


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "pipeedge", "x" * 64, "a\n"])
def test_only_plain_names_are_signed(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be the name of a node"):
        authority().sign(name, make_node_key()[1])


def test_the_file_of_a_node_reads_back() -> None:
    assert Membership.from_text(PI1.to_text(), PI1.source) == PI1
    assert PI1.fingerprint == CLUSTER.fingerprint
