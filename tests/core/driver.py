"""A scheduler, a simulated device that verifies every row, and the few verbs that a story needs.

The model never stops by itself here, so a turn generates exactly as many tokens as it may, and every count in
a story can be written out. What is said is compared with what the model says without any memory. After each
step the audit counts everything; a finding fails the story unless it was planted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from holdfast.core.errors import Refused
from holdfast.core.layout import LAYOUT_NAMES, Component, MemoryLayout, Tier, named_layout
from holdfast.core.ledger import Kind, Ledger, Pool
from holdfast.core.plan import StepResult
from holdfast.core.planner import Proposer
from holdfast.core.policy import Policy
from holdfast.core.pressure import OnDisk
from holdfast.core.registry import Event, Plan
from holdfast.core.retention import Retention
from holdfast.core.scheduler import FLIGHTS_MAX, Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn, TurnRequest
from holdfast.sim.content import content_of, extend, next_token
from holdfast.sim.device import SimDevice

PAGE_SIZES = (1, 3, 16, 64)
LAYOUTS = LAYOUT_NAMES
STATEFUL = tuple(name for name in LAYOUTS if named_layout(name, 1).state)
VOCABULARY = 1000
STEPS_MAX = 2000


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens that differ from those of every other seed in the very first one."""
    return tuple((seed * 37 + index * 11 + 5) % VOCABULARY for index in range(count))


