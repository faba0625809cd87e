"""OpenAI's interface: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

Unknown fields are ignored; fields that are known and not built are refused by name. A request with
`session_id` is a turn on that session: its messages are the new ones, or the whole conversation, of which the
new ones are appended. Without one, a conversation goes on in the hidden session that has its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.chat_sampling import chat_defaults
from holdfast.engine.portions import in_turns
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.chat_template import PromptEnd
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.dialects.tables import CHAT, COMPLETION_TOKENS, COMPLETIONS
from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.http.answers import FeedAnswer, TurnAnswer, event, json_answer
from holdfast.server.http.clients import client_of
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, told_as, turn_failed
from holdfast.server.limits import PROMPTS_MAX
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.prompts import CHAT_MESSAGE, ChatMessage, plain_messages
from holdfast.server.routes.access import body_of, caller_of, request_id_of, service_of
from holdfast.server.routes.messages_format import model_entry, model_page
from holdfast.server.routes.openai_format import Chat, Completion, Format
from holdfast.server.routes.openai_logprobs import Echo
from holdfast.server.routes.schema import documented
from holdfast.server.service import Service
from holdfast.server.sessions import is_name, new_name
from holdfast.server.turn_request import Input, TurnAsked

__all__ = ["require_model", "router"]

router = APIRouter(tags=["openai"])

ANTHROPIC_HEADER = "anthropic-version"
"""Anthropic's clients send it; they get models in their own form."""

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\0 text \0"
"""Stands for the text of a chunk while what surrounds it is encoded."""

encode_text = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completion besides sampling and turn options; null is the same as left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None

    def check(self) -> None:
        """Refuse fields that are not built."""
        refuse_unbuilt(self)
        if self.stream_options is not None:
            refuse_unbuilt(self.stream_options, "stream_options.")


class ChatBody(CommonBody, kw_only=True):
    """A conversation to continue."""

    messages: list[ChatMessage]


