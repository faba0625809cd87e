"""Which names a request may call the server by, and which web pages may call it at all.

A page of another site can make a browser on this machine send requests here. Two checks stop it. The Host
header must name this server: in DNS rebinding the attacker's own name is pointed at this address, and the
browser sends that name. And what changes something must not come from a page of another origin. Both matter
where no key is asked for: a browser cannot send a key that it does not have. Used by the gate alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from holdfast.server.http.problems import Problem
from holdfast.server.options import ServerOptions, ip_address

__all__ = ["Hosts", "foreign_page"]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::[0-9]{1,5})?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
OWN_SITE = ("same-origin", "none")


class Hosts:
    """The names that this server answers to.

    They are checked where no key is needed, and where `allowed_host` names some. Loopback names and
    addresses and the address that is listened on are always among them.
    """

    def __init__(self, options: ServerOptions, keys_required: bool) -> None:
        self._names = {_bare(name) for name in (options.host, *options.allowed_host)}
        listening = ip_address(_bare(options.host))
        self._any_address = listening is not None and listening.is_unspecified
        self.checked = "*" not in options.allowed_host and (not keys_required or bool(options.allowed_host))

    def require(self, host: str | None) -> None:
        """Refuse a request that was meant for another host, or for none."""
        if self.checked and not self._knows(host or ""):
            raise Problem(
                421,
                "host_not_allowed",
                "host: this server does not answer to that name; start it with --allowed-host NAME if it "
                "should",
                "host",
            )

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _bare(found[1])
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        # An address is no name that a stranger could point elsewhere.
        address = ip_address(name)
        return address is not None and (address.is_loopback or self._any_address)


def _bare(name: str) -> str:
    """A name without what may be written differently: brackets, a final dot, capitals."""
    return name.strip("[]").lower().removesuffix(".")


def foreign_page(headers: Mapping[str, str], allowed: tuple[str, ...]) -> bool:
    """Whether a browser sends this for a page of an origin that is neither this server's nor allowed.

    Browsers say so in Sec-Fetch-Site, older ones in Origin alone. Other clients send neither.
    """
    origin = headers.get("origin")
    if "*" in allowed or origin in allowed:
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in OWN_SITE
    return origin is not None and not _same_host(origin, headers.get("host", ""))


def _same_host(origin: str, host: str) -> bool:
    """Whether an origin is this host: its scheme aside, which a proxy may change, and with its usual port."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    usual = DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and host.lower() in (parts.netloc, f"{parts.netloc}{usual}")
