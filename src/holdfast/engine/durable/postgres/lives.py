"""The life of a server in the database: how it begins, is renewed, claims sessions, and ends.

A life is alive while its row says so; leases serve liveness alone. A server begins a life under its name; a
second one with the same name waits, and takes over when the first has ended, when its lease is over, or when
its connection is gone and it was not renewed for a second. A life whose connection is gone and of which
another process says the same is over at once. A wrong verdict costs recomputation and never history: the
fence of every commit (`commit`) is the owner and the epoch of the session. Used by the store.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from holdfast.cluster.lives import GONE_SECONDS, LEASE_SECONDS, LifeState
from holdfast.cluster.ownership import Standing
from holdfast.engine.durable.postgres.commit import LEASE
from holdfast.engine.durable.postgres.link import Connection
from holdfast.engine.durable.store import JournalInUse

__all__ = [
    "begin_life",
    "bury_life",
    "claim_sessions",
    "drain_life",
    "end_life",
    "forget_lives",
    "hold_life",
    "life_of",
    "renew_life",
]

log = logging.getLogger("holdfast.journal")

POLL_SECONDS = 0.1

LOCK_CLASS = 0x686F6C64
"""The first key of the advisory locks that lives hold on their connections; the second is the life."""

CONNECTED = f"""EXISTS (
    SELECT 1 FROM pg_locks p JOIN pg_database d ON p.database = d.oid
    WHERE d.datname = current_database() AND p.locktype = 'advisory' AND p.objsubid = 2
        AND p.classid = {LOCK_CLASS} AND p.objid = l.life AND p.granted)"""

LAPSED = f"""state IN ('live', 'draining') AND (lease < clock_timestamp() OR (
    lease < clock_timestamp() + interval '{LEASE_SECONDS - GONE_SECONDS} seconds' AND NOT {{connected}}))"""

BURY = f"UPDATE holdfast.lives l SET state = 'dead' WHERE name = %(name)s AND {LAPSED}".format(
    connected=CONNECTED
)

# Another process may know as well as PostgreSQL that the life is gone: its own socket to it has ended.
BURY_LIFE = f"""
WITH known AS MATERIALIZED (SELECT life, {CONNECTED} AS connected FROM holdfast.lives l WHERE life = %(life)s)
UPDATE holdfast.lives l SET state = 'dead' FROM known k WHERE l.life = k.life
AND (NOT (k.connected OR %(heard)s) OR {LAPSED})
AND state IN ('live', 'draining')""".format(connected="(k.connected AND %(heard)s)")

BEGIN = f"""
INSERT INTO holdfast.lives (name, state, host, process, address, lease)
VALUES (%(name)s, 'live', %(host)s, %(process)s, %(address)s, {LEASE})
ON CONFLICT (name) WHERE state IN ('live', 'draining') DO NOTHING RETURNING life
"""

# The renewal need not survive a crash of the database.
RENEW = f"""
WITH fast AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
UPDATE holdfast.lives SET lease = {LEASE} FROM fast
WHERE life = %s AND state IN ('live', 'draining') RETURNING life
"""

CLAIM = """
UPDATE holdfast.sessions SET owner = %(life)s, epoch = epoch + 1
WHERE owner IN (SELECT life FROM holdfast.lives WHERE name = %(name)s AND life <> %(life)s)
"""

FORGET = """
DELETE FROM holdfast.lives l WHERE state IN ('ended', 'dead')
AND NOT EXISTS (SELECT 1 FROM holdfast.sessions s WHERE s.owner = l.life)
"""


def begin_life(connection: Connection, name: str, place: str, timeout: float, address: str = "") -> int:
    """Begin a life; waits up to `timeout` seconds for another server of the same name.

    `address` is where other processes reach the server.
    """
    deadline = time.monotonic() + timeout
    waited = False
    values = {"name": name, "host": socket.gethostname(), "process": os.getpid(), "address": address}
    while True:
        connection.execute(BURY, values)
        found = connection.execute(BEGIN, values).fetchone()
        if found is not None:
            life = int(found[0])
            hold_life(connection, life)
            return life
        if time.monotonic() >= deadline:
            raise JournalInUse(
                f"{place} is in use by another server named {name!r}; stop it, or give each server a name of "
                "its own with application_name in the URL"
            )
        if not waited:
            waited = True
            log.warning("%s is in use by another server; waiting up to %g s for it", place, timeout)
        time.sleep(POLL_SECONDS)


def hold_life(connection: Connection, life: int) -> None:
    """Show others that the connection of a life is open; the lock goes with the connection."""
    connection.execute("SELECT pg_try_advisory_lock(%s, %s)", (LOCK_CLASS, life))


def claim_sessions(connection: Connection, name: str, life: int) -> None:
    """Make a life the owner of all sessions of earlier lives of its name."""
    connection.execute(CLAIM, {"name": name, "life": life})


def forget_lives(connection: Connection) -> None:
    """Remove the rows of lives that are over and own nothing."""
    connection.execute(FORGET)


def bury_life(connection: Connection, life: int, heard: bool = True) -> bool:
    """Declare a life dead if its lease and its connections allow that; whether it is over.

    The times are the database's own. `heard` is False where a process has lost its connection to the server:
    then it is enough that the life was not renewed for a second, or that the database has lost it too.
    """
    connection.execute(BURY_LIFE, {"life": life, "heard": heard})
    found = connection.execute("SELECT state FROM holdfast.lives WHERE life = %s", (life,)).fetchone()
    return found is None or found[0] not in (LifeState.LIVE, LifeState.DRAINING)


def renew_life(connection: Connection, life: int) -> bool:
    """Renew the lease; False if the life is over."""
    return connection.execute(RENEW, (life,)).fetchone() is not None


def life_of(connection: Connection, life: int) -> Standing:
    """The state of a life and the number of its last batch.

    It also writes, so that it returns when everything before it is as durable as a commit: a batch that is
    found stored may not be replicated yet.
    """
    found = connection.execute(
        f"UPDATE holdfast.lives SET lease = {LEASE} WHERE life = %s RETURNING state, batch", (life,)
    ).fetchone()
    return Standing(LifeState.DEAD, 0) if found is None else Standing(LifeState(found[0]), int(found[1]))


def drain_life(connection: Connection, life: int) -> bool:
    """Let a life take no more sessions; False if it is over."""
    return _turn(connection, life, LifeState.DRAINING)


def end_life(connection: Connection, life: int) -> bool:
    """End a life: its sessions are free; False if it was over."""
    return _turn(connection, life, LifeState.ENDED)


def _turn(connection: Connection, life: int, state: LifeState) -> bool:
    found = connection.execute(
        "UPDATE holdfast.lives SET state = %s WHERE life = %s AND state IN ('live', 'draining') "
        "RETURNING life",
        (state.value, life),
    )
    return found.fetchone() is not None
