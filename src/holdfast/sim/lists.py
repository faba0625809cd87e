"""Consistency of the scheduler's lists with its sessions.

Whether a session runs, waits, is idle, is sealed, moves or has rows in flight is recorded twice: in the
session, and in the lists that plans are made from. A session in a wrong list, or missing in one, is served
wrongly much later, or never. `check` compares both sides. Called by the world after every step.
"""

from __future__ import annotations

from collections import Counter

from holdfast.core.layout import Tier
from holdfast.core.ledger import Kind
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Place, Session
from holdfast.sim.found import Check, Found


class Lists:
    """The lists of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.registry = scheduler.registry

    def check(self) -> None:
        """Raise `Found` for the first session that is not where it must be."""
        rows, sampled = self._in_flight()
        for session in self.registry.sessions.values():
            self._check_lists(session)
            self._check_memory(session)
            self._require(session, session.unsettled == rows[session.number], "rows in flight")
            turn = session.turn
            awaiting = sampled[turn.number] if turn is not None and session.unsettled else 0
            self._require(session, turn is None or turn.awaiting == awaiting, "tokens that are awaited")
        self._check_names()

    def check_seal(self, session: Session) -> None:
        """A row that computed the last tokens of a finished turn has settled: no token may be left over."""
        sequence = session.sequence
        if session.life is Life.IDLE and sequence.computed < sequence.known:
            left = sequence.known - sequence.computed
            raise Found(Check.RECOMPUTATION, f"a seal has left {left} tokens to be computed", session.id)

    def _require(self, session: Session, agrees: bool, what: str) -> None:
        if not agrees:
            where = f"{session.id}, {session.life.value} and {session.place.value}"
            turn = session.turn
            whose = f"{turn.request.turn_id} of {session.id}" if turn is not None else session.id
            raise Found(Check.REGISTRY, f"{where}: wrong {what}", whose)

    def _in_flight(self) -> tuple[Counter[int], Counter[int]]:
        """Rows in flight by session, and those that sample by turn; checks the fences of what they name."""
        rows: Counter[int] = Counter()
        sampled: Counter[int] = Counter()
        sessions = self.registry.sessions
        for plan in self.registry.flights:
            for row in plan.rows:
                session = sessions.get(row.turn.session_id)
                if session is not None and session.number == row.number:
                    self._require(session, session.sequence.fence >= plan.step, "fence of a row")
                    if not plan.void:
                        rows[row.number] += 1
                        sampled[row.turn.number] += row.sample
            for owner in plan.copied:
                self._require(owner, owner.sequence.fence >= plan.step, "fence of a copy")
        return rows, sampled

    def _check_lists(self, session: Session) -> None:
        registry, turn, life = self.registry, session.turn, session.life
        waits = turn is not None and registry.queue.get(turn.number) is turn
        is_open = turn is not None and turn.is_open
        self._require(session, waits == (life is Life.QUEUED and not is_open), "place in the queue")
        runs = life is Life.RUNNING or (life is Life.CLOSING and turn is not None)
        listens = session in registry.listening
        self._require(session, listens if is_open else runs or not listens, "place among those that listen")
        placed = registry.running.count(session) + (listens and not is_open)
        self._require(session, placed == (runs and not is_open), "place among those that run")
        self._require(
            session, (turn is None) == (life in (Life.IDLE, Life.SEALING)) or life is Life.CLOSING, "turn"
        )
        sealed = life is Life.SEALING and not session.unsettled
        self._require(session, (session in registry.seals) == sealed, "place among the seals")
        rests = session.at_rest and session.sequence.lease is not None
        self._require(session, (session in registry.resting) == rests, "place among those that rest")
        expected = session in registry.queues.expected
        self._require(session, turn is None or not expected, "place among those that are expected")
        moves = session.place in (Place.LEAVING, Place.RETURNING)
        transit = session.parcel.transit if session.parcel is not None else 0
        self._require(session, (registry.transits.get(transit) is session) == moves, "place among the moves")

    def _check_memory(self, session: Session) -> None:
        sequence, registry = session.sequence, self.registry
        self._require(session, (session.parcel is None) == (session.place is Place.HOME), "parcel")
        if session.volatile:
            on_disk = session.parcel is not None and session.parcel.tier is Tier.DISK
            self._require(session, not on_disk, "tier: a volatile session has no file")
            self._require(session, session.durable, "wait for a journal: a volatile session is in none")
        copied = sequence.copy is not None
        self._require(session, not copied or session in registry.moves.copied, "place among the copies")
        self._require(session, not copied or not sequence.away, "copy: its memory is away")
        mine = session.holder if sequence.mark is None else session.turn and session.turn.holder
        self._require(session, sequence.holder is mine, "holder")
        loose = any(not p.pinned and p.holder.kind is Kind.CHECKPOINT for p in sequence.points)
        if session.at_rest and loose:
            self._require(
                session, session in registry.queues.checkpointed, "place among those with checkpoints"
            )
        pinned = any(point.pinned for point in sequence.points)
        home = session.place is Place.HOME
        self._require(session, home or not pinned, "checkpoints: one is pinned, and its session is away")

    def _check_names(self) -> None:
        """Lists name open sessions and waiting turns alone."""
        registry = self.registry
        open_ones = set(registry.sessions.values())
        queues = registry.queues
        tables = (queues.running, queues.resting, queues.checkpointed, queues.seals, queues.tainted)
        hinted = (queues.recalled, queues.expected)
        moves = (registry.moves.copied, registry.transits.values(), registry.in_flight.uncopied)
        for table in (*tables, *hinted, queues.listening, *moves):
            for session in table:
                self._require(session, session in open_ones, "list: it is closed")
        counted = Counter(session.tenant for session in open_ones if not session.volatile)
        if registry.tenants != counted or registry.volatile != len(open_ones) - counted.total():
            raise Found(Check.REGISTRY, f"sessions of tenants are miscounted: {registry.tenants}", "registry")
        for turn in registry.queue.values():
            session = registry.sessions[turn.session_id]
            if session.turn is not turn or session.life is not Life.QUEUED:
                whose = f"{turn.request.turn_id} of {session.id}"
                raise Found(Check.REGISTRY, f"a turn waits whose session is {session.life.value}", whose)
        listening = {session.turn.number for session in registry.listening if session.turn is not None}
        for number in self.scheduler.planner.prompts.matches:
            if number not in registry.queue and number not in listening:
                raise Found(
                    Check.REGISTRY, f"a match of turn {number} is kept, which waits no more", "registry"
                )
