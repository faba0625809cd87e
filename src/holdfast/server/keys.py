"""Who is calling: keys, tenants and the admin.

Each key belongs to a tenant, which has its own sessions, its own root of shared prefixes and its own caps.
Keys come from a file (one a line, `tenant:key` or the key alone) or from HOLDFAST_API_KEYS. They are compared
in constant time, as digests, and never logged. Without keys everyone is one tenant. After a key may follow
which part of each tier's memory its tenant may hold: `device=0.5 host=0.25 disk=0.1`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.options import TIERS, OptionError
from holdfast.server.options import ServerOptions

__all__ = ["ANONYMOUS", "Caller", "Keys"]

ANONYMOUS = "public"
KEYS_MAX = 100_000
VARIABLE = "HOLDFAST_API_KEYS"

_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    tenant: str
    admin: bool


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _share(part: str) -> tuple[str, float]:
    """What `tier=part` says, after a key."""
    tier, _, number = part.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if tier not in TIERS or not 0.0 < value <= 1.0:
        raise OptionError(
            "api_keys", f"may have {'=, '.join(TIERS)}= with a number up to 1 after a key, and nothing else"
        )
    return tier, value


class Keys:
    """All keys that open the server."""

    def __init__(
        self,
        users: Mapping[str, str],
        admin: str | None,
        shares: Mapping[str, dict[str, float]] | None = None,
    ) -> None:
        """`users` are tenants by key, `shares` what each may hold, by tier, where its line says so."""
        self.shares = dict(shares or {})
        self._users = [(_digest(key), tenant) for key, tenant in users.items()]
        self._admin = None if admin is None else _digest(admin)

    @classmethod
    def read(cls, options: ServerOptions) -> Keys:
        """The keys that the options and the environment name.

        Raises `OptionError` for keys that cannot be used, and where strangers would be let in though nobody
        said that they may be.
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
            users[key] = tenant
            shares.setdefault(tenant, {}).update(_share(part) for part in parts)
        if options.api_keys is not None and not users:
            raise OptionError("api_keys", f"names {options.api_keys}, which holds no key")
        if len(users) > KEYS_MAX:
            raise OptionError("api_keys", f"may hold at most {KEYS_MAX} keys")
        if users and options.allow_anonymous:
            raise OptionError(
                "allow_anonymous", "contradicts the keys that were given: leave one of them out"
            )
        if not users and not options.loopback and not options.allow_anonymous:
            raise OptionError(
                "host",
                f"{options.host} lets other machines in, and there are no keys: give --api-keys FILE (or "
                f"{VARIABLE}), listen on 127.0.0.1, or say --allow-anonymous if everybody may use the model",
            )
        return cls(users, options.admin_key, {tenant: share for tenant, share in shares.items() if share})

    @property
    def required(self) -> bool:
        """Whether a caller needs a key at all."""
        return bool(self._users)

    def caller(self, key: str | None) -> Caller | None:
        """Who has this key; None if nobody has. Every key is looked at, whichever fits."""
        digest = b"" if key is None else _digest(key)
        admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        found: str | None = None
        for known, tenant in self._users:
            if hmac.compare_digest(digest, known):
                found = tenant
        if admin:
            return Caller(found if found is not None else ANONYMOUS, admin=True)
        if found is not None:
            return Caller(found, admin=False)
        if not self.required:
            return Caller(ANONYMOUS, admin=self._admin is None)
        return None
