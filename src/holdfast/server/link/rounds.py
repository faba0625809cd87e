"""The work between two steps is bounded: the budget of a round, and the backlog of commands.

A round has `BUDGET_SECONDS` for commands, for verbs that wait and for portions of reports; each of the three
makes at least one step of progress. The rest waits for the next round. Commands are carried out in order of
arrival, with one exception: commands that end something (a turn, a session) overtake commands of other
sessions, so that a flood of requests delays no other client's interruption. They never overtake a command of
their own session, and alternate with the others, so that neither starves. While no turn runs there are no
tokens to delay, and the budget is larger. Used by the engine process.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from holdfast.server.link import wire

__all__ = [
    "BUDGET_SECONDS",
    "READ_BYTES_MAX",
    "READ_MAX",
    "UNHURRIED_SECONDS",
    "Backlog",
    "Budget",
    "Spent",
]

BUDGET_SECONDS = 0.001
UNHURRIED_SECONDS = 0.01
"""The budget of a round while no turn runs."""

READ_MAX = 128
READ_BYTES_MAX = 128 << 10
"""Maximum frames and bytes that one round reads: decoding is cheap, and finds urgent commands early."""

Spent = Callable[[], bool]
"""Whether the budget of a round is spent."""

URGENT = (wire.EndTurn, wire.Interrupt, wire.CloseSession)


class Budget:
    """The time of one round; a call says whether it is spent."""

    __slots__ = ("_clock", "_end")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def __call__(self) -> bool:
        return self._clock() >= self._end


class Backlog:
    """Commands that were read and not carried out yet.

    `session_of` names the session of a turn that is not over, by the call that started it.
    """

    def __init__(self, session_of: Callable[[int], str | None]) -> None:
        self._session_of = session_of
        self._urgent: deque[wire.Command] = deque()
        self._urgent_next = True
        self._others: deque[tuple[str | int | None, wire.Command]] = deque()
        self._ahead: Counter[str | int | None] = Counter()
        """How many commands wait for each session, or each request of its own."""
        self._starts: dict[int, str | int] = {}
        """The sessions of turns that are to be started, by call."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, command: wire.Command) -> None:
        """Add a command that was read."""
        key = self._key(command)
        if isinstance(command, URGENT) and not self._ahead[key]:
            self._urgent.append(command)
            return
        if isinstance(command, wire.StartTurn) and key is not None:
            self._starts[command.call] = key
        if key is not None:
            self._ahead[key] += 1
        self._others.append((key, command))

    def take(self) -> wire.Command:
        """The next command to carry out."""
        if self._urgent and (self._urgent_next or not self._others):
            self._urgent_next = False
            return self._urgent.popleft()
        self._urgent_next = True
        key, command = self._others.popleft()
        if isinstance(command, wire.StartTurn):
            self._starts.pop(command.call, None)
        if key is not None:
            self._ahead[key] -= 1
            if not self._ahead[key]:
                del self._ahead[key]
        return command

    def _key(self, command: wire.Command) -> str | int | None:
        """What orders a command: its session, or the request of its own that it is about."""
        match command:
            case wire.StartTurn():
                return command.session if command.session is not None else command.call
            case wire.EndTurn():
                return self._starts.get(command.turn) or self._session_of(command.turn) or command.turn
            case (
                wire.OpenSession()
                | wire.CloseSession()
                | wire.Interrupt()
                | wire.Rewind()
                | wire.Compact()
                | wire.Fork()
                | wire.MoveSession()
                | wire.Claim()
                | wire.HandOver()
            ):
                return command.session
        return None
