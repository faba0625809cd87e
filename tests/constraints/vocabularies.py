"""Small tokenizers of every kind that the engine opens: byte-level and pieces, of JSON and of GGUF."""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from holdfast.engine.text.gguf_vocabulary import TokenKind, build_tokenizer
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.fields import Fields

TEXTS = [
    '{"name": "Hello world", "age": 12, "tags": ["red", "green"], "ok": true, "none": null}',
    '{"city": "Zürich", "x": -1.25, "items": [{"id": 1}, {"id": 2}], "date": "2026-11-17"}',
    "<function=get_weather>The quick brown fox</function> It's 1234 o'clock!\n\n",
    "日本語テキスト 😀 é ünïcödé",
]
MARKS = ["<s>", "<|end|>", "<|call|>"]
END = 1
PADDING = 13
"""Ids of the model beyond the tokenizer."""

KINDS = ("bytes", "metaspace", "gguf bytes", "gguf pieces")


def small_tokenizer(kind: str = "bytes") -> Tokenizer:
    """A tokenizer with a few hundred tokens, special tokens, and added tokens that are not special."""
    encoder = _MAKERS[kind]()
    encoder.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("plain added", normalized=False)])
    return Tokenizer(encoder, template=None, names={}, eos_tokens=(END,))


def _bytes() -> Encoder:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    encoder.train_from_iterator(TEXTS * 3, trainer)
    return encoder


_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = [
    *(
        "\u2581",
        "a",
        "b",
        "c",
        "d",
        "e",
        "g",
        "h",
        "l",
        "m",
        "n",
        "o",
        "r",
        "t",
        "w",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
    ),
    *(
        "\u2581a",
        "\u2581w",
        "he",
        "ll",
        "hello",
        "\u2581h",
        "\u2581he",
        "\u2581hello",
        "or",
        "ld",
        "world",
        "\u2581world",
    ),
    *('{"', '":', "1", "2", "3", "12", "na", "me", "name", "\u2581\u2581"),
]


def _metaspace() -> Encoder:
    vocabulary = {token: number for number, token in enumerate([*MARKS, *_BYTE_PIECES, *_PIECES])}
    encoder = Encoder(models.BPE(vocabulary, [("h", "e"), ("l", "l")], unk_token="<s>", byte_fallback=True))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never")
    encoder.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="never")
    encoder.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return encoder


def _from_metadata(model: str) -> Encoder:
    if model == "llama":
        tokens = [*MARKS, *_BYTE_PIECES, *_PIECES]
        kinds = [TokenKind.CONTROL] * 3 + [TokenKind.BYTE] * 256 + [TokenKind.NORMAL] * len(_PIECES)
        extra: dict[str, object] = {"tokenizer.ggml.scores": [float(len(token)) for token in tokens]}
    else:
        written = _bytes()
        tokens = [str(written.id_to_token(number)) for number in range(written.get_vocab_size())]
        kinds = [TokenKind.CONTROL] * 3 + [TokenKind.NORMAL] * (len(tokens) - 3)
        extra = {"tokenizer.ggml.merges": _merges(written), "tokenizer.ggml.pre": "gpt-2"}
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        **extra,
    }
    return build_tokenizer(Fields(metadata, "small.gguf"))


def _merges(encoder: Encoder) -> list[str]:
    merges = json.loads(encoder.to_str())["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]


_MAKERS = {
    "bytes": _bytes,
    "metaspace": _metaspace,
    "gguf bytes": lambda: _from_metadata("gpt2"),
    "gguf pieces": lambda: _from_metadata("llama"),
}
