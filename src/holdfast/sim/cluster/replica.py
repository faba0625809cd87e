"""A replica of the simulation: an engine with sessions that uses the real `Owner`.

It claims requested sessions, runs one request per session at a time, sends one batch at a time and
answers when the batch is stored, as the engine and its journal do. It can crash, be paused (messages wait
meanwhile; it wakes as a zombie), be cut off from the store or from API processes, drain, and hand
sessions over. `Owner` interprets the answers of the store. Used by the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.cluster.lives import ALIVE, RENEW_SECONDS
from holdfast.cluster.owner import Owner
from holdfast.cluster.ownership import Claimed, Kind, Offer, Standing, Write
from holdfast.cluster.placement import Load, Move, plan_drain
from holdfast.sim.cluster.events import Events
from holdfast.sim.cluster.history import NEW, Answer, History, Op, OpKind, recognised
from holdfast.sim.cluster.store import Store

__all__ = ["Copy", "Front", "Replica"]

UNITS = 64
"""How many sessions a replica has memory for, in the eyes of placement."""

DRAIN_PORTION = 16
LOST_AFTER = 0.2
"""How long after a statement its loss is noticed."""


class Front(Protocol):
    """The API processes, as a replica sees them."""

    def answer(self, op: Op, answer: Answer) -> None:
        """Tell a client that its request is done."""

    def moved(self, op: Op) -> None:
        """Tell an API process that the session is elsewhere."""

    def others(self, replica: Replica, most: int) -> Sequence[Load]:
        """Some replicas that take sessions."""


@dataclass(slots=True)
class Copy:
    """A session in the memory of a replica."""

    epoch: int
    commits: int
    content: History


class Flight:
    """A batch that was sent and is not answered."""

    __slots__ = ("number", "ops", "writes")

    def __init__(self, number: int, writes: list[Write], ops: list[tuple[Op, Answer]]) -> None:
        self.number = number
        self.writes = writes
        self.ops = ops


class Replica:
    """One engine process, over all its lives."""

    def __init__(self, name: str, events: Events, store: Store, front: Front, loss: float) -> None:
        self.name = name
        self.events = events
        self.store = store
        self.front = front
        self.loss = loss
        self.owner: Owner[Copy] | None = None
        self.run = 0
        """Rises with each crash and start: what was under way before is void."""
        self.busy: dict[str, Op] = {}
        self.draining = False
        self.leaving = False
        """Whether it goes for good once it is drained."""
        self.paused = False
        self.cut_from_store = False
        self.cut_from_front = False
        self.rate = events.between(0.8, 1.3)
        """How fast its clock runs."""
        self.versions = 0
        self.lives: tuple[int, ...] = ()
        """Its last lives, but for the present one."""
        self._pending: list[tuple[list[Write], Op, Answer]] = []
        self._flight: Flight | None = None
        self._waiting: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def life(self) -> int:
        """The number of its life; 0 while it has none."""
        return 0 if self.owner is None else self.owner.life

    @property
    def load(self) -> Load:
        """What placement sees of it."""
        return Load(self.life, 0 if self.owner is None else len(self.owner.sessions), UNITS, len(self.busy))

    # --- lives ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life, once no other life of this name is alive."""
        if self.owner is not None or self.leaving:
            return
        life = None
        if not self.cut_from_store and not self.store.down:
            for number in self.earlier():
                self.store.bury(number, connected=False, heard=True)
            life = self.store.begin(self.name)
        if life is None:
            self.events.after(0.5, self.start)
            return
        self.run += 1
        self.owner = Owner(life)
        self.draining = False
        self.events.after(self.events.between(0.0, RENEW_SECONDS), self._renew, self.run)

    def earlier(self) -> list[int]:
        """Its lives that are not over in the store."""
        rows = self.store.rules.lives
        return [number for number in self.lives if rows[number].state in ALIVE]

    def crash(self) -> None:
        """End without a word: memory, pending and unanswered batches are gone."""
        if self.owner is not None:
            self.lives = (*self.lives[-3:], self.owner.life)
        self.run += 1
        self.owner = None
        self.busy.clear()
        self._pending.clear()
        self._flight = None
        self._waiting.clear()
        self.paused = False

    def restart(self) -> None:
        """Crash and start again."""
        self.crash()
        self.events.after(self.events.between(0.2, 3.0), self.start)

    def resume(self) -> None:
        """Wake: what has arrived in the meantime is taken up, in order."""
        if not self.paused:
            return
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for run, action, values in waiting:
            if run == self.run:
                action(*values)

    def _sleeps(self, action: Callable[..., None], *values: Any) -> bool:
        """Whether it is paused; then the action waits."""
        if self.paused:
            self._waiting.append((self.run, action, values))
        return self.paused

    def _renew(self, run: int) -> None:
        if run != self.run or self._sleeps(self._renew, run):
            return
        if not self._cut() and not self.store.renew(self.life):
            self.over()
            return
        self.events.after(RENEW_SECONDS * self.rate, self._renew, run)

    def over(self) -> None:
        """The life is over: everything is given up, and the process starts again."""
        assert self.owner is not None
        self.owner.end()
        self.restart()

    def _cut(self) -> bool:
        return self.cut_from_store or self.store.down or self.events.chance() < self.loss

    # --- statements -------------------------------------------------------------------------------

    def _ask(
        self, statement: Callable[..., Any], values: tuple[Any, ...], reply: Callable[..., None]
    ) -> None:
        """Send a statement; `reply` gets its answer, or None twice if statement or answer were lost."""
        self.events.after(self.events.between(0.001, 0.004), self._arrive, self.run, statement, values, reply)

    def _arrive(
        self, run: int, statement: Callable[..., Any], values: tuple[Any, ...], reply: Callable[..., None]
    ) -> None:
        if self._cut():
            self.events.after(LOST_AFTER, self._reply, run, reply, True, None)
            return
        answer = statement(*values)
        if self._cut():
            self.events.after(LOST_AFTER, self._reply, run, reply, True, None)
        else:
            self.events.after(self.events.between(0.001, 0.01), self._reply, run, reply, False, answer)

    def _reply(self, run: int, reply: Callable[..., None], lost: bool, answer: Any) -> None:
        if run == self.run and not self._sleeps(self._reply, run, reply, lost, answer):
            reply(lost, answer)

    # --- requests ---------------------------------------------------------------------------------

    def receive(self, op: Op, exists: bool) -> None:
        """A request arrives, from an API process that knows whether the session exists."""
        owner = self.owner
        if owner is None or self.cut_from_front or self._sleeps(self.receive, op, exists):
            return
        if op.session in self.busy:
            return
        copy = owner.sessions.get(op.session)
        if copy is None and exists:
            self.busy[op.session] = op
            self._claim(op)
        elif copy is not None:
            self.busy[op.session] = op
            self._execute(op, copy)
        elif self.draining:
            self.front.moved(op)
        else:
            self.busy[op.session] = op
            self.events.after(0.01, self._finish, self.run, op)

    def _claim(self, op: Op) -> None:
        def replied(lost: bool, answer: Mapping[str, Claimed] | None) -> None:
            owner = self.owner
            assert owner is not None
            if lost or answer is None:
                self._claim(op)
                return
            for name in owner.won(answer):
                at = answer[name]
                assert isinstance(at.content, History)
                owner.adopt(name, Copy(at.epoch, at.commits, at.content))
            copy = owner.sessions.get(op.session)
            if copy is None:
                self._release(op)
                self.front.moved(op)
            else:
                self._execute(op, copy)

        self._ask(self.store.claim, (self.life, (op.session,)), replied)

    def _execute(self, op: Op, copy: Copy) -> None:
        """Carry a request out, unless an owner has done so earlier."""
        answer = recognised(copy.content, op.key)
        if answer is not None:
            self._release(op)
            self._tell(op, answer)
        else:
            self.events.after(self.events.between(0.05, 0.8), self._finish, self.run, op)

    def _release(self, op: Op) -> None:
        self.busy.pop(op.session, None)
        if self.draining:
            self._drain_on()

    def _tell(self, op: Op, answer: Answer) -> None:
        if not self.cut_from_front and self.events.chance() >= self.loss:
            self.front.answer(op, answer)

    def _finish(self, run: int, op: Op) -> None:
        """A turn has been computed, or a verb done: its record waits for the next batch."""
        owner = self.owner
        if run != self.run or owner is None or self._sleeps(self._finish, run, op):
            return
        copy = owner.sessions.get(op.session)
        if copy is None and op.kind is not OpKind.OPEN:
            self._release(op)
            self.front.moved(op)
            return
        self.note(*self._record(owner, op, copy))
        self._send()

    def note(self, writes: list[Write], op: Op, answer: Answer) -> None:
        """Keep a record for the next batch; its client is told when the batch is stored."""
        self._pending.append((writes, op, answer))

    def _version(self) -> int:
        self.versions += 1
        return self.life << 32 | self.versions

    def _record(self, owner: Owner[Copy], op: Op, copy: Copy | None) -> tuple[list[Write], Op, Answer]:
        """What a request writes; the copy is ahead of the store from now on."""
        name = op.session
        if copy is None:
            first = NEW._replace(version=self._version(), keys=((op.key, NEW.answer),))
            owner.adopt(name, Copy(1, 1, first))
            return [Write(name, Kind.CREATE, 1, 1, first, op.tenant)], op, first.answer
        copy.commits += 1
        if op.kind is OpKind.CLOSE:
            del owner.sessions[name]
            return [Write(name, Kind.REMOVE, copy.epoch, copy.commits)], op, copy.content.answer
        before = copy.content
        copy.content = before.after(op, self._version())
        write = Write(name, Kind.CHANGE, copy.epoch, copy.commits, copy.content)
        if op.kind is not OpKind.FORK:
            return [write], op, copy.content.answer
        child = before.fork(op, self._version())
        owner.adopt(op.child, Copy(1, 1, child))
        made = Write(op.child, Kind.CREATE, 1, 1, child, op.tenant, name)
        alone = copy.content._replace(keys=before.keys)
        return [write._replace(makes=op.child, otherwise=alone), made], op, copy.content.answer

    # --- batches ----------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send what waits as one batch, if none is under way."""
        if self._flight is not None or not self._pending or self.owner is None:
            return
        pending, self._pending = self._pending, []
        writes = [write for each, _, _ in pending for write in each]
        ops = [(op, answer) for _, op, answer in pending]
        self._flight = Flight(self.owner.batch + 1, writes, ops)
        self._commit(self._flight)

    def _commit(self, flight: Flight) -> None:
        def replied(lost: bool, accepted: frozenset[str] | None) -> None:
            if lost:
                self._commit(flight)
            elif accepted is None:
                self._ask(self._standing, (flight,), judged)
            else:
                self.settle(flight, accepted)

        def judged(lost: bool, answer: tuple[Standing, frozenset[str]] | None) -> None:
            if lost or answer is None:
                self._commit(flight)
                return
            assert self.owner is not None
            if self.owner.is_stored(answer[0], flight.number):
                self.settle(flight, answer[1])
            else:
                self.over()

        self._ask(self.store.commit, (self.life, flight.number, flight.writes), replied)

    def _standing(self, flight: Flight) -> tuple[Standing, frozenset[str]]:
        rules = self.store.rules
        return rules.standing(self.life, self.store.now), rules.stored(self.life, flight.writes)

    def settle(self, flight: Flight, accepted: frozenset[str]) -> None:
        """The batch is stored, but for refused sessions: clients hear of what was accepted."""
        owner = self.owner
        assert owner is not None
        refused = owner.settle(flight.number, [write.session for write in flight.writes], accepted)
        owner.take_refused()
        self._flight = None
        for op, answer in flight.ops:
            self.busy.pop(op.session, None)
            if op.session in refused:
                self.front.moved(op)
            elif op.child in refused:
                self._forget(owner, op)
                self.front.moved(op)
            else:
                self._tell(op, answer)
        self._send()
        if self.draining:
            self._drain_on()

    @staticmethod
    def _forget(owner: Owner[Copy], op: Op) -> None:
        """A fork was refused: its request may be made again."""
        parent = owner.sessions.get(op.session)
        if parent is not None:
            kept = tuple(each for each in parent.content.keys if each[0] != op.key)
            parent.content = parent.content._replace(keys=kept)

    # --- handing over -----------------------------------------------------------------------------

    def idle(self) -> list[tuple[str, int]]:
        """Its sessions at rest, with their units."""
        if self.owner is None:
            return []
        unsettled = self._unsettled()
        return [(name, 1) for name in self.owner.sessions if name not in self.busy and name not in unsettled]

    def _unsettled(self) -> set[str]:
        writes = [] if self._flight is None else list(self._flight.writes)
        for each, _, _ in self._pending:
            writes += each
        return {write.session for write in writes}

    def hand_over(self, moves: Sequence[Move]) -> None:
        """Hand sessions at rest over; none of them is worked on meanwhile."""
        owner = self.owner
        if owner is None or self.paused:
            return
        unsettled = self._unsettled() | self.busy.keys()
        offers: list[Offer] = []
        for move in moves:
            offers += owner.offer((move.session,), move.target, unsettled)
        if offers:
            for offer in offers:
                self.busy[offer.session] = HANDING
            self._give(offers)

    def _give(self, offers: list[Offer]) -> None:
        def replied(lost: bool, answer: Mapping[str, Claimed] | None) -> None:
            if lost or answer is None:
                self._give(offers)
                return
            assert self.owner is not None
            self.owner.gave(offers, answer)
            self.owner.take_refused()
            for offer in offers:
                self.busy.pop(offer.session, None)
            if self.draining:
                self._drain_on()

        self._ask(self.store.hand_over, (self.life, offers), replied)

    def drain(self, leave: bool) -> None:
        """Take no more sessions, hand over those at rest, wait for turns, commit, end."""
        if self.owner is None or self.draining or self.paused:
            return
        self.leaving = leave

        def replied(lost: bool, alive: bool | None) -> None:
            if lost:
                self._ask(self.store.drain, (self.life,), replied)
            elif alive:
                self._drain_on()
            else:
                self.over()

        self.draining = True
        self._ask(self.store.drain, (self.life,), replied)

    def _drain_on(self) -> None:
        """The next step of a drain."""
        owner = self.owner
        if owner is None or HANDING in self.busy.values():
            return
        idle = self.idle()
        moves = plan_drain(idle[:DRAIN_PORTION], self.front.others(self, 8), DRAIN_PORTION) if idle else []
        if moves:
            self.hand_over(moves)
        elif not self.busy and self._flight is None and not self._pending:
            self._end()

    def _end(self) -> None:
        def replied(lost: bool, _ended: bool | None) -> None:
            if lost:
                self._end()
            else:
                self.restart()

        self._ask(self.store.end, (self.life,), replied)


HANDING = Op(-1, -1, OpKind.TURN, "", "")
"""What a session is busy with while it is handed over."""
