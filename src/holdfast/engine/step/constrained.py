"""Constrained turns in the executor: their tokens and masks, beside the device and beside the loop.

The mask of a token depends on the token before, so the work for constrained turns lies between the tokens of
one step and the sampling of the next. Three things keep it short. One parallel call advances the matchers of
all turns. A thread fills the masks of the launched step while the loop detokenises, settles and reports; the
loop waits for them only before it samples, since some masks take a hundred times as long as most (those
inside strings of limited length). And the mask of a turn with known tokens (the first of a turn, and after
forced tokens) is filled during the previous step. Forced tokens are queried before the mask, which takes some
microseconds.

With few constrained turns, and with drafts, masks are filled when the step is sampled. The tokens are the
same. A matcher is in one thread at a time: the loop touches none from `launch` or `accept` to `join`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from holdfast.core.turn import Turn
from holdfast.engine.constraints.guidance import ParallelMatchers
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.masks import StepMasks, Wanted
from holdfast.engine.text.stream import TurnStream

__all__ = ["ConstrainedRows"]

log = logging.getLogger("holdfast.executor")

AHEAD_MIN = 8
"""Constrained turns in a step from which on threads pay."""

THREADS = 2
"""For the masks that are begun at a launch, and for those after the tokens of a step."""


class ConstrainedRows:
    """The constrained turns of the steps of one executor."""

    def __init__(
        self, vocabulary: int, device: torch.device, stream_of: Callable[[Turn], TurnStream], *, ahead: bool
    ) -> None:
        """Without `ahead` nothing is done in a thread: somebody else uses the matchers between steps."""
        self._vocabulary = vocabulary
        self._device = device
        self._stream_of = stream_of
        self._uses_thread = ahead
        self._matchers: ParallelMatchers | None = None
        self._buffers: list[StepMasks] = []
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._launched: Flight | None = None
        """The step that is launched and not sampled."""
        self._wanted_at_launch: list[Wanted] = []
        self._unfinished: set[int] = set()
        """Turns whose next token is sampled and not known here."""

    def launch(self, flight: Flight) -> None:
        """Make room for the masks of a launched step; begin with those whose tokens are known."""
        assert flight.unsampled is not None
        self.join()
        masks = self._next_buffer()
        wanted = self._wanted(flight)
        places = {first: stop for _, first, stop in flight.places}
        masks.open(len(flight.unsampled.samples), ((each.first, places[each.first]) for each in wanted))
        flight.masks = masks
        self._launched = flight
        self._wanted_at_launch = wanted
        if self._uses_thread and len(wanted) >= AHEAD_MIN:
            rows = flight.plan.rows
            known = {
                first for index, first, _ in flight.places if rows[index].turn.number not in self._unfinished
            }
            self._begin(masks, [each for each in wanted if each.first in known])

    def fill(self, flight: Flight, masks: StepMasks) -> set[int]:
        """Fill the missing masks of a step that is now sampled; returns the samples that have one.

        A turn that is over, or whose next token has become known, needs none: its sample is not used.
        """
        self.join()
        self._launched = None
        rows = flight.plan.rows
        self._unfinished = {rows[index].turn.number for index, _, _ in flight.places if rows[index].sample}
        return masks.fill(self._wanted(flight))

    def accept(self, flight: Flight, tokens: Sequence[int]) -> None:
        """Give the tokens of a finished step to the grammars, and begin the masks of the launched step.

        Masks that were begun at the launch belong to other turns, and may go on.
        """
        self._unfinished = set()
        launched = self._launched
        if not self._uses_thread:
            return
        ready = self._ready(flight, tokens)
        if len(ready) < AHEAD_MIN:
            self.join()
            return
        assert self._matchers is not None, "a step with constrained turns was launched"
        self._matchers.accept([(constraint.grammar_matcher, token) for constraint, token in ready])
        for constraint, token in ready:
            constraint.took_ahead(token)
        if launched is None or launched.masks is None:
            return
        taken = {id(constraint) for constraint, _ in ready}
        wanted = [each for each in self._wanted_at_launch if id(each.constraint) in taken]
        self._begin(launched.masks, [each for each in wanted if not each.constraint.forced()])

    def join(self) -> None:
        """Wait for the threads, which use the matchers. Masks that failed there are filled again later."""
        running, self._running = self._running, []
        for each in running:
            error = each.exception()
            if error is not None:
                log.error("masks could not be filled ahead", exc_info=error)

    def _begin(self, masks: StepMasks, wanted: Sequence[Wanted]) -> None:
        """Fill masks in a thread."""
        several = masks.ahead(wanted)
        if not several:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-masks")
        self._running.append(self._threads.submit(masks.fill_ahead, several))

    def _ready(self, flight: Flight, tokens: Sequence[int]) -> list[tuple[TurnConstraint, int]]:
        """Constraints that may take their token at once: one without drafts that does not end the turn."""
        ready: list[tuple[TurnConstraint, int]] = []
        for index, first, stop in flight.places:
            row, token = flight.plan.rows[index], tokens[first]
            if not row.sample or row.turn.over or stop - first > 1 or token < 0:
                continue
            stream = self._stream_of(row.turn)
            constraint = stream.constraint
            if constraint is None or stream.finish is not None or token in stream.ends:
                continue
            if constraint.waits:
                ready.append((constraint, token))
        return ready

    def _wanted(self, flight: Flight) -> list[Wanted]:
        """The constrained turns of a step that are sampled."""
        wanted: list[Wanted] = []
        for index, first, _ in flight.places:
            row = flight.plan.rows[index]
            if not row.sample or row.turn.over:
                continue
            constraint = self._stream_of(row.turn).constraint
            if constraint is not None:
                wanted.append(Wanted(first, constraint, row.tokens[row.count - row.drafts :]))
        return wanted

    def _next_buffer(self) -> StepMasks:
        """A buffer that no launched step uses: the device may still read those of the step before."""
        if self._matchers is None:
            self._matchers = ParallelMatchers()
        if len(self._buffers) < 2:
            self._buffers.append(StepMasks(self._vocabulary, self._device, self._matchers))
        else:
            self._buffers.reverse()
        return self._buffers[-1]
