"""One call of SGLang's `/generate`: starts its answers, follows them, and aborts them on a disconnect.

A call starts all its answers or none: each is a one-shot request, a request in an ordinary session's tree, or
a turn of a streaming session. The result is one object or a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from starlette.responses import Response

from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.tables import GENERATE
from holdfast.server.http.answers import event, json_answer
from holdfast.server.http.clients import Client
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, told_as, turn_failed
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.ordinary_sessions import Branches
from holdfast.server.routes.sglang_body import Asked, GenerateBody, SessionParams, asked_of, input_field
from holdfast.server.routes.sglang_format import Said
from holdfast.server.routes.sglang_sessions import Choice, Native
from holdfast.server.sessions import GONE, SessionRecord, require_name
from holdfast.server.turn_request import Input, TurnAsked

__all__ = ["DONE", "Call"]

DONE = b"data: [DONE]\n\n"


class Call:
    """One call of `/generate`: all its answers in flight."""

    def __init__(
        self, native: Native, caller: Caller, body: GenerateBody, client: Client | None = None
    ) -> None:
        self.native = native
        self.client = client
        self.service = native.service
        self.caller = caller
        self.body = body
        self.asked, self.many = asked_of(body)
        self.options = GENERATE.turn.read(body)
        self.names = {**GENERATE.sampling.names(body), "input": input_field(body)}
        self.choices: list[Choice] = []

    async def start(self) -> None:
        """Start every answer, or none."""
        try:
            started = await asyncio.gather(*map(self._start, self.asked), return_exceptions=True)
            for each in started:
                if isinstance(each, BaseException):
                    raise each
            self.choices = [choice for each in started if isinstance(each, list) for choice in each]
        except BaseException:
            self.leave()
            raise

    async def _start(self, asked: Asked) -> list[Choice]:
        params = self.body.session
        if params is None:
            return await self._start_alone(asked)
        tenant, name = self.caller.tenant, require_name(params.id or "", "session_params.id")
        branches = self.native.ordinary.find(tenant, name)
        if branches is not None:
            return await self._start_branch(branches, params, asked)
        why = self.native.ordinary.gone(tenant, name)
        if why is not None and await self.service.sessions.known(tenant, name) is None:
            raise Problem(*GONE[why], "session_params.id")
        with told_as({"session_id": "session_params.id"}):
            return await self._start_turn(await self.service.sessions.find(tenant, name), params, asked)

    async def _start_alone(self, asked: Asked) -> list[Choice]:
        """A one-shot request with all its choices."""
        _require_input(asked)
        # Before the first await: the prompts of a call get their seeds in order.
        seeds = self.service.seeds
        with seeds.lend(asked.sampling, seeds.of_requests(self.caller.tenant)) as loan:
            tokens = await self._tokens(asked, first=True)
            feeds = await self._request(asked, loan.sampling, tokens)
            loan.kept = True
        return [
            self._enter(asked, Choice(self._said(asked, tokens, number), feed))
            for number, feed in enumerate(feeds)
        ]

    async def _start_branch(self, branches: Branches, params: SessionParams, asked: Asked) -> list[Choice]:
        """A request in an ordinary session's tree."""
        if params.rid is None:
            _require_input(asked)
        async with branches.lock:
            tokens = await self._tokens(asked, first=params.rid is None)
            prompt = self.native.compose(branches, asked, params, tokens)
            (feed,) = await self._request(asked, asked.sampling, prompt)
            try:
                self.native.require_open(branches)
            except Problem:
                # The session was closed before this request was in its tree.
                self.service.link.end(feed, None, "the session was closed")
                raise
            choice = self._enter(asked, Choice(self._said(asked, prompt), feed))
            choice.record = self.native.begin(branches, asked, params, prompt)
        return [choice]

    async def _start_turn(self, record: SessionRecord, params: SessionParams, asked: Asked) -> list[Choice]:
        """A turn of a streaming session."""
        for name in ("replace", "offset", "drop_previous_output"):
            if getattr(params, name):
                raise bad_field(
                    f"session_params.{name}", "a streaming session can only be appended to", "append_only"
                )
        _require_input(asked)
        first = record.view.known == 0
        tokens = await self._tokens(asked, first)
        if first != (record.view.known == 0):
            tokens = await self._tokens(asked, not first)
        _require_start(asked, record.view.known + len(tokens))
        try:
            turn = self._turn(asked, asked.sampling, tokens)
            feed = await self.service.start_turn(record, turn, self.client)
        except Problem as problem:
            raise self._explained(problem) from problem
        return [self._enter(asked, Choice(self._said(asked, tokens), feed, session=record))]

    async def _request(self, asked: Asked, sampling: Sampling, tokens: list[int]) -> list[TurnFeed]:
        """Start a one-shot request on the engine."""
        _require_start(asked, len(tokens))
        turn = self._turn(asked, sampling, tokens, asked.start if asked.start >= 0 else None)
        try:
            return await self.service.start_request(self.caller, turn)
        except Problem as problem:
            raise self._explained(problem) from problem

    def _turn(
        self, asked: Asked, sampling: Sampling, tokens: list[int], computes_from: int | None = None
    ) -> TurnAsked:
        """The turn to start; problems name the body's fields."""
        return TurnAsked(
            Input(tokens=tokens),
            sampling,
            asked.rid,
            self.options,
            asked.answer,
            reads=False,
            cut=True,
            computes_from=computes_from,
            fields=self.names,
        )

    def _explained(self, problem: Problem) -> Problem:
        """An input that exceeds the memory is reported as one that exceeds the context."""
        if problem.code != "insufficient_memory":
            return problem
        facts = self.service.facts
        limit = min(facts.context_length, facts.tokens_max)
        message = (
            f"This model's maximum context length is {limit} tokens. However, the input leaves no room in it."
        )
        return Problem(400, "context_length_exceeded", message, input_field(self.body))

    async def _tokens(self, asked: Asked, first: bool) -> list[int]:
        """The tokens of a prompt. Only the first of a history begins with the BOS token."""
        prompts = self.service.prompts
        if asked.tokens is None:
            if not asked.text:
                return []
            try:
                return await prompts.text(asked.text, first=first, tenant=self.caller.tenant)
            except Problem as problem:
                raise self._explained(problem).renamed({"input": "text"}) from problem
        vocabulary = self.service.facts.vocabulary
        if asked.tokens and max(asked.tokens) >= vocabulary:
            raise bad_field("input_ids", f"token ids must be from 0 to {vocabulary - 1}")
        if not first and prompts.bos is not None and asked.tokens[:1] == [prompts.bos]:
            return asked.tokens[1:]
        return asked.tokens

    def _said(self, asked: Asked, tokens: list[int], number: int = 0) -> Said:
        rid = f"{asked.rid}.{number}" if number else asked.rid
        return Said(rid, asked, tokens, self.service.prompts.tokenizer, self.service.facts.eos_tokens)

    # --- answers in flight ------------------------------------------------------------------------

    def _enter(self, asked: Asked, choice: Choice) -> Choice:
        """Register an answer, to be aborted by its name, its prompt's or its call's."""
        choice.names = {choice.said.rid, asked.rid}
        if isinstance(self.body.rid, str):
            choice.names.add(self.body.rid)
        self.choices.append(choice)
        self.native.enter(self.caller.tenant, choice)
        return choice

    def leave(self) -> None:
        """Abort all answers."""
        for choice in self.choices:
            self.service.leave(choice.feed, keeps=False)
            self.native.leave(self.caller.tenant, choice)

    async def whole(self) -> Response:
        """All answers when they have finished."""
        shown = await asyncio.gather(*map(self._whole, self.choices))
        return json_answer(shown if self.many else shown[0])

    async def _whole(self, choice: Choice) -> dict[str, Any]:
        async for delta in choice.feed.deltas():
            choice.said.add(delta)
            if choice.record is not None:
                choice.record.add(delta.tokens)
        end = self._ended(choice)
        if end.prompt_logprobs is None:
            return choice.said.whole(end)
        return await asyncio.to_thread(choice.said.whole, end)

    def _ended(self, choice: Choice) -> wire.End:
        """The end of an answer; raises if it failed."""
        end = choice.feed.end
        assert end is not None, "all of its output has been read"
        self.native.leave(self.caller.tenant, choice)
        if end.outcome == "failed":
            raise turn_failed(end.reason)
        return end

    @property
    def feeds(self) -> list[TurnFeed]:
        """The turns of all answers."""
        return [choice.feed for choice in self.choices]

    # --- all answers as one stream --------------------------------------------------------------------

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, place: int, delta: wire.Delta) -> bytes:
        """An answer so far."""
        choice = self.choices[place]
        if choice.record is not None:
            choice.record.add(delta.tokens)
        return choice.said.event(delta, place if self.many else None)

    def end(self, place: int, end: wire.End) -> bytes | Awaitable[bytes]:
        """The whole of an answer; one that failed fails all."""
        choice = self.choices[place]
        assert end is choice.feed.end
        self._ended(choice)
        if end.prompt_logprobs is None:
            return self._written(place, end)
        return asyncio.to_thread(self._written, place, end)

    def _written(self, place: int, end: wire.End) -> bytes:
        shown = self.choices[place].said.whole(end)
        return event({**shown, "index": place} if self.many else shown)

    def closing(self) -> bytes:
        """The end of the stream."""
        return DONE


def _require_input(asked: Asked) -> None:
    if asked.empty:
        field = "text" if asked.tokens is None else "input_ids"
        raise bad_field(field, "must not be empty", "empty_turn")


def _require_start(asked: Asked, length: int) -> None:
    if asked.start > length:
        raise bad_field("logprob_start_len", f"is more than the prompt's {length} tokens")
