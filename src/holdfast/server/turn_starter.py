"""Starts turns on the engine: written for a session's history, or as one-shot requests with their choices.

A turn on a session is written for the history that the API process knows; if it changed meanwhile, the engine
rejects the turn and it is written again. A whole conversation sent to a session with a history is
compared with it, and only the new part is appended. Without a session it continues in the hidden
session with the longest common prefix (`found_sessions`). Used by `service`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from holdfast.engine.portions import in_turns
from holdfast.engine.sampling import Sampling
from holdfast.server.conversation_keys import keys_of
from holdfast.server.found_sessions import STALE, Claim, Conversations, turn_fields
from holdfast.server.http.problems import Problem, context_exceeded, from_refusal, told_as
from holdfast.server.link import wire
from holdfast.server.link.engine_client import Link, TurnFeed
from holdfast.server.link.marks import clock, marks
from holdfast.server.prompts import Prompts, begins_with_system, opens_history
from holdfast.server.seeds import Seeds
from holdfast.server.sessions import SessionRecord, engine_name, request_name
from holdfast.server.turn_request import TurnAsked, wire_sampling
from holdfast.server.turn_writer import TurnWriter, WrittenTurn, grammar_field, tools_of

__all__ = ["TurnStarter"]

REWRITES_MAX = 4

NOTHING = WrittenTurn([])


class TurnStarter:
    """Starts turns of one model."""

    def __init__(
        self,
        link: Link,
        seeds: Seeds,
        prompts: Prompts,
        facts: wire.ModelFacts,
        conversations: Conversations,
    ) -> None:
        self._link = link
        self._conversations = conversations
        self._seeds = seeds
        self._facts = facts
        self._writer = TurnWriter(prompts, facts)

    async def start_turn(self, record: SessionRecord, asked: TurnAsked) -> TurnFeed:
        """Start a turn on a session."""
        _note_parsed()
        with told_as(_names(asked)), self._seeds.lend(asked.sampling, record.seeds) as loan:
            feed = await self._start_written(record, asked, loan.sampling)
            loan.kept = not feed.replayed
        return feed

    async def _start_written(self, record: SessionRecord, asked: TurnAsked, sampling: Sampling) -> TurnFeed:
        """Start a turn on a session; written again if the history changed meanwhile."""
        compares = asked.fingerprint is None
        for attempt in range(REWRITES_MAX):
            command = await self._command(record, asked, sampling, compares)
            try:
                feed = (await self._start([command], asked.fields))[0]
            except Problem as problem:
                if problem.code == "history_repeated" and not compares:
                    compares = True  # It is none of the turns that the engine remembers.
                elif problem.code != "history_changed" or attempt == REWRITES_MAX - 1:
                    raise
                continue
            if command.tools is not None:
                record.tools = command.tools
            return feed
        raise AssertionError("the last attempt raises")

    async def _command(
        self, record: SessionRecord, asked: TurnAsked, sampling: Sampling, compares: bool
    ) -> wire.StartTurn:
        """The command that starts a turn; with `compares`, a conversation is compared with the history."""
        view = record.view
        messages = asked.input.messages or []
        opens = asked.steers is None and not asked.options.append_history and opens_history(messages)
        if opens and not view.known and record.system is not None and begins_with_system(messages):
            raise from_refusal("history_repeated", "", "messages")
        tools = tools_of(asked, record) if asked.answer.tools and not view.known else None
        if not (opens and view.known):
            written = await self._writer.write(asked, record, record.tenant)
        elif compares:
            written, opens = await self._write_after(record, asked), False
        else:
            written = NOTHING  # The engine replays a turn that it knows, and rejects any other.
        session = engine_name(record.tenant, record.name)
        return wire.StartTurn(
            self._link.number(),
            asked.name,
            record.tenant,
            written.tokens,
            wire_sampling(sampling),
            session=session,
            known=view.known if asked.steers is None else None,
            goes_on=asked.goes_on,
            keeps=asked.options.keeps,
            timeout=asked.options.timeout,
            cut=asked.cut,
            computes_from=view.known if asked.sampling.prompt_logprobs is not None else None,
            fingerprint=asked.fingerprint,
            opens=opens,
            grammar=written.grammar,
            answer=_seeded(written.answer, f"{session}/{asked.name}"),
            expect_return=asked.answer.expect_return_seconds,
            tools=tools,
            note=asked.note,
            steers=asked.steers,
            keep_reasoning=asked.answer.keep_reasoning,
        )

    async def _write_after(self, record: SessionRecord, asked: TurnAsked) -> WrittenTurn:
        """The tokens that a conversation adds to its session's history."""
        number, name = self._link.number(), engine_name(record.tenant, record.name)
        done = await self._link.call(wire.Ask(number, wire.Question.TOKENS, name), number)
        try:
            return await self._writer.write_after(asked, record, done.answer)
        except Problem as problem:
            field = asked.fields.get("messages", "messages")
            if problem.code != "history_differs" or problem.param is None or field == "messages":
                raise
            message = problem.message.replace("messages", field, 1)
            param = problem.param.replace("messages", field, 1)
            raise Problem(problem.status, problem.code, message, param) from problem

    # --- conversations ----------------------------------------------------------------------------

    async def _start_conversation(self, tenant: str, asked: TurnAsked, sampling: Sampling) -> TurnFeed | None:
        """Start a whole conversation in the session that has its beginning; None if all sessions are busy."""
        asks = self._writer.asks(asked)
        keys = await in_turns(keys_of(tenant, asked.input.messages or [], asks.tools, asks.template_kwargs))
        for attempt in range(REWRITES_MAX):
            last = attempt == REWRITES_MAX - 1
            candidates = [] if last else await self._conversations.candidates(keys.look_up)
            trails = [each.trail.fields() for each in candidates]
            written = await self._writer.write_whole(asked, tenant, trails)
            call = self._link.number()
            claim = self._conversations.claim(tenant, keys.note, call, written, candidates)
            if claim is None:
                if last or not candidates:
                    return None
                continue
            feed = await self._start_claim(
                claim, self._follow(tenant, asked, sampling, written, claim, call), asked
            )
            if feed is not None:
                return feed
        raise AssertionError("a new session is not stale")

    async def _start_claim(self, claim: Claim, command: wire.StartTurn, asked: TurnAsked) -> TurnFeed | None:
        """Start the turn of a claim; None if the engine has lost the history that it follows."""
        try:
            feed = (await self._start([command], asked.fields))[0]
        except Problem as problem:
            if problem.code in STALE and claim.how != "new":
                self._conversations.drop(claim)
                return None
            self._conversations.release(claim)
            raise
        except BaseException:
            self._conversations.drop(claim)
            raise
        self._conversations.started(claim)
        return feed

    def _follow(
        self,
        tenant: str,
        asked: TurnAsked,
        sampling: Sampling,
        written: WrittenTurn,
        claim: Claim,
        call: int,
    ) -> wire.StartTurn:
        """The command that starts the turn of a claim."""
        name = request_name(tenant, asked.name)
        return wire.StartTurn(
            call,
            name,
            tenant,
            claim.tokens,
            wire_sampling(sampling),
            timeout=asked.options.timeout,
            cut=asked.cut,
            grammar=written.grammar,
            answer=_seeded(written.answer, name),
            expect_return=asked.answer.expect_return_seconds,
            **turn_fields(claim),
        )

    # --- requests ---------------------------------------------------------------------------------

    async def start_requests(self, tenant: str, asked: Sequence[TurnAsked]) -> list[TurnFeed]:
        """Start one-shot requests with all their choices, or none; all are sent before any is awaited.

        A single conversation goes on in the session that has its beginning.
        """
        _note_parsed()
        seeds = self._seeds.of_requests(tenant)
        with told_as(_names(asked[0])), ExitStack() as stack:
            loans = [stack.enter_context(self._seeds.lend(each.sampling, seeds)) for each in asked]
            if len(asked) == 1 and self._conversations.takes(asked[0]):
                feed = await self._start_conversation(tenant, asked[0], loans[0].sampling)
                if feed is not None:
                    loans[0].kept = True
                    return [feed]
            commands: list[wire.StartTurn] = []
            for each, loan in zip(asked, loans, strict=True):
                commands += await self._choices(tenant, each, loan.sampling)
            feeds = await self._start(commands, asked[0].fields)
            for loan in loans:
                loan.kept = True
        return feeds

    async def _choices(self, tenant: str, asked: TurnAsked, sampling: Sampling) -> list[wire.StartTurn]:
        """The commands that start the choices of a request."""
        written = await self._writer.write(asked, None, tenant)
        whole = asked.computes_from is None and asked.sampling.prompt_logprobs is not None
        names = [
            request_name(tenant, f"{asked.name}.{choice}" if choice else asked.name)
            for choice in range(asked.sampling.n)
        ]
        return [
            wire.StartTurn(
                self._link.number(),
                name,
                tenant,
                written.tokens,
                wire_sampling(sampling),
                timeout=asked.options.timeout,
                choice=choice,
                cut=asked.cut,
                computes_from=0 if whole else asked.computes_from,
                grammar=written.grammar,
                answer=_seeded(written.answer, name),
            )
            for choice, name in enumerate(names)
        ]

    async def _start(self, commands: Sequence[wire.StartTurn], fields: Mapping[str, str]) -> list[TurnFeed]:
        """Start all turns or none; `fields` are the client's field names."""
        for command in commands:
            if not command.tokens and not command.goes_on and not command.opens:
                raise Problem(400, "empty_turn", "the turn has no input tokens", "input")
        try:
            return await self._link.start(commands)
        except Problem as problem:
            if problem.code != "context_length_exceeded":
                raise
            longest = max(commands, key=_tokens_asked)
            found = longest.keep or 0
            raise context_exceeded(
                self._facts.context_length,
                len(longest.tokens) + found,
                longest.sampling.max_tokens or 1,
                history=0 if longest.volatile else longest.known or 0,
                field=fields.get("input", "input"),
            ) from problem


def _note_parsed() -> None:
    """The body of the current request is decoded and checked."""
    noted = marks.get()
    if noted is not None and noted.parsed is None:
        noted.parsed = clock()


def _names(asked: TurnAsked) -> Mapping[str, str]:
    """The client's name of each field; the engine's name of a grammar's field is `grammar`."""
    return {**asked.fields, "grammar": grammar_field(asked.answer)}


def _seeded(answer: wire.AnswerFields | None, seed: str) -> wire.AnswerFields | None:
    """A specification whose calls get the same ids when the turn is replayed."""
    return None if answer is None else msgspec.structs.replace(answer, seed=seed)


def _tokens_asked(command: wire.StartTurn) -> int:
    """The context that a turn needs; at least one token without `max_tokens`."""
    history = command.keep if command.volatile else command.known
    return (history or 0) + len(command.tokens) + (command.sampling.max_tokens or 1)
