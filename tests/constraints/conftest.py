"""Vocabularies and builders, made once a session: llguidance takes a while to read a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder, GuidanceMatcher
from holdfast.engine.constraints.vocabulary import Vocabulary
from holdfast.engine.start.pull import PullError, pull
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from tests.constraints.vocabularies import END, PADDING, small_tokenizer

Open = Callable[..., GuidanceMatcher]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A small byte-level tokenizer."""
    return small_tokenizer()


@pytest.fixture(scope="session")
def builder(tokenizer: Tokenizer) -> GuidanceBuilder:
    size = tokenizer.vocabulary_size + PADDING
    return GuidanceBuilder(Vocabulary(tokenizer, size=size, end_tokens=[END]))


@pytest.fixture(scope="session")
def open_matcher(builder: GuidanceBuilder) -> Open:
    """Compiles a grammar and begins to match."""

    def opened(kind: Kind, value: object = None, **options: object) -> GuidanceMatcher:
        options.setdefault("control_tokens", builder.vocabulary.control_tokens)
        grammar = Grammar.of(kind, value, **options)  # type: ignore[arg-type]
        return builder.compile(grammar).matcher()

    return opened


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The tokenizer of the embedded default; tests that need it are skipped without the model."""
    try:
        path: Path = pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    return open_tokenizer(open_checkpoint(path))


@pytest.fixture(scope="session")
def smollm2_builder(smollm2: Tokenizer) -> GuidanceBuilder:
    return GuidanceBuilder(Vocabulary(smollm2, size=49_152 + 128, end_tokens=smollm2.eos_tokens))
