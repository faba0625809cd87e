"""The benchmark of drafts: planted agreement, and a model that drafts for itself, shortened."""

from pathlib import Path

import pytest

from holdfast.bench.cpu import drafting
from holdfast.bench.shortened import shorten
from holdfast.engine.start.pull import cached
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from tests.engine.tiny import tiny_engine, write_model


def test_planted_agreement_is_counted(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama")
    plain, told = tiny_engine(path), tiny_engine(path, speculate="ngram")
    figures = [
        drafting.planted(plain, told, agreement, rows, 60, 1)
        for agreement in (0.0, 0.6, 0.8)
        for rows in (1, 3)
    ]
    steps = [figure["steps_with"] for figure in figures]
    assert steps[0] >= 59 and steps[0] > steps[2] > steps[4]
    assert steps[::2] == steps[1::2], "rows do not disturb each other"
    assert all(figure["steps_without"] >= 60 and figure["step_cost"] > 0 for figure in figures)


def test_a_model_is_shortened_to_its_first_layers(tmp_path: Path) -> None:
    path = cached("smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache")
    whole, short = open_checkpoint(path), open_checkpoint(shorten(path, 2, tmp_path / "short.gguf"))
    assert len(short.config.layers) == 2 and short.config.layers == whole.config.layers[:2]
    assert open_tokenizer(short).vocabulary == open_tokenizer(whole).vocabulary
