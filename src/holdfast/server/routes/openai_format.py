"""OpenAI's response formats: chat completions and plain completions, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.engine.text.tokenizer import Detokenizer, Tokenizer
from holdfast.server.link import wire

__all__ = ["Chat", "Completion", "Format", "ending"]


def ending(end: wire.End) -> str:
    """OpenAI's finish reason of a choice; `abort` if it was aborted."""
    return end.reason if end.outcome == "finished" else "abort"


class Format(Protocol):
    """What the routes need of either format."""

    def choice(self, index: int, end: wire.End) -> dict[str, Any]:
        """A whole choice."""
        ...

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        ...

    def first(self, index: int) -> list[dict[str, Any]]:
        """The first chunks of a choice's stream, if it has any."""
        ...

    def chunk(self, index: int, text: str, logprobs: list[wire.Logprob] | None) -> dict[str, Any]:
        """The next piece of a choice."""
        ...

    def last(self, index: int, reason: str) -> dict[str, Any]:
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

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        return {**self._framed(self.kind, choices), "usage": usage}

    def totals(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries only the usage."""
        return {**self._framed(self.chunk_kind, []), "usage": usage}

    def usage(self, ends: Sequence[wire.End], choices: int) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once for all of its choices."""
        prompts = ends[::choices]
        prompt = sum(end.prompt_tokens for end in prompts)
        completion = sum(len(end.tokens) for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
        }

    def _spelled(self, token: int) -> tuple[str, list[int]]:
        """A token as text, and its bytes: a token may be part of a UTF-8 sequence."""
        spelled = self.tokenizer.token_bytes(token)
        return spelled.decode("utf-8", errors="replace"), list(spelled)


class Chat(_Frame):
    """`chat.completion` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

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
            "message": {"role": "assistant", "content": end.text, "refusal": None},
            "logprobs": self._logprobs(end.logprobs),
            "finish_reason": ending(end),
        }

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._framed(self.chunk_kind, [choice])

    def first(self, index: int) -> list[dict[str, Any]]:
        """The role."""
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def chunk(self, index: int, text: str, logprobs: list[wire.Logprob] | None) -> dict[str, Any]:
        """A piece of the text."""
        return self._chunk(index, {"content": text}, logprobs=self._logprobs(logprobs))

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """The finish reason."""
        return self._chunk(index, {}, finish_reason=reason)


class _Places:
    """Character offsets of the tokens of one choice in its text.

    A token that begins inside a character has that character's offset. Tokens of a removed stop string have
    the offsets that they would have.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._characters = 0

    def next(self, token: int) -> int:
        """The offset of the next token."""
        place = self._characters
        self._characters += len(self._detokenizer.add([token]))
        return place


class Completion(_Frame):
    """`text_completion` and its chunks."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, name: str, model: str, fingerprint: str, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> None:
        super().__init__(name, model, fingerprint, tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._places: dict[int, _Places] = {}

    def _logprobs(self, index: int, logprobs: list[wire.Logprob] | None) -> dict[str, Any] | None:
        """Log-probabilities of a choice's next tokens."""
        if logprobs is None:
            return None
        places = self._places.get(index)
        if places is None:
            detokenizer = self.tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens)
            places = self._places[index] = _Places(detokenizer)
        return {
            "tokens": [self._spelled(entry.token)[0] for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {self._spelled(other.token)[0]: other.logprob for other in entry.top} for entry in logprobs
            ],
            "text_offset": [places.next(entry.token) for entry in logprobs],
        }

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, end: wire.End) -> dict[str, Any]:
        """A whole choice."""
        return self._choice(index, end.text, self._logprobs(index, end.logprobs), ending(end))

    def first(self, index: int) -> list[dict[str, Any]]:
        """There is no first chunk."""
        del index
        return []

    def chunk(self, index: int, text: str, logprobs: list[wire.Logprob] | None) -> dict[str, Any]:
        """A piece of the text."""
        return self._framed(
            self.chunk_kind, [self._choice(index, text, self._logprobs(index, logprobs), None)]
        )

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """The finish reason."""
        return self._framed(self.chunk_kind, [self._choice(index, "", None, reason)])
