"""Reads one value of a call's arguments as it streams in, and writes it as JSON.

Three notations: JSON itself, Python literals (Llama's pythonic calls) and Gemma's, which quotes strings by a
marker and leaves keys bare. A pushdown machine with one step for each state: it looks at each character once,
holds back at most one word, and its depth is bounded. JSON passes through character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

DEPTH_MAX = 128
WORD_MAX = 512
"""Longest number, keyword or bare key."""

_SPACE = " \t\n\r"
_WORD = re.compile(r"[A-Za-z0-9_+\-.]*")
_BARE_KEY = re.compile(r"[^:,{}\[\]\"\s\ud800-\udfff]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = {
    '"': re.compile(r"[^\"\\\x00-\x1f\ud800-\udfff]*"),
    "'": re.compile(r"[^'\\\x00-\x1f\ud800-\udfff]*"),
}
_UNQUOTED = re.compile(r"[^\ud800-\udfff]*")
_KEYWORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_KEYWORDS = {**_KEYWORDS, "True": "true", "False": "false", "None": "null"}
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Notation(Enum):
    """How a family writes values."""

    JSON = "json"
    PYTHON = "python"
    GEMMA = "gemma"


class State(Enum):
    """The expected next character."""

    VALUE = auto()
    ITEM_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    BARE_KEY = auto()
    DONE = auto()
    BROKEN = auto()


_ENDED = (State.DONE, State.BROKEN)


def quoted(text: str) -> str:
    """Text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ValueReader:
    """Reads one value.

    `quote` is Gemma's mark for quotes, `literal` the marks that strings may contain as text.
    """

    __slots__ = (
        "_digits",
        "_expand",
        "_is_key",
        "_keywords",
        "_literal",
        "_notation",
        "_out",
        "_quote",
        "_stack",
        "_steps",
        "_string_mark",
        "_word",
        "state",
    )

    def __init__(
        self,
        notation: Notation,
        expand: Callable[[str], str],
        literal: frozenset[str] = frozenset(),
        quote: str = "",
    ) -> None:
        self.state = State.VALUE
        self._notation = notation
        self._expand = expand
        self._literal = literal - {quote}
        self._string_mark = quote
        self._keywords = _KEYWORDS if notation is Notation.JSON else _PYTHON_KEYWORDS
        self._stack: list[str] = []
        self._out: list[str] = []
        self._quote = ""
        self._is_key = False
        self._word = ""
        self._digits = ""
        self._steps: dict[State, Callable[[str, int], int]] = {
            State.VALUE: self._value,
            State.ITEM_OR_END: self._value,
            State.KEY: self._key,
            State.KEY_OR_END: self._key,
            State.COLON: self._colon,
            State.AFTER: self._after,
            State.STRING: self._string,
            State.ESCAPE: self._escape,
            State.HEX: self._hex,
            State.WORD: self._read_word,
            State.BARE_KEY: self._bare_key,
        }

    @property
    def ended(self) -> bool:
        """Whether the value is read, or cannot be."""
        return self.state in _ENDED

    @property
    def untouched(self) -> bool:
        """Whether the value has not begun."""
        return self.state is State.VALUE and not self._stack

    def read(self, chunk: str, start: int) -> int:
        """Read on from `start`; returns the place of the first character that is not part of the value."""
        place = start
        while place < len(chunk) and self.state not in _ENDED:
            place = self._steps[self.state](chunk, place)
        if self._notation is Notation.JSON:
            self._out.append(chunk[start:place])
        return place

    def finish(self) -> None:
        """No more text: a word that stands alone is complete."""
        if self.state is State.WORD:
            self._end_word()

    def take(self) -> str:
        """The JSON text since the last call."""
        written = self._out[0] if len(self._out) == 1 else "".join(self._out)
        self._out.clear()
        return written if written.isascii() else self._expand(written)

    def _write(self, text: str) -> None:
        if self._notation is not Notation.JSON:
            self._out.append(text)

    def _break(self, place: int) -> int:
        self.state = State.BROKEN
        return place

    def _value(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in _SPACE:
            return place + 1
        if character == "]" and self.state is State.ITEM_OR_END:
            return self._close(place)
        if character in "{[":
            if len(self._stack) == DEPTH_MAX:
                return self._break(place)
            self._stack.append("}" if character == "{" else "]")
            self._write(character)
            self.state = State.KEY_OR_END if character == "{" else State.ITEM_OR_END
            return place + 1
        if self._opens_string(character):
            return self._open_string(character, place, is_key=False)
        if _WORD.fullmatch(character):
            return self._open_word(State.WORD, place)
        return self._break(place)

    def _key(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in _SPACE:
            return place + 1
        if character == "}" and self.state is State.KEY_OR_END:
            return self._close(place)
        if self._opens_string(character):
            return self._open_string(character, place, is_key=True)
        if self._notation is Notation.GEMMA and _BARE_KEY.fullmatch(character):
            return self._open_word(State.BARE_KEY, place)
        return self._break(place)

    def _colon(self, chunk: str, place: int) -> int:
        if chunk[place] in _SPACE:
            return place + 1
        if chunk[place] != ":":
            return self._break(place)
        self._write(": ")
        self.state = State.VALUE
        return place + 1

    def _after(self, chunk: str, place: int) -> int:
        character = chunk[place]
        if character in _SPACE:
            return place + 1
        if character == self._stack[-1]:
            return self._close(place)
        if character != ",":
            return self._break(place)
        self._write(", ")
        self.state = State.KEY if self._stack[-1] == "}" else State.VALUE
        return place + 1

    def _close(self, place: int) -> int:
        self._write(self._stack.pop())
        self._end_value()
        return place + 1

    def _end_value(self) -> None:
        self.state = State.AFTER if self._stack else State.DONE

    def _opens_string(self, character: str) -> bool:
        if self._notation is Notation.GEMMA:
            return character == self._string_mark
        return character == '"' or (character == "'" and self._notation is Notation.PYTHON)

    def _open_string(self, character: str, place: int, *, is_key: bool) -> int:
        self._quote, self._is_key = character, is_key
        self._write('"')
        self.state = State.STRING
        return place + 1

    def _string(self, chunk: str, place: int) -> int:
        plain = _PLAIN.get(self._quote, _UNQUOTED).match(chunk, place)
        assert plain is not None, "matches at least the empty text"
        if plain.end() > place:
            if self._notation is not Notation.JSON:
                self._out.append(quoted(plain.group()))
            return plain.end()
        character = chunk[place]
        if character == self._quote:
            self._write('"')
            if self._is_key:
                self.state = State.COLON
            else:
                self._end_value()
            return place + 1
        if character == "\\":
            self.state = State.ESCAPE
            return place + 1
        if character in self._literal:
            self._write(quoted(self._expand(character)))
            return place + 1
        return self._break(place)

    def _escape(self, chunk: str, place: int) -> int:
        character = chunk[place]
        self.state = State.STRING
        if self._notation is Notation.JSON:
            if character == "u":
                self._word, self._digits, self.state = "u", "", State.HEX
            elif character not in _JSON_ESCAPES:
                return self._break(place)
        elif character in _HEX_DIGITS:
            self._word, self._digits, self.state = character, "", State.HEX
        elif character in _PYTHON_ESCAPES:
            self._write(quoted(_PYTHON_ESCAPES[character]))
        else:
            self._write("\\\\")
            return place
        return place + 1

    def _hex(self, chunk: str, place: int) -> int:
        if chunk[place] not in "0123456789abcdefABCDEF":
            return self._break(place)
        self._digits += chunk[place]
        if len(self._digits) == _HEX_DIGITS[self._word]:
            code = int(self._digits, 16)
            if code > 0x10FFFF:
                return self._break(place)
            self._write(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code)))
            self.state = State.STRING
        return place + 1

    def _open_word(self, state: State, place: int) -> int:
        self._word, self.state = "", state
        return place

    def _read_word(self, chunk: str, place: int) -> int:
        end = self._extend_word(_WORD, chunk, place)
        if self.state is State.WORD and end < len(chunk):
            self._end_word()
        return end

    def _bare_key(self, chunk: str, place: int) -> int:
        end = self._extend_word(_BARE_KEY, chunk, place)
        if self.state is State.BARE_KEY and end < len(chunk):
            self._write(f'"{quoted(self._word)}"')
            self.state = State.COLON
        return end

    def _extend_word(self, pattern: re.Pattern[str], chunk: str, place: int) -> int:
        found = pattern.match(chunk, place, place + WORD_MAX + 1 - len(self._word))
        assert found is not None, "matches at least the empty text"
        self._word += found.group()
        if len(self._word) > WORD_MAX:
            return self._break(found.end())
        return found.end()

    def _end_word(self) -> None:
        word = self._keywords.get(self._word) or (self._word if _NUMBER.fullmatch(self._word) else None)
        if word is None:
            self.state = State.BROKEN
            return
        self._write(word)
        self._end_value()
