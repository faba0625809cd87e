"""Which models the parity tests run over, and which runs of them belong to `pytest -m parity`.

Every run is marked: `parity` for the part that `make test` has time for (one model of each family in every
scenario), `soak` for the rest of the matrix (every variant, every size, with and without overlap).
"""

from collections.abc import Iterable

import pytest

from tests.models.reference import VARIANTS

FIRST = ("llama", "qwen2", "qwen3", "mistral", "bamba")
OTHERS = (
    "qwen3-moe",
    "gemma3",
    "gpt-oss",
    "olmo3",
    "mamba2",
    "granite-hybrid",
    "falcon-h1",
    "nemotron-h",
    "qwen3-next",
    "qwen3.5",
)
FAMILIES = (*FIRST, *OTHERS)
"""One model of each family."""

KEPT = (0, 1, 6)
SIZES = tuple((page_size, chunk) for page_size in (1, 16, 64) for chunk in (1, 7, 64))
USUAL_SIZES = ((1, 7), (16, 1), (64, 64))
"""Every page size and every chunk size once."""


def _marked(values: tuple[object, ...], name: str, soon: bool) -> object:
    words = [name, *(f"{value}" for value in values if not isinstance(value, bool)), *_overlap(values)]
    mark = pytest.mark.parity if soon else pytest.mark.soak
    return pytest.param(name, *values, marks=mark, id="-".join(words))


def _overlap(values: tuple[object, ...]) -> Iterable[str]:
    return ("overlap" for value in values if value is True)


def _in_turn(name: str) -> bool:
    """Whether a family's one run of a story is an overlapped one: every second one is."""
    return name in FAMILIES and FAMILIES.index(name) % 2 == 1


every = pytest.mark.parametrize(
    "subject", [_marked((), name, name in FAMILIES) for name in VARIANTS], indirect=True
)
first = pytest.mark.parametrize(
    "subject", [_marked((), name, name in FIRST) for name in VARIANTS], indirect=True
)
overlapped = pytest.mark.parametrize(
    ("subject", "overlap"),
    [
        _marked((overlap,), name, name in FIRST or (name in FAMILIES and overlap == _in_turn(name)))
        for name in VARIANTS
        for overlap in (False, True)
    ],
    indirect=["subject"],
)
sized = pytest.mark.parametrize(
    ("subject", "page_size", "chunk", "overlap"),
    [
        _marked(
            (page_size, chunk, overlap),
            name,
            name in FAMILIES and (page_size, chunk) in USUAL_SIZES and overlap == (chunk == 7),
        )
        for name in VARIANTS
        for page_size, chunk in (SIZES if name in FAMILIES else USUAL_SIZES)
        for overlap in (False, True)
    ],
    indirect=["subject"],
)
kept = pytest.mark.parametrize(
    ("subject", "keep", "overlap"),
    [
        _marked(
            (keep, overlap),
            name,
            name in FAMILIES
            and overlap == _in_turn(name)
            and (name in FIRST or keep == KEPT[FAMILIES.index(name) % len(KEPT)]),
        )
        for name in VARIANTS
        for keep in KEPT
        for overlap in (False, True)
    ],
    indirect=["subject"],
)
