"""Layouts: which components a model has, and the arithmetic of pages and windows."""

import pytest

from holdfast.core.layout import LAYOUT_NAMES, PAGE_SIZE_MAX, Component, MemoryLayout, named_layout
from holdfast.core.plan import UnitCopy
from tests.core.world import PAGE_SIZES

COMPONENTS = {
    "dense": (Component.FULL,),
    "window": (Component.FULL, Component.WINDOW),
    "hybrid": (Component.FULL, Component.STATE),
    "full+window+state": (Component.FULL, Component.WINDOW, Component.STATE),
    "window+state": (Component.WINDOW, Component.STATE),
    "window-only": (Component.WINDOW,),
    "state": (Component.STATE,),
}


def test_every_name_has_its_components() -> None:
    assert tuple(COMPONENTS) == LAYOUT_NAMES
    for name, components in COMPONENTS.items():
        layout = named_layout(name, 16)
        assert layout.components == components
        assert layout.paged == (name != "state")
        assert layout.cuts_anywhere == (name == "dense")
        assert layout.window == (32 if Component.WINDOW in components else 0)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: dense"):
        named_layout("sparse", 16)


@pytest.mark.parametrize("page_size", [0, -1, PAGE_SIZE_MAX + 1])
def test_page_sizes_lie_between_1_and_256(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size"):
        MemoryLayout(page_size)


def test_a_layout_needs_a_component_and_sane_numbers() -> None:
    with pytest.raises(ValueError, match="at least one component"):
        MemoryLayout(16, full=False)
    with pytest.raises(ValueError, match="window"):
        MemoryLayout(16, window=-1)
    with pytest.raises(ValueError, match="checkpoint_tokens"):
        MemoryLayout(16, checkpoint_tokens=0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_are_counted_by_rounding_up(page_size: int) -> None:
    layout = MemoryLayout(page_size)
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 7 * page_size - 1, 7 * page_size):
        covered = layout.pages_for(length)
        assert covered * page_size >= length
        assert (covered - 1) * page_size < length or covered == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", [1, 7, 33, 256])
def test_the_lowest_window_page_holds_the_first_position_that_is_read(page_size: int, window: int) -> None:
    layout = MemoryLayout(page_size, window=window)
    for length in (0, 1, window, window + 1, 3 * page_size + 1, 1001):
        first_read = max(0, length - window)
        page = layout.window_first_page(length)
        assert page * page_size <= first_read < (page + 1) * page_size


def test_a_copy_prints_what_goes_where() -> None:
    assert repr(UnitCopy(Component.WINDOW, 3, 8)) == "window 3 -> 8"
