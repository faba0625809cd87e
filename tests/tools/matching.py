"""llguidance's matcher on a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import llguidance

from tests.tools.tokens import END, byte_tokenizer


@lru_cache
def _library_tokenizer(markers: tuple[str, ...]) -> object:
    tokenizer = byte_tokenizer(markers)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return llguidance.LLTokenizer(str(path), eos_token=tokenizer.token_to_id(END))


class Checker:
    """Says whether a grammar accepts texts; `markers` are tokens."""

    def __init__(self, grammar: str, markers: Sequence[str]) -> None:
        self._tokenizer = byte_tokenizer(tuple(markers))
        library = _library_tokenizer(tuple(markers))
        source = llguidance.LLMatcher.grammar_from_lark(grammar)
        problem = llguidance.LLMatcher.validate_grammar(source, library)
        assert not problem, f"{problem}\n{grammar}"
        self._matcher = llguidance.LLMatcher(library, source)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def _read(self, text: str) -> tuple[bool, bool]:
        matcher = self._matcher.deep_copy()
        tokens = self._tokenizer.encode(text).ids
        whole = matcher.try_consume_tokens(tokens) == len(tokens)
        return whole, whole and matcher.is_accepting()

    def accepts(self, text: str) -> bool:
        """Whether the answer may be this text."""
        return self._read(text)[1]

    def begins(self, text: str) -> bool:
        """Whether an answer may begin with this text."""
        return self._read(text)[0]

    def sample(self, random: Random, most: int) -> str | None:
        """A random answer of at most so many tokens; None if it did not come to an end.

        It ends as soon as it may, and so do strings, half of the time: most are short.
        """
        matcher = self._matcher.deep_copy()
        end = self._tokenizer.token_to_id(END)
        quotes = [self._tokenizer.token_to_id(each) for each in ('"', "'", "\u010a")]
        tokens: list[int] = []
        while len(tokens) < most:
            if matcher.is_accepting() and (matcher.is_stopped() or random.random() < 0.5):
                return self._tokenizer.decode(tokens, skip_special_tokens=False)
            bits = matcher.compute_bitmask()
            allowed = [
                token
                for token in range(self._tokenizer.get_vocab_size())
                if bits[token // 8] >> (token % 8) & 1 and token != end
            ]
            preferred = [token for token in allowed if token in quotes] if random.random() < 0.5 else []
            token = random.choice(preferred or allowed)
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)
        return None
