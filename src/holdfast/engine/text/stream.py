"""The output stream of one turn: detokenisation, stops, and the parts of its answer.

Stops are matched here, before a step is settled: to the core a stop is a finish, not a cut. Text is held back
until its characters are complete and no stop string can begin in it. Where reasoning and tool calls are read
(`AnswerReader`), `pieces` and `text` are the content without them. The stream feeds the turn's constraint.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.answer_reader import AnswerReader
from holdfast.engine.text.stops import StopMatcher
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.answer import Answer, AnswerSpec
from holdfast.engine.tools.events import Event

log = logging.getLogger("holdfast.stream")

MARKER_TOKENS_MAX = 16
"""How far before the end of an input the marker is looked for that opens the reasoning."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Remainder(NamedTuple):
    """A turn without its reasoning: `input` and `output`; their first `kept` tokens are where they were.

    `dropped` are the numbers of the generated tokens that are gone.
    """

    input: tuple[int, ...]
    output: tuple[int, ...]
    kept: int
    dropped: frozenset[int]

    @property
    def moved(self) -> tuple[int, ...]:
        """The tokens that are elsewhere now: they are computed again."""
        return (*self.input, *self.output)[self.kept :]


class Kept(NamedTuple):
    """Data stored with a turn besides its tokens.

    `fingerprint` is a digest of the client's request, for idempotent retries; `note` is text of the client.
    `grammar` is for the journal; the turn's constraint enforces it. Without `reasoning` the history
    drops the reasoning.
    """

    fingerprint: str | None = None
    grammar: Grammar | None = None
    note: str | None = None
    reasoning: bool = True


NOTHING_KEPT = Kept()


