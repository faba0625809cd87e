"""Puts an engine together: memory, core, journal, executor, tiers and loop; then recovers its sessions."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from holdfast.core.ledger import Ledger
from holdfast.core.policy import Policy, Share
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.dispatch import Dispatcher, LiveTurns
from holdfast.engine.durable.recovery import (
    UNKNOWN_TOKENS,
    open_files,
    open_journal,
    read_journal,
    recover_session,
)
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.listeners import SessionObserver, Unobserved
from holdfast.engine.loop import EngineLoop
from holdfast.engine.memory_plan import disk_bytes, plan_memory
from holdfast.engine.options import EngineOptions, OptionError, tenant_parts
from holdfast.engine.setup import EngineSetup
from holdfast.engine.step.executor import Executor, PlanRunner
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.disk import DiskTier
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import Model, ModelDescription

__all__ = ["Clock", "MakeExecutor", "build_loop"]

log = logging.getLogger("holdfast.engine")

Clock = Callable[[], float]
MakeExecutor = Callable[[Callable[[Turn], TurnStream]], PlanRunner]
"""Makes the executor of a model that has no weights, given the streams of turns in flight."""


def build_loop(
    model: ModelDescription,
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    options: EngineOptions,
    *,
    make_executor: MakeExecutor | None = None,
    identity: str = "",
    observer: SessionObserver | None = None,
    clock: Clock = time.monotonic,
) -> EngineLoop:
    """The loop of an engine that is ready to make steps.

    `identity` names the model's weights: files of the disk tier are valid for the same weights only.
    """
    setup = EngineSetup(model, tokenizer, defaults, options, plan_memory(model, options))
    live = LiveTurns()
    speculator = Speculator(live.sampling_of) if options.speculate == "ngram" else None
    disk: DiskTier | None = None

    def on_disk(session: Session) -> bool:
        return disk is not None and disk.covers(session)

    def release(turn: Turn) -> None:
        executor.release(turn)
        if speculator is not None:
            speculator.release(turn)

    scheduler = Scheduler(
        Ledger(setup.memory_plan.layout, setup.memory_plan.sizes()),
        _policy(model, options),
        speculator,
        strict=options.audit == "strict",
        on_disk=on_disk,
    )
    session_log = SessionLog(open_journal(options, tokenizer))
    executor: PlanRunner
    if make_executor is not None:
        executor = make_executor(live.stream_of)
    else:
        assert isinstance(model, Model), "a model without weights needs an executor of its own"
        executor = computing = Executor(model, setup.memory_plan, options.max_running, live.stream_of)
        if options.disk is not None:
            disk = _open_disk(options.disk, identity, setup, scheduler, computing, session_log, clock)
    _recover(session_log, scheduler, disk, clock)
    session_log.start()
    if disk is not None:
        disk.remove_orphans()
    dispatcher = Dispatcher(
        live, scheduler, session_log, disk, release, observer if observer is not None else Unobserved()
    )
    return EngineLoop(
        setup,
        scheduler,
        executor,
        session_log,
        dispatcher,
        disk=disk,
        speculator=speculator,
        clock=clock,
    )


def _policy(model: ModelDescription, options: EngineOptions) -> Policy:
    """The options as the core takes them."""
    parts = tenant_parts(options)
    return Policy(
        context_length=model.context_length,
        vocabulary=model.config.vocabulary,
        chunk_tokens=options.chunk_tokens,
        running_max=options.max_running,
        queue_max=options.max_queue,
        sessions_max=options.max_sessions,
        tenant_sessions_max=options.tenant_sessions or options.max_sessions,
        session_ttl=options.session_ttl,
        checkpoints=options.checkpoints,
        leave_history=options.leave_history,
        durable_turns=options.journal is not None,
        share=Share(**parts),
        shares={tenant: Share(**{**parts, **own}) for tenant, own in options.tenant_shares.items()},
    )


def _open_disk(
    directory: str,
    identity: str,
    setup: EngineSetup,
    scheduler: Scheduler,
    executor: Executor,
    session_log: SessionLog,
    clock: Clock,
) -> DiskTier:
    options, model = setup.options, setup.model
    form = (options.page_size, setup.memory_plan.layout, model.memory_shape, model.dtype)
    try:
        room, files = disk_bytes(options), open_files(directory)
    except OptionError:
        if session_log.journal is not None:
            session_log.journal.close()
        raise
    return DiskTier(
        files,
        room,
        options.snapshot_seconds,
        (scheduler, executor, session_log),
        (identity, hashlib.sha256(repr(form).encode()).hexdigest()),
        clock,
    )


def _recover(session_log: SessionLog, scheduler: Scheduler, disk: DiskTier | None, clock: Clock) -> None:
    """Open every session of the journal with its tokens; its memory comes back with its next turn."""
    journal = session_log.journal
    if journal is None:
        return
    try:
        sessions = read_journal(journal)
    except OptionError:
        if disk is not None:
            disk.files.close()
        raise
    unknown_tokens = False
    for stored in sessions:
        refusal = stored.unusable or recover_session(scheduler, stored, clock())
        if not refusal:
            session_log.recovered(stored)
            if disk is not None:
                disk.recover(stored)
            continue
        log.error("session %s stays in the journal: %s", stored.id, refusal)
        session_log.unrecovered[stored.id] = refusal
        unknown_tokens = unknown_tokens or refusal.endswith(UNKNOWN_TOKENS)
        if disk is not None:
            disk.keep(stored)
    if not unknown_tokens:
        journal.adopt_vocabulary()
