"""Statements that change or ask the owners of sessions: claim, hand over, repeat, locate.

Each is one statement with its conditions, so one round trip. Rows of lives are locked before rows of
sessions, and in the order of their numbers, so statements of several servers do not deadlock: a life that is
declared dead meanwhile either comes before the statement or after it. The rules are those of
`cluster.ownership`; a differential test compares them. Used by the store and by API processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.cluster.lives import LifeState
from holdfast.cluster.ownership import Claimed, Offer, Write
from holdfast.engine.durable.postgres.link import Connection
from holdfast.engine.durable.postgres.tables import escape, unescape
from holdfast.engine.durable.store import LifeRow

__all__ = [
    "Located",
    "claim",
    "count_of",
    "hand_over",
    "lives",
    "locate",
    "stored",
    "takers",
    "unclaimed",
]

CLAIM = """
WITH me AS MATERIALIZED (
    SELECT life FROM holdfast.lives WHERE life = %(life)s AND state = 'live' FOR SHARE),
free AS MATERIALIZED (
    SELECT s.id, me.life FROM me, holdfast.sessions s JOIN holdfast.lives l ON l.life = s.owner
    WHERE s.id = ANY(%(ids)s) AND l.state IN ('ended', 'dead') ORDER BY s.id FOR UPDATE OF s),
claimed AS (
    UPDATE holdfast.sessions s SET owner = f.life, epoch = s.epoch + 1
    FROM free f, holdfast.lives l
    WHERE s.id = f.id AND l.life = s.owner AND l.state IN ('ended', 'dead')
    RETURNING s.id, s.owner, s.epoch, s.commits)
SELECT id, owner, epoch, commits FROM claimed
UNION ALL SELECT id, owner, epoch, commits FROM holdfast.sessions
WHERE id = ANY(%(ids)s) AND id NOT IN (SELECT id FROM claimed)
"""

HAND_OVER = """
WITH alive AS MATERIALIZED (
    SELECT life, state FROM holdfast.lives WHERE life = %(life)s OR life = ANY(%(targets)s)
    ORDER BY life FOR SHARE),
offered AS (
    SELECT * FROM unnest(%(ids)s::text[], %(epochs)s::bigint[], %(commits)s::bigint[], %(targets)s::bigint[])
    AS o (id, epoch, commits, target)),
moved AS (
    UPDATE holdfast.sessions s SET owner = o.target, epoch = s.epoch + 1
    FROM offered o, alive giver, alive taker
    WHERE s.id = o.id AND s.owner = %(life)s AND s.epoch = o.epoch AND s.commits = o.commits
        AND giver.life = %(life)s AND giver.state IN ('live', 'draining')
        AND taker.life = o.target AND taker.life <> giver.life AND taker.state = 'live'
    RETURNING s.id, s.owner, s.epoch, s.commits)
SELECT id, owner, epoch, commits FROM moved
UNION ALL SELECT id, owner, epoch, commits FROM holdfast.sessions
WHERE id = ANY(%(ids)s) AND id NOT IN (SELECT id FROM moved)
"""

STORED = """
SELECT w.id FROM unnest(%(ids)s::text[], %(kinds)s::text[], %(epochs)s::bigint[], %(commits)s::bigint[])
AS w (id, kind, epoch, commits) LEFT JOIN holdfast.sessions s ON s.id = w.id
WHERE CASE WHEN w.kind = 'remove' THEN s.id IS NULL
    ELSE s.owner = %(life)s AND s.epoch = w.epoch AND s.commits = w.commits END
"""

LOCATE = """
SELECT s.id, l.life, l.state, l.address, l.lease < clock_timestamp(), l.name
FROM holdfast.sessions s JOIN holdfast.lives l ON l.life = s.owner WHERE s.id = ANY(%(ids)s)
"""


class Located(NamedTuple):
    """Who owns a session; `lapsed` says that the owner's lease is over, so that it may be declared dead."""

    life: int
    state: LifeState
    address: str
    lapsed: bool
    name: str = ""