class TurnStream:
    """The growing text of one turn: `tokens` and `text` so far, `finish` once it has ended.

    The turn's input begins at `input_first` of its `prompt_tokens`. `settled_tokens` is the number of tokens
    up to the last place outside a tool call.
    """

    __slots__ = (
        "_detokenizer",
        "_lengths",
        "_matcher",
        "_prompt",
        "_read_prompt",
        "_silent",
        "constraint",
        "ends",
        "fingerprint",
        "finish",
        "grammar",
        "input_first",
        "keeps_reasoning",
        "logprobs",
        "note",
        "pieces",
        "prompt_logprobs",
        "reader",
        "recomputed",
        "sampling",
        "settled_tokens",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: Sampling,
        end_tokens: tuple[int, ...],
        *,
        read_prompt: Callable[[], list[int]] = list,
        input_first: int = 0,
        kept: Kept = NOTHING_KEPT,
        constraint: TurnConstraint | None = None,
        reader: AnswerReader | None = None,
    ) -> None:
        """A `reader` with a thinking budget needs a `constraint`, to force the end of the reasoning."""
        self.fingerprint, self.grammar, self.note, self.keeps_reasoning = kept
        self.recomputed: int | None = None
        """Where the history drops the reasoning: how many tokens the next turn computes again for that."""
        self.sampling = sampling
        self.constraint = constraint
        self.reader = reader
        self.settled_tokens = 0
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self._read_prompt = read_prompt
        self._prompt: list[int] | None = None
        self.input_first = input_first
        self._lengths: list[int] = []
        self.finish: str | None = None
        skips = sampling.skip_special_tokens
        self._silent: frozenset[int] = frozenset()
        """Special tokens that the reader does not get, since it finds its markers among them itself."""
        if reader is not None:
            self._silent = (
                tokenizer.special_tokens if skips and not reader.reads_special_tokens else frozenset()
            )
            skips = False
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
        self._matcher = StopMatcher(sampling.stop_strings, keep_stop=sampling.keep_stop)
        ends = set(sampling.stop_token_ids)
        # After the last token of a grammar nothing else may come.
        if not sampling.ignore_eos or (constraint is not None and constraint.matcher is not None):
            ends.update(end_tokens)
        self.ends = frozenset(ends)
        self._close_spent_reasoning()

    @property
    def prompt_tokens(self) -> list[int]:
        """The history and the turn's input; read lazily, since most turns do not need it."""
        if self._prompt is None:
            self._prompt = self._read_prompt()
        return self._prompt

    @property
    def text(self) -> str:
        """All emitted text."""
        return "".join(self.pieces)

    def text_of(self, count: int) -> str:
        """The emitted text of the first `count` tokens."""
        if count >= len(self.tokens):
            return self.text
        return self.text[: self._characters(count)]

    def _characters(self, count: int) -> int:
        """How many characters of the text the first `count` tokens have."""
        length = self._lengths[count - 1] if count else 0
        return length if self.reader is None else self.reader.content.before(length)

    def tokens_of(self, characters: int) -> int:
        """How many tokens lie completely within the first `characters`, without trailing silent ones.

        Reasoning and tool calls have no characters: a call is within the text that follows it.
        """
        if self.reader is not None:
            characters = self.reader.content.end_of(characters)
        count = bisect_right(self._lengths, characters)
        while count and self._characters(count) == self._characters(count - 1):
            count -= 1
        return count

    @property
    def spec(self) -> AnswerSpec | None:
        """How the answer is read, where it is."""
        return None if self.reader is None else self.reader.spec

    @property
    def events(self) -> list[Event]:
        """The events of the answer so far, where reasoning and tool calls are read."""
        return [] if self.reader is None else self.reader.events

    def answer(self, count: int | None = None) -> Answer:
        """The parts of the answer, or of its first `count` tokens."""
        count = len(self.tokens) if count is None else count
        text = self.text_of(count)
        return Answer(text) if self.reader is None else self.reader.answer(text, count, self._lengths)

    def without_reasoning(self, given: Sequence[int]) -> Remainder | None:
        """What stays of a turn with this input, if its reasoning is to be dropped and can be."""
        reader = self.reader
        if self.keeps_reasoning or reader is None:
            return None
        thought = frozenset(reader.thought(self._lengths))
        if not thought:
            return None
        opened = reader.spec.reasoning_is_open
        left = _last_place(given, reader.start_marker) if opened else len(given)
        if left is None:
            return None
        output = tuple(token for number, token in enumerate(self.tokens) if number not in thought)
        kept = min(thought) if left == len(given) else 0
        if not left + len(output):
            return None
        return Remainder(tuple(given[:left]), output, left + kept, thought)

    def push(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> list[int]:
        """Take sampled tokens up to one that ends the turn; returns the tokens taken.

        Tokens after the one that spends a thinking budget are not taken either: another one is forced there.
        """
        if self.constraint is not None or self.reader is not None:
            return self._push_read(tokens, logprobs)
        taken: list[int] = []
        for index, token in enumerate(tokens):
            if self.finish is not None:
                break
            taken.append(token)
            self.tokens.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[index])
            self._say(token)
        return taken

    def _push_read(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> list[int]:
        """`push` of a turn with a constraint, or whose answer is read."""
        taken: list[int] = []
        for index, token in enumerate(tokens):
            if self.finish is not None:
                break
            taken.append(token)
            self.tokens.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[index])
            if self.constraint is not None:
                self.constraint.accept((token,))
            if self.reader is None:
                self._say(token)
                continue
            self._read(token, self.reader)
            if self._close_spent_reasoning():
                break
        return taken

    def _read(self, token: int, reader: AnswerReader) -> None:
        reasoned = reader.reasons
        may_stop = len(self.tokens) > self.sampling.min_tokens
        if token in self.ends and (may_stop or self._must_stop()):
            self.finish = "stop"
        marker = reader.marker_of(token)
        silent = token in self._silent or (self.finish is not None and self.sampling.skip_special_tokens)
        text = "" if silent and not marker else self._detokenizer.add([token])
        self._lengths.append((self._lengths[-1] if self._lengths else 0) + len(text))
        emitted = self._matcher.push(text.removesuffix(marker), may_stop=may_stop)
        self._emit(reader.feed(emitted.text))
        if emitted.stop is not None:
            self.finish = "stop"
            self._emit(reader.end(cut=False))
        else:
            if marker:
                self._emit(reader.feed(self._matcher.finish()))
                self._emit(reader.mark(token))
            if self.finish is not None:
                self.end()
        reader.count(len(self.tokens) - 1, reasoned, text)
        if reader.settled:
            self.settled_tokens = len(self.tokens)

    def _close_spent_reasoning(self) -> bool:
        """Force the end of the reasoning if its budget is spent."""
        if self.reader is None or self.constraint is None or self.finish is not None:
            return False
        if not self.reader.take_spent():
            return False
        self.constraint.force(self.reader.end_marker)
        return True

    def _must_stop(self) -> bool:
        """Whether nothing may follow by the grammar, whatever `min_tokens` asks for."""
        matcher = None if self.constraint is None else self.constraint.matcher
        return matcher is not None and matcher.complete

    def _say(self, token: int) -> None:
        may_stop = len(self.tokens) > self.sampling.min_tokens
        if token in self.ends and (may_stop or self._must_stop()):
            self.finish = "stop"
            # An end token has no text unless the caller asked for special tokens.
            text = "" if self.sampling.skip_special_tokens else self._detokenizer.add([token])
        else:
            text = self._detokenizer.add([token])
        self._lengths.append((self._lengths[-1] if self._lengths else 0) + len(text))
        emitted = self._matcher.push(text, may_stop=may_stop)
        self._emit(emitted.text)
        if emitted.stop is not None:
            self.finish = "stop"
        elif self.finish is not None:
            self.end()

    def end(self, *, cut: bool = False) -> None:
        """Flush held-back text at the end of the turn. Of one that was `cut` off, half a call is dropped.

        Never raises: the turn has ended, and keeps its tokens even if their text fails.
        """
        try:
            rest = self._detokenizer.finish()
        except Exception:
            log.exception("detokenisation of a turn's last tokens failed")
            rest = ""
        if self.reader is None:
            self._emit(self._matcher.push(rest).text)
            self._emit(self._matcher.finish())
            return
        self._emit(self.reader.feed(self._matcher.push(rest).text))
        self._emit(self.reader.feed(self._matcher.finish()))
        self._emit(self.reader.end(cut=cut))

    def _emit(self, text: str) -> None:
        if text:
            self.pieces.append(text)


def _last_place(given: Sequence[int], marker: Sequence[int]) -> int | None:
    """Where a marker begins for the last time, near the end of an input; None if it is not there."""
    size = len(marker)
    for place in range(len(given) - size, max(-1, len(given) - size - MARKER_TOKENS_MAX), -1):
        if list(given[place : place + size]) == list(marker):
            return place
    return None
