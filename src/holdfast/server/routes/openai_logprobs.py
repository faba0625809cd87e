"""Log-probabilities and echoes of prompts, in OpenAI's legacy format and in vLLM's.

`LegacyLogprobs` is the `logprobs` object of completions: parallel lists of token texts, log-probabilities,
most likely tokens and offsets, for the generated tokens and, with `echo`, for the prompt's before them.
`prompt_logprobs` is vLLM's field. The first token of a prompt has no log-probability: both show null there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.text.tokenizer import Detokenizer, Tokenizer
from holdfast.server.link import wire

__all__ = ["Echo", "LegacyLogprobs", "prompt_logprobs"]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the answer repeats: its text and its tokens.

    With `added`, the first token is the mark of a beginning that the tokenizer put before a text: it has no
    characters.
    """

    text: str
    tokens: Sequence[int] = ()
    added: bool = False


@dataclass(slots=True)
class LegacyLogprobs:
    """The lists of one choice, or of the tokens since the chunk before."""

    tokenizer: Tokenizer
    top: int
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, entry: wire.Logprob, offset: int) -> None:
        """One token. Of several tokens with the same text, the most likely counts."""
        text = self._spelled(entry.token)
        best: dict[str, float] = {}
        for other in entry.top[: self.top]:
            best.setdefault(self._spelled(other.token), other.logprob)
        best.setdefault(text, entry.logprob)
        self.tokens.append(text)
        self.token_logprobs.append(entry.logprob)
        self.top_logprobs.append(best)
        self.text_offset.append(offset)

    def add_prompt(self, echo: Echo, logprobs: Iterable[wire.Logprob]) -> None:
        """The tokens of a prompt, the first without a log-probability."""
        places = Places(self.tokenizer.detokenizer(skip_special_tokens=False))
        offsets = [0] * echo.added + [places.next(token) for token in echo.tokens[echo.added :]]
        self.tokens.append(self._spelled(echo.tokens[0]))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(0)
        # Those of a prompt that was cut off by a deadline end early.
        for entry, offset in zip(logprobs, offsets[1:], strict=False):
            self.add(entry, offset)

    def as_json(self) -> dict[str, Any]:
        """The object as clients get it."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def _spelled(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", errors="replace")


class Places:
    """Character offsets of the tokens of one choice in its text.

    A token that begins inside a character has that character's offset. Tokens of a removed stop string have
    the offsets that they would have.
    """

    def __init__(self, detokenizer: Detokenizer, first: int = 0) -> None:
        self._detokenizer = detokenizer
        self._characters = first

    def next(self, token: int) -> int:
        """The offset of the next token."""
        place = self._characters
        self._characters += len(self._detokenizer.add([token]))
        return place


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[wire.Logprob], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, itself and the most likely ones by their ids.

    The rank of a token that is not among those is not known: null.
    """

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    listed: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in logprobs:
        ranks = {other.token: rank for rank, other in enumerate(entry.top, 1)}
        found = {str(entry.token): shown(entry.token, entry.logprob, ranks.get(entry.token))}
        for other in entry.top[:top]:
            found.setdefault(str(other.token), shown(other.token, other.logprob, ranks[other.token]))
        listed.append(found)
    return listed
