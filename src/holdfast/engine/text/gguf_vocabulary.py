"""A tokenizer from the metadata of a GGUF file.

Two kinds are supported. Byte-level BPE (`gpt2`): files have the vocabulary, the merges and the name of a
pre-tokenizer; its splitting rules are here. SentencePiece (`llama`): merges are derived from the scores.
Other kinds are rejected by name. Used by `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from holdfast.models.fields import ConfigurationError, Fields

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + r"|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS
)
"""Words that end where upper case begins anew."""
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_SPACE = "\u2581"
"""The space character of SentencePiece vocabularies."""


class TokenKind(IntEnum):
    """Values of GGUF's token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Splitting:
    """A pre-tokenizer's split, whether it normalises (NFC), and whether whole words skip the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    compose: bool = False
    ignore_merges: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_regex(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return build


_LLAMA3 = _Splitting(_by_regex(_WORDS + r"|\p{N}{1,3}" + _REST), ignore_merges=True)
_GPT4O = _Splitting(_by_regex(_CASED_WORDS + r"|\p{N}{1,3}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*")))
_QWEN2 = _Splitting(_by_regex(_WORDS + r"|\p{N}" + _REST), compose=True)

_SPLITTINGS = {
    "gpt-2": _Splitting(_gpt2),
    "gpt2": _Splitting(_gpt2),
    "default": _Splitting(_gpt2),
    "smollm": _Splitting(_single_digits),
    "starcoder": _Splitting(_single_digits),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-4o": _GPT4O,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_tokenizer(metadata: Fields) -> Tokenizer:
    """The tokenizer that a file's metadata describes."""
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigurationError(f"GGUF tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    kinds = metadata.integers("tokenizer.ggml.token_type") or (TokenKind.NORMAL,) * len(tokens)
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _pieces(metadata, tokens, kinds)
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.CONTROL]
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    bos = metadata.optional_integer("tokenizer.ggml.bos_token_id", least=0)
    if metadata.flag("tokenizer.ggml.add_bos_token", kind == "llama") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0",
            pair=f"{tokens[bos]}:0 $A:0 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _byte_level(metadata: Fields, tokens: tuple[str, ...]) -> Tokenizer:
    """Byte-level BPE with the file's pre-tokenizer."""
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in _SPLITTINGS:
        raise ConfigurationError(
            f"GGUF pre-tokenizer {name!r} is not supported; supported are {', '.join(sorted(_SPLITTINGS))}"
        )
    splitting = _SPLITTINGS[name]
    merges = [_pair(merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=splitting.ignore_merges)
    )
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(metadata: Fields, tokens: tuple[str, ...], kinds: tuple[int, ...]) -> Tokenizer:
    """SentencePiece: unknown characters fall back to bytes, spaces are replaced."""
    scores = metadata.numbers("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ConfigurationError("the GGUF tokenizer must have one score per token")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    joinable = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == TokenKind.NORMAL
    }
    unknown = metadata.optional_integer("tokenizer.ggml.unknown_token_id", least=0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(joinable, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every merge of two pieces into a third, by descending score of the result."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _pair(merge: str) -> tuple[str, str]:
    """The two halves of a merge, separated by a space."""
    left, _, right = merge.partition(" ")
    return left, right
