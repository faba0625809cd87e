"""OpenAI's interface: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, and tokenising beside them.

Fields that are not known are ignored: clients send extras. What is known and not built yet is refused by name
(`server.unbuilt`). A request with `session_id` is a turn on that session, and its messages are only what is
new.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.server.http.answers import StreamAnswer, TurnAnswer, event, json_answer
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, told_as
from holdfast.server.limits import PROMPTS_MAX, TOP_LOGPROBS_MAX
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed, spoken
from holdfast.server.prompts import READ_MESSAGES, ChatMessage, plain_messages
from holdfast.server.routes.access import body_of, caller_of, request_id_of, service_of
from holdfast.server.routes.openai_format import Chat, Completion, Format, ending
from holdfast.server.routes.schema import documented
from holdfast.server.routes.sessions import biases, turn_failure
from holdfast.server.service import Input, Service, TurnAsked, make_sampling
from holdfast.server.sessions import new_name
from holdfast.server.unbuilt import refuse_unbuilt, refusing

__all__ = ["router"]

router = APIRouter(tags=["openai"])


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """What both kinds of completion may ask for; null is as good as a field left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    timeout: float | None = None
    session_id: str | None = None
    on_abort: Literal["rollback", "keep"] | None = None

    def check(self) -> None:
        """Refuse what is not built yet."""
        refuse_unbuilt(self)
        if self.stream_options is not None:
            refuse_unbuilt(self.stream_options, "stream_options.")
        if self.session_id is not None and (self.n or 1) > 1:
            raise bad_field("n", "more than one choice with a session is not supported yet", "unsupported")

    def fields(self) -> dict[str, Any]:
        """The sampling fields that both kinds share."""
        given = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": None if self.logit_bias is None else biases(self.logit_bias),
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "n": self.n,
        }
        return {name: value for name, value in given.items() if value is not None}


class ChatBody(CommonBody, kw_only=True):
    """A conversation to go on with."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    append_history: bool | None = None


class CompletionBody(CommonBody, kw_only=True):
    """Text, or token ids, to go on with: one prompt or several."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None


_STREAM = {"stream_options": refusing(StreamOptions) | None}
READ_CHAT = refusing(ChatBody, nested={**_STREAM, "messages": READ_MESSAGES}, add_special_tokens=(False,))
READ_COMPLETION = refusing(CompletionBody, nested=_STREAM, add_special_tokens=(True,))


