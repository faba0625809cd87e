"""The disk tier: sessions' memory in files, written and read by a thread of its own.

The core decides who moves; this carries it out. A file holds everything that a session has computed, what it
leases from the prefix tree included, so it is good for a restart as well:

    to disk      copy of the units ──> file ──> synced ──> row in the journal ──> the core gives the units up
    from disk    file ──> checked ──> copied into the units that the core has taken ──> the core is told
    at rest      a session that has been idle for a while is written as well, in the background

Steps of other sessions go on meanwhile: `launch` and `collect` are called between steps, and only copies to
and from memory happen there. A file that fails any check is forgotten with a warning, and the session is
computed again from its tokens. Called by the engine's loop alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from holdfast.core.layout import Tier
from holdfast.core.ledger import Pool
from holdfast.core.plan import TierMove
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Place, Session
from holdfast.core.tiers import whole_units
from holdfast.engine.durable.records import Snapped, StoredSession, Unsnapped
from holdfast.engine.durable.session_log import Book
from holdfast.engine.step.executor import Executor
from holdfast.engine.tiers.files import (
    SUFFIX,
    BadFile,
    Files,
    Header,
    Snapshot,
    check_header,
    decode,
    encode,
)
from holdfast.engine.tiers.thread import DiskThread, Job

log = logging.getLogger("holdfast.disk")

FAULT_SECONDS = 5.0  # How long the disk is left alone after it could not be written; longer each time.
FULL_SECONDS = 5.0  # How long nothing is copied for a disk that had no room, unless a file goes before that.
BACK_OFF_MAX = 64  # How many times as long at most, where it fails again and again.
LOOK_SECONDS = 0.5  # How often idle sessions are looked at.
LOOKS_MAX = 32  # Idle sessions that are looked at between two steps.
HURRY_SECONDS = 0.1  # How often an engine that ends looks whether there is still time.
PORTION_BYTES = 256 << 20  # What is copied from and to the device at a time.
NEWS_MIN = 128  # A file is written anew in the background when as many tokens, and a sixteenth, are new.


class Hurry:
    """Whether whoever ends the engine will wait no more; once that is so it stays so."""

    def __init__(self, asked: Callable[[], bool] | None) -> None:
        self._asked = asked
        self._hurried = False

    def __call__(self) -> bool:
        self._hurried = self._hurried or (self._asked is not None and self._asked())
        return self._hurried


class DiskTier:
    """Files of sessions, and the moves to and from them."""

    def __init__(
        self,
        files: Files,
        limit: int,
        idle_seconds: float,
        parts: tuple[Scheduler, Executor, Book],
        identity: tuple[str, str],
        clock: Callable[[], float],
    ) -> None:
        """`identity` names the model's weights and the form of its memory."""
        self.files = files
        self.limit = limit
        self.idle_seconds = idle_seconds
        self.scheduler, self.executor, self.book = parts
        self.model, self.layout = identity
        self.clock = clock
        self.snapshots: dict[str, Snapshot] = {}
        self.outcomes: dict[int, dict[int, bool | None]] = {}
        self._writing: dict[str, Job] = {}
        self._unwritten: list[Job] = []
        self._serial = 0
        self._fault_until = 0.0
        self._full_until = 0.0
        self._no_spare_until = 0.0
        self._faults = 0
        self._bytes = 0
        self._look_at = 0.0
        self._to_look_at: deque[Session] = deque()
        for pool in self.scheduler.registry.ledger.pools.values():
            if pool.tier is Tier.DISK:
                pool.guard(self._open)
        self._thread = DiskThread(self._carry_out)

    def _open(self, pool: Pool, count: int) -> bool:
        """Whether the disk takes anything: not for a while after it, or the journal, could not be written.

        Nor after there was no room. Files hold what sessions lease as well, so the limit may be reached while
        the pool has units: with the gate shut, whoever needs memory gets it in another way, or drops some.
        """
        return len(pool.free) >= count and self._sound and self.clock() >= self._full_until

    @property
    def _sound(self) -> bool:
        return self.clock() >= self._fault_until and self.book.fault is None

    def _wait_for_room(self, precaution: bool) -> None:
        """There is no room: precautions wait; so does what must move, if it was that which found none."""
        self._no_spare_until = self.clock() + FULL_SECONDS
        if not precaution:
            self._full_until = self._no_spare_until

    def _failed(self, full: bool) -> None:
        """A file could not be written: leave the disk alone, for longer each time that follows."""
        times = min(BACK_OFF_MAX, 1 << self._faults)
        self._faults = min(self._faults + 1, BACK_OFF_MAX)
        if full:
            self._full_until = self.clock() + times * FULL_SECONDS
        else:
            self._fault_until = self.clock() + times * FAULT_SECONDS

    def _carry_out(self, job: Job) -> None:
        """What the thread does."""
        if job.writes:
            content = encode(job.header, job.tensors)
            job.tensors = {}
            self.files.write(job.file, content)
            job.bytes = len(content)
        else:
            job.tensors = decode(self.files.read(job.file), job.header)

    # --- between steps ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a file is being written or read, or one should be, as far as was looked at."""
        return self._thread.under_way > 0 or self._next_to_write() is not None

    def launch(self, plan: Plan) -> None:
        """Begin the moves of a plan that the disk takes part in."""
        moves: dict[int, list[TierMove]] = {}
        for move in plan.moves:
            if Tier.DISK in (move.source_tier, move.destination_tier):
                moves.setdefault(move.number, []).append(move)
        if moves:
            self.outcomes[plan.step] = {
                number: self._begin(number, each[0]) for number, each in moves.items()
            }

    def moved(self, plan: Plan, others: Sequence[bool | None]) -> list[bool | None]:
        """What came of a plan's moves so far; `others` says so of those that the disk has no part in."""
        outcomes = self.outcomes.pop(plan.step, {})
        return [outcomes.get(move.number, other) for move, other in zip(plan.moves, others, strict=False)]

    def _begin(self, number: int, move: TierMove) -> bool | None:
        session = self.scheduler.registry.transits[number]
        if move.source_tier is Tier.DISK:
            if not self.current(session):
                self._distrust(session.id, "it is not of what the session has computed")
                return False
            snapshot = self.snapshots[session.id]
            self._thread.give(
                Job(session.id, snapshot.file, self._header(snapshot), numbers=[number], writes=False)
            )
            return None
        if self.current(session):
            return True
        job = self._write(session)
        if job is None:
            return False
        job.numbers.append(number)
        return None

    def collect(self) -> None:
        """Take what the thread has done. What waits for a journal that is at fault stays where it is."""
        if self.book.fault is not None:
            for job in self._unwritten:
                self._arrive(job, False)
            self._unwritten = []
        for job in self._thread.take():
            if job.writes:
                self._written(job)
            else:
                self._was_read(job)

    def wait(self, seconds: float) -> None:
        """Let the thread get on, until it has done something or time is up."""
        self._thread.wait(seconds)

    # --- writing ----------------------------------------------------------------------------------

    def current(self, session: Session) -> bool:
        """Whether a session's file holds exactly what it has computed."""
        snapshot, sequence = self.snapshots.get(session.id), session.sequence
        if snapshot is None or snapshot.length != sequence.computed:
            return False
        return snapshot.tokens == sequence.tokens.digest(snapshot.length)

    def _header(self, snapshot: Snapshot) -> Header:
        return Header(self.model, self.layout, snapshot.length, snapshot.tokens)

    def _write(self, session: Session, precaution: bool = False) -> Job | None:
        """Copy a session's memory and have it written; None if there is no room for it, or for the copy.

        Room is made by letting go of files that are only a precaution, but not for another such file.
        """
        sequence = session.sequence
        header = Header(self.model, self.layout, sequence.computed, sequence.tokens.digest(sequence.computed))
        before = self._writing.get(session.id)
        if before is not None and before.header == header:
            return before
        size = self._size(session)
        fits = self.used + size <= self.limit and size <= self.files.room()
        if not fits and (precaution or not self._make_room(size, session.id)):
            log.warning("no room on disk for %d bytes of session %s", size, session.id)
            self._wait_for_room(precaution)
            return None
        try:
            tensors = self._gather(session)
        except Exception as error:  # noqa: BLE001
            # The device has no room for the copy: the session stays where it is, and the loop goes on.
            log.warning("session %s could not be copied for the disk: %s", session.id, error)
            self._wait_for_room(precaution)
            return None
        self._serial += 1
        name = hashlib.sha256(session.id.encode()).hexdigest()[:20]
        job = Job(session.id, f"{name}-{self._serial}{SUFFIX}", header, tensors, bytes=size)
        self._writing[session.id] = job
        self._thread.give(job)
        return job

    def _size(self, session: Session) -> int:
        """How many bytes a session's file will hold, without a copy of any."""
        size = 0
        for component, (leased, own) in whole_units(session.sequence, session.parcel).items():
            storages = self.executor.memory.storage(component.name.lower())
            size += (len(leased) + len(own)) * sum(storage[0].nbytes for storage in storages)
        return size

    @torch.inference_mode()
    def _gather(self, session: Session) -> dict[str, Tensor]:
        """Copies of all units that hold what a session has computed, by the name of their storage."""
        parcel = session.parcel
        away = session.sequence.away and parcel is not None
        memory = self.executor.host if away and self.executor.host is not None else self.executor.memory
        tensors: dict[str, Tensor] = {}
        for component, (leased, own) in whole_units(session.sequence, parcel).items():
            name = component.name.lower()
            for index, (device, there) in enumerate(
                zip(self.executor.memory.storage(name), memory.storage(name), strict=True)
            ):
                # The thread never touches the device: it must not disturb what is captured or launched there.
                parts = [
                    _rows(storage, units) for storage, units in ((device, leased), (there, own)) if units
                ]
                tensors[f"{name}.{index}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensors

    @property
    def used(self) -> int:
        """Bytes in files, and in those that are being written."""
        return self._bytes + sum(job.bytes for job in self._writing.values())

    def _take_up(self, session_id: str, snapshot: Snapshot) -> None:
        """A session has a file from now on."""
        self.snapshots[session_id] = snapshot
        self._bytes += snapshot.bytes

    def _make_room(self, size: int, asker: str) -> bool:
        """Let files go that are only a precaution, oldest first, until `size` bytes fit; none in vain."""
        sessions = self.scheduler.registry.sessions
        excess = max(self.used + size - self.limit, size - self.files.room())
        spare: list[str] = []
        for name, snapshot in self.snapshots.items():
            if excess <= 0:
                break
            if name != asker and not (name in sessions and _precious(sessions[name])):
                spare.append(name)
                excess -= snapshot.bytes
        if excess > 0:
            return False
        for name in spare:
            self.forget(name)
            self.book.write(Unsnapped(name))
        return True

    def _written(self, job: Job) -> None:
        """A file is there, synced: its row comes next, and then the units may be given up."""
        superseded = self._writing.get(job.session) is not job
        if job.error is not None:
            log.warning("session %s could not be written to disk: %s", job.session, job.error)
            self._failed(job.full)
            self._arrive(job, False)
            return
        self._faults = 0
        if superseded or not self._of_use(job):
            self.files.remove(job.file)
            self._arrive(job, False)
            return
        snapshot = Snapshot(job.file, job.header.length, job.header.tokens, job.bytes)
        self.book.write(Snapped(job.session, job.file, snapshot.length, job.bytes))
        self._unwritten.append(job)

        def durable() -> None:
            of_use = self._of_use(job)
            if of_use:
                self.forget(job.session)
                self._take_up(job.session, snapshot)
            else:
                self.files.remove(job.file)
                self._restate(job.session)
            self._arrive(job, of_use)
            self._unwritten = [other for other in self._unwritten if other is not job]

        self.book.when_durable(durable)

    def _of_use(self, job: Job) -> bool:
        """Whether a file that was written is of its session's history still.

        Of a session that lies on disk alone only the file of all that it has computed may take the place.
        """
        session = self.scheduler.registry.sessions.get(job.session)
        if session is None or job.session not in self.book.sessions:
            return False
        length, sequence = job.header.length, session.sequence
        if _precious(session) and length != sequence.computed:
            return False
        return length <= sequence.known and sequence.tokens.digest(length) == job.header.tokens

    def _arrive(self, job: Job, arrived: bool) -> None:
        """A job is over: moves that waited for its file hear of it, and later ones need another."""
        if self._writing.get(job.session) is job:
            del self._writing[job.session]
        numbers, job.numbers = job.numbers, []
        for number in numbers:
            self.scheduler.arrive(number, arrived, self.clock())

    def _restate(self, session_id: str) -> None:
        """Let the journal's row name the file that a session has, after it named another one."""
        snapshot = self.snapshots.get(session_id)
        if snapshot is None:
            self.book.write(Unsnapped(session_id))
        else:
            self.book.write(Snapped(session_id, snapshot.file, snapshot.length, snapshot.bytes))

    def forget(self, session_id: str) -> None:
        """A session's file is of no use any more."""
        snapshot = self.snapshots.pop(session_id, None)
        if snapshot is not None:
            self.files.remove(snapshot.file)
            self._bytes -= snapshot.bytes
            self._full_until = self._no_spare_until = 0.0

    def cut(self, session: Session) -> None:
        """A session's history was cut: a file of what lies past the cut is of no use any more."""
        snapshot = self.snapshots.get(session.id)
        if snapshot is not None and snapshot.length > session.sequence.known:
            self.forget(session.id)
            self.book.write(Unsnapped(session.id))

    # --- reading ----------------------------------------------------------------------------------

    def _distrust(self, session_id: str, why: str) -> None:
        log.warning("session %s is computed again: its file cannot be used: %s", session_id, why)
        self.forget(session_id)
        self.book.write(Unsnapped(session_id))

    def _was_read(self, job: Job) -> None:
        """A file's content is here: put it where the core wants it, unless that was cancelled meanwhile."""
        (number,) = job.numbers
        session = self.scheduler.registry.transits.get(number)
        if session is None:
            return
        if job.error is not None:
            self._distrust(job.session, job.error)
            self.scheduler.arrive(number, False, self.clock())
            return
        try:
            self._put_back(session, job.tensors)
        except Exception as error:  # noqa: BLE001
            # What is there is not whole and goes. The file is good, and stays for a restart.
            log.warning("session %s is computed again: it could not be put back: %s", job.session, error)
            self.scheduler.arrive(number, False, self.clock())
            return
        self.scheduler.arrive(number, True, self.clock())

    def _put_back(self, session: Session, tensors: dict[str, Tensor]) -> None:
        assert session.parcel is not None
        for component, hold in session.parcel.home.items():
            name = component.name.lower()
            for index, storage in enumerate(self.executor.memory.storage(name)):
                _put(storage, list(hold.units), tensors[f"{name}.{index}"])

    # --- idle sessions ----------------------------------------------------------------------------

    def _next_to_write(self) -> Session | None:
        """A session that has been idle for a while and has no file, or an old one; the longest idle.

        All are looked at in turn, a few between two steps, and from the first again after a while.
        """
        now = self.clock()
        if self._writing or not self._sound or now < max(self._full_until, self._no_spare_until):
            return None
        if not self._to_look_at:
            if now < self._look_at:
                return None
            self._look_at = now + LOOK_SECONDS
            self._to_look_at.extend(self.scheduler.registry.resting)
        for _ in range(min(LOOKS_MAX, len(self._to_look_at))):
            session = self._to_look_at[0]
            rests = session in self.scheduler.registry.resting
            if rests and now - session.idle_since >= self.idle_seconds and self._worth_writing(session):
                return session
            self._to_look_at.popleft()
        return None

    def _worth_writing(self, session: Session) -> bool:
        """Whether a session can be written now, and has enough that its file has not."""
        computed, snapshot = session.sequence.computed, self.snapshots.get(session.id)
        covered = snapshot.length if snapshot is not None and snapshot.length <= computed else 0
        news_min = min(computed, max(NEWS_MIN, covered // 16))
        return computed - covered >= news_min and self._can_write(session)

    def _can_write(self, session: Session) -> bool:
        """Whether a session has memory that is whole, and nobody uses."""
        parcel = session.parcel
        on_host = session.place is Place.AWAY and parcel is not None and parcel.tier is Tier.HOST
        return (
            session.sequence.computed > 0
            and session.life is Life.IDLE
            and session.at_rest
            and (session.place is Place.HOME or on_host)
            and session.id in self.book.sessions
            and not self.scheduler.registry.copying(session)
        )

    def tend(self) -> None:
        """Have one idle session written, if there is one to write."""
        session = self._next_to_write()
        if session is not None:
            self._write(session, precaution=True)

    def write_all(self, progress: Callable[[int, int], None], hurry: Hurry) -> None:
        """Have every session written that is not, exactly as it is now; returns when that is done, or when
        there is no time for it any more."""
        sessions = [
            session
            for name in self.book.sessions
            if (session := self.scheduler.registry.sessions.get(name)) is not None
            and self._can_write(session)
            and not self.current(session)
        ]
        left = len(sessions)
        for session in sessions:
            if hurry():
                break
            self._write(session)
            while self._thread.under_way and not hurry():
                self.wait(HURRY_SECONDS)
                self.collect()
            self.book.settle()
            if not self._thread.under_way:
                left -= 1
                progress(len(sessions) - left, len(sessions))
        if left:
            log.warning(
                "%d of %d sessions are not written: there was no time; they will be computed again",
                left,
                len(sessions),
            )

    # --- restarts ---------------------------------------------------------------------------------

    def welcome(self, stored: StoredSession) -> None:
        """A session of the journal has a file: take it up if it is what it should be."""
        row = stored.snapshot
        if row is None:
            return
        session = self.scheduler.registry.sessions[stored.id]
        tokens = session.sequence.tokens
        try:
            if not 0 < row.length <= len(tokens):
                raise BadFile("it is of a history that was cut since")
            snapshot = Snapshot(row.file, row.length, tokens.digest(row.length), row.bytes)
            check_header(self.files.read_head(row.file), self._header(snapshot))
        except (OSError, ValueError, BadFile) as error:  # A damaged row may name what can be no file at all.
            log.warning("session %s will be computed again: its file cannot be used: %s", stored.id, error)
            self.book.write(Unsnapped(stored.id))
            return
        if self.scheduler.adopt(stored.id, row.length):
            self._take_up(stored.id, snapshot)

    def keep(self, stored: StoredSession) -> None:
        """A session of the journal could not come back: its file stays for the next engine if it can."""
        row = stored.snapshot
        if row is not None and (self.files.directory / row.file).is_file():
            # Nobody reads it here, so that nobody asks which tokens it is of.
            self._take_up(stored.id, Snapshot(row.file, row.length, "", row.bytes))

    def sweep(self) -> None:
        """Remove files that no session has: what a death left behind."""
        known = {snapshot.file for snapshot in self.snapshots.values()}
        for name in self.files.names():
            if name not in known:
                self.files.remove(name)
        numbers = [name.removesuffix(SUFFIX).rpartition("-")[2] for name in known]
        self._serial = max([self._serial, *(int(number) for number in numbers if number.isdecimal())])

    def close(self, hurry: Hurry) -> None:
        """Let the thread end. Without a journal nobody could know whose the files are: they go.

        In a hurry the file that is being written is given up, and a disk that stands still left alone. What
        such a thread leaves behind has no row in the journal, and is swept away by the next engine.
        """
        self._thread.end(hurry, self._give_up)
        if self.book.journal is None:
            for name in list(self.snapshots):
                self.forget(name)
        self.files.close()

    def _give_up(self) -> None:
        self.files.given_up = True


def _precious(session: Session) -> bool:
    """Whether a session's memory lies on disk alone, or is about to."""
    return session.parcel is not None and session.parcel.tier is Tier.DISK


def _portions(storage: Tensor, units: list[int]) -> Iterator[tuple[slice, Tensor]]:
    """Units a few at a time, by where they stand in the list: a GPU has no room for a long session twice."""
    most = max(1, PORTION_BYTES // max(1, storage[0].nbytes))
    for begin in range(0, len(units), most):
        some = units[begin : begin + most]
        index = torch.tensor(some, dtype=torch.int64, device=storage.device)
        yield slice(begin, begin + len(some)), index


def _rows(storage: Tensor, units: list[int]) -> Tensor:
    """Copies of some units on the host."""
    copies = torch.empty((len(units), *storage.shape[1:]), dtype=storage.dtype)
    for places, index in _portions(storage, units):
        if storage.device == copies.device:
            torch.index_select(storage, 0, index, out=copies[places])
        else:
            copies[places] = storage.index_select(0, index)
    return copies


@torch.inference_mode()
def _put(storage: Tensor, units: list[int], content: Tensor) -> None:
    """The last units of a file's content into units of the storage: those before them are leased."""
    mine = content[len(content) - len(units) :]
    for places, index in _portions(storage, units):
        storage.index_copy_(0, index, mine[places].to(storage.device))
