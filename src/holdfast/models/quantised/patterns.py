"""Regular expressions of checkpoints, compiled only where matching them takes bounded time.

`re` backtracks: a repetition inside of a repeated group takes exponential time on a name that does not match.
Expressions that name modules need none, so those that have one are rejected.
"""

from __future__ import annotations

import re

__all__ = ["compile_bounded"]

LENGTH_MAX = 1000
REPETITIONS_MAX = 6
"""Most `*`, `+` and `{…}` of an expression: each multiplies the time by the length of a name."""

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)

_COMMENT = re.compile(r"\(\?(?:#|[A-Za-z-]*x)")
"""A comment, or the flag that allows them: what follows could not be told from the expression."""


def compile_bounded(pattern: str) -> re.Pattern[str]:
    """The expression, matched from the start of a name; raises ValueError or `re.error`."""
    if len(pattern) > LENGTH_MAX:
        raise ValueError(f"it has {len(pattern)} characters, at most {LENGTH_MAX} are allowed")
    if _COMMENT.search(pattern):
        raise ValueError("comments are not allowed")
    compiled = re.compile(f"^(?:{pattern})")
    repetitions, groups, closed = 0, [False], False
    for token in _TOKEN.findall(pattern):
        if token in ("*", "+") or (token[0] == "{" and len(token) > 2):
            if closed:
                raise ValueError("a repeated group has a repetition or alternatives in it")
            repetitions += 1
            groups[-1] = True
        elif token == "|":
            groups[-1] = True
        elif token == "(":
            groups.append(False)
        closed = token == ")" and groups.pop()
        groups[-1] |= closed
    if repetitions > REPETITIONS_MAX:
        raise ValueError(f"it has {repetitions} repetitions, at most {REPETITIONS_MAX} are allowed")
    return compiled
