"""GBNF, the grammar notation of llama.cpp, to Lark.

Rules are `name ::= alternatives`, begin with `root`, and may go on over several lines. A rule without
reference to a rule that is not itself a terminal becomes a Lark terminal, which is matched as one regular
expression; masks are a hundred times cheaper for it. As in Lark, terminals match greedily: `word "x"` with
`word ::= [a-z]+` never matches, because `word` takes the x. Errors name line and column. Used by `grammar`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.lark import literal

__all__ = ["DEPTH_MAX", "REPETITIONS_MAX", "to_lark"]

DEPTH_MAX = 64
"""Limit of nested parentheses."""
REPETITIONS_MAX = 100_000


class _Sign(Enum):
    """The signs of the notation."""

    SPACE = "space"
    DEFINE = "::="
    NAME = "name"
    STRING = "string"
    CLASS = "class"
    ANY = "."
    OPEN = "("
    CLOSE = ")"
    OR = "|"
    REPEAT = "repeat"
    BOUNDS = "bounds"
    END = "end"


_LEXER = re.compile(
    r"""
    (?P<SPACE> (?:\s+ | \#[^\n]*)+ )
    | (?P<DEFINE> ::= )
    | (?P<NAME> [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<STRING> "(?:\\.|[^"\\\n])*" )
    | (?P<CLASS> \[(?:\\.|[^\]\\\n])*\] )
    | (?P<ANY> \. )
    | (?P<OPEN> \( )
    | (?P<CLOSE> \) )
    | (?P<OR> \| )
    | (?P<REPEAT> [*+?] )
    | (?P<BOUNDS> \{\s*(?P<least>[0-9]{1,9})\s*(?P<comma>,)?\s*(?P<most>[0-9]{1,9})?\s*\} )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """One lexical element of the source and where it begins."""

    sign: _Sign
    text: str
    offset: int


@dataclass(frozen=True, slots=True)
class _Character:
    """A character of a string or class. Only a hyphen that is not escaped makes a range."""

    text: str
    escaped: bool


_HYPHEN = _Character("-", escaped=False)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule: its name, its body as symbols of Lark with `&name` for each reference, and the names it refers
    to."""

    name: str
    body: list[str]
    references: dict[str, int]
    """Names that the body refers to, with the offset of the first reference."""


def to_lark(source: str) -> str:
    """The same grammar in Lark; raises `GrammarError` with line and column."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise GrammarError(Fault.INVALID, "has no rule root")
    for rule in rules.values():
        for name, offset in rule.references.items():
            if name not in rules:
                raise GrammarError(Fault.INVALID, f"rule {name} is not defined", _place(source, offset))
    terminals = _terminals(rules)
    names = {
        name: "start" if name == "root" else f"{'T' if name in terminals else 'r'}{index}"
        for index, name in enumerate(rules)
    }
    lines = [
        f"{names[rule.name]}: " + " ".join(names[part[1:]] if part[0] == "&" else part for part in rule.body)
        for rule in rules.values()
    ]
    return "\n".join(lines) + "\n"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that can be one regular expression: they refer to such rules alone. The root is never one."""
    missing = {rule.name: len(rule.references) for rule in rules.values()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for name in rule.references:
            users[name].append(rule.name)
    ready = [name for name, count in missing.items() if count == 0]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        if name == "root":
            continue
        found.add(name)
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return found


class _Parser:
    """Recursive descent over the pieces of a source."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._pieces = _lexed(source)
        self._next = 0
        self._depth = 0
        self._references: dict[str, int] = {}

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        while self._peek().sign is not _Sign.END:
            name = self._take(_Sign.NAME)
            if name.text in found:
                raise self._error(name, f"rule {name.text} is defined twice")
            self._take(_Sign.DEFINE)
            self._references = {}
            body = self._alternatives()
            found[name.text] = _Rule(name.text, body, self._references)
        return found

    def _alternatives(self) -> list[str]:
        parts = self._sequence()
        while self._peek().sign is _Sign.OR:
            self._next += 1
            parts += ["|", *self._sequence()]
        return parts

    def _sequence(self) -> list[str]:
        parts: list[str] = []
        while (item := self._item()) is not None:
            parts += self._repeated(item)
        return parts or ['""']

    def _item(self) -> list[str] | None:
        """The next string, class, reference or group; None at the end of a sequence."""
        piece = self._peek()
        match piece.sign:
            case _Sign.STRING:
                found = [literal("".join(each.text for each in self._characters(piece)))]
            case _Sign.CLASS:
                found = [self._class(piece)]
            case _Sign.ANY:
                found = [r"/(.|\n)/"]
            case _Sign.NAME if self._pieces[self._next + 1].sign is not _Sign.DEFINE:
                self._references.setdefault(piece.text, piece.offset)
                found = ["&" + piece.text]
            case _Sign.OPEN:
                return self._group(piece)
            case _Sign.NAME | _Sign.END | _Sign.OR | _Sign.CLOSE:
                return None
            case _:
                raise self._error(piece, f"unexpected {piece.text!r}")
        self._next += 1
        return found

    def _group(self, piece: _Piece) -> list[str]:
        self._next += 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise GrammarError(
                Fault.TOO_LARGE,
                f"nested deeper than {DEPTH_MAX} levels",
                _place(self._source, piece.offset),
            )
        inner = self._alternatives()
        self._take(_Sign.CLOSE)
        self._depth -= 1
        return ["(", *inner, ")"]

    def _repeated(self, item: list[str]) -> list[str]:
        piece = self._peek()
        if piece.sign is _Sign.REPEAT:
            self._next += 1
            return _grouped(item, piece.text)
        if piece.sign is not _Sign.BOUNDS:
            return item
        self._next += 1
        bounds = _LEXER.fullmatch(piece.text)
        assert bounds is not None
        least = int(bounds["least"])
        most = int(bounds["most"]) if bounds["most"] else least
        if max(least, most) > REPETITIONS_MAX:
            raise GrammarError(
                Fault.TOO_LARGE,
                f"repeats more than {REPETITIONS_MAX} times",
                _place(self._source, piece.offset),
            )
        if most < least:
            raise self._error(piece, "the upper bound is below the lower bound")
        upper = "" if bounds["comma"] and not bounds["most"] else most
        return _grouped(item, f"{{{least},{upper}}}")

    def _class(self, piece: _Piece) -> str:
        """A character class, each character written as a number: none has a meaning of its own."""
        negated = piece.text.startswith("[^")
        inner = _Piece(piece.sign, piece.text[:1] + piece.text[1 + negated :], piece.offset)
        characters = self._characters(inner)
        if not characters:
            raise self._error(piece, "a character class is empty")
        ranges: list[str] = []
        index = 0
        while index < len(characters):
            first = last = ord(characters[index].text)
            if index + 2 < len(characters) and characters[index + 1] == _HYPHEN:
                last = ord(characters[index + 2].text)
                index += 2
            if last < first:
                raise self._error(piece, "a range of characters ends before it begins")
            ranges.append(rf"\x{{{first:X}}}-\x{{{last:X}}}")
            index += 1
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _characters(self, piece: _Piece) -> list[_Character]:
        """The characters between the delimiters of a string or class, escapes resolved."""
        found: list[_Character] = []
        for escape in _ESCAPE.finditer(piece.text, 1, len(piece.text) - 1):
            code, plain = escape[1], escape[2]
            if plain is not None:
                found.append(_Character(plain, escaped=False))
            elif len(code) > 1:
                number = int(code[1:], 16)
                if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                    raise self._error(piece, f"\\{code} is not a character")
                found.append(_Character(chr(number), escaped=True))
            elif code in _ESCAPED or not code.isalnum():
                found.append(_Character(_ESCAPED.get(code, code), escaped=True))
            else:
                raise self._error(piece, f"unknown escape \\{code}")
        return found

    def _peek(self) -> _Piece:
        return self._pieces[self._next]

    def _take(self, sign: _Sign) -> _Piece:
        piece = self._peek()
        if piece.sign is not sign:
            shown = "the end" if piece.sign is _Sign.END else repr(piece.text)
            raise self._error(piece, f"expected {sign.value}, found {shown}")
        self._next += 1
        return piece

    def _error(self, piece: _Piece, problem: str) -> GrammarError:
        return GrammarError(Fault.INVALID, problem, _place(self._source, piece.offset))


def _grouped(item: list[str], repetition: str) -> list[str]:
    """An item in parentheses, with what repeats it."""
    inner = item[1:-1] if item[0] == "(" else item
    return ["(", *inner, ")" + repetition]


def _lexed(source: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    offset = 0
    while offset < len(source):
        found = _LEXER.match(source, offset)
        if found is None:
            raise GrammarError(
                Fault.INVALID, f"unexpected {source[offset : offset + 10]!r}", _place(source, offset)
            )
        assert found.lastgroup is not None
        sign = _Sign[found.lastgroup]
        if sign is not _Sign.SPACE:
            pieces.append(_Piece(sign, found[0], offset))
        offset = found.end()
    pieces.append(_Piece(_Sign.END, "", len(source)))
    return pieces


def _place(source: str, offset: int) -> str:
    line = source.count("\n", 0, offset) + 1
    column = offset - source.rfind("\n", 0, offset)
    return f"line {line}, column {column}"
