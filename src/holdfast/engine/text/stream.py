"""The output stream of one turn: detokenisation and stops.

Stops are matched here, before a step is settled: to the core a stop is a finish, not a cut. Text is held back
until its characters are complete and no stop string can begin in it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stops import StopMatcher
from holdfast.engine.text.tokenizer import Tokenizer

log = logging.getLogger("holdfast.stream")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TurnStream:
    """The growing text of one turn: `tokens` and `text` so far, `finish` once it has ended.

    The turn's input begins at `input_first` of its `prompt_tokens`. `fingerprint` is a digest of the client's
    request, for idempotent retries.
    """

    __slots__ = (
        "_detokenizer",
        "_lengths",
        "_matcher",
        "_prompt",
        "_read_prompt",
        "constraint",
        "ends",
        "fingerprint",
        "finish",
        "input_first",
        "logprobs",
        "pieces",
        "prompt_logprobs",
        "sampling",
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
        fingerprint: str | None = None,
        constraint: TurnConstraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self._read_prompt = read_prompt
        self._prompt: list[int] | None = None
        self.input_first = input_first
        self._lengths: list[int] = []
        self.finish: str | None = None
        self.fingerprint = fingerprint
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopMatcher(sampling.stop_strings, keep_stop=sampling.keep_stop)
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(end_tokens)
        self.ends = frozenset(ends)

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
        return self.text[: self._lengths[count - 1] if count else 0]

    def tokens_of(self, characters: int) -> int:
        """How many tokens lie completely within the first `characters`, without trailing silent ones."""
        count = bisect_right(self._lengths, characters)
        while count and self._lengths[count - 1] == (self._lengths[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def push(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> list[int]:
        """Take sampled tokens up to one that ends the turn; returns the tokens taken."""
        taken: list[int] = []
        for index, token in enumerate(tokens):
            if self.finish is not None:
                break
            taken.append(token)
            self.tokens.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[index])
            self._say(token)
        if self.constraint is not None:
            self.constraint.accept(taken)
        return taken

    def _say(self, token: int) -> None:
        may_stop = len(self.tokens) > self.sampling.min_tokens
        # Under a constraint an end token comes before `min_tokens` only where nothing else may come.
        if token in self.ends and (may_stop or self.constraint is not None):
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

    def end(self) -> None:
        """Flush held-back text at the end of the turn.

        Never raises: the turn has ended, and keeps its tokens even if their text fails.
        """
        try:
            rest = self._detokenizer.finish()
        except Exception:
            log.exception("detokenisation of a turn's last tokens failed")
            rest = ""
        self._emit(self._matcher.push(rest).text)
        self._emit(self._matcher.finish())

    def _emit(self, text: str) -> None:
        if text:
            self.pieces.append(text)
