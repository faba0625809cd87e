"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM's and SGLang's clients call them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.portions import in_turns
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.http.answers import json_answer
from holdfast.server.http.problems import bad_field, told_as
from holdfast.server.prompts import CHAT_MESSAGE, ChatMessage, plain_messages
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.text import jobs
from holdfast.server.turn_writer import require_template_kwargs

__all__ = ["router"]

router = APIRouter(tags=["openai"])


class TokenizeBody(msgspec.Struct):
    """Text or messages to tokenise."""

    prompt: str | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True


TOKENIZE = make_body(TokenizeBody, nested={"messages": CHAT_MESSAGE})


class DetokenizeBody(msgspec.Struct):
    """Token ids to decode."""

    tokens: list[int]


@router.post("/tokenize", **documented(TOKENIZE.described, "The tokens of a text."))
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    body = await body_of(request, TOKENIZE.read)
    refuse_unbuilt(body)
    given = [value for value in (body.prompt, body.text, body.messages) if value is not None]
    if len(given) != 1:
        raise bad_field("prompt", "give one of prompt, text and messages")
    tenant = caller_of(request).tenant
    require_template_kwargs(body.chat_template_kwargs)
    asks = jobs.Asks(tools=body.tools or [], template_kwargs=body.chat_template_kwargs or {})
    if body.messages is not None:
        with told_as({"input": "messages"}):
            plain = await in_turns(plain_messages(body.messages))
            job = jobs.Chat(plain, None, first=True, asks=asks)
            tokens = (await service.prompts.chat(job, tenant)).tokens
    else:
        text = body.prompt if body.prompt is not None else body.text or ""
        with told_as({"input": "text" if body.prompt is None else "prompt"}):
            tokens = await service.prompts.text(text, first=body.add_special_tokens, tenant=tenant)
    return json_answer(
        {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.context_length}
    )


@router.get("/tokenizer_info", **documented(None, "The tokenizer's special tokens and chat template."))
async def tokenizer_info(request: Request) -> Response:
    service = service_of(request)
    tokenizer = service.prompts.tokenizer
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    return json_answer(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": service.facts.context_length,
            "vocab_size": service.facts.vocabulary,
            **{role: tokenizer.names.get(role) for role in roles},
            "chat_template": None if tokenizer.template is None else tokenizer.template.source,
        }
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
