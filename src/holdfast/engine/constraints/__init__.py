"""Constraints: grammars that a turn's text must match.

A `Grammar` is the constraint of a request; the journal stores it. A `Compiler` turns it into a `Compiled`
form in a thread and caches it. A `Matcher` is the position of one turn in it: it fills token masks, names
forced tokens, and is rebuilt by replaying the turn's tokens. `guidance` implements the last two on
llguidance, which is imported only when the first `Vocabulary` is built.
"""

from holdfast.engine.constraints.compiler import Compilation, Compiler, CompilerLimits, State
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind, Whitespace
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.matcher import Compiled, Fill, Matcher

__all__ = [
    "Compilation",
    "Compiled",
    "Compiler",
    "CompilerLimits",
    "Fault",
    "Fill",
    "Grammar",
    "GrammarError",
    "Kind",
    "MaskRows",
    "Matcher",
    "State",
    "Whitespace",
]