def claim(connection: Connection, life: int, names: Iterable[str]) -> dict[str, Claimed]:
    """Claim free sessions for a life that is LIVE: where each session is now, but for unknown ones."""
    return _where(connection, CLAIM, {"life": life, "ids": [escape(name) for name in names]})


def hand_over(connection: Connection, life: int, offers: Sequence[Offer]) -> dict[str, Claimed]:
    """Make lives that are LIVE the owners of sessions at rest: where each is now, but for unknown ones."""
    values = {
        "life": life,
        "ids": [escape(offer.session) for offer in offers],
        "epochs": [offer.epoch for offer in offers],
        "commits": [offer.commits for offer in offers],
        "targets": [offer.target for offer in offers],
    }
    return _where(connection, HAND_OVER, values)


def _where(connection: Connection, statement: str, values: dict[str, Any]) -> dict[str, Claimed]:
    rows = connection.execute(statement, values)
    return {unescape(name): Claimed(owner, epoch, commits) for name, owner, epoch, commits in rows}


def stored(connection: Connection, life: int, writes: Sequence[Write]) -> frozenset[str]:
    """The sessions of a batch that is stored already, by the epoch and the number of each write."""
    values = {
        "life": life,
        "ids": [escape(write.session) for write in writes],
        "kinds": [write.kind.value for write in writes],
        "epochs": [write.epoch for write in writes],
        "commits": [write.commits for write in writes],
    }
    return frozenset(unescape(name) for (name,) in connection.execute(STORED, values))


def locate(connection: Connection, names: Iterable[str]) -> dict[str, Located]:
    """The owners of sessions, but for unknown ones."""
    rows = connection.execute(LOCATE, {"ids": [escape(name) for name in names]})
    return {
        unescape(name): Located(life, LifeState(state), address, lapsed, server)
        for name, life, state, address, lapsed, server in rows
    }


def takers(connection: Connection, life: int) -> list[Located]:
    """The lives besides this one that take sessions."""
    rows = connection.execute(
        "SELECT life, state, address, lease < clock_timestamp(), name FROM holdfast.lives "
        "WHERE state = 'live' AND life <> %s ORDER BY life",
        (life,),
    )
    return [
        Located(other, LifeState(state), address, lapsed, name)
        for other, state, address, lapsed, name in rows
    ]


def lives(connection: Connection) -> list[LifeRow]:
    """The lives that are alive or own sessions, the newest of a name last."""
    rows = connection.execute(
        "SELECT l.life, l.name, l.address, l.state, "
        "extract(epoch FROM l.lease - clock_timestamp())::double precision, "
        "count(s.id), coalesce(max(s.epoch), 0) "
        "FROM holdfast.lives l LEFT JOIN holdfast.sessions s ON s.owner = l.life GROUP BY l.life "
        "HAVING l.state IN ('live', 'draining') OR count(s.id) > 0 ORDER BY l.life"
    )
    return [
        LifeRow(life, name, address, state, round(lease, 3), owned, epoch)
        for life, name, address, state, lease, owned, epoch in rows
    ]


def count_of(connection: Connection, tenant: str) -> int:
    """How many sessions of a tenant were opened under a limit and are open."""
    found = connection.execute(
        "SELECT sessions FROM holdfast.tenants WHERE tenant = %s", (escape(tenant),)
    ).fetchone()
    return 0 if found is None else int(found[0])


def unclaimed(connection: Connection, after: str, seconds: float, most: int) -> list[str]:
    """Sessions after `after` whose owner is over, and was last alive so long ago."""
    rows = connection.execute(
        "SELECT s.id FROM holdfast.sessions s JOIN holdfast.lives l ON l.life = s.owner "
        "WHERE l.state IN ('ended', 'dead') AND l.lease < clock_timestamp() - make_interval(secs => %s) "
        "AND s.id > %s ORDER BY s.id LIMIT %s",
        (seconds, escape(after), most),
    )
    return [unescape(name) for (name,) in rows]
