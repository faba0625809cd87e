"""What one turn says: tokens become text, and stop where they must.

Stops are matched here, on the engine's side, before a step is settled: to the core a stop is a finish, not a
cut. Text is held back until its bytes are whole and no stop string can begin in it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stops import StopMatcher
from holdfast.engine.text.tokenizer import Tokenizer

log = logging.getLogger("holdfast.stream")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and of the most likely ones in its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TurnStream:
    """The text of one turn as it grows. `tokens` and `text` are what was said, `finish` why it ended.

    The turn's input begins at `input_first` of its `prompt_tokens`. `fingerprint` is what its client's
    request adds up to, where it may be asked for again.
    """

    __slots__ = (
        "_detokenizer",
        "_lengths",
        "_matcher",
        "_prompt",
        "_read_prompt",
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
    ) -> None:
        self.sampling = sampling
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
        """The history and the turn's input; read when somebody asks: most turns never do."""
        if self._prompt is None:
            self._prompt = self._read_prompt()
        return self._prompt

    @property
    def text(self) -> str:
        """All text that may be shown."""
        return "".join(self.pieces)

    def text_of(self, count: int) -> str:
        """The text of the first `count` tokens, as far as it may be shown."""
        if count >= len(self.tokens):
            return self.text
        return self.text[: self._lengths[count - 1] if count else 0]

    def tokens_of(self, characters: int) -> int:
        """How many tokens lie wholly inside the first `characters` of the text, silent last ones left out."""
        count = bisect_right(self._lengths, characters)
        while count and self._lengths[count - 1] == (self._lengths[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def push(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> list[int]:
        """Take sampled tokens up to one that ends the turn; returns those that count."""
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

    def _say(self, token: int) -> None:
        may_stop = len(self.tokens) > self.sampling.min_tokens
        if token in self.ends and may_stop:
            self.finish = "stop"
            # An end token is a mark, not text, unless the caller asked to see such marks.
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
        """Nothing more will come: show what was held back.

        Never raises: the turn is over, and stands with its tokens, whatever can be made of the last of them.
        """
        try:
            rest = self._detokenizer.finish()
        except Exception:
            log.exception("the last tokens of a turn cannot be made text")
            rest = ""
        self._emit(self._matcher.push(rest).text)
        self._emit(self._matcher.finish())

    def _emit(self, text: str) -> None:
        if text:
            self.pieces.append(text)
