"""A world so small that all orders of events can be tried: two sessions, a handful of pages, a few tokens.

It has no randomness and no clock: events are given one by one. The core and the device are
the real ones; conversations are followed as in a large world. Used by the exploration.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from holdfast.core import errors
from holdfast.core.audit import Audit, Finding
from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Ledger, Pool
from holdfast.core.plan import StepResult
from holdfast.core.policy import Policy, Share
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Session
from holdfast.core.turn import KEEP_ALL, TurnRequest
from holdfast.sim.constraint import Matcher
from holdfast.sim.device import SimDevice, WrongContent
from holdfast.sim.found import Check, Found, assertions_of_the_core, found_by
from holdfast.sim.hearing import Audience
from holdfast.sim.inspection import Inspection
from holdfast.sim.reference import Conversation

VOCABULARY = 50
NAMES = ("a", "b")
FIRST_INPUT = (1, 2, 3)
LATER_INPUT = (4, 5)
OUTPUT = 2
CONSTRAINED_OUTPUT = 3
SEED = 111
"""Of a constraint that forces the second token of a first turn, and the last two of a second turn."""
TURNS_MAX = 2
BUDGET = 4

# Which askings for units are refused while a plan is made.
REFUSALS: dict[str, Container[int]] = {
    "": (),
    "first unit refused": (1,),
    "second unit refused": (2,),
    "every unit refused": range(1, 1 << 30),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The setup of a tiny world, and the events before the exploration.

    In a `mute` one first turns sample nothing: their input is computed, and they end.
    """

    layout: str
    page_size: int
    pages: int
    slots: int = 0
    host: int = 0
    overlap: bool = False
    leave_history: bool = False
    window: int = 3
    share: float = 1.0
    constrained: bool = False
    mute: bool = False
    prologue: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = f"{self.pages} pages of {self.page_size}, {self.slots} slots, {self.host} on host"
        overlap = ", overlap" if self.overlap else ""
        history = ", history is left" if self.leave_history else ""
        share = f", {self.share} of them for a tenant" if self.share < 1.0 else ""
        begun = f", after {', '.join(self.prologue)}" if self.prologue else ""
        constrained = ", turns are constrained" if self.constrained else ""
        mute = ", first turns are mute" if self.mute else ""
        return f"{self.layout}: {memory}{share}{overlap}{history}{constrained}{mute}{begun}"


class Quiet(Audit):
    """An audit that does nothing: for events that were checked when they first happened."""

    __slots__ = ()

    def slice(self, budget: int) -> list[Finding]:  # noqa: ARG002
        """Check nothing."""
        return []


