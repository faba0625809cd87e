"""A seeded world around the real core.

Clients act, plans are made and run, possibly one ahead of the other, results come back, faults strike, and
after every step the audit runs and each transcript is compared with the reference. The
same seed gives the same trace and the same state hash; every finding can be replayed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from random import Random

from holdfast.core.layout import Component, Tier, named_layout
from holdfast.core.ledger import Ledger
from holdfast.core.plan import Row, RowResult, StepResult, TierMove
from holdfast.core.policy import Policy, Share
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Session
from holdfast.core.turn import Turn
from holdfast.sim.chats import AllClients
from holdfast.sim.clients import TENANTS, VOCABULARY
from holdfast.sim.constraint import Constraints
from holdfast.sim.content import extend
from holdfast.sim.device import SimDevice, WrongContent
from holdfast.sim.faults import Faults
from holdfast.sim.files import Files
from holdfast.sim.found import Check, Found, assertions_of_the_core, found_by
from holdfast.sim.inspection import Inspection
from holdfast.sim.keeping import Keeping
from holdfast.sim.lists import Lists
from holdfast.sim.restart import come_back
from holdfast.sim.workloads import WORKLOADS, Workload

__all__ = ["Found", "Setup", "World"]

STALL_STEPS = 200
STEPS_PER_INSPECTION = 16
STEPS_PER_INSPECTION_OF_A_CROWD = 400
CLOSING_STEPS = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a world; with the seed it determines the whole run."""

    seed: int
    layout: str
    page_size: int
    workload: str = "mix"
    faults: float = 0.05