@router.get("/v1/models", **documented(None, "The model that is served."))
async def models(request: Request) -> Response:
    return json_answer({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{model:path}", **documented(None, "One model."))
async def model(request: Request, model: str) -> Response:
    service = service_of(request)
    if model != service.model_name:
        raise _unknown_model()
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
    }


def _unknown_model() -> Problem:
    return Problem(404, "model_not_found", "this server serves another model; see /v1/models", "model")


def _require_model(service: Service, name: str | None) -> None:
    """Some clients name a model of their own choosing; only a wrong name that was meant is refused."""
    if name not in (None, "", "default", service.model_name, service.facts.path):
        raise _unknown_model()


@router.post("/v1/chat/completions", **documented(ChatBody, "Answer a conversation.", stream=True))
async def chat(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, READ_CHAT)
    _require_model(service, body.model)
    body.check()
    if not service.prompts.chats:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    fields = body.fields()
    names = {"input": "messages"}
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        count = body.top_logprobs or 0
        if not 0 <= count <= TOP_LOGPROBS_MAX:
            raise bad_field("top_logprobs", f"must be from 0 to {TOP_LOGPROBS_MAX}")
        fields["logprobs"] = count
    elif body.top_logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    asked = TurnAsked(
        Input(messages=plain_messages(body.messages)),
        make_sampling(names, **fields),
        new_name("chatcmpl"),
        keeps=body.on_abort == "keep",
        timeout=body.timeout,
        appends=bool(body.append_history),
        fields=names,
    )
    feeds = await _start(service, caller, body, [asked])
    form = Chat(asked.name, service.model_name, service.facts.fingerprint, service.prompts.tokenizer)
    return _answer(service, body, feeds, form, request_id_of(request))


@router.post("/v1/completions", **documented(CompletionBody, "Go on with a text.", stream=True))
async def completions(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, READ_COMPLETION)
    _require_model(service, body.model)
    body.check()
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field("best_of", "other than n is not supported yet", "unsupported")
    fields = body.fields()
    if body.logprobs is not None:
        if not 0 <= body.logprobs <= TOP_LOGPROBS_MAX:
            raise bad_field("logprobs", f"must be from 0 to {TOP_LOGPROBS_MAX}")
        fields["logprobs"] = body.logprobs
    if "max_tokens" not in fields and body.session_id is None:
        fields["max_tokens"] = 16
    sampling = make_sampling(**fields)
    prompts = _prompts(body.prompt)
    if len(prompts) * sampling.n > PROMPTS_MAX or (body.session_id is not None and len(prompts) > 1):
        raise bad_field("prompt", f"may ask for at most {PROMPTS_MAX} choices, and for one on a session")
    name = new_name("cmpl")
    asked = [
        TurnAsked(
            prompt,
            sampling,
            f"{name}-{number}" if len(prompts) > 1 else name,
            keeps=body.on_abort == "keep",
            timeout=body.timeout,
            fields={"input": "prompt", "messages": "prompt"},
        )
        for number, prompt in enumerate(prompts)
    ]
    feeds = await _start(service, caller, body, asked)
    form = Completion(
        name,
        service.model_name,
        service.facts.fingerprint,
        service.prompts.tokenizer,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    return _answer(service, body, feeds, form, request_id_of(request))


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


async def _start(
    service: Service, caller: Caller, body: CommonBody, asked: Sequence[TurnAsked]
) -> list[TurnFeed]:
    """Start all turns of a request, or none."""
    if body.session_id is not None:
        record = service.table.find(caller.tenant, body.session_id)
        return [await service.start_turn(record, asked[0])]
    return await service.start_requests(caller, asked)


def _answer(
    service: Service, body: CommonBody, feeds: list[TurnFeed], form: Format, request_id: str
) -> Response:
    """The answer: a stream, or one object."""

    def leave() -> None:
        for feed in feeds:
            service.leave(feed, body.on_abort == "keep")

    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return StreamAnswer(
            _chunks(feeds, form, usage, body.n or 1), leave, lambda problem: event(problem.body())
        )
    return TurnAnswer(_whole(feeds, form, body.n or 1, request_id), leave)


async def _said(feed: TurnFeed) -> wire.End:
    """What a turn said. One that failed fails the answer at once, whatever others have yet to say."""
    end = await feed.result()
    if end.outcome == "failed":
        raise turn_failure(end)
    return end


async def _whole(feeds: list[TurnFeed], form: Format, choices: int, request_id: str) -> Response:
    ends = await asyncio.gather(*(_said(feed) for feed in feeds))
    shown = [form.choice(index, end) for index, end in enumerate(ends)]
    body = form.whole(shown, form.usage(ends, choices))
    return json_answer(body, headers={"openai-request-id": request_id})


async def _chunks(feeds: list[TurnFeed], form: Format, usage: bool, choices: int) -> AsyncIterator[bytes]:
    """All choices as one stream, each delta as it comes."""
    for index in range(len(feeds)):
        for opening in form.first(index):
            yield event(opening)
    async for index, delta in spoken(feeds):
        if delta is None:
            end = feeds[index].end
            assert end is not None
            if end.outcome == "failed":
                raise turn_failure(end)
            yield event(form.last(index, ending(end)))
        elif delta.text or delta.logprobs:
            yield event(form.chunk(index, delta.text, delta.logprobs))
    if usage:
        ends = [feed.end for feed in feeds if feed.end is not None]
        yield event(form.totals(form.usage(ends, choices)))
    yield b"data: [DONE]\n\n"


class TokenizeBody(msgspec.Struct):
    """Text, or messages, to be counted."""

    prompt: str | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True


READ_TOKENIZE = refusing(TokenizeBody, nested={"messages": READ_MESSAGES | None})


class DetokenizeBody(msgspec.Struct):
    """Token ids to be read."""

    tokens: list[int]


@router.post("/tokenize", **documented(TokenizeBody, "The tokens of a text."))
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    body = await body_of(request, READ_TOKENIZE)
    refuse_unbuilt(body)
    given = [value for value in (body.prompt, body.text, body.messages) if value is not None]
    if len(given) != 1:
        raise bad_field("prompt", "give one of prompt, text and messages")
    tenant = caller_of(request).tenant
    if body.messages is not None:
        with told_as({"input": "messages"}):
            plain = plain_messages(body.messages)
            tokens = await service.prompts.chat(plain, last_token=None, first=True, tenant=tenant)
    else:
        text = body.prompt if body.prompt is not None else body.text or ""
        with told_as({"input": "text" if body.prompt is None else "prompt"}):
            tokens = await service.prompts.text(text, first=body.add_special_tokens, tenant=tenant)
    return json_answer(
        {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.context_length}
    )


@router.post("/detokenize", **documented(DetokenizeBody, "The text of tokens."))
async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = await body_of(request, DetokenizeBody)
    vocabulary = service.facts.vocabulary
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocabulary:
        raise bad_field("tokens", f"token ids must be from 0 to {vocabulary - 1}")
    text = await service.prompts.decode(body.tokens, caller_of(request).tenant)
    return json_answer({"prompt": text, "text": text})
