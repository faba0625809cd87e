"""Engines in network namespaces of their own: what they say and hear can be cut without a word.

A namespace has two links to the main one: one for API processes, one for the database, which a relay in the
main namespace brings to PostgreSQL's Unix socket. A link is cut in one direction by a neighbour entry with a
hardware address that nobody has: packets are lost, and neither end is told. Needs root and `ip`.
"""

import itertools
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cluster.cutting import NAME
from tests.server.apart import Proxy

__all__ = ["Network", "Relay", "require_namespaces"]

NOBODY = "02:00:00:00:00:fe"
FIRST = 100 << 24 | 64 << 16
"""100.64.0.0: addresses that are used by nobody outside of a provider's network."""

NUMBERS = itertools.count(8 * (os.getpid() % (1 << 15)))


def ip(*words: str) -> None:
    """Run `ip`."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def require_namespaces() -> None:
    """Skip the test where network namespaces cannot be made."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program `ip`")
    tried = f"hft{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        link = ["ip", "-n", tried, "link", "add", "name", "hfl", "type", "veth", "peer", "name", "hfr"]
        made = subprocess.run(link, capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", tried], check=True)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made: {made.stderr.strip()}")


class Line:
    """A link between the main namespace and another."""

    def __init__(self, namespace: str) -> None:
        number = next(NUMBERS) % (1 << 20)
        self._namespace = namespace
        self._outer, self._inner = f"hf{number}o", f"hf{number}i"
        first = FIRST + 4 * number
        self.outer, self.inner = (socket.inet_ntoa((first + n).to_bytes(4, "big")) for n in (1, 2))
        ip(
            "link",
            "add",
            "name",
            self._outer,
            "type",
            "veth",
            "peer",
            "name",
            self._inner,
            "netns",
            namespace,
        )
        ip("addr", "add", f"{self.outer}/30", "dev", self._outer)
        ip("link", "set", self._outer, "up")
        ip("-n", namespace, "addr", "add", f"{self.inner}/30", "dev", self._inner)
        ip("-n", namespace, "link", "set", self._inner, "up")

    def cut(self, inward: bool = True, outward: bool = True) -> None:
        """Lose all packets to the namespace, from it, or both."""
        if inward:
            ip("neigh", "replace", self.inner, "lladdr", NOBODY, "dev", self._outer, "nud", "permanent")
        if outward:
            words = ("neigh", "replace", self.outer, "lladdr", NOBODY, "dev", self._inner, "nud", "permanent")
            ip("-n", self._namespace, *words)

    def heal(self) -> None:
        """Let packets pass again."""
        ip("neigh", "flush", "dev", self._outer, "nud", "permanent")
        ip("-n", self._namespace, "neigh", "flush", "dev", self._inner, "nud", "permanent")


class Relay(Proxy):
    """Brings connections to an address to PostgreSQL's Unix socket."""

    def __init__(self, host: str, behind: Path) -> None:
        self._behind = str(behind / NAME)
        super().__init__(0, host)

    def connect(self) -> socket.socket:
        """A connection to PostgreSQL."""
        there = socket.socket(socket.AF_UNIX)
        there.connect(self._behind)
        return there


class Network:
    """The namespace of one engine, with its two links and a relay to the database."""

    def __init__(self, database: Path) -> None:
        self._name = f"hf-{os.getpid()}-{next(NUMBERS)}"
        ip("netns", "add", self._name)
        ip("-n", self._name, "link", "set", "lo", "up")
        self.file = f"/run/netns/{self._name}"
        self.clients, self.journal = Line(self._name), Line(self._name)
        self._relay = Relay(self.journal.outer, database)

    def url(self, database: str) -> str:
        """The URL of a database as the engine reaches it."""
        return f"postgresql://holdfast@{self._relay.address}/{database}"

    def remove(self) -> None:
        """Remove the namespace with its links, after its processes have ended."""
        self._relay.close()
        ip("netns", "del", self._name)
