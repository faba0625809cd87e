"""OpenAI's response formats: chat completions and plain completions, whole or in chunks.

Reasoning is `reasoning_content`, and `reasoning` for clients that call it so. A tool call streams as OpenAI
streams it: a chunk with its id and name, then pieces of its arguments. Calls that are broken or cut are
listed too, with the arguments that arrived. Log-probabilities are those of all tokens of a choice, with
reasoning, calls and markup; a chunk has those of the tokens since the chunk before. Those of the prompt come
with the whole answer alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.engine.sampling import Sampling
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.server.answer_parts import calls_of, finish_reason, reasoning_tokens, shown_calls
from holdfast.server.link import wire
from holdfast.server.routes.openai_logprobs import Echo, LegacyLogprobs, Places, prompt_logprobs

__all__ = ["Chat", "Completion", "Format"]

NO_ECHO = Echo("")


class Format(Protocol):
    """The interface of both formats."""

    def whole(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """The whole answer; each prompt has so many `choices`."""
        ...

    def first(self, index: int, reads: bool) -> list[dict[str, Any]]:
        """The first chunks of a choice's stream, if it has any; `reads` if its answer may have calls."""
        ...

    def chunks(self, index: int, delta: wire.Delta) -> list[dict[str, Any]]:
        """The next pieces of a choice."""
        ...

    def last(self, index: int, end: wire.End) -> list[dict[str, Any]]:
        """The end of a choice's stream."""
        ...

    def totals(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries only the usage."""
        ...

    def usage(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once for all of its choices."""
        ...


class _Frame:
    """The parts that both formats share."""

    kind = ""
    chunk_kind = ""
    shows_prompt: int | None = None
    """How many most likely tokens vLLM's `prompt_logprobs` shows, where the client asked for it."""

    def __init__(self, name: str, model: str, fingerprint: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.model = model
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.created = int(time.time())

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def whole(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """The whole answer."""
        shown = [self.choice(index, end) for index, end in enumerate(ends)]
        return {**self._framed(self.kind, shown), "usage": self.usage(ends, choices)}

    def choice(self, index: int, end: wire.End) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def totals(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries only the usage."""
        return {**self._framed(self.chunk_kind, []), "usage": usage}

    def usage(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once for all of its choices."""
        prompts = ends[::choices]
        prompt = sum(end.prompt_tokens for end in prompts)
        completion = sum(len(end.tokens) for end in ends)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
        }
        if any(end.answer is not None for end in ends):
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(map(reasoning_tokens, ends))}
        return usage

    def _spelled(self, token: int) -> tuple[str, list[int]]:
        """A token as text, and its bytes: a token may be part of a UTF-8 sequence."""
        spelled = self.tokenizer.token_bytes(token)
        return spelled.decode("utf-8", errors="replace"), list(spelled)


class Chat(_Frame):
    """`chat.completion` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        name: str,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        *,
        stream_reasoning: bool = True,
    ) -> None:
        """Without `stream_reasoning` a stream has it in one piece, before what follows it."""
        super().__init__(name, model, fingerprint, tokenizer)
        self._held: dict[int, list[wire.AnswerEvent]] | None = None if stream_reasoning else {}
        """Reasoning that is held back, by choice."""

    def whole(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """The whole answer; the log-probabilities of the prompt are the same for all choices."""
        shown, logprobs = super().whole(ends, choices), ends[0].prompt_logprobs
        if logprobs is not None and self.shows_prompt is not None:
            shown["prompt_logprobs"] = prompt_logprobs(self.tokenizer, logprobs, self.shows_prompt)
        return shown

    def _logprobs(self, logprobs: list[wire.Logprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = []
        for entry in logprobs:
            text, spelled = self._spelled(entry.token)
            top = []
            for other in entry.top:
                other_text, other_spelled = self._spelled(other.token)
                top.append({"token": other_text, "logprob": other.logprob, "bytes": other_spelled})
            content.append({"token": text, "logprob": entry.logprob, "bytes": spelled, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def choice(self, index: int, end: wire.End) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "message": self._message(end),
            "logprobs": self._logprobs(end.logprobs),
            "finish_reason": finish_reason(end),
        }

    def _message(self, end: wire.End) -> dict[str, Any]:
        """The content is null where there are calls and no text."""
        message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
        calls = calls_of(end)
        if calls:
            message["content"] = end.text or None
            message["tool_calls"] = shown_calls(calls)
        if end.answer is not None and end.answer.reasoning:
            message |= _thought(end.answer.reasoning)
        return message

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._framed(self.chunk_kind, [choice])

    def first(self, index: int, reads: bool) -> list[dict[str, Any]]:
        """The role; no content yet if there may be none."""
        return [self._chunk(index, {"role": "assistant", "content": None if reads else ""})]

    def chunks(self, index: int, delta: wire.Delta) -> list[dict[str, Any]]:
        """Pieces of the answer; the first has the log-probabilities."""
        pieces: list[dict[str, Any]]
        if delta.events is None:
            pieces = [{"content": delta.text}] if delta.text or delta.logprobs else []
        else:
            events = delta.events if self._held is None else self._collected(index, delta.events)
            pieces = [_piece(event) for event in events if event.part is not wire.Part.CALL_END]
            if not pieces and delta.logprobs:
                pieces = [{}]
        logprobs = self._logprobs(delta.logprobs)
        return [
            self._chunk(index, piece, logprobs=None if number else logprobs)
            for number, piece in enumerate(pieces)
        ]

    def _collected(self, index: int, events: list[wire.AnswerEvent]) -> list[wire.AnswerEvent]:
        """Events with the reasoning in one piece, once something follows it."""
        assert self._held is not None, "reasoning is held back"
        held = self._held.setdefault(index, [])
        collected: list[wire.AnswerEvent] = []
        for event in events:
            if event.part is wire.Part.REASONING:
                held.append(event)
            else:
                collected += [*_joined(held), event]
                held.clear()
        return collected

    def last(self, index: int, end: wire.End) -> list[dict[str, Any]]:
        """Reasoning that was held back, and the finish reason."""
        held = [] if self._held is None else self._held.pop(index, [])
        chunks = [self._chunk(index, _piece(event)) for event in _joined(held)]
        return [*chunks, self._chunk(index, {}, finish_reason=finish_reason(end))]


def _joined(held: list[wire.AnswerEvent]) -> list[wire.AnswerEvent]:
    """Pieces of reasoning as one, if there are any."""
    text = "".join(event.text for event in held)
    return [wire.AnswerEvent(wire.Part.REASONING, text)] if text else []


def _thought(text: str) -> dict[str, Any]:
    """Reasoning, under both of its names."""
    return {"reasoning_content": text, "reasoning": text}


def _piece(event: wire.AnswerEvent) -> dict[str, Any]:
    """An event of an answer as the delta of a chunk."""
    if event.part is wire.Part.TEXT:
        return {"content": event.text}
    if event.part is wire.Part.REASONING:
        return _thought(event.text)
    call: dict[str, Any] = {"index": event.index}
    if event.part is wire.Part.CALL:
        call |= {"id": event.id, "type": "function", "function": {"name": event.text, "arguments": ""}}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}


class Completion(_Frame):
    """`text_completion` and its chunks.

    `echoes` are the prompts to repeat, one for each `choices` choices; none without `echo`.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        name: str,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        sampling: Sampling,
        echoes: Sequence[Echo] = (),
    ) -> None:
        super().__init__(name, model, fingerprint, tokenizer)
        self._sampling = sampling
        self._echoes = echoes
        self._places: dict[int, Places] = {}

    def _echo(self, index: int) -> Echo:
        """The prompt that a choice repeats."""
        return self._echoes[index // self._sampling.n] if self._echoes else NO_ECHO

    def _logprobs(
        self, index: int, logprobs: list[wire.Logprob] | None, prompt: list[wire.Logprob] | None = None
    ) -> dict[str, Any] | None:
        """Log-probabilities of a choice's next tokens; with an echo, of the `prompt` before them."""
        if logprobs is None:
            return None
        echo = self._echo(index)
        listed = LegacyLogprobs(self.tokenizer, self._sampling.logprobs or 0)
        places = self._places.get(index)
        if places is None:
            hidden = self._sampling.skip_special_tokens
            detokenizer = self.tokenizer.detokenizer(skip_special_tokens=hidden)
            places = self._places[index] = Places(detokenizer, len(echo.text))
            if prompt is not None and echo.tokens:
                listed.add_prompt(echo, prompt)
        for entry in logprobs:
            listed.add(entry, places.next(entry.token))
        return listed.as_json()

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, end: wire.End) -> dict[str, Any]:
        """A whole choice."""
        text = self._echo(index).text + end.text
        logprobs = self._logprobs(index, end.logprobs, end.prompt_logprobs)
        choice = self._choice(index, text, logprobs, finish_reason(end))
        if end.prompt_logprobs is not None and self.shows_prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, end.prompt_logprobs, self.shows_prompt
            )
        return choice

    def first(self, index: int, reads: bool) -> list[dict[str, Any]]:
        """The prompt, where it is repeated; otherwise there is no first chunk."""
        del reads
        text = self._echo(index).text
        return [self._framed(self.chunk_kind, [self._choice(index, text, None, None)])] if text else []

    def chunks(self, index: int, delta: wire.Delta) -> list[dict[str, Any]]:
        """A piece of the text."""
        if not delta.text and not delta.logprobs:
            return []
        choice = self._choice(index, delta.text, self._logprobs(index, delta.logprobs), None)
        return [self._framed(self.chunk_kind, [choice])]

    def last(self, index: int, end: wire.End) -> list[dict[str, Any]]:
        """The finish reason."""
        return [self._framed(self.chunk_kind, [self._choice(index, "", None, finish_reason(end))])]
