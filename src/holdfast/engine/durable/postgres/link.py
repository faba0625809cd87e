"""The connection of a journal to its database: settings, loss, and reconnecting with bounded back-off.

The URL is libpq's: TLS, hosts and files with passwords come from its parameters or from libpq's environment.
Messages name the place without credentials. A lost connection is opened again at the next use, not sooner
than the back-off allows. Used by the store, in the writer's thread, and by readers.
"""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import Diagnostic

from holdfast.engine.durable.places import fault_of, shown
from holdfast.engine.durable.records import JournalError
from holdfast.engine.durable.store import Durability

__all__ = ["SYNCHRONOUS", "Connection", "Link", "Unreachable", "connect", "in_words", "name_of", "named"]

log = logging.getLogger("holdfast.journal")

Connection = psycopg.Connection[tuple[Any, ...]]

SYNCHRONOUS = {"off": "off", "commit": "local", "fsync": "on"}
"""What PostgreSQL's `synchronous_commit` is for each durability."""

STATEMENT_SECONDS = 30
LOCK_SECONDS = 10
DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""Settings of libpq where the URL has none: a network that is gone is noticed within ten seconds."""

BACK_OFF_FIRST_SECONDS = 0.05
BACK_OFF_MAX_SECONDS = 2.0


class Unreachable(RuntimeError):
    """There is no connection now."""


def require_url(url: str) -> None:
    """Raise `JournalError` if a URL is malformed, before libpq repeats its password in an error."""
    if fault := fault_of(url):
        raise JournalError(f"{shown(url)} {fault}")


def name_of(url: str) -> str:
    """The name of the server among those of the database: the URL's `application_name`."""
    require_url(url)
    return str(conninfo_to_dict(url).get("application_name", "holdfast"))


def named(url: str, name: str) -> str:
    """The URL for a server of this name."""
    place, _, query = url.partition("?")
    given = [part for part in query.split("&") if part and not part.startswith("application_name=")]
    return f"{place}?{'&'.join([*given, f'application_name={quote(name)}'])}"


def connect(url: str, durability: Durability = "fsync") -> Connection:
    """A connection whose statements have time limits; `JournalError` if the URL is malformed."""
    require_url(url)
    given = conninfo_to_dict(url)
    stated = {name: value for name, value in DEFAULTS.items() if name not in given}
    opened: Connection = psycopg.connect(
        make_conninfo(url, **stated, application_name=name_of(url)), autocommit=True
    )
    try:
        opened.execute(
            "SELECT set_config('synchronous_commit', %s, false), set_config('statement_timeout', %s, false), "
            "set_config('lock_timeout', %s, false), set_config('client_encoding', 'UTF8', false), "
            # A commit is planned once: its plan takes longer than the statement, and depends on no value.
            "set_config('plan_cache_mode', 'force_generic_plan', false)",
            (SYNCHRONOUS[durability], f"{STATEMENT_SECONDS}s", f"{LOCK_SECONDS}s"),
        )
    except BaseException:
        opened.close()
        raise
    return opened


def in_words(error: Exception) -> str:
    """An error in one line. libpq's messages name host and user, and no password."""
    return " ".join(str(error).split()) or type(error).__name__


class Link:
    """A connection that is opened again when it was lost."""

    def __init__(self, url: str, durability: Durability) -> None:
        self.place = shown(url)
        self.failing_since: float | None = None
        """When the first statement failed, or the connection; None while statements succeed."""
        self.problem = ""
        """Why there is no connection."""
        self.warned = False
        """Whether the server has warned since this was last cleared: a commit may not be replicated."""
        self._url = url
        self._durability = durability
        self._connection: Connection | None = None
        self._failures = 0
        """Failures since the last statement that succeeded."""
        self._next_try = 0.0

    def open(self) -> Connection:
        """The connection, opened if need be; `JournalError` if the database cannot be reached."""
        try:
            return self.use()
        except Unreachable as error:
            raise JournalError(f"{self.place} cannot be reached: {self.problem}") from error

    def use(self) -> Connection:
        """The connection; `Unreachable` while there is none."""
        if self._connection is not None and not self._connection.closed:
            return self._connection
        now = time.monotonic()
        if now < self._next_try:
            raise Unreachable(self.problem)
        try:
            self._connection = connect(self._url, self._durability)
        except psycopg.Error as error:
            self._fail(error)
            self._next_try = time.monotonic() + self._wait
            raise Unreachable(self.problem) from error
        self._connection.add_notice_handler(self._notice)
        return self._connection

    @property
    def _wait(self) -> float:
        return min(BACK_OFF_FIRST_SECONDS * 2.0 ** min(self._failures - 1, 16), BACK_OFF_MAX_SECONDS)

    def worked(self) -> None:
        """A statement has succeeded."""
        if self.failing_since is not None:
            log.warning("%s is reached again", self.place)
        self.failing_since, self.problem, self._failures, self._next_try = None, "", 0, 0.0

    def drop(self, error: Exception) -> None:
        """Close the connection after an error on it; the first time it is opened again at the next use."""
        self.close()
        self._fail(error)
        if self._failures > 1:
            self._next_try = time.monotonic() + self._wait

    def _fail(self, error: Exception) -> None:
        self.problem = in_words(error)
        self._failures += 1
        if self.failing_since is None:
            self.failing_since = time.monotonic()
            log.warning("%s: the connection is lost; trying again: %s", self.place, self.problem)

    def _notice(self, diagnostic: Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            self.warned = True
            log.warning("%s: %s", self.place, diagnostic.message_primary)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
