"""Anthropic's interface: `/v1/messages` and `/v1/messages/count_tokens`.

A request is translated into the same call of the service as a chat completion. Unknown fields are ignored;
fields that are known and not built are refused by name. Errors have Anthropic's form (`http/error_forms.py`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.portions import in_turns
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.chat_template import PromptEnd
from holdfast.server.dialects.tables import MESSAGES
from holdfast.server.http.answers import FeedAnswer, KeepAlive, TurnAnswer, event, json_answer
from holdfast.server.http.error_forms import anthropic_error
from holdfast.server.http.problems import Problem, bad_field, told_as
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.routes.access import body_of, caller_of, request_id_of, service_of
from holdfast.server.routes.messages_body import (
    COUNT_BODY,
    MESSAGES_BODY,
    CountBody,
    MessagesBody,
    answer_fields,
    eager_tools,
)
from holdfast.server.routes.messages_format import PING, Answer, MessageStream, require_answer, stop_string
from holdfast.server.routes.messages_input import Conversation, read_conversation
from holdfast.server.routes.openai import require_model
from holdfast.server.routes.schema import documented
from holdfast.server.service import Service
from holdfast.server.turn_request import Input, TurnAsked
from holdfast.server.turn_writer import TurnWriter

__all__ = ["router"]

router = APIRouter(tags=["anthropic"])

KEEP_ALIVE = KeepAlive(event(PING, PING["type"]), 5.0)
"""A stream is silent for at most twice these seconds."""

_LIMIT = re.compile(r"maximum context length is ([0-9]+) tokens")
_COUNT = re.compile(r"([0-9]+) in the messages|has ([0-9]+) tokens")


@router.post(
    "/v1/messages",
    **documented(MESSAGES_BODY.described, "Answer a conversation, for Anthropic's clients.", stream=True),
)
async def create(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    with _too_long():
        body = await body_of(request, MESSAGES_BODY.read)
        conversation = await _conversation(service, body)
        sampling = MESSAGES.sampling.read(body)
        if sampling.max_tokens is None:
            raise bad_field("max_tokens", "this field is required")
        asked = _asked(body, conversation, sampling, f"msg_{secrets.token_hex(12)}")
        with _told(conversation):
            (feed,) = await service.start_requests(caller, [asked])
    form = _form(service, body, asked, sampling.max_tokens)

    def leave() -> None:
        service.leave(feed, asked.options.keeps)

    if body.stream:
        request_id = request_id_of(request)

        def failure(problem: Problem) -> bytes:
            return event(anthropic_error(problem, request_id), "error")

        return FeedAnswer([feed], MessageStream(form), leave, failure, KEEP_ALIVE)
    return TurnAnswer(_whole(feed, form), leave)


@router.post(
    "/v1/messages/count_tokens",
    **documented(COUNT_BODY.described, "Count the tokens of a conversation, for Anthropic's clients."),
)
async def count_tokens(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    with _too_long():
        body = await body_of(request, COUNT_BODY.read)
        conversation = await _conversation(service, body)
        asked = _asked(body, conversation, Sampling(), "count")
        with _told(conversation), told_as(asked.fields):
            written = await TurnWriter(service.prompts, service.facts).write(asked, None, caller.tenant)
    return json_answer({"input_tokens": len(written.tokens)})


async def _conversation(service: Service, body: CountBody) -> Conversation:
    """The checked conversation of a request."""
    require_model(service, body.model)
    body.check()
    if not service.prompts.chats:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    return await in_turns(read_conversation(body.system, body.messages))


def _asked(body: CountBody, conversation: Conversation, sampling: Sampling, name: str) -> TurnAsked:
    end = PromptEnd.OPEN if conversation.begins_answer else PromptEnd.ANSWER
    return TurnAsked(
        Input(messages=conversation.messages, prompt_end=end),
        sampling,
        name,
        MESSAGES.turn.read(body),
        MESSAGES.answer.read(body, **answer_fields(body)),
        cut=True,
        fields={**MESSAGES.turn.names(body), **MESSAGES.answer.names(body), **MESSAGES.sampling.names(body)},
    )


def _form(service: Service, body: MessagesBody, asked: TurnAsked, max_tokens: int) -> Answer:
    tokenizer, stops = service.prompts.tokenizer, asked.sampling.stop_strings
    ends = frozenset(service.facts.eos_tokens)

    def stop(tokens: list[int]) -> str | None:
        return stop_string(tokens, stops, ends, lambda part: tokenizer.decode(part, skip_special_tokens=True))

    return Answer(
        asked.name,
        service.model_name,
        max_tokens=max_tokens,
        stop=stop,
        eager=eager_tools(body),
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
    )


# --- problems -------------------------------------------------------------------------------------


@contextmanager
def _told(conversation: Conversation) -> Iterator[None]:
    """Name messages and fields in problems as the client wrote them."""
    try:
        yield
    except Problem as problem:
        raise conversation.told(problem) from problem


@contextmanager
def _too_long() -> Iterator[None]:
    """Tell of a prompt over the context in the words that Claude Code looks for before it compacts."""
    try:
        yield
    except Problem as problem:
        limit = _LIMIT.search(problem.message)
        if problem.code != "context_length_exceeded" or limit is None:
            raise
        count = _COUNT.search(problem.message)
        counted = (
            f"{count[1] or count[2]} tokens > {limit[1]} maximum" if count else f"over {limit[1]} tokens"
        )
        raise Problem(400, problem.code, f"prompt is too long: {counted}", problem.param) from problem


# --- answers --------------------------------------------------------------------------------------


async def _whole(feed: TurnFeed, form: Answer) -> Response:
    async for delta in feed.deltas():
        form.read(delta)
    assert feed.end is not None, "all of its output has been read"
    return json_answer(form.whole(require_answer(feed.end)))
