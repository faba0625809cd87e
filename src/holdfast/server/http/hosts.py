"""Allowed Host headers and origins: protection against DNS rebinding and cross-site requests.

A page of another site can make a browser on this machine send requests here. The Host header must name this
server, since under DNS rebinding the browser sends the attacker's name; and requests with side effects must
not come from a page of another origin. Both matter where no key is needed. Used by the middleware.
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
    """The host names that this server accepts.

    Checked where no key is needed, and wherever `allowed_host` is given. Loopback names and addresses and the
    listening address are always accepted.
    """

    def __init__(self, options: ServerOptions, keys_required: bool) -> None:
        self._names = {_bare(name) for name in (options.host, *options.allowed_host)}
        listening = ip_address(_bare(options.host))
        self._any_address = listening is not None and listening.is_unspecified
        self.checked = "*" not in options.allowed_host and (not keys_required or bool(options.allowed_host))

    def require(self, host: str | None) -> None:
        """Reject a request for another host, or without a Host header."""
        if self.checked and not self._knows(host or ""):
            raise Problem(
                421,
                "host_not_allowed",
                "host: this server does not accept this host name; to allow it, start it with "
                "--allowed-host NAME",
                "host",
            )

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _bare(found[1])
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        # DNS rebinding needs a name; an address cannot be rebound.
        address = ip_address(name)
        return address is not None and (address.is_loopback or self._any_address)


def _bare(name: str) -> str:
    """A normalised host name: lower case, without brackets and final dot."""
    return name.strip("[]").lower().removesuffix(".")


def foreign_page(headers: Mapping[str, str], allowed: tuple[str, ...]) -> bool:
    """Whether a browser sends this for a page of another origin that is not allowed.

    Browsers send Sec-Fetch-Site, older ones only Origin. Other clients send neither.
    """
    origin = headers.get("origin")
    if "*" in allowed or origin in allowed:
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in OWN_SITE
    return origin is not None and not _same_host(origin, headers.get("host", ""))


def _same_host(origin: str, host: str) -> bool:
    """Whether an origin is this host, ignoring the scheme (a proxy may change it) and the default port."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    usual = DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and host.lower() in (parts.netloc, f"{parts.netloc}{usual}")
