"""The statement that commits a part of a batch: one round trip, whatever the number of its records.

Its conditions are the fence. The life must be alive and at the batch before this one, and its row is locked
meanwhile; each session must belong to the life, in the epoch and at the commit that the life knows. Rows of a
session that fails its condition are left out; the statement returns the sessions that were accepted. New
sessions under a limit are counted in the row of their tenant, which is locked meanwhile: what does not fit is
left out as well. A name that two lives open at the same moment is an error (a unique key), and the second
one's statement is sent again. The rules are those of `cluster.ownership`. Used by the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.cluster.lives import LEASE_SECONDS
from holdfast.engine.durable.postgres.changes import Part, about_sum, head_sum, tenant_sum
from holdfast.engine.durable.postgres.tables import escape

__all__ = ["COMMIT", "LEASE", "parameters"]

LEASE = f"clock_timestamp() + interval '{LEASE_SECONDS} seconds'"

COMMIT = f"""
WITH me AS (
    UPDATE holdfast.lives SET batch = %(batch)s, lease = {LEASE}
    WHERE life = %(life)s AND batch = %(before)s AND state IN ('live', 'draining') RETURNING life),
given AS (
    SELECT g.* FROM me, unnest(
        %(ids)s::text[], %(kinds)s::text[], %(epochs)s::bigint[], %(commits)s::bigint[], %(needs)s::text[],
        %(describes)s::boolean[], %(moves)s::boolean[], %(tenants)s::text[], %(ttls)s::float8[],
        %(metadata)s::text[], %(systems)s::text[], %(created)s::float8[], %(parents)s::text[],
        %(tools)s::text[], %(settings)s::text[], %(origins)s::bigint[], %(tenant_sums)s::bigint[],
        %(about_sums)s::bigint[], %(heads)s::bigint[], %(head_sums)s::bigint[], %(depths)s::integer[]
    ) WITH ORDINALITY AS g (id, kind, epoch, commits, needs, describes, moves, tenant, ttl, metadata, system,
        created, parent, tools, settings, origin, tenant_sum, about_sum, head, head_sum, turns, place)),
changed AS (
    UPDATE holdfast.sessions s SET
        commits = g.commits,
        ttl = CASE WHEN g.describes THEN g.ttl ELSE s.ttl END,
        metadata = CASE WHEN g.describes THEN g.metadata ELSE s.metadata END,
        tools = CASE WHEN g.describes THEN g.tools ELSE s.tools END,
        settings = CASE WHEN g.describes THEN g.settings ELSE s.settings END,
        about_sum = CASE WHEN g.describes THEN g.about_sum ELSE s.about_sum END,
        head = CASE WHEN g.moves THEN g.head ELSE s.head END,
        head_sum = CASE WHEN g.moves THEN g.head_sum ELSE s.head_sum END,
        turns = CASE WHEN g.moves THEN g.turns ELSE s.turns END
    FROM given g WHERE g.kind = 'change' AND s.id = g.id
        AND s.owner = %(life)s AND s.epoch = g.epoch AND s.commits = g.commits - 1 RETURNING s.id),
removed AS (
    DELETE FROM holdfast.sessions s USING given g WHERE g.kind = 'remove' AND s.id = g.id
        AND s.owner = %(life)s AND s.epoch = g.epoch AND s.commits = g.commits - 1
    RETURNING s.id, s.tenant, s.counted),
wanted AS (
    SELECT g.*, row_number() OVER (PARTITION BY g.tenant ORDER BY g.place) AS rank FROM given g
    WHERE g.kind = 'create' AND NOT EXISTS (SELECT 1 FROM holdfast.sessions s WHERE s.id = g.id)
        AND (g.needs IS NULL OR g.needs IN (SELECT id FROM changed UNION ALL SELECT id FROM removed))),
tally AS (
    SELECT tenant, least(sum(comes), %(limit)s::bigint) AS comes, sum(leaves) AS leaves FROM (
        SELECT tenant, 1 AS comes, 0 AS leaves FROM wanted WHERE %(limit)s::bigint IS NOT NULL
        UNION ALL SELECT tenant, 0, 1 FROM removed WHERE counted) AS t GROUP BY tenant),
counted AS (
    INSERT INTO holdfast.tenants AS t (tenant, sessions, granted)
    SELECT tenant, comes - leaves, comes FROM tally ORDER BY tenant
    ON CONFLICT (tenant) DO UPDATE SET
        granted = greatest(0, least(excluded.granted, %(limit)s::bigint - t.sessions)),
        sessions = t.sessions + greatest(0, least(excluded.granted, %(limit)s::bigint - t.sessions))
            - (excluded.granted - excluded.sessions)
    RETURNING t.tenant, t.granted),
