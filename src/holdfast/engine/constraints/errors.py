"""Why a grammar cannot be used, and where in it the reason lies."""

from __future__ import annotations

from enum import Enum

__all__ = ["Fault", "GrammarError"]


class Fault(Enum):
    """The kind of a fault. The first four are the request's fault, the last two are not."""

    INVALID = "invalid"
    """Not a grammar: syntax, a wrong value, a reference to nothing, or no text matches it."""
    UNSUPPORTED = "unsupported"
    """A grammar with a feature that cannot be enforced."""
    TOO_LARGE = "too_large"
    """Over a limit of size, depth or complexity."""
    TOO_SLOW = "too_slow"
    """Compilation took longer than its time limit."""
    BUSY = "busy"
    """Too many grammars wait for compilation; try again."""
    UNAVAILABLE = "unavailable"
    """This server cannot constrain output: llguidance is missing or the tokenizer is of an unknown kind."""

    @property
    def of_request(self) -> bool:
        """Whether sending the same request again gives the same error."""
        return self not in (Fault.BUSY, Fault.UNAVAILABLE)


class GrammarError(ValueError):
    """A grammar that cannot be used.

    `place` is a JSON pointer in schemas and structural tags, `line L, column C` in grammars written as text,
    and empty where the whole grammar is meant or the place is unknown.
    """

    def __init__(self, fault: Fault, problem: str, place: str = "") -> None:
        super().__init__(f"at {place}: {problem}" if place else problem)
        self.fault = fault
        self.problem = problem
        self.place = place

    def below(self, prefix: str) -> GrammarError:
        """The same error of a schema that lies at `prefix` of a larger document."""
        return GrammarError(self.fault, self.problem, prefix + self.place)

    def of_field(self, field: str) -> str:
        """The message for a client that sent the grammar in `field`."""
        return f"{field}: {self}"
