"""`holdfast bench sessions --here`: what it measures really happens, whatever the clock says."""

from pathlib import Path

import pytest

from holdfast.bench import prompts
from holdfast.bench.cpu import crowd
from holdfast.bench.cpu.crowd import Sizes
from holdfast.bench.models import VOCABULARY, BenchModel, write_random_bamba
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from tests.engine.tiny import BYTE_FIRST
from tests.engine.tiny import VOCABULARY as TINY_VOCABULARY


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_ten_times_as_many_sessions_as_fit_all_answer_and_compute_only_what_is_new(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(prompts, "PROMPT_TOKENS", (BYTE_FIRST, TINY_VOCABULARY))
    sizes = Sizes(history=400, fit=2, times=10, crowd_history=40, turns=2, given=8, wanted=6)
    told: list[str] = []
    figures = crowd.measure(BenchModel(directories[family], "dummy"), sizes, 1, 1, told.append)
    named = {figure["name"]: figure for figure in figures}
    assert set(named) == {
        "computing",
        "restoring_from_host",
        "computing_over_restoring_from_host",
        "restoring_from_disk",
        "computing_over_restoring_from_disk",
        "all_resident",
        "a_tenth_resident",
        "a_tenth_over_all",
        "computed_a_turn",
    }
    assert all(float(str(figure["value"])) > 0 for figure in figures)
    assert named["computed_a_turn"]["value"] <= sizes.given + sizes.wanted  # type: ignore[operator]
    assert (named["all_resident"]["sessions"], named["all_resident"]["fit"]) == (20, 2)
    assert told


def test_the_model_without_weights_has_words_for_all_its_tokens(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(open_checkpoint(write_random_bamba(tmp_path / "random-bamba")))
    first = tokenizer.encode(" 0")[0]
    assert tokenizer.encode(f" 7 {VOCABULARY - 1 - first}") == [first + 7, VOCABULARY - 1]
    assert tokenizer.eos_tokens == (0,)