class Driver:
    """One server of a story."""

    def __init__(
        self,
        layout: str | MemoryLayout = "dense",
        page_size: int = 16,
        pages: int = 400,
        slots: int = 60,
        host: int = 0,
        disk: int = 0,
        on_disk: OnDisk | None = None,
        budget: int = 4096,
        overlap: bool = False,
        propose: Proposer | None = None,
        strict: bool = True,
        **policy: object,
    ) -> None:
        self.layout = named_layout(layout, page_size, window=8) if isinstance(layout, str) else layout
        sizes: dict[tuple[Component, Tier], int] = {}
        for component in self.layout.components:
            units = slots if component is Component.STATE else pages
            sizes[component, Tier.DEVICE] = units
            if host:
                sizes[component, Tier.HOST] = host
            if disk:
                sizes[component, Tier.DISK] = disk
        self.ledger = Ledger(self.layout, sizes)
        chosen = {"vocabulary": VOCABULARY, "context_length": 100_000} | policy
        self.scheduler = Scheduler(self.ledger, Policy(**chosen), propose, strict=strict, on_disk=on_disk)
        self.registry = self.scheduler.registry
        self.device = SimDevice(self.layout, VOCABULARY, self._log)
        self.budget = budget
        self.overlap = overlap
        self.now = 0.0
        self.serial = 0
        self.numbers: dict[int, str] = {}
        self.heard: dict[str, list[int]] = {}
        self.events: list[Event] = []
        self.findings: list[Event] = []
        self.plans: list[Plan] = []
        self.spoil: Callable[[Plan, StepResult], StepResult] | None = None

    def _log(self, number: int) -> list[int]:
        tokens = self.registry.sessions[self.numbers[number]].sequence.tokens
        return tokens.slice(0, len(tokens))

    # --- clients ----------------------------------------------------------------------------------

    def open(
        self, name: str = "a", tenant: str = "red", ttl: float | None = None, **retention: object
    ) -> Session:
        """Open a session."""
        return self.scheduler.open(name, tenant, self.now, Retention(ttl, **retention))

    def submit(self, name: str, tokens: tuple[int, ...], max_tokens: int, **more: object) -> Turn:
        """Queue a turn."""
        self.serial += 1
        turn_id = str(more.pop("turn_id", f"t{self.serial}"))
        return self.scheduler.submit(name, TurnRequest(turn_id, tokens, max_tokens, **more), self.now)

    def listen(self, name: str, tokens: tuple[int, ...] = (), **more: object) -> Turn:
        """Begin an open turn."""
        self.serial += 1
        return self.scheduler.listen(name, TurnRequest(f"o{self.serial}", tokens, 1, **more), self.now)

    def say(self, name: str, tokens: tuple[int, ...], start: int | None = None) -> None:
        """Let the input of an open turn go on, or be revised from its token `start` on."""
        turn = self.session(name).turn
        assert turn is not None
        at = len(turn.request.tokens) if start is None else start
        self.scheduler.hear(name, turn.request.turn_id, at, tokens, self.now)

    def commit(self, name: str, max_tokens: int, more: tuple[int, ...] = (), **fields: object) -> Turn:
        """Commit an open turn, with some more input."""
        turn = self.session(name).turn
        assert turn is not None
        request = TurnRequest(f"c{self.serial}", turn.request.tokens + more, max_tokens, **fields)
        return self.scheduler.commit(name, turn.request.turn_id, request, self.now)

    def request(self, tokens: tuple[int, ...], max_tokens: int, tenant: str = "red", **more: object) -> Turn:
        """Queue a request of its own."""
        self.serial += 1
        turn_id = str(more.pop("turn_id", f"r{self.serial}"))
        return self.scheduler.request(tenant, TurnRequest(turn_id, tokens, max_tokens, **more), self.now)

    def turn(self, name: str, count: int, max_tokens: int, seed: int = 0, **more: object) -> Turn:
        """A whole turn of `count` input tokens, until nothing is left to do."""
        turn = self.submit(name, prompt(count, seed), max_tokens, **more)
        self.run()
        return turn

    def close(self, name: str = "a") -> None:
        """Close a session, and let whatever is in flight end."""
        self.scheduler.close(name, self.now)
        self.run()

    def session(self, name: str = "a") -> Session:
        """An open session."""
        return self.registry.sessions[name]

    def tokens(self, name: str = "a") -> list[int]:
        """Everything that a session knows."""
        log = self.session(name).sequence.tokens
        return log.slice(0, len(log))

    # --- steps ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Make a plan and leave it in flight."""
        plan = self.scheduler.plan(self.budget, self.now)
        for row in plan.rows:
            self.numbers[row.number] = row.turn.session_id
        assert all(owner.sequence.fence == plan.step for owner in self._named(plan)), "units go free too soon"
        assert self.device.announce(plan) is None
        self.plans.append(plan)
        return plan

    def _named(self, plan: Plan) -> Iterator[Session]:
        """The sessions whose memory a plan names."""
        yield from (self.registry.sessions[row.turn.session_id] for row in plan.rows)
        yield from plan.copied
        yield from (self.registry.transits[move.number] for move in plan.moves)

    def compute(self, plan: Plan) -> StepResult:
        """What the device makes of a plan."""
        rows, moved = self.device.run(plan)
        for row in rows:
            row.finish = None
        return StepResult(rows, moved)

    def settle(self, error: str | None = None) -> list[Event]:
        """Run and settle the oldest plan in flight."""
        plan = self.registry.flights[0]
        if plan.void or error is not None:
            self.device.spoil(plan)
            result = StepResult([], error=error or "discarded")
        else:
            result = self.compute(plan)
        if self.spoil is not None:
            result = self.spoil(plan, result)
        events = self.scheduler.settle(plan, result, self.now)
        self.device.settled(plan)
        self.hear(events)
        return events

    def step(self) -> Plan:
        """One step; with overlap, one plan stays in flight as long as there is something to plan."""
        if len(self.registry.flights) == FLIGHTS_MAX:
            self.settle()
        plan = self.plan()
        while len(self.registry.flights) > (1 if self.overlap and plan else 0):
            self.settle()
        return plan

    def run(self) -> int:
        """Step until nothing is left to do; returns the number of steps."""
        for steps in range(STEPS_MAX):
            registry = self.registry
            busy = registry.running or registry.queue or registry.seals or registry.flights
            busy = busy or registry.queues.unheard
            if not (busy or registry.in_flight.forgotten or registry.moves.pending or registry.copies):
                self.hear(self.scheduler.take_events())
                assert self.scheduler.audit.census() == []
                return steps
            self.step()
        raise AssertionError(f"nothing came to an end in {STEPS_MAX} steps")

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until something holds."""
        for _ in range(STEPS_MAX):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def land(self) -> None:
        """Settle everything in flight."""
        while self.registry.flights:
            self.settle()

    def hear(self, events: list[Event]) -> None:
        """Take events in as a client does."""
        self.events += events
        for event in events:
            if event.kind == "finding":
                self.findings.append(event)
            elif event.kind == "tokens":
                assert event.turn is not None
                self.heard.setdefault(event.turn.request.turn_id, []).extend(event.tokens)
        assert not self.findings, [event.reason for event in self.findings]

    # --- what there is ----------------------------------------------------------------------------

    def counts(self, component: Component = Component.FULL, tier: Tier = Tier.DEVICE) -> dict[str, int]:
        """Units by holder kind, without the kinds that have none."""
        return {kind: count for kind, count in self.ledger.pool(component, tier).counts().items() if count}

    def all_counts(self) -> dict[str, dict[str, int]]:
        """Units by holder kind, for every pool."""
        return {pool.name: pool.counts() for pool in self.ledger.pools.values()}

    def all_free(self) -> bool:
        """Whether every unit of every pool is free."""
        return all(len(pool.free) == pool.size for pool in self.ledger.pools.values())

    def kinds(self, name: str) -> list[tuple[str, str]]:
        """Kinds and turns of the events about a session, tokens aside."""
        return [
            (event.kind, event.turn.request.turn_id if event.turn is not None else "")
            for event in self.events
            if event.session_id == name and event.kind != "tokens"
        ]

    def says(self, history: list[int], count: int) -> list[int]:
        """What the model says after a history, without any memory."""
        content, said = content_of(history), []
        for _ in range(count):
            said.append(next_token(content, VOCABULARY))
            content = extend(content, said[-1])
        return said

    def snapshot(self) -> dict[str, object]:
        """Everything that a refusal must leave alone: the ledger, the tree, the registry, every session."""
        registry, ledger = self.registry, self.ledger
        return {
            "pools": {
                pool.name: (list(pool.free), list(pool.by_kind), [list(u) for _, u in pool.retiring])
                for pool in ledger.pools.values()
            },
            "holds": {
                serial: (list(grant.units), repr(grant.holder)) for serial, grant in ledger.live.items()
            },
            "leases": {serial: record.length for serial, record in registry.tree.leases.records.items()},
            "sessions": {name: _picture(session) for name, session in registry.sessions.items()},
            "queue": list(registry.queue),
            "lists": [
                [session.id for session in table]
                for table in (
                    registry.running,
                    registry.listening,
                    registry.resting,
                    registry.queues.checkpointed,
                    registry.seals,
                )
            ],
            "in flight": [plan.step for plan in registry.flights],
            "planned": (
                len(registry.copies),
                len(registry.moves.pending),
                list(registry.in_flight.forgotten),
            ),
            "tables": (dict(registry.tenants), registry.deadlines.entries(), list(registry.expired)),
            "events": len(registry.events),
            "numbers": registry.numbers,
            "counters": [getattr(registry.counters, name) for name in registry.counters.__slots__],
        }

    @contextmanager
    def unchanged(self, refusal: type[Refused]) -> Iterator[None]:
        """Something is refused with exactly this class, and nothing at all has changed."""
        before = self.snapshot()
        with pytest.raises(refusal) as caught:
            yield
        assert caught.type is refusal, caught.value
        assert self.snapshot() == before

    @contextmanager
    def starved(self, *purposes: str, times: int = 1 << 30) -> Iterator[list[str]]:
        """Allocations for these purposes find nothing, the first `times` times; yields which were struck."""
        struck: list[str] = []

        def gate(pool: Pool, count: int) -> bool:
            if self.ledger.purpose in purposes and len(struck) < times:
                struck.append(self.ledger.purpose)
                return False
            return True

        for pool in self.ledger.pools.values():
            pool.guard(gate)
        yield struck
        for pool in self.ledger.pools.values():
            pool.guard(None)


def _picture(session: Session) -> tuple[object, ...]:
    sequence, turn = session.sequence, session.turn
    return (
        session.life,
        session.place,
        session.unsettled,
        session.idle_since,
        tuple(session.boundaries),
        session.last.request.turn_id if session.last is not None else None,
        (turn.request, turn.state, turn.generated, turn.awaiting, turn.ending) if turn is not None else None,
        sequence.tokens.packed(0, len(sequence.tokens)),
        (sequence.computed, sequence.planned, sequence.pages, sequence.changed, sequence.fence),
        [(point.length, point.pinned, repr(point.holder)) for point in sequence.points],
        (sequence.mark.known, sequence.mark.point.length) if sequence.mark is not None else None,
        sequence.lease.length if sequence.lease is not None else None,
    )


def holder_units(driver: Driver, kind: Kind, name: str) -> int:
    """Units of all components that holders of this kind and name have, counted from the live Holds."""
    return sum(
        len(grant.units)
        for grant in driver.ledger.live.values()
        if grant.holder.kind is kind and grant.holder.name == name
    )
