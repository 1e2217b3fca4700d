"""Test who is accepted as a member, by handshakes in memory, and which files make one."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path

import certificates
import pytest
from certificates import DAY, NOW, Issued, issue, read_issued, shake_hands

from pipeedge.base.errors import RequestError
from pipeedge.base.files import write_secret
from pipeedge.transport.membership import Membership, describe_handshake_failure
from pipeedge.transport.new_key import make_key

KEY = make_key()
OTHER_KEY = make_key()


def member(text: str = KEY) -> Membership:
    return Membership.from_text(text, "--key k.pem")


def outcome(accepts: Membership, dials: Membership) -> tuple[str | None, str | None]:
    """Return what the end that accepts says of the other one, and the reverse; None if all is well."""
    server, client, errors = shake_hands(accepts.server_context(), dials.client_context())
    ends = {"server": server, "client": client}
    says = {name: describe_handshake_failure(error, ends[name]) for name, error in errors.items()}
    return says.get("server"), says.get("client")


# --- who is a member ------------------------------------------------------------------------------------


def test_members_with_one_key_accept_each_other() -> None:
    server, client, errors = shake_hands(member().server_context(), member().client_context())
    assert not errors
    assert server.version() == client.version() == "TLSv1.3"
    own = read_issued(KEY).certificate.public_bytes(certificates.serialization.Encoding.DER)
    assert server.getpeercert(binary_form=True) == client.getpeercert(binary_form=True) == own


def test_another_key_is_refused_and_named_at_both_ends() -> None:
    assert outcome(member(), member(OTHER_KEY)) == ("has another key", "has another key")


def test_a_client_without_a_certificate_is_refused() -> None:
    for alpn in (["pipeedge"], ["http/1.1"]):
        anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
        anonymous.set_alpn_protocols(alpn)
        server, _, errors = shake_hands(member().server_context(), anonymous)
        assert describe_handshake_failure(errors["server"], server) == "has no key"


def test_a_server_without_a_certificate_of_ours_is_another_program() -> None:
    site = Membership.from_text(OTHER_KEY, "a web server").server_context()
    site.set_alpn_protocols(["http/1.1"])
    site.verify_mode = ssl.CERT_NONE
    _, client, errors = shake_hands(site, member().client_context())
    assert describe_handshake_failure(errors["client"], client) == "is another program"


def test_an_older_tls_is_refused() -> None:
    old = member().client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    server, _, errors = shake_hands(member().server_context(), old)
    assert describe_handshake_failure(errors["server"], server) == "does not speak TLS 1.3"


def test_a_member_cannot_admit_others_by_issuing_certificates() -> None:
    """Excluding a machine by a new key must exclude what it issued with the old one, too."""
    ours = read_issued(KEY)
    below = issue("below", Issued(ours.certificate, ours.key))
    chain = below.certificate_pem + ours.certificate_pem
    intruder = Membership("x", chain, below.key_pem(), KEY)
    assert outcome(member(), intruder)[0] == "has another key"
    assert outcome(intruder, member())[1] == "has another key"


def test_a_session_is_never_resumed_without_certificates() -> None:
    server_context, client_context = member().server_context(), member().client_context()
    _, client, errors = shake_hands(server_context, client_context)
    assert not errors
    assert client.session is None or not client.session.has_ticket


def test_the_certificate_is_valid_whatever_the_clock_says() -> None:
    found = read_issued(KEY).certificate
    assert found.not_valid_before_utc <= datetime.datetime(1969, 12, 31, tzinfo=datetime.UTC)
    assert found.not_valid_after_utc.year == 9999


# --- a PKI of the user's own -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> Issued:
    return issue("root", is_ca=True)


def holder(directory: Path, leaf: Issued, trusted: str, chain: str = "") -> Membership:
    files = {"cert": leaf.certificate_pem + chain, "key": leaf.key_pem(), "ca": trusted}
    for name, text in files.items():
        (directory / name).touch(mode=0o600)
        (directory / name).write_text(text)
    return Membership.from_pki(directory / "cert", directory / "key", directory / "ca")


def test_ranks_with_certificates_of_one_ca_accept_each_other(authority: Issued, tmp_path: Path) -> None:
    one, two = (holder(tmp_path, issue(name, authority), authority.certificate_pem) for name in "ab")
    assert outcome(one, two) == (None, None)
    assert one.fingerprint == two.fingerprint


def test_certificates_of_another_ca_are_refused(authority: Issued, tmp_path: Path) -> None:
    stranger = issue("root", is_ca=True)
    one = holder(tmp_path, issue("a", authority), authority.certificate_pem)
    two = holder(tmp_path, issue("b", stranger), authority.certificate_pem)
    assert outcome(one, two) == ("has another key", "has another key")
    assert outcome(two, one) == ("has another key", "has another key")


def test_an_intermediate_ca_can_be_what_is_trusted(authority: Issued, tmp_path: Path) -> None:
    cluster, elsewhere = (issue(name, authority, is_ca=True) for name in ("cluster", "elsewhere"))
    one, two = (holder(tmp_path, issue(name, cluster), cluster.certificate_pem) for name in "ab")
    assert outcome(one, two) == (None, None)
    chain = elsewhere.certificate_pem
    three = holder(tmp_path, issue("c", elsewhere), cluster.certificate_pem, chain)
    assert outcome(one, three)[0] == "has another key"


@pytest.mark.parametrize(
    ("begins", "ends", "why"),
    [
        (NOW - 2 * DAY, NOW - DAY, "certificate has expired"),
        (NOW + DAY, NOW + 2 * DAY, "certificate is not yet valid"),
    ],
)
def test_dates_of_a_pki_are_checked(
    authority: Issued, tmp_path: Path, begins: datetime.datetime, ends: datetime.datetime, why: str
) -> None:
    good = holder(tmp_path, issue("a", authority), authority.certificate_pem)
    bad = holder(tmp_path, issue("b", authority, begins=begins, ends=ends), authority.certificate_pem)
    assert outcome(good, bad)[0] == f"has a certificate that is not valid now ({why}; check the clocks)"


# --- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.pem"
    write_secret(path, KEY, "FILE")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        Membership.from_file(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_new_file_is_its_owners_alone_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    before = os.umask(0)
    try:
        write_secret(path, KEY, "FILE")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Membership.from_file(path).fingerprint == member().fingerprint != member(OTHER_KEY).fingerprint
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_never_replaced(file: Path) -> None:
    with pytest.raises(RequestError, match=r"k\.pem: exists already, and is not replaced"):
        write_secret(file, OTHER_KEY, "FILE")
    assert file.read_text() == KEY
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match="No space left on device"):
        write_secret(tmp_path / "k.pem", KEY, "FILE")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"other users may read it (mode {mode:03o}): run chmod 600" in refusal(file)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    assert "no such file: make it with pipeedge-key" in refusal(tmp_path / "k.pem")
    assert "Is a directory" in refusal(tmp_path)


def test_a_file_without_a_key_and_an_empty_standard_input_are_refused(file: Path) -> None:
    file.write_text("")
    assert refusal(file) == f"--key {file}: holds no private key"
    file.write_text(KEY + KEY)
    assert refusal(file) == f"--key {file}: holds 2 private keys, but one is needed"
    standard_input = os.dup(0)
    try:
        with open(os.devnull) as nothing:  # noqa: PTH123 - its descriptor is wanted
            os.dup2(nothing.fileno(), 0)
        assert refusal(Path("-")) == "--key -: standard input is empty; the key is read from there"
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_every_cut_off_file_is_refused(file: Path) -> None:
    whole = KEY.rstrip("\n")
    for length in range(0, len(whole), 7):
        file.write_text(whole[:length])
        assert any(
            part in refusal(file) for part in ("is cut off within", "holds no private key", "holds no cert")
        )


def test_damage_is_found(file: Path) -> None:
    middle = KEY.index("BEGIN CERTIFICATE") + 100
    file.write_text(KEY[:middle] + "!" + KEY[middle + 1 :])
    assert "is damaged" in refusal(file)
    file.write_bytes(KEY[:middle].encode() + b"\xff" + KEY[middle + 1 :].encode())
    assert "is damaged" in refusal(file)
    file.write_text("x" * 70_000)
    assert "is larger than 64 KiB" in refusal(file)


def test_a_key_of_another_certificate_is_refused(file: Path) -> None:
    other = read_issued(OTHER_KEY)
    file.write_text(other.key_pem() + read_issued(KEY).certificate_pem)
    assert "the private key does not belong to the certificate" in refusal(file)


def test_a_key_with_a_password_is_refused_without_asking_for_it(file: Path) -> None:
    own = read_issued(KEY)
    file.write_text(own.key_pem(b"secret") + own.certificate_pem)
    assert "the private key has a password" in refusal(file)


def test_several_certificates_are_a_pki(file: Path) -> None:
    file.write_text(KEY + read_issued(OTHER_KEY).certificate_pem)
    assert "holds 2 certificates" in refusal(file)


def test_a_key_shows_neither_in_texts_nor_in_errors(file: Path) -> None:
    secret = KEY.splitlines()[1]
    assert secret not in repr(Membership.from_file(file))
    assert secret not in str(Membership.from_file(file))
