"""Host copies: host units of a sequence whose memory is on the device.

A restored session keeps its host units. History is append-only, so a full page never changes: the next spill
copies only the units that are new since then.

    0          first                          length          computed
    ├── shared ──┼── whole pages of the copy ──┬──┤ new tokens ──┤
                                          partial page and state

The copy has the content of its units at `length` computed tokens. Pages that end at or below `length` are
*whole*: they stay valid as long as the first `length` tokens do. The partly filled page and the recurrent
state are valid only while the sequence has computed exactly `length` tokens; after the next turn the copy is
*stale* there. A cut at n tokens shortens the copy to n. Pages shared with a fork stay in the parent's copy
until the parent is spilled without them.

A unit of a copy has one holder, of kind COPY, with the session's name. The sequence claims it for the census
and releases it with its own memory. No session loses its only memory while copies take room on the host
(`pressure`). Called by the sequence, by falling back, and by moves between tiers.
"""

from __future__ import annotations

from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.ledger import Grant, Hold, Holder, Kind
from holdfast.core.points import Run


class HostCopy:
    """Units on the host that contain the first `length` tokens of a sequence, less what it leased then.

    No step in flight reads or writes them, so a released unit is free at once.
    """

    __slots__ = ("holder", "layout", "length", "runs", "state")

    def __init__(
        self, layout: MemoryLayout, owner: Holder, length: int, runs: dict[Component, Run], state: Hold | None
    ) -> None:
        """Take over the units of `runs` and `state` from the session that is their `owner`."""
        self.layout = layout
        self.holder = Holder(Kind.COPY, owner.name, owner.account)
        self.length = length
        self.runs = {
            component: Run(run.hold.move_to(self.holder), run.first) for component, run in runs.items()
        }
        self.state = state.move_to(self.holder) if state is not None else None

    def claim(self, into: list[Grant]) -> None:
        """Name everything that the copy holds, for the census."""
        into.extend(run.hold.grant for run in self.runs.values())
        if self.state is not None:
            into.append(self.state.grant)

    def span(self, component: Component, first: int, computed: int) -> tuple[int, int]:
        """The pages from `first` on that are what a sequence at `computed` tokens has; empty at `first`."""
        run = self.runs.get(component)
        if run is None:
            return first, first
        begin, end = max(first, run.first), min(run.end, self.pages(computed))
        return (begin, end) if begin < end else (first, first)

    def size(self, component: Component) -> int:
        """How many units of a component the copy holds."""
        run = self.runs.get(component)
        return 0 if run is None else len(run.hold)

    def pages(self, computed: int) -> int:
        """The page before which the copy is what a sequence at `computed` tokens has."""
        whole = self.layout.pages_for if computed == self.length else self._whole_pages
        return whole(self.length)

    def _whole_pages(self, length: int) -> int:
        """Pages that are full: they never change."""
        return length // self.layout.page_size

    def has_state(self, computed: int) -> bool:
        """Whether the state at `computed` tokens is in the copy."""
        return self.state is not None and computed == self.length

    def is_whole(self, computed: int) -> bool:
        """Whether a sequence at `computed` tokens, with all that it had then as its own, leaves at once."""
        return computed == self.length and (self.state is not None or not self.layout.state)

    def trim(self, firsts: dict[Component, int], computed: int) -> None:
        """Give up pages before `firsts`: the sequence, at rest at `computed` tokens, leases them."""
        current = computed == self.length
        assert current or self.state is None, "a stale state was given up at rest"
        for component, run in list(self.runs.items()):
            assert current or run.end * self.layout.page_size <= self.length, "so were stale pages"
            begin = max(firsts[component], run.first)
            if begin < run.end:
                run.hold.shrink_front(begin - run.first)
                run.first = begin
            else:
                del self.runs[component]
                run.hold.release()

    def follow(self, computed: int) -> None:
        """Give up what the sequence, at rest at `computed` tokens, has taken back or gone on from.

        That is all that lies past a cut, or else the partly filled page and the state, if there is more now.
        """
        if computed < self.length:
            self._shorten(self.layout.pages_for(computed))
            self.length = computed
        elif computed > self.length:
            self._shorten(self.pages(computed))

    def _shorten(self, pages: int) -> None:
        """Keep pages below `pages`, and no state."""
        for component, run in list(self.runs.items()):
            if run.first >= pages:
                del self.runs[component]
                run.hold.release()
            else:
                run.hold.shrink(max(0, run.end - pages))
        self._release_state()

    def _release_state(self) -> None:
        if self.state is not None:
            self.state.release()
            self.state = None

    @property
    def is_empty(self) -> bool:
        """Whether the copy holds nothing."""
        return not self.runs and self.state is None

    def take(self, component: Component, holder: Holder) -> Hold | None:
        """Hand the units of one component over; None if the copy has none."""
        if component is Component.STATE:
            state, self.state = self.state, None
            return None if state is None else state.move_to(holder)
        run = self.runs.pop(component, None)
        return None if run is None else run.hold.move_to(holder)

    def discard(self) -> None:
        """Give up everything."""
        self._shorten(0)