class World:
    """Clients, core and device of one simulation."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = rng = Random(f"{setup.seed}/{setup.layout}/{setup.page_size}/{setup.workload}")
        self.workload: Workload = WORKLOADS[setup.workload]
        self.layout = named_layout(setup.layout, setup.page_size, window=rng.choice((3, 8, 20)))
        self.sizes = self._sizes()
        self.overlap = rng.random() < 0.6
        self.drafting = rng.random() < 0.4
        self.faults = Faults(Random(f"faults {setup.seed}"), setup.faults)
        self.policy = self._policy()
        self.state_budget = rng.choice((1, 3, 1000))
        self.constraints = Constraints(setup.seed, VOCABULARY)
        self.file_rng = Random(f"files {setup.seed}")
        self._boot()
        self.clients = AllClients(self.workload, self.scheduler, rng, self.faults, self.constraints.matcher)
        self._attach()
        self.keeping = Keeping(self.clients, Random(f"retention {setup.seed}"), self.policy.pinned_share == 1)
        self.now = 0.0
        self.step = 0
        self.stalled = 0
        self.oldest: tuple[int, int, int] | None = None
        self.oldest_waited = 0
        self.trace = 0
        self.disk_rng = Random(f"disk {setup.seed}")
        self.copy_rng = Random(f"copies {setup.seed}")
        self.slow_copies = self.copy_rng.random() < 0.5
        self.death_rng = Random(f"deaths {setup.seed}")

    def _boot(self) -> None:
        """Start a process with empty memory."""
        self.ledger = Ledger(self.layout, self.sizes)
        self.device = SimDevice(self.layout, VOCABULARY, self._log, self.constraints.matcher)
        self.files = Files(self.device, self.file_rng)
        self.scheduler = Scheduler(
            self.ledger,
            self.policy,
            propose=self._propose if self.drafting else None,
            strict=self.workload.strict,
            state_budget=self.state_budget,
            on_disk=self.files.on_disk,
        )
        self.inspection = Inspection(self.scheduler, self.device)
        self.lists = Lists(self.scheduler)
        self.numbers: dict[int, str] = {}
        self.late: dict[int, tuple[int, list[TierMove]]] = {}
        self.launched = True

    def _attach(self) -> None:
        """Connect clients and faults to the process."""
        self.clients.scheduler = self.scheduler
        self.faults.guard(self.ledger)

    def _propose(self, session: Session, turn: Turn) -> list[int]:
        return self.clients.propose(session, turn)

    def _die(self) -> None:
        """Kill the process and start another from the durable state."""
        self._boot()
        self._attach()
        come_back(self.clients, self.scheduler, self.device, self.now, self.death_rng)
        self.stalled = 0

    def _policy(self) -> Policy:
        rng = self.rng
        return Policy(
            context_length=rng.choice((120, 200)),
            vocabulary=VOCABULARY,
            chunk_tokens=rng.choice((3, 7, 16, 64)),
            mixed_tokens=Random(f"mixed {self.setup.seed}").choice((2, 8, 24, 64)),
            drafts_max=3,
            running_max=rng.choice((2, 4, 16)),
            queue_max=64,
            sessions_max=self.workload.sessions,
            session_ttl=rng.choice((30.0, 400.0)),
            checkpoints=rng.choice((0, 1, 4)),
            leave_history=rng.random() < 0.7,
            durable_turns=rng.random() < 0.3,
            shares=self._shares(),
            pinned_share=Random(f"pins {self.setup.seed}").choice((0.25, 1.0, 1.0)),
        )

    def _shares(self) -> dict[str, Share]:
        """In every third world or so, what each tenant may hold, perhaps too little for long turns."""
        rng = Random(f"shares {self.setup.seed}")
        if rng.random() < 0.6:
            return {}
        parts = (1.0, 0.7, 0.4)
        return {tenant: Share(rng.choice(parts), rng.choice(parts), rng.choice(parts)) for tenant in TENANTS}

    def _sizes(self) -> dict[tuple[Component, Tier], int]:
        """Pools small enough that memory is short most of the time, but any one turn fits."""
        rng = self.rng
        pages = self.layout.pages_for(200) + rng.choice((4, 40, 120))
        if not self.workload.strict:
            pages *= 8
        slots = rng.choice((3, 8, 40))
        sizes: dict[tuple[Component, Tier], int] = {}
        disk_rng = Random(f"disk sizes {self.setup.seed}")
        likely = self.workload.tiers
        host, disk = rng.random() < max(0.6, likely), rng.random() < max(0.3, likely)
        for component in self.layout.components:
            units = slots if component is Component.STATE else pages
            sizes[component, Tier.DEVICE] = units
            if host:
                sizes[component, Tier.HOST] = rng.choice((2, units, 4 * units))
            if disk:
                sizes[component, Tier.DISK] = disk_rng.choice((2, units, 4 * units))
        return sizes

    def _log(self, number: int) -> list[int] | None:
        session = self.scheduler.registry.sessions.get(self.numbers[number])
        if session is None or session.number != number:
            return None
        tokens = session.sequence.tokens
        return tokens.slice(0, len(tokens))

    @property
    def turns(self) -> int:
        """How many turns were accepted."""
        return self.clients.turns

    # --- running ----------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Run a number of steps; raises `Found` at the first finding."""
        with assertions_of_the_core():
            if not self.step:
                for _ in range(self.workload.present):
                    self.clients.open()
            for _ in range(steps):
                self._advance()
                self.clients.doubtful = False

    def _advance(self) -> None:
        """One step: clients act, a plan is made, an earlier one settles, everything is counted."""
        clients = self.clients
        self.step = clients.step = self.step + 1
        self.now += self.rng.random() * 0.2
        if self.faults.strike("clock jump", 0.1):
            self.now += self.rng.choice((-50.0, 5.0, 35.0))
        clients.now = self.now
        if self.faults.strike("process killed", self.workload.deaths, self.death_rng):
            self._die()
        self._arrive()
        actions = self.workload.actions_per_step
        while self.rng.random() < actions:
            clients.act()
            self.files.fill()
            actions -= 1
        self.keeping.change()
        flights = self.scheduler.registry.flights
        self._plan()
        counted = self.ledger.settled
        while flights and (len(flights) == 2 or not self.overlap or self.rng.random() < 0.1):
            self._settle()
        if self.workload.strict and self.ledger.settled == counted:
            self._census()
        self.inspection.quotas()
        if self.workload.strict or self.step % STEPS_PER_INSPECTION_OF_A_CROWD == 0:
            self.lists.check()
            self.inspection.fences()
            self.keeping.compare(self.scheduler)
        if (
            self.step % (STEPS_PER_INSPECTION if self.workload.strict else STEPS_PER_INSPECTION_OF_A_CROWD)
            == 0
        ):
            self.inspection.everything()
        self._watch_progress()

    def _plan(self) -> None:
        resting = self.keeping.resting(self.scheduler) if self.workload.strict else []
        registry = self.scheduler.registry
        answering = {session.id for session in (*registry.running, *registry.listening)}
        by_hand = {move.number for move in registry.moves.pending}
        plan = self.scheduler.plan(self.rng.choice((4, 16, 64)), self.now)
        self.keeping.check(resting)
        self.files.fill()
        self._forsake()
        if plan.rows or plan.moves or plan.copies:
            self.stalled = 0
        trace = self.trace
        for row in plan.rows:
            self.numbers[row.number] = row.turn.session_id
            conversation = self.clients.conversations.get(row.turn.session_id)
            if conversation is not None and not row.turn.is_open:
                conversation.planned(row.start, row.turn.retracts)
            trace = extend(trace, row.start * 1009 + row.count)
        self.trace = trace
        self._watch_delays(plan)
        self._watch_prefetches(plan, by_hand)
        self._watch_pauses(plan, answering)
        try:
            self.device.announce(plan, self.scheduler.registry.transits)
        except WrongContent as wrong:
            self._census()
            raise Found(Check.FENCE, str(wrong), self._whose(plan, wrong.number)) from wrong
        self.clients.hear(self.scheduler.take_events())

    def _watch_delays(self, plan: Plan) -> None:
        """No step computes an input ahead and leaves out a turn that could have got on.

        A turn whose tenant is at its quota waits for no input of another tenant.
        """
        sessions = self.scheduler.registry.sessions
        tenants = {sessions[row.turn.session_id].tenant for row in plan.rows if row.turn.is_open}
        if not tenants:
            return
        served = {row.turn for row in plan.rows}
        for session in self.scheduler.registry.running:
            turn, sequence = session.turn, session.sequence
            if turn is None or turn in served or turn.ending is not None or session.life is not Life.RUNNING:
                continue
            left = sequence.known + turn.awaiting - sequence.planned
            done = turn.generated + turn.awaiting >= turn.request.max_tokens > 0
            guesses = self.scheduler.planner.propose is not None and session.unsettled
            account = session.holder.account
            full = any(pool.room(account) < 1 for pool in self.ledger.pools.values())
            apart = full and session.tenant not in tenants
            if left > 0 and not (done or guesses or apart):
                which = f"{turn.request.turn_id} of {session.id}"
                raise Found(Check.DELAY, f"an input was computed ahead while {which} waited", which)

    def _watch_prefetches(self, plan: Plan, by_hand: Set[int]) -> None:
        """No plan brings memory back ahead while a turn waits, and none more than one session's."""
        registry = self.scheduler.registry
        ahead: list[Session] = []
        for move in plan.moves:
            session = registry.transits.get(move.number)
            if session is None or move.destination_tier is not Tier.DEVICE or move.number in by_hand:
                continue
            if session.turn is None and session not in (*ahead, *registry.recalled):
                ahead.append(session)
        if not ahead:
            return
        if len(ahead) > 1:
            raise Found(Check.DELAY, f"memory of {len(ahead)} sessions comes back ahead", ahead[0].id)
        waiting = next(iter(registry.queue.values()), None)
        if waiting is not None:
            which = f"{waiting.request.turn_id} of {waiting.session_id}"
            raise Found(Check.DELAY, f"memory of {ahead[0].id} comes back ahead while {which} waits", which)

    def _watch_pauses(self, plan: Plan, running: Set[str]) -> None:
        """A step beside the next token of a turn that ran before it is no larger than the policy says."""
        late = [row for row in plan.rows if row.sample and row.count == 1 + row.drafts]
        waiting = next((row for row in late if row.turn.session_id in running), None)
        tokens = sum(row.count for row in plan.rows)
        each = 1 + self.policy.drafts_max if self.drafting else 1
        if waiting is None or tokens <= max(self.policy.mixed_tokens, 2 * len(running) * each):
            return
        which = f"{waiting.turn.request.turn_id} of {waiting.turn.session_id}"
        raise Found(Check.PAUSE, f"its next token waits for a step of {tokens} tokens", which)

    def _whose(self, plan: Plan, number: int) -> str:
        """The turn that a row of this number belongs to, or the session."""
        for row in plan.rows:
            if row.number == number:
                return f"{row.turn.request.turn_id} of {row.turn.session_id}"
        return self.numbers.get(number, "nobody")

    def _settle(self) -> None:
        plan = self.scheduler.registry.flights[0]
        result = self._execute(plan)
        self.clients.doubtful = result.error is not None or len(result.rows) != len(plan.rows)
        sealing = [] if self.clients.doubtful else self._sealing(plan, result)
        events = self.scheduler.settle(plan, result, self.now)
        for session in sealing:
            self.lists.check_seal(session)
        self.device.settled(plan)
        self.clients.hear(events)
        for number in plan.forgotten:
            self.numbers.pop(number, None)

    def _sealing(self, plan: Plan, result: StepResult) -> list[Session]:
        """The sessions of finished turns whose last tokens a plan computes."""
        sessions = self.scheduler.registry.sessions
        return [
            sessions[row.turn.session_id]
            for row, out in zip(plan.rows, result.rows, strict=True)
            if row.turn.over and out.error is None and sessions[row.turn.session_id].life is Life.SEALING
        ]

    def _execute(self, plan: Plan) -> StepResult:
        """Run a plan on the device, or let it go wrong.

        A void plan may have begun before the failure was known, unless the one before it never did: an
        executor that could not launch a step launches none after it.
        """
        if plan.void:
            if self.launched and self.rng.random() < 0.5:
                self.device.spoil(plan)
            return StepResult([], error="discarded")
        weight = 1.0 if plan.copies else 0.1
        self.launched = not (plan.rows and self.faults.strike("step raises before writing", weight))
        if not self.launched:
            return StepResult([], error="the executor raised")
        try:
            if plan.rows and self.faults.strike("step raises after writing", weight):
                self.device.spoil(plan)
                return StepResult([], error="the executor raised")
            if self.faults.strike("matchers lost", 0.2):
                self.device.lose_matchers(plan.rows)
            late = self._late_moves(plan)
            rows, moved = self.device.run(plan, late)
        except WrongContent as wrong:
            self._census()
            raise Found(Check.CONTENT, str(wrong), self._whose(plan, wrong.number)) from wrong
        moved = [arrived and not self.faults.strike("move lost") for arrived in moved]
        known = [
            None if move.number in late else arrived for move, arrived in zip(plan.moves, moved, strict=True)
        ]
        return StepResult(self._spoil_rows(plan.rows, rows), known)

    def _late_moves(self, plan: Plan) -> set[int]:
        """Files take their time, and copies to and from the host do in some worlds: some steps."""
        moves: dict[int, list[TierMove]] = {}
        for move in plan.moves:
            moves.setdefault(move.number, []).append(move)
        late: set[int] = set()
        for number, each in moves.items():
            of_disk = Tier.DISK in (each[0].source_tier, each[0].destination_tier)
            rng = self.disk_rng if of_disk else self.copy_rng
            if (of_disk or self.slow_copies) and rng.random() < 0.8:
                late.add(number)
                self.late[number] = (self.step + rng.randint(0, 6), each)
        return late

    def _arrive(self) -> None:
        """Moves under way arrive or are lost; cancelled ones are not reported."""
        for number in [number for number, (due, _) in self.late.items() if due < self.step]:
            _, moves = self.late.pop(number)
            if number in self.scheduler.registry.transits:
                arrived = not self.faults.strike("move lost")
                for move in moves:
                    if arrived and move.destination_tier is not Tier.DISK:
                        self.device.move(move)
                self.scheduler.arrive(number, arrived, self.now)
                self.stalled = 0

    def _forsake(self) -> None:
        """Finish cancelled copies before the plan that was just made begins."""
        transits = self.scheduler.registry.transits
        for number in [number for number in self.late if number not in transits]:
            for move in self.late.pop(number)[1]:
                if Tier.DISK not in (move.source_tier, move.destination_tier):
                    self.device.move(move)

    def _spoil_rows(self, rows: list[Row[Turn]], results: list[RowResult]) -> list[RowResult]:
        """Let results go wrong. Matchers that were fed what the core does not take are made again."""
        if rows and self.faults.strike("rows missing", 0.1):
            self.device.lose_matchers(rows)
            return results[1:]
        for row, out in zip(rows, results, strict=True):
            if not out.tokens:
                continue
            if self.faults.strike("token count wrong", 0.02):
                out.tokens = out.tokens * 7
            elif self.faults.strike("token out of vocabulary", 0.02):
                out.tokens, out.forced = [VOCABULARY + 3], 0
            elif self.faults.strike("forced tokens miscounted", 0.02):
                out.forced = len(out.tokens)
            elif self.faults.strike("row error", 0.02):
                out.error = "numeric_error"
            else:
                continue
            self.device.lose_matchers([row])
        return results

    # --- watching ---------------------------------------------------------------------------------

    def _census(self) -> None:
        """Count everything. A finding of the audit names the culprit better than a later symptom."""
        found = self.scheduler.audit.census()
        if found:
            raise found_by(self.scheduler.audit, found[0])

    def _watch_progress(self) -> None:
        """Something must always move: a row, a spill, an end."""
        self.clients.watch()
        registry = self.scheduler.registry
        if not registry.running and not registry.queue:
            self.stalled = 0
            return
        self._watch_the_oldest()
        self.stalled += 1
        if self.stalled > STALL_STEPS:
            self._census()
            running = [session.turn for session in registry.running]
            waiting = [turn for turn in (*running, *registry.queue.values()) if turn is not None]
            first = f"{waiting[0].request.turn_id} of {waiting[0].session_id}"
            raise Found(
                Check.STALL, f"nothing moved for {STALL_STEPS} steps; {len(waiting)} turns wait", first
            )

    def _watch_the_oldest(self) -> None:
        """The oldest running turn must always get on."""
        running = self.scheduler.registry.running
        turn = running[0].turn if running else None
        state = (turn.number, turn.computed, turn.generated) if turn is not None else None
        if state is None or state != self.oldest:
            self.oldest, self.oldest_waited = state, 0
            return
        self.oldest_waited += 1
        if turn is not None and self.oldest_waited > STALL_STEPS:
            self._census()
            which = f"{turn.request.turn_id} of {turn.session_id}"
            raise Found(Check.STALL, f"the oldest turn has not got on for {STALL_STEPS} steps", which)

    def close_down(self) -> None:
        """Close everything: every pool must be exactly full and the tree unlocked and empty."""
        with assertions_of_the_core():
            self._close_down()

    def _close_down(self) -> None:
        clients, registry = self.clients, self.scheduler.registry
        self.faults.rate = 0.0
        clients.hear(self.scheduler.take_events())
        for name in list(clients.conversations):
            if name in registry.sessions:
                self.scheduler.close(name, self.now)
        clients.hear(self.scheduler.take_events())
        for _ in range(CLOSING_STEPS):
            if len(registry.flights) < 2:
                self._plan()
            while registry.flights:
                self._settle()
        self.scheduler.flush()
        clients.hear(self.scheduler.take_events())
        self._census()
        for name in clients.conversations:
            raise Found(Check.LEFT_OVER, "a session is still there after it was closed", name)
        for pool in self.ledger.pools.values():
            if len(pool.free) != pool.size:
                raise Found(Check.LEFT_OVER, f"{pool.name}: {pool.counts()}", self._keepers())
        if registry.tree.roots:
            raise Found(Check.LEFT_OVER, "the tree is not empty", f"TREE {next(iter(registry.tree.roots))}")

    def _keepers(self) -> str:
        """The holders that still hold units."""
        holders = {repr(grant.holder): None for grant in self.ledger.live.values() if grant.units}
        return ", ".join(holders) or "nobody"

    @property
    def quarantined(self) -> int:
        """Units in quarantine."""
        return sum(len(pool.quarantine) for pool in self.ledger.pools.values())

    @property
    def state_hash(self) -> int:
        """A number that stands for everything that happened and for where every unit is now."""
        content = extend(self.trace, self.clients.trace)
        for pool in self.ledger.pools.values():
            for unit in pool.free:
                content = extend(content, unit)
        return extend(extend(content, self.ledger.serial), self.faults.total)
