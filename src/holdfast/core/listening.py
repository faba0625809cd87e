"""Listening: a turn whose input is computed while it still arrives.

    listen   an open turn begins: its input so far is computed, nothing is sampled
    hear     its input grows, or is revised from a position on
    commit   its input is complete: from now on it is an ordinary turn

The rule is the sequence's own: computed catches up with known. An open turn differs in three things. It does
not sample, and its last known token is left for the row that will. It gets the rest of a step's budget, and
loses its memory before any answering turn waits. It is never kept in part: unless it is committed, it
is rolled back.

A revision changes the log; computed falls back to the common prefix. While rows of the turn are in
flight it is noted (`Turn.revised`) and carried out when they have settled; no row is planned before that.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core import errors
from holdfast.core.admission import ask_for_points
from holdfast.core.fallback import fall_back, resume_length
from holdfast.core.pressure import requeue
from holdfast.core.prompts import Prompts
from holdfast.core.registry import Registry
from holdfast.core.requirements import require_length
from holdfast.core.sequence import Sequence
from holdfast.core.session import Life, Session
from holdfast.core.turn import NEVER, Turn, TurnEvent, TurnRequest

POINTS_KEPT = 2
"""How many resume points an open turn keeps inside its input, where a length cannot be resumed without."""


class Listening:
    """What may happen to open turns."""

    __slots__ = ("prompts", "registry")

    def __init__(self, registry: Registry, prompts: Prompts) -> None:
        self.registry = registry
        self.prompts = prompts

    def find(self, session: Session, turn_id: str) -> Turn:
        """The open turn of that name on a session, unless it is about to end."""
        turn = session.turn
        if turn is None or not turn.is_open or turn.request.turn_id != turn_id or _is_ending(turn):
            raise errors.UnknownTurn(f"turn {turn_id} is not open on session {session.id}")
        return turn

    def hear(self, session: Session, turn: Turn, start: int, tokens: tuple[int, ...], drafting: bool) -> None:
        """Let the input from its token `start` on be `tokens`."""
        before = turn.request.tokens
        if not 0 <= start <= len(before):
            raise errors.UnknownPosition(f"the input has {len(before)} tokens, not {start}")
        request = replace(turn.request, tokens=before[:start] + tokens)
        require_length(self.registry, session.tenant, turn.known_before, request, drafting)
        self._revise(session, turn, request, start)

    def put_off(self, session: Session, turn: Turn, deadline: float) -> None:
        """Take an open turn back at another time."""
        self.registry.deadlines.drop(-turn.number)
        turn.request = replace(turn.request, deadline=deadline)
        self.registry.watch_turn(session, turn)

    def commit(self, session: Session, turn: Turn, request: TurnRequest) -> None:
        """Make an open turn an ordinary one, with the whole of its input: what differs is computed again."""
        registry, sequence = self.registry, session.sequence
        start = common(turn.request.tokens, request.tokens)
        first = request.computes_from
        if first is not None:
            begun = sequence.mark.point.length if sequence.mark is not None else sequence.computed
            if first < begun:
                raise errors.AlreadyComputed(
                    f"session {session.id} has computed {begun} tokens, past {first}"
                )
            start = min(start, max(0, first - turn.known_before))
        registry.deadlines.drop(-turn.number)
        self._revise(session, turn, request, start)
        turn.number = registry.number()
        turn.arrived = registry.now
        turn.computed_ahead = turn.computed
        turn.is_open = False
        if session.life is Life.QUEUED:
            del registry.queues.listening[session]
            registry.queues.wait(session, turn)
        else:
            turn.admitted = registry.now
            if turn.revised == NEVER:
                prepare_to_answer(registry, session, turn)
        registry.watch_turn(session, turn)

    def _revise(self, session: Session, turn: Turn, request: TurnRequest, start: int) -> None:
        """Let the input be that of `request`, which agrees with what it was up to its token `start`."""
        self.prompts.forget(turn)
        self.registry.queues.unheard = True
        turn.request = request
        if turn.admitted is None:
            return  # The input is not in the log yet.
        position = turn.known_before + start
        sequence = session.sequence
        if turn.revised == NEVER and position >= sequence.planned and position == sequence.known:
            sequence.tokens.extend(request.tokens[start:])
            return
        turn.revised = min(turn.revised, position)
        carry_out_revision(self.registry, session, turn)


def carry_out_revision(registry: Registry, session: Session, turn: Turn) -> None:
    """Revise the log of a session, and let its memory fall back to it, unless rows are in flight."""
    if session.unsettled:
        return
    registry.queues.unheard = True
    sequence, mark = session.sequence, session.sequence.mark
    limit = min(revise_log(sequence, turn), sequence.known - 1)
    if mark is None or sequence.computed <= limit:
        pass
    elif resume_length(sequence, limit) <= mark.point.length:
        # Nothing of what was computed ahead is left: the turn begins again.
        requeue(registry, session)
        if not sequence.computed:
            registry.drop_memory(session)
        return
    else:
        copies = fall_back(sequence, limit)
        assert not copies, "an open input lies past the lease"
    if mark is not None:
        mark.cuts = [cut for cut in mark.cuts if cut <= limit]
        if not turn.is_open:
            prepare_to_answer(registry, session, turn)


def revise_log(sequence: Sequence, turn: Turn) -> int:
    """Set the log to the request's tokens, and return the length of the common prefix."""
    position, turn.revised = turn.revised, NEVER
    sequence.tokens.cut(position)
    sequence.tokens.extend(turn.request.tokens[position - turn.known_before :])
    return position


def prepare_to_answer(registry: Registry, session: Session, turn: Turn) -> None:
    """A turn that computed ahead is going to answer: leave points, and share its prompt, as any turn does."""
    ask_for_points(registry.ledger.layout, session.sequence, turn)


def leave_point_ahead(sequence: Sequence) -> None:
    """Keep where an open turn stands, so that a revision falls back to there and not to its beginning.

    Where every length can be resumed from, nothing has to be kept. Only free slots are taken.
    """
    mark = sequence.mark
    assert mark is not None, "only a turn that runs computes ahead"
    kept = max(mark.known, sequence.points[-1].length)
    if sequence.ledger.layout.cuts_anywhere or sequence.planned <= kept:
        return
    sequence.leave_point()
    own = [point for point in sequence.points if point.length > mark.known and point is not mark.point]
    for point in own[:-POINTS_KEPT]:
        sequence.drop_point(point)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many tokens two inputs have in common at their beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_ending(turn: Turn) -> bool:
    """Whether a turn is to end, and not only to be computed again."""
    return turn.ending is not None and turn.ending.event is not TurnEvent.RETRACT
