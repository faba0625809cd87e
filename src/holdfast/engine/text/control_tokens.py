"""Control token injection: control tokens come from a chat template, never from the text of a message.

A message may contain the name of a control token, such as `<|im_end|>`. Before a conversation is rendered,
`disguise` replaces such names with placeholders of private-use characters; afterwards, `encode` restores the
names as ordinary tokens. A placeholder is derived from its name and a secret, so that the same conversation
is always rendered to the same text, and no client can write one. A conversation without such names is
rendered and encoded directly. Control tokens are the tokenizer's special tokens, and the added tokens that
the template writes (`<tool_response>`); the latter stay tokens in the assistant's messages, since models
write them, but not in the arguments of its calls. Used by `tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

__all__ = ["ControlTokens", "Disguise"]

PRIVATE_FIRST, PRIVATE_COUNT = 0xE100, 0x1000
"""The alphabet of placeholders: private use, caseless, never trimmed, quoted or escaped."""
PLACEHOLDER_CHARACTERS = 21
SECRET_BYTES = 16

_NOTHING = re.compile(r"(?!)")


@dataclass(slots=True)
class Disguise:
    """Messages and variables without control token names, and the name behind each placeholder."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether the messages are unchanged."""
        return not self.names

    def restored(self, text: str) -> str:
        """A text with placeholders replaced by their names."""
        for placeholder, name in self.names.items():
            text = text.replace(placeholder, name)
        return text


class ControlTokens:
    """The control tokens of one tokenizer with one template."""

    def __init__(self, encoder: Encoder, template: str, secret: bytes = b"") -> None:
        """Placeholders are the same for the same `secret`; without one they are this object's own."""
        self._encoder = encoder
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        added = encoder.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special and token.content}
        written = {token.content for token in added.values() if token.content and token.content in template}
        self.numbers = frozenset(
            number for number, token in added.items() if token.content in special | written
        )
        self._marks = {token.content: token for token in added.values() if token.content}
        self._private = re.compile(f"[{_private(0)}-{_private(PRIVATE_COUNT - 1)}]")
        self._special = _any_of(special)
        self._all = _any_of(special | written)

    def disguise(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> Disguise:
        """The messages, and the template's variables, with placeholders for control token names."""
        placeholders: dict[str, str] = {}

        def placeholder(found: re.Match[str]) -> str:
            name = found[0]
            if name not in placeholders:
                placeholders[name] = self._placeholder(name)
            return placeholders[name]

        def replaced(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(placeholder, value)
            if isinstance(value, Mapping):
                return {replaced(key, pattern): replaced(inner, pattern) for key, inner in value.items()}
            return [replaced(inner, pattern) for inner in value] if isinstance(value, list | tuple) else value

        def shown_message(message: Mapping[str, Any]) -> Any:
            if message.get("role") != "assistant":
                return replaced(message, self._all)
            made = replaced(message, self._special)
            if "tool_calls" in made:
                made["tool_calls"] = replaced(made["tool_calls"], self._all)
            return made

        shown = [shown_message(message) for message in messages]
        given = {name: replaced(value, self._all) for name, value in (variables or {}).items()}
        names = {placed: name for name, placed in placeholders.items()}
        return Disguise(shown if names else messages, given, names)

    def disguised(self, text: str) -> str:
        """A text that was spelled by ordinary tokens, as it would be in a rendered conversation."""
        return self._all.sub(lambda found: self._placeholder(found[0]), text)

    def has_placeholder(self, text: str) -> bool:
        """Whether a rendered text may have a placeholder."""
        return self._private.search(text) is not None

    def _placeholder(self, name: str) -> str:
        drawn = hashlib.blake2b(name.encode(), key=self._secret, digest_size=2 * PLACEHOLDER_CHARACTERS)
        pairs = zip(*[iter(drawn.digest())] * 2, strict=True)
        return "".join(_private((high << 8 | low) % PRIVATE_COUNT) for high, low in pairs)

    def encode(self, text: str, disguise: Disguise) -> list[int]:
        """Encode a rendered text, with the disguised names as ordinary text.

        The encoder splits a text at its added tokens and encodes the stretches between them independently; so
        a stretch with a placeholder can be encoded by itself.
        """
        hidden = re.compile("|".join(map(re.escape, disguise.names)))
        marks = list(_any_of(self._marks).finditer(text))
        borders = [(0, ""), *((mark.end(), mark[0]) for mark in marks)]
        ends = [*((mark.start(), mark[0]) for mark in marks), (len(text), "")]
        tokens: list[int] = []
        done = 0
        for (start, before), (end, after) in zip(borders, ends, strict=True):
            if hidden.search(text, start, end) is None:
                continue
            tokens += self._encoder.encode(text[done:start], add_special_tokens=False).ids
            stretch = text[start:end]
            if before and self._marks[before].rstrip:
                stretch = stretch.lstrip()
            if after and self._marks[after].lstrip:
                stretch = stretch.rstrip()
            tokens += self._plain_tokens(stretch, disguise, hidden, first=not before)
            done = end
        return tokens + self._encoder.encode(text[done:], add_special_tokens=False).ids

    def begins_with_one(self, text: str) -> bool:
        """Whether a text begins with an added token, so that it is encoded alike after any other text."""
        found = _any_of(self._marks).match(text)
        return found is not None and not self._marks[found[0]].lstrip

    def _plain_tokens(
        self, stretch: str, disguise: Disguise, hidden: re.Pattern[str], *, first: bool
    ) -> list[int]:
        """The tokens of a stretch, none of them an added token."""
        tokens = self._plain_encoded(disguise.restored(stretch), first)
        if self.numbers.isdisjoint(tokens):
            return tokens
        # The base vocabulary has the name as a word: spell it character by character.
        tokens, done = [], 0
        for found in hidden.finditer(stretch):
            tokens += self._plain_encoded(stretch[done : found.start()], first and not tokens)
            for character in disguise.names[found[0]]:
                tokens += self._plain_encoded(character, False)
            done = found.end()
        tokens += self._plain_encoded(stretch[done:], first and not tokens)
        if not self.numbers.isdisjoint(tokens):
            raise ValueError("the vocabulary cannot spell a control token's name as text")
        return tokens

    def _plain_encoded(self, text: str, first: bool) -> list[int]:
        """The tokens of a text without added tokens; vocabularies may treat the first text differently."""
        encoder, mark = self._plain
        if not text:
            return []
        if first:
            return list(encoder.encode(text, add_special_tokens=False).ids)
        return list(encoder.encode(mark + text, add_special_tokens=False).ids[1:])

    @cached_property
    def _plain(self) -> tuple[Encoder, str]:
        """The same vocabulary and rules with a single, random added token, and that token."""
        written = json.loads(self._encoder.to_str())
        encoder = Encoder.from_str(json.dumps({**written, "added_tokens": []}))
        mark = "".join(_private(secrets.randbelow(PRIVATE_COUNT)) for _ in range(PLACEHOLDER_CHARACTERS))
        encoder.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
        return encoder, mark


def _private(number: int) -> str:
    return chr(PRIVATE_FIRST + number)


def _any_of(texts: set[str] | Mapping[str, Any]) -> re.Pattern[str]:
    """Matches any of some texts; the longest where several start at one place."""
    if not texts:
        return _NOTHING
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
