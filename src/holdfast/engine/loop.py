"""The engine's loop: plan, run, settle, tell.

It joins the core's scheduler to an executor. The driver calls `step` while the loop is `busy`. An executor
that raises does not end the loop: the step is reported as failed, and the core rolls its turns back. The
journal records of a step are written while the next steps run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.core.in_flight import Plan
from holdfast.core.plan import StepResult
from holdfast.core.scheduler import Scheduler
from holdfast.engine.dispatch import Dispatcher
from holdfast.engine.draft.proposer import DraftProposer
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.reports.loop_times import LoopTimes
from holdfast.engine.start.setup import EngineSetup
from holdfast.engine.step.capturing import Capturing
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.pacing import Pacing
from holdfast.engine.step.runner import PlanRunner
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.tiers.disk import Cancellation, DiskTier

__all__ = ["EngineLoop"]

log = logging.getLogger("holdfast.engine")

SEALING_STEPS = 4
"""Steps in which the last tokens of finished turns are computed before the loop ends."""

MOVING_SECONDS = 10.0
"""How long moves between tiers are waited for before the loop ends."""

DISK_SECONDS = 0.005
"""How long a step without work waits for the disk, or for a copy."""

JOURNAL_SECONDS = 0.005
"""How long a step without work waits for the journal."""


class EngineLoop:
    """Makes the steps of one engine. `startup.build_loop` puts it together."""

    __slots__ = (
        "_overlap",
        "_pending",
        "capturing",
        "disk",
        "dispatcher",
        "drafts",
        "executor",
        "now",
        "pacing",
        "scheduler",
        "session_log",
        "setup",
        "speculator",
        "times",
    )

    def __init__(
        self,
        setup: EngineSetup,
        scheduler: Scheduler,
        executor: PlanRunner,
        session_log: SessionLog,
        dispatcher: Dispatcher,
        *,
        disk: DiskTier | None = None,
        speculator: Speculator | DraftProposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds and never jumps.

        `speculator` proposes drafts; one with a draft model prepares them before each plan.
        """
        self.setup = setup
        self.scheduler = scheduler
        self.executor = executor
        self.session_log = session_log
        self.dispatcher = dispatcher
        self.disk = disk
        self.speculator = speculator
        self.drafts = speculator if isinstance(speculator, DraftProposer) else None
        self.now = clock
        self.times = LoopTimes()
        self.pacing = Pacing()
        self._pending: Flight | StepResult | None = None
        device, overlap = setup.model.device, setup.options.overlap
        self.capturing = Capturing(executor, clock)
        # A CPU that computes a step has no time to plan the next one. Rows that may have drafts wait for the
        # step in flight: planned beside it, other rows need a step of their own, which reads all weights.
        ahead = device.type == "cuda" and speculator is None
        self._overlap = ahead if overlap is None else overlap

    @property
    def busy(self) -> bool:
        """Whether there is anything to plan, run, settle or write to the journal."""
        return self.active or self.session_log.pending

    @property
    def active(self) -> bool:
        """Whether a step has anything to do. Writing the journal needs no step."""
        registry = self.scheduler.registry
        return bool(
            registry.running
            or registry.queue
            or registry.flights
            or registry.transits
            or registry.recalled
            or registry.unheard
            or registry.unfetched
            or registry.seals_due(self.now())
            or (self.disk is not None and self.disk.busy)
        )

    def step(self) -> None:
        """One step: make a plan and launch it, settle what is due, and tell the listeners.

        With overlap the previous plan is settled while this one runs; without, this one is. A step with
        constrained turns is sampled after that: its masks depend on the tokens of the step before.
        """
        scheduler = self.scheduler
        if self.capturing.due:
            self._capture()
        if self.disk is not None:
            with self.times.measured("disk"):
                self.disk.collect()
        for number, arrived in self.executor.host_tier.take_finished().items():
            scheduler.arrive(number, arrived, self.now())
        self.pacing.plan()
        if self.drafts is not None:
            with self.times.measured("draft"):
                self.drafts.prepare(scheduler.registry.running, scheduler.registry.sessions)
        with self.times.measured("plan"):
            plan = scheduler.plan(self.setup.tuning.step_tokens, self.now())
        self._rest(plan)
        launched = self._launch(plan)
        if self._pending is not None:
            self._settle(self._pending)
        launched = self._sample(plan, launched)
        self._pending = launched
        if not self._overlap or not plan.rows or isinstance(launched, StepResult):
            self._settle(launched)
            self._pending = None
        self.dispatcher.tell()
        self.flush_journal()
        if self.disk is not None:
            with self.times.measured("disk"):
                self.disk.write_idle()

    def _capture(self) -> None:
        """Capture a graph that steps have lacked, with no step in flight and no copy between tiers."""
        if self.scheduler.registry.transits or (self.disk is not None and self.disk.busy):
            return
        if self._pending is not None:
            self._settle(self._pending)
            self._pending = None
        with self.times.measured("capture"):
            self.capturing.when_busy()

    def flush_journal(self) -> None:
        """Submit the records so far, acknowledge what is durable, and close sessions of other servers."""
        with self.times.measured("journal"):
            self.session_log.flush()
            self.dispatcher.give_up(self.now())

    def _rest(self, plan: Plan) -> None:
        """A step without work waits for a copy, the disk or the journal instead of spinning."""
        if plan or self._pending is not None:
            return
        self.executor.host_tier.wait(DISK_SECONDS)
        if self.disk is not None:
            self.disk.wait(DISK_SECONDS)
        self.session_log.wait(JOURNAL_SECONDS)

    def _launch(self, plan: Plan) -> Flight | StepResult:
        """Start a step, ordered after abandoned copies. An exception fails the step, not the engine."""
        try:
            self.executor.host_tier.fence_abandoned(self.scheduler.registry.transits)
            if self.disk is not None:
                self.disk.launch(plan)
            launched = self.executor.start(plan)
        except Exception as error:  # noqa: BLE001
            return self._failure(plan, error)
        if plan.rows:
            self.pacing.launch(sum(row.count for row in plan.rows))
        return launched

    def _sample(self, plan: Plan, launched: Flight | StepResult) -> Flight | StepResult:
        """Sample a launched step, where that was left for now. An exception fails the step."""
        if plan.void or isinstance(launched, StepResult):
            return launched
        try:
            self.executor.sample(launched)
        except Exception as error:  # noqa: BLE001
            if plan.rows:
                self.pacing.settle(None)
            return self._failure(plan, error)
        return launched

    def _settle(self, launched: Flight | StepResult) -> None:
        """Settle the oldest plan in flight with the results of its launch."""
        plan = self.scheduler.registry.flights[0]
        if plan.void:
            result = StepResult([], error="discarded")
            if isinstance(launched, Flight) and plan.rows:
                self.pacing.settle(None)
        elif isinstance(launched, StepResult):
            result = launched
        else:
            try:
                if plan.rows:
                    self.pacing.settle(launched.tokens)
                result = self.executor.finish(launched)
            except Exception as error:  # noqa: BLE001
                result = self._failure(plan, error)
        if self.disk is not None and plan.moves:
            result.moved = self.disk.settle(plan, result.moved)
        self.dispatcher.dispatch(self.scheduler.settle(plan, result, self.now()))

    def _failure(self, plan: Plan, error: Exception) -> StepResult:
        log.error("step %d failed", plan.step, exc_info=error)
        self.executor.guard.require()
        return StepResult([], error=f"the executor failed: {type(error).__name__}")

    def shut_down(
        self,
        progress: Callable[[int, int], None] | None = None,
        hurried: Callable[[], bool] | None = None,
    ) -> None:
        """Write every session's memory to disk and the remaining records to the journal, and close both.

        The sessions come back with the next loop; any turn still running is discarded. Once `hurried` returns
        True no more memory is written: what is not in a file is computed again.
        """
        hurry = Cancellation(hurried)
        registry = self.scheduler.registry
        for session in list(registry.listening):
            assert session.turn is not None, "a session that listens has a turn"
            self.scheduler.abort(session.id, session.turn.request.turn_id, self.now(), reason="shutdown")
        if registry.seals:
            time.sleep(registry.policy.seal_seconds)  # No turn follows: they are due.
        for _ in range(SEALING_STEPS):
            if registry.seals or registry.flights:
                self.step()
        deadline = self.now() + MOVING_SECONDS
        while registry.transits and self.now() < deadline and not hurry():
            self.step()
        if self.disk is not None:
            if self.session_log.journal is not None:
                self.disk.write_all(progress if progress is not None else _no_progress, hurry)
            self.session_log.sync()
            self.disk.close(hurry)
            self.disk = None
            self.dispatcher.keep_files()
        self.session_log.close()
        self.setup.grammars.close()
        self.executor.host_tier.drain()

    def end_ranks(self) -> None:
        """End the other ranks of the model: no step follows."""
        self.executor.guard.close()


def _no_progress(done: int, total: int) -> None:
    """Progress that is not shown."""