class TinyWorld:
    """One tiny world. `apply` lets an event happen; `enabled` says which can."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        layout = named_layout(setting.layout, setting.page_size, window=setting.window)
        sizes: dict[tuple[Component, Tier], int] = {}
        for component in layout.components:
            units = setting.slots if component is Component.STATE else setting.pages
            sizes[component, Tier.DEVICE] = units
            if setting.host:
                sizes[component, Tier.HOST] = setting.host
        self.ledger = Ledger(layout, sizes)
        policy = Policy(
            context_length=12,
            vocabulary=VOCABULARY,
            chunk_tokens=3,
            running_max=2,
            queue_max=4,
            sessions_max=2,
            session_ttl=1e9,
            checkpoints=1,
            age_seconds=1e9,
            leave_history=setting.leave_history,
            share=Share(device=setting.share),
        )
        self.scheduler = Scheduler(self.ledger, policy)
        self.audit = self.scheduler.audit
        self.scheduler.healing.audit = Quiet(self.ledger, self.scheduler.registry.tree, self.audit.owners)
        self.audience = Audience(self.scheduler, lambda: True, self._matcher)
        self.device = SimDevice(layout, VOCABULARY, self._log, self._matcher)
        self.inspection = Inspection(self.scheduler, self.device)
        self.numbers: dict[int, str] = {}
        self.serial = 0
        self.turns = dict.fromkeys(NAMES, 0)
        self.asked = 0
        self.refused: Container[int] = ()
        for pool in self.ledger.pools.values():
            pool.guard(self._gate)
        for name in NAMES:
            self._open(name)
        for event in setting.prologue:
            happened = self.apply(event, watched=False)
            assert happened, f"{event} was refused in the prologue"

    def _log(self, number: int) -> list[int] | None:
        session = self.scheduler.registry.sessions.get(self.numbers[number])
        if session is None or session.number != number:
            return None
        return session.sequence.tokens.slice(0, session.sequence.known)

    def _matcher(self, _turn_id: str) -> Matcher | None:
        """Turns that are constrained all are in the same way."""
        return Matcher(VOCABULARY, SEED) if self.setting.constrained else None

    def _gate(self, _pool: Pool, _count: int) -> bool:
        """Let the allocation fail that an event has asked to fail."""
        self.asked += 1
        return self.asked not in self.refused

    # --- events -----------------------------------------------------------------------------------

    def enabled(self) -> list[str]:
        """What can happen now, in a fixed order."""
        events: list[str] = []
        for name in NAMES:
            session = self.scheduler.registry.sessions.get(name)
            if session is None:
                events.append(f"open {name}")
            else:
                events += [f"{verb} {name}" for verb in self._verbs(session)]
        flights = self.scheduler.registry.flights
        if len(flights) < (2 if self.setting.overlap else 1):
            events += [f"plan, {detail}" if detail else "plan" for detail in REFUSALS]
        if flights:
            events += ["settle"]
            if flights[0].rows or flights[0].moves or flights[0].copies:
                events += ["settle, failed before writing", "settle, failed after writing"]
        return events

    def _verbs(self, session: Session) -> list[str]:
        """What the client of a session can do."""
        verbs: list[str] = []
        if session.life in {Life.IDLE, Life.SEALING} and self.turns[session.id] < TURNS_MAX:
            verbs.append("turn")
        if session.turn is not None and session.turn.ending is None and session.life is not Life.CLOSING:
            verbs += ["abort", "interrupt"]
        if session.life is not Life.CLOSING:
            verbs.append("close")
        if session.turn is None and session.boundaries:
            verbs.append("rewind")
            if self.setting.host:
                verbs.append("spill")
            if len(self.scheduler.registry.sessions) == 1:
                verbs.append("fork")
        return verbs

    def apply(self, event: str, watched: bool) -> bool:
        """Let one event happen; False if it was refused. `watched` looks at everything afterwards."""
        with assertions_of_the_core():
            try:
                self._happen(event)
            except errors.Refused:
                return False
            self.audience.hear(self.scheduler.take_events())
            if watched:
                self._look()
        return True

    def _happen(self, event: str) -> None:
        what, _, detail = event.partition(", ")
        verb, _, name = what.partition(" ")
        if verb == "plan":
            self.asked, self.refused = 0, REFUSALS[detail]
            self._plan()
            self.refused = ()
        elif verb == "settle":
            self._settle(detail)
        elif verb == "open":
            self._open(name)
        elif verb == "turn":
            self._turn(name)
        elif verb in {"abort", "interrupt"}:
            self._end(name, None if verb == "abort" else KEEP_ALL)
        elif verb == "close":
            self.scheduler.close(name, 0.0)
        elif verb == "spill":
            self.scheduler.spill(name, 0.0)
        else:
            self._go_back(verb, name)

    def _open(self, name: str) -> None:
        self.scheduler.open(name, "red", 0.0)
        self.audience.welcome(name, Conversation(name, VOCABULARY))
        self.turns[name] = 0

    def _turn(self, name: str) -> None:
        self.serial += 1
        known = self.scheduler.registry.sessions[name].sequence.known
        limit = CONSTRAINED_OUTPUT if self.setting.constrained else OUTPUT
        if self.setting.mute and not known:
            limit = 0
        request = TurnRequest(f"t{self.serial}", LATER_INPUT if known else FIRST_INPUT, limit)
        self.scheduler.submit(name, request, 0.0)
        self.audience.begin(name, request)
        self.turns[name] += 1

    def _end(self, name: str, keep: int | None) -> None:
        turn = self.scheduler.registry.sessions[name].turn
        assert turn is not None, "only a turn in flight can be ended"
        self.audience.ask_to_end(name, keep)
        self.scheduler.abort(name, turn.request.turn_id, 0.0, keep)

    def _go_back(self, verb: str, name: str) -> None:
        session = self.scheduler.registry.sessions[name]
        turns = len(session.boundaries) - 1
        conversation = self.audience.conversations[name]
        if verb == "rewind":
            self.scheduler.rewind(name, turns, 0.0)
            conversation.rewind(turns)
            self.audience.compare(session)
            return
        other = NAMES[1 - NAMES.index(name)]
        child = self.scheduler.fork(name, other, 0.0)
        self.audience.welcome(other, conversation.fork(other, len(session.boundaries)))
        self.turns[other] = self.turns[name]
        self.audience.compare(child)

    # --- steps ------------------------------------------------------------------------------------

    def _plan(self) -> None:
        plan = self.scheduler.plan(BUDGET, 0.0)
        for row in plan.rows:
            self.numbers[row.number] = row.turn.session_id
            self.audience.conversations[row.turn.session_id].planned(row.start, row.turn.retracts)
        try:
            self.device.announce(plan, self.scheduler.registry.transits)
        except WrongContent as wrong:
            raise Found(Check.FENCE, str(wrong), self.numbers.get(wrong.number, "nobody")) from wrong

    def _settle(self, detail: str) -> None:
        plan = self.scheduler.registry.flights[0]
        error = "discarded" if plan.void else detail or None
        if error is None:
            try:
                rows, moved = self.device.run(plan)
            except WrongContent as wrong:
                raise Found(Check.CONTENT, str(wrong), self.numbers.get(wrong.number, "nobody")) from wrong
            result = StepResult(rows, moved)
        else:
            if "after" in error:
                self.device.spoil(plan)
            result = StepResult([], error=error)
        self.audience.doubtful = error is not None
        events = self.scheduler.settle(plan, result, 0.0)
        self.device.settled(plan)
        self.audience.hear(events)
        self.audience.doubtful = False

    def _look(self) -> None:
        """Count everything, read everything, and see that every turn is where it can go on."""
        found = self.audit.census()
        if found:
            raise found_by(self.audit, found[0])
        self.inspection.everything()
        self.inspection.quotas()
        self.audience.watch()
