"""A byte-level tokenizer with the markers of the formats."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end_of_turn|>"


@lru_cache
def byte_tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """One token a byte, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    # As checkpoints have them: Qwen's <tool_call> is not "special", and llguidance knows it by its brackets.
    tokenizer.add_tokens(
        [AddedToken(marker, special=marker[0] != "<", normalized=False) for marker in markers]
    )
    return tokenizer
