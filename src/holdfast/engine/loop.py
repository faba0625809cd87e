"""The engine's loop: plan, run, settle, tell.

It joins the core's scheduler to an executor and keeps, for each turn in flight, the stream of what it says.
Whoever drives it calls `step` until there is nothing to do. An executor that raises does not end the loop:
the step is reported as failed, and the core takes its turns back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.core.ledger import Ledger
from holdfast.core.plan import StepResult
from holdfast.core.policy import Policy
from holdfast.core.registry import Event, Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.turn import Turn, TurnRequest
from holdfast.engine.executor import Executor, Flight
from holdfast.engine.memory_plan import MemoryPlan, plan_memory
from holdfast.engine.options import EngineOptions
from holdfast.engine.sampling import Sampling
from holdfast.engine.stream import TurnStream
from holdfast.engine.tokenizer import Tokenizer
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import Model

log = logging.getLogger("holdfast.engine")

ENDS = frozenset({"finished", "aborted", "failed"})

Listener = Callable[[Event], None]


def _unobserved(event: Event) -> None:
    """Events that are about no turn (a session closed, a finding) have no listener of their own."""


class EngineLoop:
    """One model, one core, one executor."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        options: EngineOptions,
        make_executor: Callable[[EngineLoop], Executor] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.options = options
        self.plan: MemoryPlan = plan_memory(model, options)
        policy = Policy(
            context_length=model.context_length,
            vocabulary=model.config.vocabulary,
            chunk_tokens=options.chunk_tokens,
            running_max=options.max_running,
            queue_max=options.max_queue,
            sessions_max=options.max_sessions,
            tenant_sessions_max=options.max_sessions,
            session_ttl=options.session_ttl,
            checkpoints=options.checkpoints,
            leave_history=options.leave_history,
        )
        ledger = Ledger(self.plan.layout, self.plan.sizes())
        self.scheduler = Scheduler(ledger, policy, strict=options.audit == "strict")
        self.streams: dict[int, TurnStream] = {}
        self.listeners: dict[int, Listener] = {}
        self.observer: Listener = _unobserved
        self._pending: Flight | StepResult | None = None
        if make_executor is not None:
            self.executor = make_executor(self)
        else:
            self.executor = Executor(model, self.plan, options.max_running, self.stream_of)

    def stream_of(self, turn: Turn) -> TurnStream:
        """What a turn in flight says."""
        return self.streams[turn.number]

    # --- turns ------------------------------------------------------------------------------------

    def submit(
        self, session_id: str, request: TurnRequest, sampling: Sampling, listener: Listener
    ) -> tuple[Turn, TurnStream]:
        """Queue a turn on a session; `listener` hears its events until it ends."""
        turn = self.scheduler.submit(session_id, request, self.now())
        return turn, self._attend(turn, sampling, listener)

    def request(
        self, tenant: str, request: TurnRequest, sampling: Sampling, listener: Listener
    ) -> tuple[Turn, TurnStream]:
        """Queue a request of its own."""
        turn = self.scheduler.request(tenant, request, self.now())
        return turn, self._attend(turn, sampling, listener)

    def _attend(self, turn: Turn, sampling: Sampling, listener: Listener) -> TurnStream:
        stream = TurnStream(self.tokenizer, sampling, self.defaults.eos_tokens or self.tokenizer.eos_tokens)
        tokens = self.scheduler.registry.sessions[turn.session_id].sequence.tokens
        stream.prompt_tokens = [*tokens.slice(0, len(tokens)), *turn.request.tokens]
        stream.input_first = len(tokens)
        self.streams[turn.number] = stream
        self.listeners[turn.number] = listener
        return stream

    # --- steps ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is anything to plan, run or settle."""
        registry = self.scheduler.registry
        return bool(
            registry.running or registry.queue or registry.flights or registry.transits or registry.seals
        )

    def step(self) -> None:
        """One step: make a plan and launch it, settle what is due, and tell who listens.

        With overlap the plan launched before is settled now, while this one runs; without, this one is.
        """
        scheduler = self.scheduler
        plan = scheduler.plan(self.options.step_tokens, self.now())
        launched = self._launch(plan)
        if self._pending is not None:
            self._settle(self._pending)
        self._pending = launched
        if not self.options.overlap or not plan.rows or isinstance(launched, StepResult):
            self._settle(launched)
            self._pending = None
        self.tell(scheduler.take_events())

    def _launch(self, plan: Plan) -> Flight | StepResult:
        """Start a step on the executor; whatever it raises is a failed step, never a dead engine."""
        try:
            return self.executor.start(plan)
        except Exception as error:  # noqa: BLE001
            return self._failure(plan, error)

    def _settle(self, launched: Flight | StepResult) -> None:
        """Settle the oldest plan in flight with what was launched for it."""
        plan = self.scheduler.registry.flights[0]
        if plan.void:
            result = StepResult([], error="discarded")
        elif isinstance(launched, StepResult):
            result = launched
        else:
            try:
                result = self.executor.finish(launched)
            except Exception as error:  # noqa: BLE001
                result = self._failure(plan, error)
        self.tell(self.scheduler.settle(plan, result, self.now()))

    def _failure(self, plan: Plan, error: Exception) -> StepResult:
        log.error("step %d failed", plan.step, exc_info=error)
        return StepResult([], error=f"the executor failed: {type(error).__name__}")

    def tell(self, events: list[Event]) -> None:
        """Pass events on to those who listen; a turn that is over is forgotten here."""
        for event in events:
            turn = event.turn
            if event.kind == "finding":
                log.error("audit: %s", event.reason)
            if turn is None:
                self.observer(event)
                continue
            listener = self.listeners.get(turn.number)
            if listener is not None:
                listener(event)
            if event.kind in ENDS:
                self.executor.release(turn)
                self.streams.pop(turn.number, None)
                self.listeners.pop(turn.number, None)

    def now(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()
