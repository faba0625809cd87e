"""The engine's view of a constraint: a position in a grammar that advances with a turn's tokens.

A matcher belongs to one turn and is never saved: after a retract, a restart or a failed step it is made anew
and fed the turn's tokens (`Compiled.matcher`). `guidance` implements these protocols on llguidance, `toy` in
plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.constraints.masks import MaskRows

__all__ = ["Compiled", "Fill", "Matcher"]


class Matcher(Protocol):
    """The position of one turn in its grammar.

    End-of-turn tokens are no part of the grammar: one is allowed exactly when the matcher accepts, and
    nothing follows it. Control tokens are allowed where the grammar names them and never as text.
    """

    @property
    def accepting(self) -> bool:
        """Whether the turn may end here."""

    @property
    def complete(self) -> bool:
        """Whether the turn must end here: it has ended, or nothing but an end-of-turn token may follow."""

    @property
    def failed(self) -> bool:
        """Whether a token was refused or a limit exceeded. A failed matcher stays failed."""

    @property
    def why(self) -> str:
        """The reason of a failure; empty if there is none."""

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens of the turn. False, and failed, if the grammar refuses one of them."""

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could be accepted one after the other; changes nothing."""

    def rollback(self, count: int) -> None:
        """Take back the last accepted tokens. Not for failed matchers."""

    def forced(self) -> list[int]:
        """The tokens that must follow, spelled as the tokenizer spells them; empty if there is a choice."""

    def fill(self, rows: MaskRows, row: int) -> None:
        """Write the mask of the next token. All bits are zero if the matcher has failed, then or before.

        Where a token is forced, its bit alone is set.
        """


class Compiled(Protocol):
    """A grammar compiled for one vocabulary; read-only."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory, for the cache."""

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning, or after the tokens that a turn already has."""


@dataclass(slots=True)
class Fill:
    """A request for masks: of the next token at `row`, and after each draft at the rows that follow."""

    matcher: Matcher
    row: int
    drafts: Sequence[int] = ()
