"""Build and remove test beds, and run commands in their hosts.

    up      check requirements and name conflicts -> journal -> groups -> network -> journal "whole"
    change  a host's quota and rate, under the programs that run in it -> journal
    down    journal -> processes -> namespaces -> groups -> journal removed

``down`` removes whatever part of the journal exists, so it also cleans up after an interrupted ``up``. A
test bed that belongs to a process (``lent``) and outlived it is removed by the next ``up``, ``down`` or
``status``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from pipeedge.base.errors import RequestError
from pipeedge.base.interrupt import raise_interrupts
from pipeedge.testbed import network
from pipeedge.testbed.cluster import Cluster, EmulatedHost
from pipeedge.testbed.groups import GroupSettings, Hierarchy, HostUsage, find_hierarchies, kill_all
from pipeedge.testbed.journal import Journal, JournalFiles, Owner

__all__ = ["DEFAULT_NAME", "TestBed", "TestBeds"]

DEFAULT_NAME = "testbed"
_SHELF = Path("/run/pipeedge-testbed")
_ENTERING = ("nsenter", "unshare", "mount", "sh")

# $1: hosts file, $2: host name; the rest is the command. Both need a mount and UTS namespace of their own.
_SETTLE = (
    'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname || exit 126; shift 2; exec "$@"'
)


@dataclass(frozen=True)
class TestBed:
    """A test bed that is up."""

    __test__ = False
    """Tells pytest that this class is not a test."""
    journal: Journal
    directory: Path
    """Directory of the test bed's files."""
    hierarchies: tuple[Hierarchy, ...]
    """Control group trees that limit the hosts."""

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` in the groups, network and name of ``host``.

        Raises:
            RequestError: There is no such host.
        """
        known = self.journal.host(host)
        group = self.journal.group(known.name)
        files = [str(tree.mount / group / "cgroup.procs") for tree in self.hierarchies]
        join = "; ".join(f"echo $$ > {shlex.quote(file)} || exit 126" for file in files)
        return [
            *("sh", "-c", f'{join}; exec "$@"', "sh"),
            *("nsenter", f"--net=/run/netns/{self.journal.namespace(known.name)}", "--"),
            *("unshare", "--mount", "--uts", "--"),
            *("sh", "-c", _SETTLE, "sh", str(self.directory / "hosts"), known.name),
            *command,
        ]

    def usage(self, host: str) -> HostUsage:
        """Return the resources that a host has used so far."""
        group = self.journal.group(self.journal.host(host).name)
        found = [tree.usage(group) for tree in self.hierarchies]
        return HostUsage(
            processes=max(usage.processes for usage in found),
            mem_bytes=max(usage.mem_bytes for usage in found),
            throttled_s=max(usage.throttled_s for usage in found),
        )


@dataclass(frozen=True)
class TestBeds:
    """All test beds of this machine.

    Args:
        shelf: Place of their journals.
        mounts: List of mounted file systems in the form of ``/proc/mounts``.
    """

    __test__ = False
    shelf: JournalFiles = field(default_factory=lambda: JournalFiles(_SHELF))
    mounts: Path = Path("/proc/mounts")

    def up(self, name: str, cluster: Cluster, *, owner: Owner | None = None) -> TestBed:
        """Build a test bed.

        Args:
            name: Name that tells it from other test beds.
            cluster: Hosts to emulate.
            owner: Process whose end removes the test bed, or None to keep it until ``down``.

        Raises:
            RequestError: It is up already, or this machine cannot emulate it; nothing is left behind.
        """
        _check_name(name)
        trees = self._features()
        cluster.check(processors=os.cpu_count() or 1, mem_bytes=int(psutil.virtual_memory().total))
        with self.shelf.locked():
            known = self.shelf.find(name)
            if known is not None and not known.left_over:
                raise RequestError(
                    f"test bed {name} is up already; take it down first, or use another --name"
                )
            if known is not None:
                self._remove(known, trees)
            journal = Journal(name, cluster.hosts, Owner.of(os.getpid()))
            _check_nothing_in_the_way(journal, trees)
            self.shelf.write(journal)
            try:
                self._build(journal, cluster, trees)
            except BaseException:
                self._remove(journal, trees)
                raise
            journal = journal.finished(owner)
            self.shelf.write(journal)
        return TestBed(journal, self.shelf.place(name), trees)

    @contextlib.contextmanager
    def lent(self, name: str, cluster: Cluster) -> Iterator[TestBed]:
        """Build a test bed and remove it when the block, or this process, ends, also by Ctrl-C or SIGTERM."""
        raise_interrupts()
        bed = self.up(name, cluster, owner=Owner.of(os.getpid()))
        try:
            yield bed
        finally:
            self.down(name)

    def change(
        self,
        name: str,
        host: str,
        *,
        cpu_fraction: float | None = None,
        bw_bytes_per_s: float | None = None,
    ) -> TestBed:
        """Change the processor time or the bandwidth of a host while programs run in it.

        Args:
            name: Name of the test bed.
            host: Name of the host.
            cpu_fraction: Number of processors, or None to leave it as it is.
            bw_bytes_per_s: Bandwidth of its cable in each direction, or None to leave it as it is.

        Raises:
            RequestError: There is no such host, or this machine cannot emulate it.
        """
        with self.shelf.locked():
            bed = self.find(name)
            journal = bed.journal
            old = journal.host(host)
            new = replace(
                old,
                cpu_fraction=old.cpu_fraction if cpu_fraction is None else cpu_fraction,
                bw_bytes_per_s=old.bw_bytes_per_s if bw_bytes_per_s is None else bw_bytes_per_s,
            )
            cluster = Cluster(journal.hosts).with_host(new)
            cluster.check(processors=os.cpu_count() or 1, mem_bytes=int(psutil.virtual_memory().total))
            if bw_bytes_per_s is not None:
                network.change_rate(journal.switch, _port(journal, cluster, new))
            if cpu_fraction is not None:
                for tree in bed.hierarchies:
                    tree.limit_time(journal.group(host), GroupSettings(new.cpu_fraction, new.mem_bytes))
            journal = journal.changed(cluster.hosts)
            _prefer_limited(journal, bed.hierarchies)
            self.shelf.write(journal)
        return replace(bed, journal=journal)

    def down(self, name: str) -> bool:
        """Remove a test bed with all processes in it; return False if there is none."""
        _check_name(name)
        trees = self._features()
        with self.shelf.locked():
            journal = self.shelf.find(name)
            if journal is None:
                return False
            self._remove(journal, trees)
        return True

    def find(self, name: str) -> TestBed:
        """Return a test bed that is up.

        Raises:
            RequestError: No test bed of that name is up.
        """
        _check_name(name)
        journal = self.shelf.find(name)
        if journal is None or not journal.whole:
            raise RequestError(f"no test bed {name} is up; build one with 'testbed.py up CLUSTER.yml'")
        return TestBed(journal, self.shelf.place(name), self._features())

    def all(self) -> list[TestBed]:
        """Return the test beds that are up, after removing what crashes have left behind."""
        trees = self._features()
        beds = []
        with self.shelf.locked():
            for name in self.shelf.names():
                journal = self.shelf.find(name)
                if journal is None:
                    continue
                if journal.left_over:
                    self._remove(journal, trees)
                else:
                    beds.append(TestBed(journal, self.shelf.place(name), trees))
        return beds

    def _features(self) -> tuple[Hierarchy, ...]:
        """Check that this machine has what a test bed needs, and return its control group trees.

        Raises:
            RequestError: Something is missing; the message says what.
        """
        if not sys.platform.startswith("linux"):
            raise RequestError("the test bed needs Linux: network namespaces and control groups")
        if os.geteuid() != 0:
            raise RequestError(
                "the test bed needs root, because only root can set up network namespaces and control groups"
            )
        network.check_programs()
        for program in _ENTERING:
            if shutil.which(program) is None:
                raise RequestError(f"the test bed needs the program {program}: install util-linux")
        return find_hierarchies(self.mounts.read_text())

    def _build(self, journal: Journal, cluster: Cluster, trees: Sequence[Hierarchy]) -> None:
        lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost"]
        lines += [f"{host.address}\t{host.name}" for host in journal.hosts]
        (self.shelf.place(journal.name) / "hosts").write_text("\n".join(lines) + "\n")
        for tree in trees:
            for host in journal.hosts:
                tree.create(journal.group(host.name))
                tree.limit(journal.group(host.name), GroupSettings(host.cpu_fraction, host.mem_bytes))
        _prefer_limited(journal, trees)
        network.make_network(journal.switch, [_port(journal, cluster, host) for host in journal.hosts])

    def _remove(self, journal: Journal, trees: Sequence[Hierarchy]) -> None:
        for group in journal.groups:
            kill_all(trees, group)
        network.remove_namespaces(journal.namespaces)
        for tree in trees:
            for group in journal.groups:
                tree.remove(group)
            tree.remove(str(Path(journal.groups[0]).parent))
            # The common parent cannot be removed while another test bed has groups in it.
            with contextlib.suppress(OSError):
                tree.remove(str(Path(journal.groups[0]).parent.parent))
        self.shelf.forget(journal.name)


def _port(journal: Journal, cluster: Cluster, host: EmulatedHost) -> network.Port:
    return network.Port(
        journal.namespace(host.name),
        host.name,
        f"{host.address}/{cluster.prefix_length}",
        host.bw_bytes_per_s,
    )


def _prefer_limited(journal: Journal, trees: Sequence[Hierarchy]) -> None:
    """Give the hosts precedence if all have a quota; others would starve everything else on the machine."""
    if all(host.cpu_fraction is not None for host in journal.hosts):
        for tree in trees:
            tree.prefer(str(Path(journal.groups[0]).parent))


def _check_name(name: str) -> None:
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_]{0,63}", name, re.ASCII):
        raise RequestError(f"--name {name}: use up to 64 letters, digits and _, not beginning with _")


def _check_nothing_in_the_way(journal: Journal, trees: Sequence[Hierarchy]) -> None:
    """Raise if something exists under one of our names that no test bed created, rather than touch it."""
    for namespace in sorted(network.existing_namespaces() & set(journal.namespaces)):
        raise RequestError(
            f"network namespace {namespace} exists, but no test bed created it; use another --name"
        )
    for tree in trees:
        for group in journal.groups:
            if (tree.mount / group).exists():
                raise RequestError(
                    f"control group {tree.mount / group} exists, but no test bed created it; use another "
                    "--name"
                )