class CompletionBody(CommonBody, kw_only=True):
    """Text or token ids to continue: one prompt or several."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None


_STREAM = make_body(StreamOptions)
CHAT_BODY = make_body(
    ChatBody,
    CHAT.sampling,
    CHAT.turn,
    CHAT.answer,
    nested={"stream_options": _STREAM, "messages": CHAT_MESSAGE},
    add_special_tokens=(False,),
)
COMPLETION_BODY = make_body(
    CompletionBody,
    COMPLETIONS.sampling,
    COMPLETIONS.turn,
    COMPLETIONS.answer,
    nested={"stream_options": _STREAM},
    add_special_tokens=(True,),
)


@router.get("/v1/models", **documented(None, "The served model."))
async def models(request: Request) -> Response:
    service = service_of(request)
    if ANTHROPIC_HEADER in request.headers:
        return json_answer(model_page(service.model_name, service.created, service.facts.context_length))
    return json_answer({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{model:path}", **documented(None, "One model."))
async def model(request: Request, model: str) -> Response:
    service = service_of(request)
    if model != service.model_name:
        raise _unknown_model()
    if ANTHROPIC_HEADER in request.headers:
        return json_answer(model_entry(service.model_name, service.created, service.facts.context_length))
    return json_answer(_model(service))


def _model(service: Service) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "holdfast",
        "max_model_len": facts.context_length,
        "sampling_defaults": facts.defaults,
        "chat_sampling": chat_defaults(facts.defaults),
    }


def _unknown_model() -> Problem:
    return Problem(404, "model_not_found", "this server serves another model; see /v1/models", "model")


def require_model(service: Service, name: str | None) -> None:
    """Raise for the name of another model; empty and default names are accepted."""
    if name not in (None, "", "default", service.model_name, service.facts.path):
        raise _unknown_model()


@router.post("/v1/chat/completions", **documented(CHAT_BODY.described, "Answer a conversation.", stream=True))
async def chat(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, CHAT_BODY.read)
    if body.session_id is None:
        body.session_id = await _session_in_header(request, service, caller)
    require_model(service, body.model)
    body.check()
    if not service.prompts.chats:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    sampling = CHAT.sampling.read(body)
    _require_one_choice(body, sampling)
    _require_whole(body, sampling)
    messages, options = await in_turns(plain_messages(body.messages)), CHAT.turn.read(body)
    asked = TurnAsked(
        Input(messages=messages, prompt_end=_prompt_end(messages, options)),
        sampling,
        new_name("chatcmpl"),
        options,
        CHAT.answer.read(body),
        fields=CHAT.names(body, body),
    )
    feeds = await _start(request, body, [asked])
    form = Chat(
        asked.name,
        service.model_name,
        service.facts.fingerprint,
        service.prompts.tokenizer,
        stream_reasoning=asked.answer.stream_reasoning,
    )
    form.shows_prompt = sampling.prompt_logprobs
    return _answer(service, body, feeds, form, request_id_of(request), asked)


@router.post("/v1/completions", **documented(COMPLETION_BODY.described, "Continue a text.", stream=True))
async def completions(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, COMPLETION_BODY.read)
    require_model(service, body.model)
    body.check()
    defaults = {} if body.session_id is not None else {"max_tokens": COMPLETION_TOKENS}
    sampling = COMPLETIONS.sampling.read(body, **defaults)
    _require_one_choice(body, sampling)
    _require_whole(body, sampling)
    if body.best_of is not None and body.best_of != sampling.n:
        raise bad_field("best_of", "other than n is not supported yet", "unsupported")
    prompts = _prompts(body.prompt)
    if len(prompts) * sampling.n > PROMPTS_MAX or (body.session_id is not None and len(prompts) > 1):
        raise bad_field("prompt", f"may ask for at most {PROMPTS_MAX} choices, and for one on a session")
    shows_prompt = sampling.prompt_logprobs
    echoes: list[Echo] = []
    if body.echo:
        prompts, echoes = await _echoed(service, caller, body, prompts)
        if sampling.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=max(sampling.logprobs, shows_prompt or 0))
    name = new_name("cmpl")
    options, answer = COMPLETIONS.turn.read(body), COMPLETIONS.answer.read(body)
    asked = [
        TurnAsked(
            prompt,
            sampling,
            f"{name}-{number}" if len(prompts) > 1 else name,
            options,
            answer,
            reads=False,
            fields=COMPLETIONS.names(body, body),
        )
        for number, prompt in enumerate(prompts)
    ]
    feeds = await _start(request, body, asked)
    form = Completion(
        name,
        service.model_name,
        service.facts.fingerprint,
        service.prompts.tokenizer,
        sampling,
        echoes,
    )
    form.shows_prompt = shows_prompt
    return _answer(service, body, feeds, form, request_id_of(request), asked[0])


async def _session_in_header(request: Request, service: Service, caller: Caller) -> str | None:
    """The session that the header `x-session-id` names; unknown names, as proxies send them, are ignored."""
    name = request.headers.get("x-session-id")
    if name is None or not is_name(name) or await service.sessions.known(caller.tenant, name) is None:
        return None
    return name


def _require_one_choice(body: CommonBody, sampling: Sampling) -> None:
    """Raise if a session is asked for several choices."""
    if body.session_id is not None and sampling.n > 1:
        raise bad_field("n", "more than one choice with a session is not supported yet", "unsupported")


def _require_whole(body: CommonBody, sampling: Sampling) -> None:
    """Raise if a stream is to carry log-probabilities of its prompt, which come with the whole answer."""
    if body.stream and sampling.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "is not supported with stream", "unsupported")


def _prompt_end(messages: Sequence[Mapping[str, Any]], options: TurnOptions) -> PromptEnd:
    """Where the prompt ends: after the last message, inside it, or with the beginning of an answer."""
    asks = options.add_generation_prompt
    if not options.continue_final_message:
        return PromptEnd.ANSWER if asks is None or asks else PromptEnd.MESSAGE
    if asks:
        raise bad_field("continue_final_message", "and add_generation_prompt must not both be true")
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise bad_field(
            "continue_final_message", "needs a last message of role assistant, without tool calls"
        )
    return PromptEnd.OPEN


async def _echoed(
    service: Service, caller: Caller, body: CompletionBody, prompts: Sequence[Input]
) -> tuple[list[Input], list[Echo]]:
    """Prompts as tokens, with what the answer repeats of them: the given text, or that of the tokens."""
    if body.session_id is not None:
        raise bad_field("echo", "is not supported with session_id", "unsupported")
    if body.stream and COMPLETIONS.sampling.read(body).logprobs is not None:
        raise bad_field("echo", "with logprobs is not supported in a stream", "unsupported")
    inputs: list[Input] = []
    echoes: list[Echo] = []
    with told_as({"input": "prompt"}):
        for prompt in prompts:
            if prompt.text is None:
                tokens = prompt.tokens or []
                service.prompts.require_tokens(tokens, service.facts.vocabulary)
                echo = Echo(await service.prompts.decode(tokens, caller.tenant), tokens)
            else:
                tokens = await service.prompts.text(prompt.text, first=True, tenant=caller.tenant)
                echo = Echo(prompt.text, tokens, added=service.prompts.begins_with_mark(prompt.text, tokens))
            inputs.append(Input(tokens=tokens if prompt.text != "" else []))
            echoes.append(echo)
    return inputs, echoes


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Input]:
    """One prompt or several: texts, or lists of token ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise bad_field("prompt", "must not be empty", "empty_turn")
    tokens = [entry for entry in prompt if isinstance(entry, int)]
    if tokens:
        if len(tokens) != len(prompt):
            raise bad_field("prompt", "must not mix token ids with texts")
        return [Input(tokens=tokens)]
    if len(prompt) > PROMPTS_MAX:
        raise bad_field("prompt", f"may hold at most {PROMPTS_MAX} prompts")
    return [
        Input(text=entry, templated=False) if isinstance(entry, str) else Input(tokens=entry)
        for entry in prompt
        if not isinstance(entry, int)
    ]


