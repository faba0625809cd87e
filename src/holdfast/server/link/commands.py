"""Decodes commands of the API process into verbs of the engine; `results` encodes what comes of them.

One object in the engine process. `receive` takes a command; its answer, and what turns say, is in the outbox.
Nothing here touches a socket or blocks.
"""

from __future__ import annotations

from concurrent.futures import Future

import msgspec

from holdfast.core.errors import JournalUnavailable, Refused
from holdfast.core.layout import Tier
from holdfast.engine.claims import Found
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.draft.reporting import draft_gauges
from holdfast.engine.durable.store import LifeRow
from holdfast.engine.grammars import GrammarRefused
from holdfast.engine.loop import EngineLoop
from holdfast.engine.reports.memory_map import leased_units
from holdfast.engine.reports.report import session_report
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.verbs import Verbs, never_spent
from holdfast.server.link import wire
from holdfast.server.link.hand_overs import HandOvers, UnknownEngine
from holdfast.server.link.reports import SURVEYS, Surveys
from holdfast.server.link.results import CallReply, Outbox, TurnReply, noted_turns, stored_session
from holdfast.server.link.rounds import Spent
from holdfast.server.link.snapshot_receiver import SnapshotReceiver
from holdfast.server.link.wire import Question

__all__ = ["EngineCommands"]

OF_SESSIONS = frozenset(
    {
        Question.SESSION,
        Question.SESSIONS,
        Question.LEASED,
        Question.TURNS,
        Question.TOKENS,
        Question.STORED,
    }
)
"""Questions that the owner of sessions answers."""


