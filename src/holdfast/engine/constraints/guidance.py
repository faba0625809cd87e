"""Compilation and matching on llguidance.

`GuidanceBuilder` compiles grammars for one vocabulary; it is called in threads, and llguidance releases the
interpreter lock. A matcher is a copy of the compiled prototype, which takes microseconds. `ParallelMatchers`
takes the tokens and fills the masks of many turns at once, in llguidance's threads.

Limits are llguidance's fuel, which bounds work rather than time: building a lexer, one mask, and the size of
the grammar. A grammar that runs out of fuel while it compiles is an error of the request; one that runs out
later fails its turn.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

from holdfast.engine.constraints import schema
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Form, Grammar
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.matcher import Fill, Matcher
from holdfast.engine.constraints.vocabulary import Vocabulary, available, library

__all__ = ["GuidanceBuilder", "GuidanceCompiled", "GuidanceMatcher", "ParallelMatchers"]

GRAMMAR_SYMBOLS_MAX = 100_000
LEXER_FUEL_MAX = 400_000
MASK_LEXER_FUEL_MAX = 40_000
MASK_ITEMS_MAX = 10_000
LOCATE_SECONDS_MAX = 1.0
PROBED_TOKENS = 4
EMBEDDED_MAX = 128
"""Schemas in a grammar that are looked at for an error."""

_BASE_BYTES = 64 << 10
_BYTES_PER_SOURCE_BYTE = 80
"""Memory of a compiled grammar as measured: 130 KB for a schema of 0.9 KB, 1.3 MB for one of 16 KB."""

_TOO_LARGE = re.compile(r"too (big|large|many|complex)|limit|max is", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"unimplemented|not supported|unknown format", re.IGNORECASE)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_SOURCE = re.compile(r"^(?:parser|lexer) error: ", re.IGNORECASE)
_ADVICE = re.compile(r"; (?:following|either|consider|try)|\. Enable")
"""What the library suggests to its caller, who is not the client."""
_EMBEDDED = re.compile(r"%json\s+(?={)")
_CARET = re.compile(r"regex parse error:\n    [^\n]*\n    ( *)\^")
"""Where a regular expression of one line is wrong."""


class LibraryMatcher(Protocol):
    """The part of llguidance's LLMatcher that is used."""

    def deep_copy(self) -> LibraryMatcher:
        """An independent copy."""

    def is_error(self) -> bool:
        """Whether the matcher has failed."""

    def get_error(self) -> str:
        """Why it has failed."""

    def is_accepting(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""

    def is_stopped(self) -> bool:
        """Whether no text may follow."""

    def rollback(self, num_tokens: int) -> bool:
        """Take back tokens."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Accept tokens up to the first refused one; returns how many."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many tokens would be taken."""

    def compute_ff_tokens(self) -> list[int]:
        """The tokens that must follow."""

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        """Write the mask of the next token."""


class GuidanceBuilder:
    """Compiles grammars for one vocabulary. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._library = library()
        self._limits = self._library.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL_MAX,
            step_lexer_fuel=MASK_LEXER_FUEL_MAX,
            step_max_items=MASK_ITEMS_MAX,
            max_grammar_size=GRAMMAR_SYMBOLS_MAX,
            verbose_errors=False,
        )

    @property
    def identity(self) -> str:
        """The vocabulary that grammars are compiled for."""
        return self.vocabulary.identity

    def compile(self, grammar: Grammar) -> GuidanceCompiled:
        """Compile; raises `GrammarError`. Takes from a millisecond to some tenths of a second."""
        matcher = self._matcher(grammar.kind.form, grammar.source)
        if matcher.is_error():
            raise self._error(grammar, matcher.get_error())
        # The first mask is computed here, off the loop. It also tells whether any text matches.
        scratch = MaskRows.allocated(1, self.vocabulary.size)
        matcher.unsafe_compute_mask_ptr(scratch.address, scratch.row_bytes)
        if matcher.is_error():
            raise self._error(grammar, matcher.get_error())
        for token in scratch.allowed(0)[:PROBED_TOKENS]:
            self._probe(grammar, matcher.deep_copy(), token)
        return GuidanceCompiled(matcher, self.vocabulary, _size_of(grammar))

    def _probe(self, grammar: Grammar, matcher: LibraryMatcher, token: int) -> None:
        """Raise for a grammar that exceeds a limit with its first token, which its turn would fail by."""
        if token not in self.vocabulary.end_tokens:
            matcher.try_consume_tokens([token])
            if matcher.is_error():
                raise self._error(grammar, matcher.get_error())

    def _matcher(self, form: Form, source: str) -> LibraryMatcher:
        made: LibraryMatcher = self._library.LLMatcher(
            self.vocabulary.tokenizer, self._text_of(form, source), log_level=0, limits=self._limits
        )
        return made

    def _text_of(self, form: Form, source: str) -> str:
        """A source in the library's own format."""
        if form is Form.SCHEMA:
            return f'{{"grammars": [{{"json_schema": {source}}}]}}'
        package = self._library.LLMatcher
        made = package.grammar_from_regex(source) if form is Form.REGEX else package.grammar_from_lark(source)
        return str(made)

    def _error(self, grammar: Grammar, message: str) -> GrammarError:
        """The library's message as an error with its kind and place."""
        problem, place = _problem_of(message), ""
        if "NoExtension" in message:
            return GrammarError(Fault.INVALID, "no text matches the grammar")
        if _TOO_LARGE.search(problem):
            return GrammarError(Fault.TOO_LARGE, f"too complex: {problem}")
        if grammar.kind.form is Form.SCHEMA:
            place = self._locate(grammar.source, message)
        elif grammar.kind.form is Form.LARK and (found := _PLACE.match(message)):
            place = self._locate_embedded(grammar.source) or f"line {found[1]}, column {found[2]}"
        elif found := _CARET.search(message):
            place = f"line 1, column {len(found[1]) + 1}"
        fault = Fault.UNSUPPORTED if _UNSUPPORTED.search(problem) else Fault.INVALID
        return GrammarError(fault, problem, place)

    def _locate(self, source: str, message: str) -> str:
        """Where in a schema an error is, as far as that is found in a short time."""
        deadline = time.monotonic() + LOCATE_SECONDS_MAX

        def error_of(part: str) -> str:
            return "" if time.monotonic() > deadline else self._matcher(Form.SCHEMA, part).get_error()

        return schema.locate(source, message, error_of)

    def _locate_embedded(self, source: str) -> str:
        """Where in a grammar's JSON schemas an error is; empty if they are fine by themselves."""
        for number, embedded in enumerate(_embedded_schemas(source), start=1):
            message = self._matcher(Form.SCHEMA, embedded).get_error()
            if message:
                return f"schema {number} of the grammar{self._locate(embedded, message)}"
        return ""


def _embedded_schemas(source: str) -> Iterator[str]:
    """The JSON schemas in a Lark grammar, in order."""
    decoder = json.JSONDecoder()
    for found in islice(_EMBEDDED.finditer(source), EMBEDDED_MAX):
        try:
            _, end = decoder.raw_decode(source, found.end())
        except (ValueError, RecursionError):
            continue
        yield source[found.end() : end]


def _problem_of(message: str) -> str:
    """The sentence of a library's message, without its place, excerpt and lists."""
    problem = _SOURCE.sub("", _PLACE.sub("", message, count=1), count=1)
    explained = re.search(r"^error: (.+)$", problem, re.MULTILINE)
    if problem.startswith(("regex parse error", "invalid regex")) and explained:
        return f"invalid regular expression: {explained[1]}"
    return _ADVICE.split(problem.partition("\n")[0])[0].strip() or "not a grammar"


def _refusal_of(token: int) -> str:
    return f"the grammar does not allow token {token}"


def _size_of(grammar: Grammar) -> int:
    return _BASE_BYTES + _BYTES_PER_SOURCE_BYTE * len(grammar.source)


class GuidanceCompiled:
    """A prototype that matchers are copied from; it never advances, so its memory does not grow."""

    __slots__ = ("_prototype", "_vocabulary", "size_bytes")

    def __init__(self, prototype: LibraryMatcher, vocabulary: Vocabulary, size_bytes: int) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self.size_bytes = size_bytes

    def matcher(self, tokens: Sequence[int] = ()) -> GuidanceMatcher:
        made = GuidanceMatcher(self._prototype.deep_copy(), self._vocabulary)
        if tokens:
            made.accept(tokens)
        return made


class GuidanceMatcher:
    """One turn's position. llguidance never sees end-of-turn tokens: they are counted here."""

    __slots__ = ("_ended", "_ends", "_refusal", "inner", "vocabulary")

    def __init__(self, inner: LibraryMatcher, vocabulary: Vocabulary) -> None:
        self.inner = inner
        self.vocabulary = vocabulary
        self._ends = vocabulary.end_tokens
        self._ended = False
        self._refusal = ""

    @property
    def accepting(self) -> bool:
        return self._ended or (not self.failed and self.inner.is_accepting())

    @property
    def complete(self) -> bool:
        return self._ended or (not self.failed and self.inner.is_stopped() and self.inner.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether an end-of-turn token was accepted."""
        return self._ended

    @property
    def failed(self) -> bool:
        return bool(self._refusal) or self.inner.is_error()

    @property
    def why(self) -> str:
        if self._refusal or not self.inner.is_error():
            return self._refusal
        return f"the grammar is too complex: {_problem_of(self.inner.get_error())}"

    def accept(self, tokens: Sequence[int]) -> bool:
        if self.failed:
            return False
        if self._ended:
            return self._refuse(tokens, 0)
        text = self.before_end(tokens)
        count = self.inner.try_consume_tokens(text)
        if count == len(text) < len(tokens) and tokens[count] in self._ends and self.inner.is_accepting():
            self._ended = True
            count += 1
        return self._refuse(tokens, count)

    def takes_directly(self, token: int) -> bool:
        """Whether to pass this token to the library: not an end-of-turn token, and the turn continues."""
        within = 0 <= token < self.vocabulary.size and token not in self._ends
        return within and not self._ended and not self._refusal

    def not_taken(self, token: int) -> None:
        """The library did not take this token of the turn: it refused it, which stops it, or had failed."""
        if "doesn't satisfy the grammar" in self.inner.get_error():
            self._refusal = _refusal_of(token)

    def _refuse(self, tokens: Sequence[int], count: int) -> bool:
        """Fail if not all tokens could be taken; whether all is well."""
        if count < len(tokens):
            self._refusal = _refusal_of(tokens[count])
        return not self.failed

    def validate(self, tokens: Sequence[int]) -> int:
        if self._ended or self.failed:
            return 0
        text = self.before_end(tokens)
        whole = len(text) < len(tokens) and tokens[len(text)] in self._ends
        if not text:
            return int(whole and self.inner.is_accepting())
        return self.inner.validate_tokens([*text, tokens[len(text)]] if whole else text)

    def rollback(self, count: int) -> None:
        assert not self.failed, "a failed matcher is rebuilt, not rolled back"
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self.inner.rollback(count):
            self._refusal = f"{count} tokens cannot be taken back"

    def forced(self) -> list[int]:
        return [] if self._ended or self.failed else self.inner.compute_ff_tokens()

    def fill(self, rows: MaskRows, row: int) -> None:
        if self._ended or self._refusal:
            rows.clear(row)
            return
        self.inner.unsafe_compute_mask_ptr(rows.address_of(row), rows.row_bytes)
        self.correct(rows, row)

    def before_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to an end-of-turn token, or one outside of the vocabulary."""
        size, ends = self.vocabulary.size, self._ends
        return list(takewhile(lambda token: 0 <= token < size and token not in ends, tokens))

    def correct(self, rows: MaskRows, row: int) -> None:
        """Remove tokens from the library's mask that must not be allowed."""
        if self.inner.is_error():
            rows.clear(row)
        elif self.vocabulary.text_ends and not self.inner.is_accepting():
            rows.forbid(row, self.vocabulary.text_ends)


class ParallelMatchers:
    """The matchers of a step: tokens and masks of several in parallel, without the interpreter lock."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` as llguidance chooses if left out: four fifths of the cores, at most 32.

        Where llguidance is missing there are only matchers of other kinds.
        """
        self._executor: Any = library().LLExecutor(threads) if available() else None

    def accept(self, tokens: Sequence[tuple[Matcher, int]]) -> None:
        """Advance each matcher by one token, which its mask allows. A matcher may occur only once."""
        several: list[tuple[GuidanceMatcher, int]] = []
        for matcher, token in tokens:
            if isinstance(matcher, GuidanceMatcher) and matcher.takes_directly(token):
                several.append((matcher, token))
            else:
                matcher.accept((token,))
        if several:
            results = self._executor.consume_token_par([(each.inner, token) for each, token in several])
            for (matcher, token), taken in zip(several, results, strict=True):
                if not taken:
                    matcher.not_taken(token)

    def fill(self, fills: Sequence[Fill], rows: MaskRows) -> None:
        """Fill each request's row, and one more for each draft.

        The mask after a draft that the grammar refuses, and after an end-of-turn token, is zero: cut drafts
        with `validate` before. A matcher may be in one request only.
        """
        plain: list[tuple[LibraryMatcher, int]] = []
        drafted: list[tuple[LibraryMatcher, int, list[int]]] = []
        written: list[Fill] = []
        for each in fills:
            for offset in range(len(each.drafts)):
                rows.clear(each.row + 1 + offset)
            matcher = each.matcher
            if not isinstance(matcher, GuidanceMatcher):
                _fill_one_by_one(each, rows)
            elif matcher.ended or matcher.failed:
                rows.clear(each.row)
            elif each.drafts and matcher.vocabulary.text_ends:
                _fill_one_by_one(each, rows)  # Each mask has to be corrected where the matcher stands.
            elif each.drafts:
                drafted.append((matcher.inner, each.row, matcher.before_end(each.drafts)))
                written.append(each)
            else:
                plain.append((matcher.inner, each.row))
                written.append(each)
        if len(plain) == 1 and not drafted:
            only, row = plain[0]
            only.unsafe_compute_mask_ptr(rows.address_of(row), rows.row_bytes)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, rows.address, rows.row_bytes, rows.rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, rows.address, rows.row_bytes, rows.rows
            )
        for each in written:
            assert isinstance(each.matcher, GuidanceMatcher)
            each.matcher.correct(rows, each.row)


def _fill_one_by_one(fill: Fill, rows: MaskRows) -> None:
    """Masks of a matcher without support for drafts: accept them one at a time, then roll back."""
    valid = fill.matcher.validate(fill.drafts)
    fill.matcher.fill(rows, fill.row)
    for offset, draft in enumerate(fill.drafts[:valid]):
        fill.matcher.accept([draft])
        fill.matcher.fill(rows, fill.row + 1 + offset)
    fill.matcher.rollback(valid)