made AS (
    INSERT INTO holdfast.sessions (id, tenant, ttl, metadata, system, created, parent, tools, settings,
        origin, tenant_sum, about_sum, head, head_sum, turns, owner, epoch, commits, counted)
    SELECT w.id, w.tenant, w.ttl, w.metadata, w.system, w.created, w.parent, w.tools, w.settings,
        w.origin, w.tenant_sum, w.about_sum, w.head, w.head_sum, w.turns, %(life)s, w.epoch, w.commits,
        %(limit)s::bigint IS NOT NULL
    FROM wanted w LEFT JOIN counted c ON c.tenant = w.tenant
    WHERE %(limit)s::bigint IS NULL OR w.rank <= c.granted ORDER BY w.id RETURNING id),
accepted AS (SELECT id FROM changed UNION ALL SELECT id FROM removed UNION ALL SELECT id FROM made),
kept AS (SELECT id FROM changed UNION ALL SELECT id FROM made),
added AS (
    INSERT INTO holdfast.turns (number, before, depth, turn_id, input, output, finish, checksum, details)
    SELECT t.number, t.before, t.depth, t.turn_id, t.input, t.output, t.finish, t.checksum, t.details
    FROM unnest(%(turn_sessions)s::text[], %(numbers)s::bigint[], %(befores)s::bigint[],
        %(turn_depths)s::integer[], %(turn_ids)s::text[], %(inputs)b::bytea[], %(outputs)b::bytea[],
        %(finishes)s::text[], %(turn_sums)s::bigint[], %(details)s::text[]
    ) AS t (session, number, before, depth, turn_id, input, output, finish, checksum, details)
    WHERE t.session IN (SELECT id FROM accepted)),
unfinished AS (
    DELETE FROM holdfast.finished f
    USING unnest(%(unfinished_sessions)s::text[], %(unfinished)s::text[]) AS d (session, turn_id)
    WHERE f.session = d.session AND f.turn_id = d.turn_id AND d.session IN (SELECT id FROM kept)),
finished AS (
    INSERT INTO holdfast.finished (session, turn_id, number, result, checksum)
    SELECT f.* FROM unnest(%(finished_sessions)s::text[], %(finished)s::text[],
        %(finished_numbers)s::bigint[], %(results)s::text[], %(finished_sums)s::bigint[]
    ) AS f (session, turn_id, number, result, checksum)
    WHERE f.session IN (SELECT id FROM kept)
    ON CONFLICT (session, turn_id) DO UPDATE
    SET number = excluded.number, result = excluded.result, checksum = excluded.checksum),
unrequested AS (
    DELETE FROM holdfast.requests r
    USING unnest(%(unrequested_sessions)s::text[], %(unrequested)s::text[]) AS d (session, request_id)
    WHERE r.session = d.session AND r.request_id = d.request_id AND d.session IN (SELECT id FROM kept)),
requested AS (
    INSERT INTO holdfast.requests (session, request_id, number, asked, answer, checksum)
    SELECT r.session, r.request_id, r.number, r.asked, r.answer, r.checksum
    FROM unnest(%(request_sessions)s::text[], %(requests)s::text[], %(request_numbers)s::bigint[],
        %(asked)s::text[], %(answers)s::text[], %(request_sums)s::bigint[], %(request_needs)s::text[]
    ) AS r (session, request_id, number, asked, answer, checksum, needs)
    WHERE r.session IN (SELECT id FROM kept) AND (r.needs IS NULL OR r.needs IN (SELECT id FROM accepted))
    ON CONFLICT (session, request_id) DO UPDATE
    SET number = excluded.number, asked = excluded.asked, answer = excluded.answer,
        checksum = excluded.checksum),
unsnapped AS (
    DELETE FROM holdfast.snapshots s USING unnest(%(unsnapped)s::text[]) AS d (session)
    WHERE s.session = d.session AND d.session IN (SELECT id FROM kept)),
snapped AS (
    INSERT INTO holdfast.snapshots (session, file, length, bytes)
    SELECT s.* FROM unnest(%(snapped)s::text[], %(files)s::text[], %(lengths)s::bigint[], %(sizes)s::bigint[]
    ) AS s (session, file, length, bytes) WHERE s.session IN (SELECT id FROM kept)
    ON CONFLICT (session) DO UPDATE
    SET file = excluded.file, length = excluded.length, bytes = excluded.bytes),
logged AS (
    INSERT INTO holdfast.log (session, kind, detail)
    SELECT l.session, l.kind, l.detail
    FROM unnest(%(log_sessions)s::text[], %(log_kinds)s::text[], %(log_details)s::text[])
    WITH ORDINALITY AS l (session, kind, detail, place)
    WHERE l.session IN (SELECT id FROM accepted) ORDER BY l.place)
