"""The life of a server in the database: how it begins, is renewed, claims sessions, and ends.

A life is alive while its row says so; leases serve liveness alone. A server begins a life under its name; a
second one with the same name waits, and takes over when the first has ended, when its lease is over, or when
its connection is gone and it was not renewed for a second. A wrong verdict costs recomputation and never
history: the fence of every commit (`commit`) is the owner and the epoch of the session. Used by the store.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from holdfast.engine.durable.postgres.commit import LEASE, LEASE_SECONDS
from holdfast.engine.durable.postgres.link import Connection
from holdfast.engine.durable.postgres.tables import LifeState
from holdfast.engine.durable.store import JournalInUse

__all__ = ["RENEW_SECONDS", "begin_life", "claim_sessions", "end_life", "hold_life", "life_of", "renew_life"]

log = logging.getLogger("holdfast.journal")

RENEW_SECONDS = 0.5
"""How often a life without commits is renewed."""

GONE_SECONDS = 1.0
"""How long a life whose connection is gone may go without a renewal."""

POLL_SECONDS = 0.1

LOCK_CLASS = 0x686F6C64
"""The first key of the advisory locks that lives hold on their connections; the second is the life."""

BURY = f"""
UPDATE holdfast.lives l SET state = 'dead' WHERE name = %(name)s AND state IN ('live', 'draining') AND (
    lease < clock_timestamp() OR (
        lease < clock_timestamp() + interval '{LEASE_SECONDS - GONE_SECONDS} seconds' AND NOT EXISTS (
            SELECT 1 FROM pg_locks p JOIN pg_database d ON p.database = d.oid
            WHERE d.datname = current_database() AND p.locktype = 'advisory' AND p.objsubid = 2
                AND p.classid = {LOCK_CLASS} AND p.objid = l.life AND p.granted)))
"""

BEGIN = f"""
INSERT INTO holdfast.lives (name, state, host, process, lease)
VALUES (%(name)s, 'live', %(host)s, %(process)s, {LEASE})
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
DELETE FROM holdfast.lives l WHERE name = %(name)s AND life <> %(life)s AND state IN ('ended', 'dead')
AND NOT EXISTS (SELECT 1 FROM holdfast.sessions s WHERE s.owner = l.life)
"""


def begin_life(connection: Connection, name: str, place: str, timeout: float) -> int:
    """Begin a life; waits up to `timeout` seconds for another server of the same name."""
    deadline = time.monotonic() + timeout
    waited = False
    values = {"name": name, "host": socket.gethostname(), "process": os.getpid()}
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
    with connection.transaction():
        connection.execute(CLAIM, {"name": name, "life": life})
        connection.execute(FORGET, {"name": name, "life": life})


def renew_life(connection: Connection, life: int) -> bool:
    """Renew the lease; False if the life is over."""
    return connection.execute(RENEW, (life,)).fetchone() is not None


def life_of(connection: Connection, life: int) -> tuple[LifeState, int]:
    """The state of a life and the number of its last batch.

    It also writes, so that it returns when everything before it is as durable as a commit: a batch that is
    found stored may not be replicated yet.
    """
    found = connection.execute(
        f"UPDATE holdfast.lives SET lease = {LEASE} WHERE life = %s RETURNING state, batch", (life,)
    ).fetchone()
    return (LifeState.DEAD, 0) if found is None else (LifeState(found[0]), int(found[1]))


def end_life(connection: Connection, life: int) -> None:
    """End a life: its sessions wait for the next one."""
    connection.execute(
        "UPDATE holdfast.lives SET state = 'ended' WHERE life = %s AND state IN ('live', 'draining')", (life,)
    )
