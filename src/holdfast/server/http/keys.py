"""API keys, tenants and the admin.

Each key belongs to a tenant, which has its own sessions, its own root of the prefix tree and its own quotas.
Keys come from a file (one a line, `tenant:key` or the key alone) or from HOLDFAST_API_KEYS. They are never
logged. Without keys all callers are one tenant, whose name no key can have. A line may go on with the share
of each tier's memory that the tenant may hold: `device=0.5 host=0.25 disk=0.1`.

Keys are looked up by SHA-256 digest in a hash table. Its timing leaks nothing useful: an attacker chooses
keys, not digests, and similar keys have unrelated digests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.options import TIERS, OptionError
from holdfast.server.options import ServerOptions

__all__ = ["ANONYMOUS", "Caller", "Keys", "warn_if_readable"]

log = logging.getLogger("holdfast.server")

ANONYMOUS = "public"
KEYS_MAX = 100_000
VARIABLE = "HOLDFAST_API_KEYS"

_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that sent a request, and whether it is the admin."""

    tenant: str
    admin: bool


def warn_if_readable(path: str | None) -> None:
    """Warn if the key file is readable by other users."""
    if path is not None and Path(path).expanduser().stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "key file is readable by other users: chmod 600 it",
            extra={"fields": {"file": path}},
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _share(part: str) -> tuple[str, float]:
    """Parse `tier=share`, after a key."""
    tier, _, number = part.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if tier not in TIERS or not 0.0 < value <= 1.0:
        raise OptionError("api_keys", f"may have only {'=, '.join(TIERS)}= with a number up to 1 after a key")
    return tier, value


class Keys:
    """All keys of the server."""

    def __init__(
        self,
        users: Mapping[str, str],
        admin: str | None,
        shares: Mapping[str, dict[str, float]] | None = None,
    ) -> None:
        """`users` are tenants by key, `shares` the memory shares of tenants, by tier."""
        self.shares = dict(shares or {})
        self._users = {_digest(key): tenant for key, tenant in users.items()}
        self.tenants = frozenset(users.values())
        self._admin = None if admin is None else _digest(admin)

    @classmethod
    def read(cls, options: ServerOptions) -> Keys:
        """The keys of the options and the environment.

        Raises `OptionError` for invalid keys, and for a public address without keys or `allow_anonymous`.
        """
        lines: list[str] = []
        if options.api_keys is not None:
            try:
                lines = Path(options.api_keys).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                problem = f"names {options.api_keys}, which cannot be read: {type(error).__name__}"
                raise OptionError("api_keys", problem) from error
        lines += os.environ.get(VARIABLE, "").split(",")
        users: dict[str, str] = {}
        shares: dict[str, dict[str, float]] = {}
        for line in lines:
            entry, *parts = line.split() or [""]
            if not entry or entry.startswith("#"):
                continue
            tenant, colon, key = entry.partition(":")
            if not colon:
                tenant, key = f"key-{hashlib.sha256(entry.encode()).hexdigest()[:12]}", entry
            if not _TENANT.fullmatch(tenant) or not key or key in users:
                raise OptionError("api_keys", "needs lines of `tenant:key`, each key once")
            if tenant == ANONYMOUS:
                raise OptionError(
                    "api_keys", f"must not name a tenant {ANONYMOUS}: callers without a key have that name"
                )
            users[key] = tenant
            shares.setdefault(tenant, {}).update(_share(part) for part in parts)
        if options.api_keys is not None and not users:
            raise OptionError("api_keys", f"names {options.api_keys}, which holds no key")
        if len(users) > KEYS_MAX:
            raise OptionError("api_keys", f"may hold at most {KEYS_MAX} keys")
        if users and options.allow_anonymous:
            raise OptionError("allow_anonymous", "cannot be combined with keys: leave one of them out")
        if not users and not options.loopback and not options.allow_anonymous:
            raise OptionError(
                "host",
                f"{options.host} is reachable from other machines, and there are no keys: give --api-keys "
                f"FILE (or {VARIABLE}), listen on 127.0.0.1, or give --allow-anonymous to serve without keys",
            )
        return cls(users, options.admin_key, {tenant: share for tenant, share in shares.items() if share})

    def session_limit(self, stated: int | None, max_sessions: int) -> int | None:
        """The maximum of open sessions per tenant: as stated, or half of all where there are several tenants.

        So no tenant can take all the sessions of a shared server.
        """
        if stated is None and len(self.tenants) > 1:
            return (max_sessions + 1) // 2
        return stated

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._users)

    def caller(self, key: str | None) -> Caller | None:
        """The caller with this key; None if the key is unknown."""
        digest = b"" if key is None else _digest(key)
        admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        found = self._users.get(digest)
        if admin:
            return Caller(found if found is not None else ANONYMOUS, admin=True)
        if found is not None:
            return Caller(found, admin=False)
        if not self.required:
            return Caller(ANONYMOUS, admin=self._admin is None)
        return None