SELECT NULL AS id FROM me UNION ALL SELECT id FROM accepted
"""
"""Returns a row without a name if the life is alive, and the names of the accepted sessions."""


def parameters(part: Part, life: int, before: int, batch: int, limit: int | None = None) -> dict[str, Any]:
    """The values of `COMMIT` for a part of a batch; `before` is the batch that the life must be at.

    `limit` is how many sessions a tenant may have in the store; None counts none.
    """
    return {
        "life": life,
        "limit": limit,
        "before": before,
        "batch": batch,
        **_sessions(part),
        **_turns(part),
        **_answers(part),
        **_snapshots(part),
    }


def _sessions(part: Part) -> dict[str, Any]:
    names = list(part.changes)
    changes = list(part.changes.values())
    known = [change.known for change in changes]
    return {
        "ids": _escaped(names),
        "kinds": [change.kind.value for change in changes],
        "epochs": [each.epoch for each in known],
        "commits": [each.commits for each in known],
        "needs": _escaped(change.needs for change in changes),
        "describes": [change.describes for change in changes],
        "moves": [change.moves for change in changes],
        "tenants": _escaped(each.tenant for each in known),
        "ttls": [each.about.ttl for each in known],
        # Long texts are only sent where they change.
        "metadata": [change.known.about.metadata if change.describes else None for change in changes],
        "systems": _escaped(change.known.about.system if change.describes else None for change in changes),
        "created": [each.about.created for each in known],
        "parents": _escaped(each.about.parent for each in known),
        "tools": [change.known.about.tools if change.describes else None for change in changes],
        "settings": [each.about.settings for each in known],
        "origins": [each.origin for each in known],
        "tenant_sums": [tenant_sum(name, each) for name, each in zip(names, known, strict=True)],
        "about_sums": [
            about_sum(name, change.known) if change.describes else None
            for name, change in part.changes.items()
        ],
        "heads": [each.head for each in known],
        "head_sums": [head_sum(name, each) for name, each in zip(names, known, strict=True)],
        "depths": [len(each.numbers) for each in known],
    }


def _turns(part: Part) -> dict[str, Any]:
    turns = part.turns
    return {
        "turn_sessions": _escaped(turn.session for turn in turns),
        "numbers": [turn.number for turn in turns],
        "befores": [turn.before for turn in turns],
        "turn_depths": [turn.depth for turn in turns],
        "turn_ids": _escaped(turn.turn_id for turn in turns),
        "inputs": [turn.input for turn in turns],
        "outputs": [turn.output for turn in turns],
        "finishes": _escaped(turn.finish for turn in turns),
        "turn_sums": [turn.checksum for turn in turns],
        "details": [turn.details for turn in turns],
    }


def _answers(part: Part) -> dict[str, Any]:
    finished, requests = part.finished, part.requests
    return {
        "unfinished_sessions": _escaped(name for name, _ in part.unfinished),
        "unfinished": _escaped(turn_id for _, turn_id in part.unfinished),
        "finished_sessions": _escaped(name for name, _ in finished),
        "finished": _escaped(turn_id for _, turn_id in finished),
        "finished_numbers": [row.number for row in finished.values()],
        "results": [row.result for row in finished.values()],
        "finished_sums": [row.checksum for row in finished.values()],
        "unrequested_sessions": _escaped(name for name, _ in part.unrequested),
        "unrequested": _escaped(request_id for _, request_id in part.unrequested),
        "request_sessions": _escaped(name for name, _ in requests),
        "requests": _escaped(request_id for _, request_id in requests),
        "request_numbers": [row.number for row in requests.values()],
        "asked": _escaped(row.asked for row in requests.values()),
        "answers": _escaped(row.answer for row in requests.values()),
        "request_sums": [row.checksum for row in requests.values()],
        "request_needs": _escaped(row.needs for row in requests.values()),
        "log_sessions": _escaped(name for name, _, _ in part.log),
        "log_kinds": [kind for _, kind, _ in part.log],
        "log_details": _escaped(words for _, _, words in part.log),
    }


def _snapshots(part: Part) -> dict[str, Any]:
    written = [snapshot for snapshot in part.snapshots.values() if snapshot is not None]
    return {
        "unsnapped": _escaped(name for name, snapshot in part.snapshots.items() if snapshot is None),
        "snapped": _escaped(snapshot.session for snapshot in written),
        "files": _escaped(snapshot.file for snapshot in written),
        "lengths": [snapshot.length for snapshot in written],
        "sizes": [snapshot.bytes for snapshot in written],
    }


def _escaped(texts: Iterable[str | None]) -> list[str | None]:
    return [None if text is None else escape(text) for text in texts]
