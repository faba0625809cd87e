"""The journal in PostgreSQL: an `OwningStore` whose sessions belong to one life of a server.

A flush is one statement, so one round trip, in one transaction (`commit`): a batch is stored as a whole,
except for sessions that belong to another life by now. Their records are dropped and not acknowledged, and
the engine closes the sessions. A batch whose answer was lost is sent again unchanged; the life's row has the
number of the last batch, so a repeat is recognised. `cluster.owner` interprets the answers.

A server that is alone takes over the sessions of earlier lives of its name at its start. A member
of a cluster claims sessions one by one (`claim`, `take_over`), hands them over (`hand_over`) and drains
(`drain`). If it is declared dead by mistake it begins another life, without its earlier sessions.

While the database is unreachable, batches wait here in order, and the connection is reopened with a
bounded back-off. Only after `PATIENCE_SECONDS`, or with too many waiting records, is it a fault that refuses
new turns; until then answers wait. Called by the writer's thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

import psycopg

from holdfast.cluster.lives import ALIVE, RENEW_SECONDS
from holdfast.cluster.owner import Owner
from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.postgres import owners
from holdfast.engine.durable.postgres.changes import Batch, Builder, Content, Known
from holdfast.engine.durable.postgres.commit import COMMIT, parameters
from holdfast.engine.durable.postgres.compaction import Compaction
from holdfast.engine.durable.postgres.link import Connection, Link, Unreachable, in_words, name_of, named
from holdfast.engine.durable.postgres.lives import (
    begin_life,
    bury_life,
    claim_sessions,
    drain_life,
    end_life,
    forget_lives,
    hold_life,
    life_of,
    renew_life,
)
from holdfast.engine.durable.postgres.reading import read_snapshots, revive
from holdfast.engine.durable.postgres.tables import read_facts, unescape, upgrade
from holdfast.engine.durable.records import (
    Closed,
    JournalError,
    Record,
    SnapshotWritten,
    StoredSession,
    Truncated,
)
from holdfast.engine.durable.store import (
    Claims,
    Durability,
    Home,
    JournalInUse,
    LifeRow,
    OwningStore,
    Probe,
    Refusal,
    Taken,
    WritePoint,
    no_probe,
)

__all__ = ["PostgresJournal"]

log = logging.getLogger("holdfast.journal")

PATIENCE_SECONDS = 5.0
"""How long the database may be out of reach before new turns are refused."""

LIFE_OVER = "another server has taken over this server's sessions; restart it"

SAME_NAME_TRIES = 8
"""How often a batch is sent again because another server opened a session of the same name meanwhile."""


class PostgresJournal:
    """A journal that is open for writing."""

    def __init__(
        self,
        url: str,
        durability: Durability,
        vocabulary: str,
        probe: Probe | None = None,
        lock_timeout: float = 0.0,
        member: Membership | None = None,
    ) -> None:
        """Open or create; `vocabulary` identifies what the tokens mean, and must match the database's.

        `lock_timeout` is how many seconds to wait for another server of the same name. Without a `member` the
        server is alone, and the sessions of earlier lives of its name are claimed now.
        """
        if member is not None:
            url = named(url, member.name)
        self.durability: Durability = durability
        self.fault: str | None = None
        self._owner: Owner[Known] = Owner(0)
        self._name = name_of(url)
        self._member = member
        self.identity = ""
        """What tells this journal from others: a random number in its tables."""
        self._limit = None if member is None else member.tenant_sessions
        self._probe = probe if probe is not None else no_probe
        self._link = Link(url, durability)
        self._pending: list[Record] = []
        self._unsent: Batch | None = None
        self._serial = 0
        self._damaged = False
        self._compaction = Compaction()
        self._renewed = time.monotonic()
        self.confirmed = 0.0
        """When a statement was sent that has shown this life to be alive, by this process's clock."""
        try:
            self._begin(vocabulary)
            life = self._begin_life(self._link.open(), lock_timeout)
            self._owner = Owner(life)
            if member is None:
                claim_sessions(self._link.open(), self._name, life)
            forget_lives(self._link.open())
        except psycopg.Error as error:
            self._link.close()
            raise JournalError(f"{self.place}: {in_words(error)}") from error
        except BaseException:
            self._link.close()
            raise

    def _begin(self, vocabulary: str) -> None:
        connection = self._link.open()
        upgrade(connection)
        connection.execute(
            "INSERT INTO holdfast.facts VALUES ('vocabulary', %s) ON CONFLICT (name) DO NOTHING",
            (vocabulary,),
        )
        connection.execute(
            "INSERT INTO holdfast.facts VALUES ('identity', %s) ON CONFLICT (name) DO NOTHING",
            (secrets.token_hex(16),),
        )
        facts = read_facts(connection)
        self.identity = facts["identity"]
        if facts["vocabulary"] != vocabulary:
            raise JournalError(
                f"{self.place} was written with another vocabulary; start with the model that it was written "
                "with, or name another database"
            )

    def _begin_life(self, connection: Connection, lock_timeout: float) -> int:
        address = "" if self._member is None else self._member.address
        return begin_life(connection, self._name, self.place, lock_timeout, address)

    @property
    def life(self) -> int:
        """The number of this run among all lives of the database."""
        return self._owner.life

    @property
    def place(self) -> str:
        """The URL without credentials."""
        return self._link.place

    @property
    def owning(self) -> OwningStore | None:
        """This store, for a member of a cluster; a server that is alone claims nothing after its start."""
        return None if self._member is None else self

    def __enter__(self) -> PostgresJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the remaining records, end the life and close the connection."""
        if not self.flush():
            left = len(self._pending) + (0 if self._unsent is None else self._unsent.records)
            log.error(
                "%d records were not written to the journal: %s", left, self.fault or self._link.problem
            )
        with suppress(psycopg.Error, Unreachable):
            end_life(self._link.use(), self.life)
        self._link.close()

    # --- reading ----------------------------------------------------------------------------------

    def sessions(self) -> Iterator[StoredSession]:
        """Every session of this life, with what earlier lives of its name left.

        A damaged session is truncated to its valid turns. There is no compaction then while the journal is
        open: unreachable turns may be all that is left of a session.
        """
        for stored in self._revive():
            self._mend(stored)
            yield stored
            self.keep_alive()

    def _revive(self) -> Iterator[StoredSession]:
        try:
            yield from self._read(self._link.open(), None)
        except psycopg.Error as error:
            raise JournalError(f"{self.place} cannot be read: {in_words(error)}") from error

    def _read(self, connection: Connection, only: Sequence[str] | None) -> Iterator[StoredSession]:
        """Read sessions of this life, all or some."""
        for stored, known in revive(connection, self.life, only):
            self._owner.adopt(stored.id, known)
            self._damaged = self._damaged or stored.damaged
            yield stored

    def _mend(self, stored: StoredSession) -> None:
        """Truncate a damaged session to its valid turns."""
        if stored.damaged and not stored.unusable:
            self.append(Truncated(stored.id, len(stored.turns), None))

    def load(self) -> list[StoredSession]:
        """All sessions at once."""
        return list(self.sessions())

    def adopt_vocabulary(self) -> None:
        """Nothing to adopt: every version has the vocabulary."""

    # --- writing ----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a record has been appended and is not in the database."""
        return bool(self._pending) or self._unsent is not None

    def append(self, record: Record) -> None:
        """Add a record to the next flush."""
        self._pending.append(record)

    def flush(self) -> bool:
        """Write everything that was appended; False if that fails, and the records are kept."""
        while self.pending:
            try:
                if self._unsent is None:
                    self._unsent = self._build()
                self._send(self._unsent)
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                self._link.drop(error)
                return self._failed(None)
            except Unreachable:
                return self._failed(None)
            except (psycopg.Error, JournalError) as error:
                return self._failed(in_words(error))
            self._unsent = None
            self._probe(WritePoint.AFTER_FSYNC)
        if self.fault is not None and not self._owner.over:
            log.warning("the journal can be written again")
            self.fault = None
        return True

    def remove(self, session_id: str) -> bool:
        """Close a session for good; False if that fails."""
        for _ in self._revive():
            self.keep_alive()
        self.append(Closed(session_id, "removed"))
        return self.flush()

    def take_refused(self) -> frozenset[str]:
        """Sessions that belong to another life, since the last call."""
        return self._owner.take_refused()

    def _failed(self, problem: str | None) -> bool:
        """A write failed: at once a fault, or, if the database is out of reach, after a while."""
        since = self._link.failing_since
        if problem is None and since is not None and time.monotonic() - since >= PATIENCE_SECONDS:
            problem = f"the database is out of reach: {self._link.problem}"
        if problem is not None:
            if self.fault is None:
                log.error("the journal cannot be written; turns wait until it can: %s", problem)
            self.fault = problem
        return False

    def _build(self) -> Batch:
        """The pending records as a batch. Until it is made, nothing is changed here."""
        builder = Builder(self._owner.sessions, self.life, self._serial, self._fetch)
        builder.build(self._pending)
        batch = Batch(
            self._owner.batch + 1, builder.parts, len(self._pending), builder.refused, builder.loose
        )
        for name, known in builder.staged.items():
            if known is None:
                self._owner.sessions.pop(name, None)
            else:
                self._owner.sessions[name] = known
        self._serial = builder.serial
        self._pending = []
        return batch

    def _fetch(self, numbers: Sequence[int]) -> dict[int, Content]:
        """The contents of turns."""
        rows = self._connection().execute(
            "SELECT number, turn_id, input, output, finish, details FROM holdfast.turns "
            "WHERE number = ANY(%s)",
            (list(numbers),),
            binary=True,
        )
        return {
            number: Content(unescape(turn_id), bytes(said), bytes(heard), unescape(finish), details)
            for number, turn_id, said, heard, finish, details in rows
        }

    def _connection(self) -> Connection:
        connection = self._link.use()
        if self._link.failing_since is not None:
            hold_life(connection, self.life)
        return connection

    def _send(self, batch: Batch) -> None:
        """Store a batch, or find that it is stored already; the refused sessions are noted."""
        self._owner.refuse(batch.refused)
        if not batch.sessions or self._owner.over:
            self._owner.refuse(batch.sessions)
            return
        asked, connection = time.monotonic(), self._connection()
        self._probe(WritePoint.BEFORE_APPEND)
        self._link.warned = False
        accepted = self._execute(connection, batch)
        if accepted is None:
            accepted = self._accepted_before(connection, batch)
        if self._link.warned:
            raise psycopg.OperationalError("the commit was not replicated in time")
        self._link.worked()
        self._compaction.add(batch.loose)
        self._renewed = time.monotonic()
        if not self._owner.over:
            self.confirmed = asked
        self._owner.settle(batch.number, batch.sessions, accepted)

    def _execute(self, connection: Connection, batch: Batch) -> set[str] | None:
        """Send a batch; the accepted sessions, or None if the life is over or the batch is stored already."""
        for attempt in range(SAME_NAME_TRIES):
            try:
                return self._commit(connection, batch)
            except psycopg.errors.UniqueViolation:
                if attempt == SAME_NAME_TRIES - 1:
                    raise
        raise AssertionError

    def _commit(self, connection: Connection, batch: Batch) -> set[str] | None:
        sent = [
            parameters(part, self.life, batch.number - (place == 0), batch.number, self._limit)
            for place, part in enumerate(batch.parts)
        ]
        if len(sent) == 1 and self._probe is no_probe:
            return _names(connection.execute(COMMIT, sent[0], prepare=True).fetchall())
        accepted: set[str] | None = set()
        with connection.transaction():
            for place, values in enumerate(sent):
                names = _names(connection.execute(COMMIT, values, prepare=True).fetchall())
                if names is None:
                    accepted = None
                    break
                missing = batch.parts[place].changes.keys() - names
                assert accepted is not None
                accepted = (accepted | names) - missing
                self._probe(WritePoint.MID_RECORD)
            self._probe(WritePoint.AFTER_WRITE)
        return accepted

    def _accepted_before(self, connection: Connection, batch: Batch) -> set[str]:
        """What became of a batch that the fence of the life refused."""
        if not self._owner.is_stored(life_of(connection, self.life), batch.number):
            self._end()
            return set()
        return set(owners.stored(connection, self.life, batch.writes))

    def _end(self) -> None:
        """The life is over: nothing that it has is its own any more."""
        if not self._owner.over:
            log.error("%s: %s", self.place, LIFE_OVER)
        self.fault = LIFE_OVER
        self._owner.end()

    # --- owners -----------------------------------------------------------------------------------

    def confirm(self, asked: float) -> bool:
        """Whether this life is alive: at once if that was confirmed since `asked`.

        `JournalError` if the database cannot be reached.
        """
        if self._owner.over:
            return False
        if self.confirmed >= asked:
            return True
        with self._reachable():
            return self._renew()

    def claim(self, names: Sequence[str]) -> Claims:
        """Take over sessions whose owner is over, and read them; those of this life are read again.

        `JournalError` if the database cannot be reached; the claim may be made again.
        """
        connection = self._at_rest(names)
        with self._reachable():
            answer = owners.claim(connection, self.life, names)
            found = list(self._read(connection, self._owner.won(answer)))
        for stored in found:
            self._mend(stored)
        read = {stored.id for stored in found}
        return Claims(found, {name: at.owner for name, at in answer.items() if name not in read})

    def hand_over(self, names: Sequence[str], life: int) -> frozenset[str]:
        """Hand sessions at rest over to a life: those that are its own now.

        The others stay if that life takes no sessions, and are given up if they are not this life's.
        `JournalError` if the database cannot be reached; the call may be made again.
        """
        connection = self._at_rest(names)
        offers = self._owner.offer(names, life, ())
        with self._reachable():
            answer = owners.hand_over(connection, self.life, offers)
        return frozenset(self._owner.gave(offers, answer))

    def take_over(self, names: Sequence[str], unheard: Collection[str]) -> Taken:
        """Claim sessions, and declare their owners dead first where the leases allow that.

        `unheard` are names of servers whose connection to an API process has ended: they are dead if the
        database has lost them too, or if they have not renewed their lease for a second.
        """
        connection = self._at_rest(names)
        with self._reachable():
            for life, name in {
                (at.life, at.name)
                for at in owners.locate(connection, names).values()
                if at.state in ALIVE and at.life != self.life
            }:
                bury_life(connection, life, heard=name not in unheard)
        claims = self.claim(names)
        return Taken(claims.sessions, self.locate(list(claims.elsewhere)) if claims.elsewhere else {})

    def lives(self) -> list[LifeRow]:
        """The lives that are alive or own sessions, the newest of a name last."""
        with self._reachable():
            return owners.lives(self._connection())

    def snapshots(self) -> list[SnapshotWritten]:
        """The rows of all snapshot files, of this engine and of others."""
        with self._reachable():
            return list(read_snapshots(self._link.open()))

    def unclaimed(self, after: str, seconds: float, most: int) -> list[str]:
        """Sessions after `after` whose owner was last alive that long ago, and that are still unclaimed."""
        with self._reachable():
            return owners.unclaimed(self._connection(), after, seconds, most)

    def locate(self, names: Sequence[str]) -> dict[str, Home]:
        """The owners of sessions, but for unknown ones."""
        with self._reachable():
            found = owners.locate(self._connection(), names)
        return {name: _home(at) for name, at in found.items()}

    def others(self) -> list[Home]:
        """The servers besides this one that take sessions."""
        with self._reachable():
            return [_home(at) for at in owners.takers(self._connection(), self.life)]

    def why_refused(self, name: str, tenant: str) -> Refusal:
        """Why a new session was refused."""
        if self.locate([name]):
            return Refusal.EXISTS
        with self._reachable():
            full = self._limit is not None and owners.count_of(self._connection(), tenant) >= self._limit
        return Refusal.LIMIT if full else Refusal.MOVED

    def drain(self) -> bool:
        """Take no more sessions over; False if the life is over."""
        with self._reachable():
            if drain_life(self._connection(), self.life):
                return True
        self._end()
        return False

    def _at_rest(self, names: Sequence[str]) -> Connection:
        """The connection, once everything that was appended is stored: what owners do comes after it."""
        with self._reachable():
            connection = self._connection()
        if not self.flush():
            raise JournalError(f"{self.place}: {len(names)} sessions wait for records that are not stored")
        return connection

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Errors of the database become `JournalError`; a connection that failed is opened again."""
        try:
            yield
        except Unreachable as error:
            raise JournalError(f"{self.place} cannot be reached: {self._link.problem}") from error
        except psycopg.Error as error:
            if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
                self._link.drop(error)
            raise JournalError(f"{self.place}: {in_words(error)}") from error

    # --- beside writing ---------------------------------------------------------------------------

    def keep_alive(self) -> float | None:
        """Renew the lease, if it is time."""
        left = self._renewed + RENEW_SECONDS - time.monotonic()
        if self._owner.over and self._member is None:
            return None
        if left > 0:
            return left
        try:
            if self._owner.over:
                self._begin_again()
            elif self._renew() and not self.pending:
                self._link.worked()
                self.fault = None
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self._link.drop(error)
            self._failed(None)
        except Unreachable:
            self._failed(None)
        except psycopg.Error as error:
            log.warning("the lease of the journal could not be renewed: %s", in_words(error))
        except JournalInUse as error:
            self.fault = str(error)
        self._renewed = time.monotonic()
        return RENEW_SECONDS

    def _renew(self) -> bool:
        """Renew the lease; False if the life is over."""
        asked = time.monotonic()
        if not renew_life(self._connection(), self.life):
            self._end()
            return False
        self.confirmed = asked
        return True

    def _begin_again(self) -> None:
        """Begin another life, once nothing of the one before waits. Its sessions are given up by then."""
        if self.pending:
            return
        life = self._begin_life(self._link.use(), 0.0)
        refused = self._owner.take_refused()
        self._owner = Owner(life)
        self._owner.refuse(refused)
        self._serial = 0
        self.fault = None
        log.warning("%s: this server continues with a new life", self.place)

    def compact(self) -> bool:
        """Remove a portion of the turns that no session reaches; whether there is more to do."""
        if self._damaged or self._owner.over or not self._compaction.due:
            return False
        try:
            return self._compaction.step(self._connection())
        except Unreachable:
            return False
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self._link.drop(error)
            return False
        except psycopg.Error as error:
            log.warning("the journal could not be compacted: %s", in_words(error))
            return False


def _home(at: owners.Located) -> Home:
    return Home(at.life, at.name, at.address, at.state in ALIVE)


def _names(rows: list[tuple[str | None]]) -> set[str] | None:
    """The accepted sessions of a commit; None if the fence of the life refused it."""
    return {unescape(name) for (name,) in rows if name is not None} if rows else None
