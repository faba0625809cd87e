"""The model's vocabulary as llguidance sees it: the bytes of every token, control tokens, and end-of-turn
tokens.

llguidance reads the tokenizer's own JSON, so that forced text is spelled by the same rules as prompts. Two
things are changed on the way. Control tokens get names that cannot be written: otherwise a schema with the
constant `<|im_end|>` would be spelled with the token, which is not text and which the matcher then refuses.
Metaspace decoders, which llguidance does not know, are written as the equivalent sequence.

Building takes about 1 s of CPU time for 49,000 tokens and holds the interpreter lock: build it at startup,
before turns run. Used by `guidance`; `control_tokens` alone by those who read requests.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.masks import words_for
from holdfast.engine.text.tokenizer import Tokenizer

__all__ = ["LibraryTokenizer", "Vocabulary", "available", "control_tokens", "library"]

PADDING_MAX = 1 << 16
"""Logits beyond the tokenizer's tokens: llguidance allocates for each; a damaged model claims billions."""

_PRIVATE_FIRST, _PRIVATE_COUNT = 0xE100, 0x1000
_NONCE_CHARACTERS = 10


class LibraryTokenizer(Protocol):
    """The part of llguidance's LLTokenizer that is used."""

    vocab_size: int

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """The bytes of tokens; of control tokens, their names."""

    def is_special_token(self, token: int) -> bool:
        """Whether a token is not text."""

    def tokenize_str(self, text: str) -> list[int]:
        """The tokens that text is spelled with."""


def available() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


def library() -> Any:
    """llguidance, imported at the first call; raises `GrammarError` where it is not installed."""
    if not available():
        raise GrammarError(Fault.UNAVAILABLE, "constrained output needs the package llguidance")
    return import_module("llguidance")


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that are marks rather than text, by name: special ones, and added ones written `<like this>`."""
    return _controls_of(json.loads(tokenizer.written()))


def _controls_of(document: Mapping[str, Any]) -> dict[str, int]:
    return {token["content"]: token["id"] for token in document["added_tokens"] if _is_control(token)}


class Vocabulary:
    """Token ids up to `size`, the width of the model's logits; ids beyond the tokenizer are never allowed."""

    def __init__(self, tokenizer: Tokenizer, *, size: int, end_tokens: Sequence[int]) -> None:
        """Raises `GrammarError` if llguidance is missing or cannot read this kind of tokenizer."""
        if size < tokenizer.vocabulary_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocabulary_size} tokens, the model {size}")
        if size > tokenizer.vocabulary_size + PADDING_MAX:
            problem = f"the model has {size} logits, its tokenizer {tokenizer.vocabulary_size} tokens"
            raise GrammarError(Fault.UNAVAILABLE, problem)
        if not end_tokens:
            raise GrammarError(
                Fault.UNAVAILABLE, "constrained output needs a model with an end-of-turn token"
            )
        self.size = size
        self.words = words_for(size)
        self.end_tokens = frozenset(end_tokens)
        document = json.loads(tokenizer.written())
        self.control_tokens: Mapping[str, int] = _controls_of(document)
        controls = frozenset(self.control_tokens.values())
        self.text_ends = self.end_tokens - controls
        """End-of-turn tokens that are also text, which llguidance would allow as text."""
        facts = json.dumps([tokenizer.identity(), size, sorted(self.end_tokens)])
        self.identity = hashlib.sha256(facts.encode()).hexdigest()[:32]
        self.tokenizer: LibraryTokenizer = _build(document, size, sorted(self.end_tokens))
        if not all(self.tokenizer.is_special_token(token) for token in controls):
            raise GrammarError(
                Fault.UNAVAILABLE, "llguidance takes control tokens of this tokenizer for text"
            )


def _build(document: dict[str, Any], size: int, end_tokens: list[int]) -> LibraryTokenizer:
    package = library()
    try:
        made: LibraryTokenizer = package.LLTokenizer(_rewritten(document), n_vocab=size, eos_token=end_tokens)
    except (ValueError, RuntimeError) as error:
        problem = f"llguidance cannot read this tokenizer: {_first_line(error)}"
        raise GrammarError(Fault.UNAVAILABLE, problem) from error
    return made


def _rewritten(document: dict[str, Any]) -> str:
    """The tokenizer as JSON, with control tokens that no text can spell. Changes the document."""
    nonce = "".join(chr(_PRIVATE_FIRST + secrets.randbelow(_PRIVATE_COUNT)) for _ in range(_NONCE_CHARACTERS))
    renamed: dict[str, str] = {}
    for token in document["added_tokens"]:
        if _is_control(token):
            renamed[token["content"]] = f"{nonce}{token['id']}{nonce}"
            token.update(content=renamed[token["content"]], special=True)
    model = document["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(text, text): number for text, number in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _joined(pair) not in renamed]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    document.update(post_processor=None, padding=None, truncation=None)
    if (document.get("decoder") or {}).get("type") == "Metaspace":
        document["decoder"] = _pieces_decoder(document["decoder"]["replacement"])
    return json.dumps(document, ensure_ascii=False)


def _joined(pair: str | list[str]) -> str:
    """The result of a merge: older files write its two halves with a space between."""
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def _pieces_decoder(mark: str) -> dict[str, Any]:
    """The replacement of a Metaspace decoder, without the removal of the first token's space."""
    replace = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}


def _is_control(token: Mapping[str, Any]) -> bool:
    text = token["content"]
    return bool(token["special"]) or (len(text) > 2 and text[0] == "<" and text[-1] == ">")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
