"""Pieces of llguidance's dialect of Lark: quoted text, regular expressions, references to control tokens.

Control tokens cannot be written as text: their names in a literal are ordinary characters. Where a grammar
means the token it refers to its id, `<[id]>`, because names differ between tokenizers and not all of them can
be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

__all__ = ["ANY_TEXT", "literal", "pattern", "split_at_tokens", "terminal_choice", "with_token_ids"]

ANY_TEXT = r"/(.|\n)*/"

_TOKEN_OR_SKIPPED = re.compile(
    r"""
    "(?:\\.|[^"\\])*"               # a string
    | /(?![/*])(?:\\.|[^/\\\n])+/   # a regular expression
    | //[^\n]* | \#[^\n]*           # a comment
    | (?P<token> <[^<>\s\[][^<>\s]*> )
    """,
    re.VERBOSE,
)


def literal(text: str) -> str:
    """A text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def pattern(regex: str) -> str:
    """A regular expression between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def terminal_choice(texts: list[str]) -> str:
    """A grammar of exactly these texts."""
    return "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in texts) + "\n"


def with_token_ids(source: str, control_tokens: Mapping[str, int]) -> str:
    """The grammar with ids in place of the names of control tokens; other names stay as they are."""

    def replaced(found: re.Match[str]) -> str:
        name = found["token"]
        return f"<[{control_tokens[name]}]>" if name in control_tokens else found[0]

    return _TOKEN_OR_SKIPPED.sub(replaced, source)


def split_at_tokens(text: str, control_tokens: Mapping[str, int]) -> list[str]:
    """Grammar symbols that spell a text: strings, and references where the name of a control token stands."""
    if not text:
        return []
    if not control_tokens:
        return [literal(text)]
    names = "|".join(re.escape(name) for name in sorted(control_tokens, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return [
        f"<[{control_tokens[part]}]>" if index % 2 else literal(part)
        for index, part in enumerate(parts)
        if part
    ]
