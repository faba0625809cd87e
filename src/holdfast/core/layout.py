"""The memory requirements of a model, as numbers.

A `MemoryLayout` says which components a model has and how large they are. The core never looks at a
model: it sees the page size, whether there is full-attention KV, how wide the sliding window is and
whether there is recurrent state. Everything here is immutable and shared by all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

PAGE_SIZE_MAX = 256


class Component(IntEnum):
    """The kinds of memory a sequence may need. Pages for the first two, slots for the last."""

    FULL = 0
    WINDOW = 1
    STATE = 2


class Tier(IntEnum):
    """Where a unit lives. Only device units can be computed with."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The components of one model.

    `window` is the number of earlier positions that a sliding-window layer may read, 0 when there is
    no such layer. `checkpoint_tokens` is the length of input above which a turn leaves a resume
    point at the input's end, so that an interruption does not recompute a long prompt.
    """

    page_size: int
    full: bool = True
    window: int = 0
    state: bool = False
    checkpoint_tokens: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= PAGE_SIZE_MAX:
            raise ValueError(f"page_size must lie in 1..{PAGE_SIZE_MAX}, got {self.page_size}")
        if self.window < 0:
            raise ValueError(f"window must not be negative, got {self.window}")
        if self.checkpoint_tokens < 1:
            raise ValueError(f"checkpoint_tokens must be positive, got {self.checkpoint_tokens}")
        if not (self.full or self.window or self.state):
            raise ValueError("a layout needs at least one component")

    @property
    def paged(self) -> bool:
        """Whether any component is made of pages."""
        return self.full or self.window > 0

    @property
    def cuts_anywhere(self) -> bool:
        """Whether computation can continue from every computed length, without a resume point."""
        return not self.window and not self.state

    @property
    def components(self) -> tuple[Component, ...]:
        """The components present, in the order of their numbers."""
        present = (
            (Component.FULL, self.full),
            (Component.WINDOW, self.window > 0),
            (Component.STATE, self.state),
        )
        return tuple(component for component, there in present if there)

    def pages_for(self, tokens: int) -> int:
        """Pages that cover `tokens` positions: the last one may be partly filled."""
        return -(-tokens // self.page_size)

    def window_first_page(self, length: int) -> int:
        """The lowest page that computing position `length` may still read in the window component."""
        return max(0, length - self.window) // self.page_size


def named_layout(name: str, page_size: int, window: int = 32) -> MemoryLayout:
    """The layouts that the command line and the tests speak of by name."""
    shapes: dict[str, tuple[bool, bool, bool]] = {
        "dense": (True, False, False),
        "window": (True, True, False),
        "hybrid": (True, False, True),
        "full+window+state": (True, True, True),
        "window+state": (False, True, True),
        "window-only": (False, True, False),
        "state": (False, False, True),
    }
    if name not in shapes:
        raise ValueError(f"unknown layout {name!r}; known: {', '.join(shapes)}")
    full, windowed, state = shapes[name]
    return MemoryLayout(page_size, full=full, window=window if windowed else 0, state=state)


LAYOUT_NAMES = ("dense", "window", "hybrid", "full+window+state", "window+state", "window-only", "state")
