"""Which models the parity tests run over, and which runs of them belong to `pytest -m parity`.

Every run is marked: `parity` for the part that `make test` has time for, `soak` for the rest of the matrix
(every variant, every size, with and without overlap). What a session goes through depends on what its memory
is made of more than on the model, so a story runs over one family of each kind of memory. Stories take the
families of a kind in turn, with and without overlap: each family is in several stories, each story sees both.
"""

from collections.abc import Iterable

import pytest

from tests.models.reference import VARIANTS

KINDS = (
    ("llama", "qwen2", "qwen3", "qwen3-moe"),
    ("mistral", "gemma3", "gpt-oss", "olmo3"),
    ("bamba", "granite-hybrid", "falcon-h1", "nemotron-h"),
    ("qwen3-next", "qwen3.5"),
    ("mamba2",),
)
"""Families by memory: pages, windows, pages and Mamba2 states, pages and gated delta states, states alone."""

FAMILIES = tuple(name for kind in KINDS for name in kind)
"""One model of each family."""

HALVES = "llama-bf16"
"""A model that is computed by the C kernels, in one pass."""

KEPT = (0, 1, 6)
SIZES = tuple((page_size, chunk) for page_size in (1, 16, 64) for chunk in (1, 7, 64))
USUAL_SIZES = ((1, 7), (16, 1), (64, 64))
"""Every page size and every chunk size once."""


def cover(story: int) -> dict[str, bool]:
    """The families that a story runs over in `make test`, one of each kind, and whether steps overlap.

    The first story runs over weights of 16 bits, too.
    """
    found = {
        kind[story % len(kind)]: (story + story // 4 + place) % 2 == 1 for place, kind in enumerate(KINDS)
    }
    return found | {HALVES: True} if story == 0 else found


def _marked(values: tuple[object, ...], name: str, soon: bool) -> object:
    words = [name, *(f"{value}" for value in values if not isinstance(value, bool)), *_overlap(values)]
    mark = pytest.mark.parity if soon else pytest.mark.soak
    return pytest.param(name, *values, marks=mark, id="-".join(words))


def _overlap(values: tuple[object, ...]) -> Iterable[str]:
    return ("overlap" for value in values if value is True)


def _usual_size(name: str) -> tuple[int, int] | None:
    """The size that a family runs with in `make test`."""
    return USUAL_SIZES[FAMILIES.index(name) % len(USUAL_SIZES)] if name in FAMILIES else None


every = pytest.mark.parametrize(
    "subject", [_marked((), name, name in FAMILIES) for name in VARIANTS], indirect=True
)


def without_overlap(story: int) -> pytest.MarkDecorator:
    """Every variant; in `make test` the families of a story."""
    return pytest.mark.parametrize(
        "subject", [_marked((), name, name in cover(story)) for name in VARIANTS], indirect=True
    )


def overlapped(story: int) -> pytest.MarkDecorator:
    """Every variant with and without overlap; in `make test` the families of a story."""
    return pytest.mark.parametrize(
        ("subject", "overlap"),
        [
            _marked((overlap,), name, cover(story).get(name) is overlap)
            for name in VARIANTS
            for overlap in (False, True)
        ],
        indirect=["subject"],
    )


def kept(story: int) -> pytest.MarkDecorator:
    """How many tokens of a turn stay: each number over the families of another story."""
    return pytest.mark.parametrize(
        ("subject", "keep", "overlap"),
        [
            _marked((keep, overlap), name, cover(story + place).get(name) is overlap)
            for name in VARIANTS
            for place, keep in enumerate(KEPT)
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
            (page_size, chunk) == _usual_size(name) and overlap == (chunk == 7),
        )
        for name in VARIANTS
        for page_size, chunk in (SIZES if name in FAMILIES else USUAL_SIZES)
        for overlap in (False, True)
    ],
    indirect=["subject"],
)