async def _start(request: Request, body: CommonBody, asked: Sequence[TurnAsked]) -> list[TurnFeed]:
    """Start all turns of a request, or none."""
    service, caller = service_of(request), caller_of(request)
    if body.session_id is not None:
        record = await service.sessions.find(caller.tenant, body.session_id)
        return [await service.start_turn(record, asked[0], client_of(request.scope))]
    return await service.start_requests(caller, asked)


def _answer(
    service: Service,
    body: CommonBody,
    feeds: list[TurnFeed],
    form: Format,
    request_id: str,
    asked: TurnAsked,
) -> Response:
    """The answer: a stream, or one object."""
    choices = asked.sampling.n

    def leave() -> None:
        for feed in feeds:
            service.leave(feed, asked.options.keeps)

    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        streamed = ChunkForm(feeds, form, usage, choices)
        return FeedAnswer(feeds, streamed, leave, lambda problem: event(problem.body()))
    return TurnAnswer(_whole(feeds, form, choices, request_id), leave)


async def _said(feed: TurnFeed) -> wire.End:
    """The end of a turn; one that failed fails the whole answer at once."""
    end = await feed.result()
    if end.outcome == "failed":
        raise turn_failed(end.reason)
    return end


async def _whole(feeds: list[TurnFeed], form: Format, choices: int, request_id: str) -> Response:
    ends = await asyncio.gather(*(_said(feed) for feed in feeds))
    if any(end.prompt_logprobs for end in ends):
        body = await asyncio.to_thread(form.whole, ends, choices)
    else:
        body = form.whole(ends, choices)
    return json_answer(body, headers={"openai-request-id": request_id})


class ChunkForm:
    """All choices of a request as one stream."""

    def __init__(self, feeds: list[TurnFeed], form: Format, usage: bool, choices: int) -> None:
        self._feeds = feeds
        self._form = form
        self._usage = usage
        self._choices = choices
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What is before and after the text in a chunk of plain text, by choice."""

    def opening(self) -> bytes:
        """The first chunks of each choice."""
        chunks = [
            event(chunk)
            for index, feed in enumerate(self._feeds)
            for chunk in self._form.first(index, feed.reads)
        ]
        return b"".join(chunks)

    def delta(self, place: int, delta: wire.Delta) -> bytes:
        """The chunks of a delta; most have plain text, and differ in that alone."""
        if delta.events is None and delta.logprobs is None and delta.text:
            frame = self._frames.get(place)
            if frame is not None:
                return frame[0] + encode_text(delta.text) + frame[1]
            (chunk,) = self._form.chunks(place, msgspec.structs.replace(delta, text=PLACEHOLDER))
            before, found, after = event(chunk).partition(encode_text(PLACEHOLDER))
            assert found, "a chunk of plain text has the text"
            self._frames[place] = before, after
            return before + encode_text(delta.text) + after
        return b"".join([event(chunk) for chunk in self._form.chunks(place, delta)])

    def end(self, place: int, end: wire.End) -> bytes:
        """The last chunks of a choice; one that failed fails the whole answer."""
        if end.outcome == "failed":
            raise turn_failed(end.reason)
        return b"".join([event(chunk) for chunk in self._form.last(place, end)])

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end of the stream."""
        if not self._usage:
            return DONE
        ends = [feed.end for feed in self._feeds if feed.end is not None]
        return event(self._form.totals(self._form.usage(ends, self._choices))) + DONE
