"""Refusals of the core: each is a type of its own, with the figures that explain it.

A refusal changes nothing. `code` is stable and machine-readable; `param` names the field at fault, where
there is one. The server turns the class into a status.
"""

from __future__ import annotations


class Refused(Exception):
    """The core rejects the operation and has changed nothing."""

    code: str
    param: str | None = None


class UnknownSession(Refused):
    """No session has this id."""

    code = "session_not_found"
    param = "session_id"


class SessionExpired(Refused):
    """The session was closed because it was idle for too long."""

    code = "session_expired"
    param = "session_id"


class SessionExists(Refused):
    """A session with this id is open already."""

    code = "session_exists"
    param = "id"


class SessionBusy(Refused):
    """The session has a turn in flight, or is being closed."""

    code = "session_busy"
    param = "session_id"


class TooManySessions(Refused):
    """The cap on open sessions, of the server or of the tenant, is reached."""

    code = "too_many_sessions"


class QueueFull(Refused):
    """The queue of waiting turns is full."""

    code = "queue_full"


class EmptyTurn(Refused):
    """A turn has no input tokens, and did not ask to continue without input."""

    code = "empty_turn"
    param = "input"


class UnknownToken(Refused):
    """A turn, or a history, has a token id that is not in the vocabulary: the model has no row for it."""

    code = "unknown_token"
    param = "input"

    def __init__(self, turn_id: str, vocabulary: int) -> None:
        super().__init__(
            f"turn {turn_id} has a token id outside the vocabulary: ids are 0 to {vocabulary - 1}"
        )


class TurnExists(Refused):
    """A turn with this id is in flight already."""

    code = "turn_exists"
    param = "turn_id"


class TurnConflict(Refused):
    """A turn with this id has finished, and asked for something else."""

    code = "turn_conflict"
    param = "turn_id"


class RequestConflict(Refused):
    """A rewind, fork or interruption with this id was carried out, and asked for something else."""

    code = "request_conflict"
    param = "request_id"


class JournalUnavailable(Refused):
    """The journal cannot be written: no new work is accepted until it can."""

    code = "journal_unavailable"


class SessionMoved(Refused):
    """The journal refused a record of a session: the session belongs to another server now."""

    code = "session_moved"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} belongs to another server now; send the request again")


class UnknownTurn(Refused):
    """The named turn is not in flight: it has ended, or never existed."""

    code = "turn_not_found"
    param = "turn_id"


class UnknownPosition(Refused):
    """A revision begins past the end of the input that it revises."""

    code = "unknown_position"
    param = "start"


class NothingToKeep(Refused):
    """An interruption asks to keep more tokens than the turn has generated."""

    code = "nothing_to_keep"
    param = "keep_tokens"


class UnknownBoundary(Refused):
    """There is no such turn to return to."""

    code = "turn_not_found"
    param = "to_turn"


class AlreadyComputed(Refused):
    """A turn asks for log probabilities of tokens that its session has computed already."""

    code = "already_computed"
    param = "prompt_logprobs"


class BadMaxTokens(Refused):
    """A turn must be allowed to generate at least one token."""

    code = "bad_max_tokens"
    param = "max_tokens"


class ContextExceeded(Refused):
    """Input and output together are longer than the model's context or the cap on a session."""

    code = "context_length_exceeded"
    param = "max_tokens"

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(f"the turn needs a context length of {needed} tokens; the maximum is {limit}")
        self.needed = needed
        self.limit = limit


class TooLarge(Refused):
    """The turn would not fit into memory even alone."""

    code = "insufficient_memory"
    param = "input"

    def __init__(self, component: str, needed: int, available: int) -> None:
        super().__init__(f"the turn needs {needed} units of {component} memory; the server has {available}")
        self.component = component
        self.needed = needed
        self.available = available


class OverQuota(Refused):
    """The turn would not fit into its tenant's quota, even alone."""

    code = "over_quota"
    param = "input"

    def __init__(self, component: str, needed: int, limit: int) -> None:
        super().__init__(f"the turn needs {needed} units of {component} memory; its tenant may hold {limit}")
        self.component = component
        self.needed = needed
        self.limit = limit


class IllegalTransition(Exception):
    """An event is not allowed in the present state: a fault of the caller, never of the client."""
