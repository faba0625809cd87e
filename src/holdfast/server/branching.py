"""Ordinary (branching) sessions: a tree of requests by id, and no memory at all.

Each request of such a session is a one-shot through the prefix tree; only tokens are kept here,
so that a later request can continue an earlier one:

    compose ──> the tokens of a request, or a refusal; nothing has changed
    begin ────> the request is in the tree; returns the requests that must be stopped for it
    record ───> its generated tokens, as they arrive; `finished` with the last

A request without a parent starts a new branch. Otherwise it gets the parent's prompt and output
(without the output if it is to be dropped), cut at `offset` (a negative one counts from the end, 0 cuts
nothing), followed by its own tokens. With `replace` all descendants of the parent are removed
first, and the parent itself, if it still runs, ends with its output so far; without a parent all requests
are removed. Tokens are copied between logs, so a removal breaks no other. Used by `ordinary_sessions`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.errors import Refused, TurnExists
from holdfast.core.tokens import TokenLog


class UnknownRequest(Refused):
    """The request that another one, or an event, names is not in the session, or is over."""

    code = "request_not_found"
    param = "session_params.rid"


class RequestRunning(Refused):
    """The parent still runs: only a finished request can be continued, unless it is replaced."""

    code = "request_not_finished"
    param = "session_params.rid"


class BadOffset(Refused):
    """There are not as many tokens before the end as are to be cut off."""

    code = "bad_offset"
    param = "session_params.offset"


class SessionFull(Refused):
    """A branching session holds as many tokens as it may."""

    code = "session_full"
    param = "session_params.id"


class RequestLog:
    """One request: its prompt, then its output."""

    __slots__ = ("children", "finished", "output_start", "parent", "tokens")

    def __init__(self, parent: str | None, prompt: Iterable[int]) -> None:
        self.parent = parent
        self.children: list[str] = []
        self.tokens = TokenLog(prompt)
        self.output_start = len(self.tokens)
        self.finished = False


class BranchingSession:
    """All requests of one session. `capacity` bounds the tokens of its logs when a request is composed."""

    __slots__ = ("capacity", "held", "logs")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self.logs: dict[str, RequestLog] = {}

    def compose(
        self,
        parent: str | None,
        tokens: list[int],
        offset: int = 0,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> list[int]:
        """The whole prompt of a request. Changes nothing, whether it answers or refuses."""
        prompt = list(tokens)
        if parent is not None:
            prompt = self._history(parent, offset, replace, drop_previous_output) + prompt
        kept = self.held
        if replace:
            kept -= sum(len(self.logs[rid].tokens) for rid in self._replaced(parent))
        if kept + len(prompt) > self.capacity:
            brought = f"the session holds {kept} tokens, the request brings {len(prompt)}"
            raise SessionFull(f"{brought}; {self.capacity} may be held")
        return prompt

    def _history(self, parent: str, offset: int, replace: bool, drop_previous_output: bool) -> list[int]:
        """The tokens that a request inherits from its parent."""
        log = self._find(parent)
        if not log.finished and not replace:
            raise RequestRunning(f"request {parent} has not finished")
        length = log.output_start if drop_previous_output else len(log.tokens)
        if offset < -length:
            raise BadOffset(f"offset {offset} reaches past the start of {length} tokens")
        if offset:
            length = length + offset if offset < 0 else min(length, offset)
        return log.tokens.slice(0, length)

    def begin(self, rid: str, parent: str | None, prompt: list[int], replace: bool = False) -> list[str]:
        """Enter a composed request; returns which requests are to be stopped because it replaces them."""
        if rid in self.logs:
            raise TurnExists(f"a request {rid} is in the session already")
        stopped: list[str] = []
        if parent is not None:
            log = self._find(parent)
            if replace and not log.finished:
                log.finished = True
                stopped.append(parent)
        if replace:
            stopped += self._forget(parent)
        self.logs[rid] = RequestLog(parent, prompt)
        self.held += len(prompt)
        if parent is not None:
            self.logs[parent].children.append(rid)
        return stopped

    def record(self, rid: str, output: Iterable[int], finished: bool = True) -> None:
        """More output of a request, the last of it if `finished`; refused once it is over or forgotten."""
        log = self._find(rid)
        if log.finished:
            raise UnknownRequest(f"request {rid} is over")
        before = len(log.tokens)
        log.tokens.extend(output)
        log.finished = finished
        self.held += len(log.tokens) - before

    def _find(self, rid: str) -> RequestLog:
        log = self.logs.get(rid)
        if log is None:
            raise UnknownRequest(f"no request {rid} in this session")
        return log

    def _replaced(self, parent: str | None) -> list[str]:
        """The requests that grew out of a parent, or all."""
        if parent is None:
            return list(self.logs)
        found = list(self.logs[parent].children)
        for rid in found:
            found += self.logs[rid].children
        return found

    def _forget(self, parent: str | None) -> list[str]:
        """Drop the requests that are replaced; returns those that were still running."""
        running: list[str] = []
        for rid in self._replaced(parent):
            log = self.logs.pop(rid)
            self.held -= len(log.tokens)
            if not log.finished:
                running.append(rid)
        if parent is not None:
            self.logs[parent].children = []
        return running
