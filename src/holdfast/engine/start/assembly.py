"""Puts an engine together: memory, core, journal, executor, tiers and loop; then recovers its sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.core.layout import Tier
from holdfast.core.ledger import Ledger
from holdfast.core.policy import Policy, Share
from holdfast.core.scheduler import Scheduler
from holdfast.core.turn import Turn
from holdfast.engine.dispatch import Dispatcher, LiveTurns
from holdfast.engine.draft.opening import LoadedDraft
from holdfast.engine.draft.proposer import DraftProposer
from holdfast.engine.durable.membership import ALONE, Identity
from holdfast.engine.durable.recovery import open_journal, open_snapshots, recover_sessions
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.grammars import Grammars
from holdfast.engine.listeners import SessionObserver, Unobserved
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import EngineOptions, tenant_parts
from holdfast.engine.ranks.crew import Crew
from holdfast.engine.ranks.exchange import RankedMemory
from holdfast.engine.start.memory_plan import MemoryPlan, plan_memory
from holdfast.engine.start.setup import AnswerSetup, EngineSetup
from holdfast.engine.start.tuning import Tuning
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.profiling import measure_step
from holdfast.engine.step.runner import PlanRunner
from holdfast.engine.step.speculation import LENGTH_MAX as DRAFTS_MAX
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.disk import DiskTier
from holdfast.engine.tiers.files import MemoryForm, layout_identity
from holdfast.engine.tiers.session_memory import SessionMemory
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tools.choose import Chosen
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import Model, ModelDescription

__all__ = ["Clock", "MakeExecutor", "build_loop"]

Clock = Callable[[], float]
MakeExecutor = Callable[[Callable[[Turn], TurnStream]], PlanRunner]
"""Makes the executor of a model that has no weights, given the streams of turns in flight."""


def build_loop(
    model: ModelDescription,
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    options: EngineOptions,
    *,
    runner: MakeExecutor | Crew | LoadedDraft | None = None,
    identity: Identity = ALONE,
    answers: AnswerSetup | None = None,
    observer: SessionObserver | None = None,
    clock: Clock = time.monotonic,
) -> EngineLoop:
    """The loop of an engine that is ready to make steps.

    Without `answers`, turns with a grammar are refused. `runner` makes the executor of a model without
    weights, is the crew of a model on several ranks, or the draft model of one on a single device.
    """
    crew = runner if isinstance(runner, Crew) else None
    draft = runner if isinstance(runner, LoadedDraft) else None
    if answers is None:
        answers = AnswerSetup(Chosen(None, None), Grammars(None, "this engine has no grammar compiler"))
    memory_plan = plan_memory(
        model,
        options,
        measure_step if crew is None else crew.measure,
        promised=0 if draft is None else draft.promised,
    )
    tuning = memory_plan.tuning
    options = replace(options, **tuning.options())  # type: ignore[arg-type]
    setup = EngineSetup(model, tokenizer, defaults, options, memory_plan, answers.formats, answers.grammars)
    live = LiveTurns()
    ngrams = Speculator(live.stream_of) if options.speculate == "ngram" else None
    drafts = None if draft is None else draft.proposer(model, tuning.mixed_tokens, live.stream_of, ngrams)
    speculator: Speculator | DraftProposer | None = ngrams if drafts is None else drafts
    session_log = SessionLog(open_journal(options, tokenizer, identity.member))
    executor: PlanRunner
    snapshots: SnapshotStore | None = None
    if runner is not None and not isinstance(runner, Crew | LoadedDraft):
        executor = runner(live.stream_of)
    else:
        assert isinstance(model, Model), "a model without weights needs an executor of its own"
        if crew is not None:
            crew.plan(memory_plan.rank_options(options), memory_plan.device)
        executor = Executor(
            model,
            memory_plan,
            tuning.max_running,
            live.stream_of,
            ahead=speculator is None,
            lead=crew,
            watch=None if drafts is None else drafts.watch,
        )
        form = _memory_form(model, memory_plan, options.tensor_parallel)
        snapshots = open_snapshots(options, identity.weights, form, session_log, clock)
    scheduler = Scheduler(
        _ledger(setup, snapshots),
        _policy(model, options, tuning),
        speculator,
        strict=options.audit == "strict",
        on_disk=None if snapshots is None else snapshots.covers,
    )
    disk: DiskTier | None = None
    if snapshots is not None and isinstance(executor, Executor):
        memory = SessionMemory(executor.memory, executor.host, executor.host_tier.copier)
        if crew is not None:
            memory = RankedMemory(executor.memory, executor.host, executor.host_tier.copier, crew)
        disk = DiskTier(snapshots, options.snapshot_seconds, scheduler, memory, session_log, clock)
    recover_sessions(scheduler, session_log, disk, clock())

    def release(turn: Turn) -> None:
        executor.release(turn)
        if speculator is not None:
            speculator.release(turn)

    observed = observer if observer is not None else Unobserved()
    return EngineLoop(
        setup,
        scheduler,
        executor,
        session_log,
        Dispatcher(
            live, scheduler, session_log, disk, release, observed, None if drafts is None else drafts.closed
        ),
        disk=disk,
        speculator=speculator,
        clock=clock,
    )


def _memory_form(model: Model, memory: MemoryPlan, ranks: int) -> MemoryForm:
    """What the memory of sessions looks like in files."""
    shape = model.memory_shape if ranks == 1 else (model.memory_shape, ranks)
    layout = layout_identity(memory.tuning.page_size, memory.layout, shape, model.dtype)
    return MemoryForm(layout, str(memory.types))


def _ledger(setup: EngineSetup, snapshots: SnapshotStore | None) -> Ledger:
    """The ledger; its disk pools give out units only while snapshots can be written."""
    ledger = Ledger(setup.memory_plan.layout, setup.memory_plan.sizes())
    if snapshots is not None:
        for pool in ledger.pools.values():
            if pool.tier is Tier.DISK:
                pool.guard(snapshots.back_off.admits)
    return ledger


def _policy(model: ModelDescription, options: EngineOptions, tuning: Tuning) -> Policy:
    """The options as the core takes them."""
    parts = tenant_parts(options)
    return Policy(
        context_length=model.context_length,
        vocabulary=model.config.vocabulary,
        chunk_tokens=tuning.chunk_tokens,
        mixed_tokens=tuning.mixed_tokens,
        drafts_max=DRAFTS_MAX,
        running_max=tuning.max_running,
        queue_max=options.max_queue,
        sessions_max=options.max_sessions,
        tenant_sessions_max=options.tenant_sessions or options.max_sessions,
        session_ttl=options.session_ttl,
        pinned_share=options.tenant_pinned,
        checkpoints=tuning.checkpoints,
        leave_history=options.leave_history,
        durable_turns=options.journal is not None,
        seal_seconds=options.seal_seconds,
        share=Share(**parts),
        shares={tenant: Share(**{**parts, **own}) for tenant, own in options.tenant_shares.items()},
    )
