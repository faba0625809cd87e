"""The options of the server itself; those of the engine are `EngineOptions`.

Filled from the command line, the environment and a file. An invalid value is an error that names the option.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from holdfast.engine.options import OptionError
from holdfast.engine.sampling import SEED_MAX
from holdfast.server.link.addresses import split_address

__all__ = ["LOG_LEVELS", "TTL_MAX", "EngineProcessOptions", "ServerOptions", "ip_address"]

LOG_LEVELS = ("debug", "info", "warning", "error")

MEBIBYTE = 1 << 20
TTL_MAX = 30 * 86_400.0
"""The longest time that a session is kept without use, in seconds."""
FOUND_SESSIONS_MAX = 1 << 16
LINK_SECONDS = 10.0
LINK_SECONDS_LIMITS = 2.0, 86_400.0

_ENGINE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Addresses, keys and limits. Sizes are in bytes, times in seconds.

    `api_keys` is a file of one key a line, `name:key` or the key alone; `HOLDFAST_API_KEYS` in the
    environment gives the same, separated by commas. A tenant may have `tenant_sessions` open; None for as
    many as the server. Turns without a seed get one derived from `seed`. Chats that resend their history
    continue in one of `found_sessions` hidden sessions; 0 runs each request independently.
    Stored responses are kept for `response_ttl` seconds after their last use. With `engine`, addresses of
    engine processes, this process has no engine of its own; a link that is silent for `link_seconds` is lost.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    allow_anonymous: bool = False
    served_model_name: str | None = None
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    body_limit: int = 16 * MEBIBYTE
    bodies_limit: int = 256 * MEBIBYTE
    message_limit: int = 4 * MEBIBYTE
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    drain_seconds: float = 30.0
    hang_seconds: float = 300.0
    tenant_sessions: int | None = None
    found_sessions: int = 1024
    response_ttl: float = TTL_MAX
    storm: bool = False
    seed: int | None = None
    engine: tuple[str, ...] = ()
    link_keys: str | None = None
    link_seconds: float = LINK_SECONDS

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError("port", f"must be from 0 to 65535, not {self.port}")
        _check_logging(self.log_level, self.log_format)
        if self.engine and self.link_keys is None:
            raise OptionError("engine", "needs --link-keys FILE: make one with `holdfast link-keys FILE`")
        if self.link_keys is not None and not self.engine:
            raise OptionError("link_keys", "needs --engine")
        if len(set(self.engine)) < len(self.engine):
            raise OptionError("engine", "names an address twice")
        for name in ("body_limit", "bodies_limit", "message_limit", "tenant_sessions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, "must be at least 1")
        if not 0 <= self.found_sessions <= FOUND_SESSIONS_MAX:
            raise OptionError("found_sessions", f"must be from 0 to {FOUND_SESSIONS_MAX}")
        for name in self.allowed_host:
            if name != "*" and not _HOST_NAME.fullmatch(name) and ip_address(name.strip("[]")) is None:
                raise OptionError("allowed_host", "must be a host name without a port, or * for any")
        for name in ("header_seconds", "body_seconds", "drain_seconds", "hang_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(name, "must be a positive number of seconds")
        _check_link(self.link_seconds)
        if not 0 < self.response_ttl <= TTL_MAX:
            raise OptionError("response_ttl", f"must be more than 0 and at most {TTL_MAX:.0f} seconds")
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise OptionError("seed", f"must be from 0 to {SEED_MAX}")
        if self.admin_key is not None and not self.admin_key:
            raise OptionError("admin_key", "must not be empty")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        address = ip_address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)


@dataclass(frozen=True, slots=True)
class EngineProcessOptions:
    """An engine process alone: where it listens, its keys and its name. Times are in seconds.

    A link that is silent for `link_seconds` is lost. Memory shares of tenants are taken from `api_keys`.
    Where engines share a journal, others reach this one at `advertise`, and a tenant may have
    `tenant_sessions` sessions open over all engines.
    """

    listen: str = "127.0.0.1:7000"
    link_keys: str | None = None
    link_seconds: float = LINK_SECONDS
    engine_id: str | None = None
    api_keys: str | None = None
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    advertise: str | None = None
    tenant_sessions: int | None = None

    def __post_init__(self) -> None:
        _check_logging(self.log_level, self.log_format)
        if self.advertise is not None:
            split_address("advertise", self.advertise)
        if self.tenant_sessions is not None and self.tenant_sessions < 1:
            raise OptionError("tenant_sessions", "must be at least 1")
        if self.link_keys is None:
            raise OptionError("link_keys", "is required: make a key file with `holdfast link-keys FILE`")
        if self.engine_id is not None and not _ENGINE_ID.fullmatch(self.engine_id):
            raise OptionError("engine_id", "must be 1 to 64 of the characters A-Z, a-z, 0-9, _, ., : and -")
        if not 0 < self.drain_seconds < float("inf"):
            raise OptionError("drain_seconds", "must be a positive number of seconds")
        _check_link(self.link_seconds)


def _check_link(seconds: float) -> None:
    """Heartbeats come each second; the system counts the time in milliseconds, in 32 bits."""
    least, most = LINK_SECONDS_LIMITS
    if not least <= seconds <= most:
        raise OptionError("link_seconds", f"must be from {least:.0f} to {most:.0f} seconds")


def _check_logging(level: str, form: str) -> None:
    if level not in LOG_LEVELS:
        raise OptionError("log_level", f"must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    if form not in ("text", "json"):
        raise OptionError("log_format", f"must be text or json, not {form!r}")


def ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; None if `name` is not one."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