class EngineCommands:
    """The commands of the API process, on one engine.

    The loop must have been opened with the outbox as its observer.
    """

    __slots__ = ("_outbox", "_surveys", "drains", "hand_overs", "loop", "receiver", "turns", "verbs")

    def __init__(self, loop: EngineLoop, outbox: Outbox, receiver: SnapshotReceiver | None = None) -> None:
        """`receiver`: of files from other engines, where there is a disk tier."""
        self.loop = loop
        self.receiver = receiver
        self.verbs = Verbs(loop, patient=True)
        self.turns: dict[int, TurnReply] = {}
        """Turns that are not over, by the calls that started them; some wait for their session."""
        self.hand_overs: HandOvers | None = None
        """Sessions on their way to other engines, where the journal is shared with them."""
        self.drains = False
        """Whether an API process has asked the engine to drain."""
        self._outbox = outbox
        self._surveys = Surveys(loop)

    def receive(self, command: wire.Command) -> None:
        """Carry out one command, or answer why not."""
        verbs = self.verbs
        match command:
            case wire.StartTurn():
                self._start(command)
            case wire.EndTurn():
                reply = self.turns.get(command.turn)
                if reply is not None:
                    verbs.abort(reply, command.keep, command.reason)
            case wire.Hear(call=call, session=name):
                tokens = None if command.soon else command.tokens
                verbs.hear(self._reply(call), name, tokens, command.known)
            case wire.OpenSession(call=call, session=name):
                about = (command.tenant, command.ttl, command.metadata, command.system, command.tools)
                verbs.open(self._reply(call), name, *about, command.settings)
            case wire.CloseSession(call=call, session=name):
                verbs.close(self._reply(call), name)
            case wire.UpdateSession(call=call, session=name):
                verbs.update(self._reply(call), name, command.metadata, command.settings)
            case wire.Interrupt(call=call, session=name):
                verbs.interrupt(self._reply(call), name, command.keep, command.turn, command.request_id)
            case wire.Rewind(call=call, session=name):
                verbs.rewind(self._reply(call), name, command.turns, command.request_id)
            case wire.Compact(call=call, session=name, first=first, last=last):
                reply_to = self._reply(call)
                verbs.compact(reply_to, name, (first, last), command.tokens, command.turn, command.request_id)
            case wire.Fork(call=call, session=name):
                reply_to = self._reply(call)
                verbs.fork(reply_to, name, command.child, command.turns, command.request_id, command.anew)
            case wire.MoveSession(call=call, session=name, to="device"):
                verbs.restore(self._reply(call), name)
            case wire.MoveSession(call=call, session=name, to=to):
                verbs.spill(self._reply(call), name, None if to is None else Tier[to.upper()])
            case wire.Claim():
                self._claim(command)
            case wire.HandOver(call=call, session=name):
                self._hand_over(self._reply(call), name, command.engine)
            case wire.Stage() | wire.Abandon():
                self._stage(command)
            case wire.Drain(call=call):
                self.drains = True
                self._reply(call).done(None)
            case wire.Ask():
                self._ask(command)
            case wire.Configure() | wire.Stop() | wire.Greeting() | wire.Content() | wire.Beat():
                raise AssertionError("the worker handles these itself")
            case wire.FetchMissed() | wire.Missed() | wire.KeepMissed():
                raise AssertionError("these pass between API processes")

    def _reply(self, call: int) -> CallReply:
        return CallReply(self._outbox, self.loop, call)

    def _claim(self, command: wire.Claim) -> None:
        """Find a session, and take it over if its engine has ended."""
        reply, name = self._reply(command.call), command.session
        claims = self.verbs.claims

        def told(found: Found) -> None:
            if found.refusal is not None:
                reply.refused(found.refusal)
            elif found.here:
                reply.done(name, wire.Found(stored_session(self.loop, name)))
            else:
                reply.done(None, None if found.home is None else wire.Found(engine=found.home.name))

        if claims is None:
            stored = stored_session(self.loop, name)
            reply.done(None, None if stored is None else wire.Found(stored))
        else:
            claims.claim(name, command.lost, told)

    def _hand_over(self, reply: CallReply, session: str, engine: str) -> None:
        if self.hand_overs is None:
            reply.refused(UnknownEngine("this engine does not share its journal with others"))
        else:
            self.hand_overs.begin(reply, session, engine)

    def _stage(self, command: wire.Stage | wire.Abandon) -> None:
        """Another engine announces a file, or does not send it."""
        if self.receiver is None:
            said = "this engine has no disk tier"
            self._outbox.answer(wire.Declined(command.call, "not_staged", said))
        elif isinstance(command, wire.Stage):
            self.receiver.stage(command)
        else:
            self.receiver.abandon(command.stage)

    # --- turns ------------------------------------------------------------------------------------

    def _start(self, command: wire.StartTurn) -> None:
        reply = self.turns[command.call] = TurnReply(self._outbox, self.loop, self.turns, command)
        try:
            sampling = Sampling(**msgspec.structs.asdict(command.sampling))
            grammar = None if command.grammar is None else _grammar(command.grammar)
        except (SamplingError, GrammarRefused) as error:
            reply.refused(error)
            return
        answer = None if command.answer is None else AnswerSpec(**msgspec.structs.asdict(command.answer))
        self.verbs.submit(
            reply,
            TurnSpec(
                command.name,
                command.tenant,
                command.tokens,
                sampling,
                command.session,
                choice=command.choice,
                known=command.known,
                opens=command.opens,
                goes_on=command.goes_on,
                keeps=command.keeps,
                fits=command.cut,
                timeout=command.timeout,
                computes_from=command.computes_from,
                fingerprint=command.fingerprint,
                grammar=grammar,
                answer=answer,
                expect_return=command.expect_return,
                tools=command.tools,
                note=command.note,
                volatile=command.volatile,
                keep=command.keep,
                parent=command.parent,
                steers=command.steers,
                keep_reasoning=command.keep_reasoning,
            ),
        )

    def session_of(self, call: int) -> str | None:
        """The session of a turn that is not over, by the call that started it."""
        reply = self.turns.get(call)
        return None if reply is None else reply.session_id

    # --- between steps ----------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a verb or a turn waits for its session, or a turn for its grammar."""
        return self.verbs.waits

    @property
    def compiles(self) -> bool:
        """Whether a grammar is being compiled."""
        return self.verbs.compiles

    def retry(self, spent: Spent = never_spent) -> None:
        """Try some of the verbs and turns that wait, until the round has no more time."""
        if self.hand_overs is not None:
            self.hand_overs.poll()
        if self.receiver is not None:
            self.receiver.poll()
        self.verbs.retry(spent)

    @property
    def moves(self) -> bool:
        """Whether a session is on its way to another engine, and nothing wakes the process for it."""
        return self.hand_overs is not None and self.hand_overs.waits

    @property
    def reporting(self) -> bool:
        """Whether a report is being made."""
        return bool(self._surveys)

    def report(self, spent: Spent = never_spent) -> None:
        """Make portions of reports, one at least, until the round has no more time."""
        for call, answer in self._surveys.work(spent):
            self._outbox.answer(wire.Done(call, answer=answer))

    def take_reports(self) -> list[wire.Report]:
        """What is to be sent, in order."""
        return self._outbox.take()

    def pulse(self) -> wire.Pulse:
        """A sign of life, with totals and gauges."""
        registry = self.loop.scheduler.registry
        counters, graphs = registry.counters, self.loop.executor.graphs
        return wire.Pulse(
            step=registry.ledger.step,
            running=len(registry.running),
            queued=len(registry.queue),
            sessions=len(self.loop.session_log.sessions),
            counters={name: getattr(counters, name) for name in type(counters).__slots__},
            holders=[
                (pool.component.name.lower(), pool.tier.name.lower(), kind, units)
                for pool in registry.ledger.pools.values()
                for kind, units in pool.counts().items()
            ],
            findings=self._outbox.findings,
            loop_counts={work: list(counts) for work, counts in self.loop.times.counts.items()},
            loop_seconds=dict(self.loop.times.seconds),
            graphs=None if graphs is None else (graphs.captured, graphs.total),
            drafts=draft_gauges(self.loop.drafts),
            leased={
                component.name.lower(): registry.tree.forest.leased[component]
                for component in registry.ledger.layout.components
            },
        )

    # --- questions --------------------------------------------------------------------------------

    def _ask(self, command: wire.Ask) -> None:
        """Answer a question now, have a report made between steps, or ask the journal first."""
        reply, claims = self._reply(command.call), self.verbs.claims

        def answer() -> None:
            if command.what in SURVEYS:
                self._surveys.ask(command)
                return
            try:
                reply.done(None, self._answer(command))
            except Refused as refusal:
                reply.refused(refusal)

        if command.what == Question.LIVES:
            self._ask_lives(reply)
        elif claims is None or command.what not in OF_SESSIONS:
            answer()
        else:
            claims.when_owned(command.name or "", answer, reply.refused)

    def _ask_lives(self, reply: CallReply) -> None:
        """Answer with the engines that the journal knows."""
        claims = self.verbs.claims
        if claims is None:
            reply.done(None, [])
            return

        def answered(future: Future[list[LifeRow]]) -> None:
            error = future.exception()
            if error is not None:
                reply.refused(JournalUnavailable(str(error)))
            else:
                reply.done(None, [life._asdict() for life in future.result()])

        claims.ask(claims.store.lives, answered)

    def _answer(self, command: wire.Ask) -> object:
        loop = self.loop
        name = command.name or ""
        if command.what == Question.LEASED:
            return leased_units(loop, name)
        if command.what == Question.STORED:
            return stored_session(loop, name)
        session = loop.scheduler.registry.find(name)
        if command.what == Question.TURNS:
            return noted_turns(loop, session, command.names)
        if command.what == Question.TOKENS:
            return session.sequence.tokens.packed(0, session.history)
        assert command.what == Question.SESSION, f"{command.what} is a report"
        return session_report(loop, session)


def _grammar(fields: wire.GrammarFields) -> Grammar:
    """A grammar that the API process has checked."""
    try:
        return Grammar.from_values(msgspec.structs.asdict(fields))
    except GrammarError as error:
        raise GrammarRefused(error) from error
