"""A text that is far too long is refused before it is encoded; one that may fit is encoded as always."""

from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from holdfast.engine.text.tokenizer import PORTION_CHARACTERS, Tokenizer, TooManyTokens

LONG = "Ġ" * 64


class Counting:
    """An encoder that counts the characters that it is given."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.characters = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.encoder.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


def made() -> tuple[Tokenizer, Counting]:
    """One token a byte, and one for 64 spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ["Ġ" * (1 << power) for power in range(1, 7)]
    vocabulary = {text: number for number, text in enumerate([*letters, *runs])}
    merges = [("Ġ" * (1 << power), "Ġ" * (1 << power)) for power in range(6)]
    encoder = Encoder(models.BPE(vocabulary, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer = Tokenizer(encoder, template=None, names={}, eos_tokens=())
    counting = Counting(encoder)
    tokenizer._encoder = counting  # type: ignore[assignment]
    return tokenizer, counting


def test_what_cannot_fit_is_never_encoded() -> None:
    tokenizer, counting = made()
    assert tokenizer.bytes_per_token == 64
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(" " * 64_001, most=1000)
    assert caught.value.tokens is None and counting.characters == 0


def test_what_is_far_too_long_is_encoded_in_part() -> None:
    tokenizer, counting = made()
    most = 40_000
    with pytest.raises(TooManyTokens):
        tokenizer.encode("x" * (60 * most), most=most)
    assert counting.characters <= 2 * most + PORTION_CHARACTERS


def test_what_fits_is_encoded_as_always() -> None:
    tokenizer, counting = made()
    most = 5000
    text = " " * 64 * most
    assert tokenizer.encode(text, most=most) == tokenizer.encode(text)
    assert len(tokenizer.encode(text)) == most
    before = counting.characters
    assert len(tokenizer.encode("x" * most, most=most)) == most
    assert counting.characters == before + most
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("x" * (most + 1), most=most)
    assert caught.value.tokens == most + 1
