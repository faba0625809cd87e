"""What the native door keeps: requests in flight by their names, and ordinary sessions.

An ordinary session is a tree of requests (sglang_branches.py) and holds no memory of the engine's: each of
its requests is one of its own, through the prefix tree, with the tokens of what it follows in front. It lives
in this process, counts its idle time from the end of its last request, and is bounded in number and in
tokens. Streaming sessions are the engine's and are not kept here. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import Refused
from holdfast.engine.options import make_options
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, from_refusal
from holdfast.server.limits import TTL_MAX
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.routes.sglang_body import Asked, SessionParams
from holdfast.server.routes.sglang_branches import BranchingSession, RequestLog
from holdfast.server.routes.sglang_format import Said
from holdfast.server.service import Service
from holdfast.server.sessions import GONE, SessionRecord, new_name, require_name

__all__ = ["Branches", "Choice", "Native", "Record", "check_timeout"]

SESSION_TOKENS_MAX = 1 << 21
"""Tokens that the requests of one ordinary session may hold; each holds those of all that it follows."""

TENANT_TOKENS_MAX = 1 << 25
GONE_KEPT = 4096


@dataclass(slots=True, eq=False)
class Branches:
    """One ordinary session."""

    tenant: str
    name: str
    ttl: float
    tree: BranchingSession = field(default_factory=lambda: BranchingSession(SESSION_TOKENS_MAX))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the moment a request is composed until it is in the tree."""
    used: float = field(default_factory=time.monotonic)
    running: int = 0
    closed: bool = False

    @property
    def expired(self) -> bool:
        """Whether nothing has happened for too long."""
        return not self.running and not self.lock.locked() and time.monotonic() - self.used > self.ttl


class Record:
    """Writes what one request says into its session's tree, until it is over or forgotten."""

    def __init__(self, branches: Branches, rid: str) -> None:
        self._branches = branches
        self._rid = rid
        self._log: RequestLog = branches.tree.logs[rid]
        self._over = False
        branches.running += 1

    def add(self, tokens: Sequence[int], finished: bool = False) -> None:
        """More output, the last of it if `finished`."""
        tree = self._branches.tree
        if tree.logs.get(self._rid) is self._log and not self._log.finished:
            tree.record(self._rid, tokens, finished)
        if finished and not self._over:
            self._over = True
            self._branches.running -= 1
            self._branches.used = time.monotonic()


@dataclass(slots=True, eq=False)
class Choice:
    """One answer in flight: what the engine says, how it is shown, and where it is written down."""

    said: Said
    feed: TurnFeed
    record: Record | None = None
    session: SessionRecord | None = None
    """The streaming session that it is a turn of."""
    names: set[str] = field(default_factory=set)
    """What it can be stopped by."""


class Native:
    """All that the door remembers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.ttl = make_options(**service.supervisor.configure.options).session_ttl
        self._sessions: dict[tuple[str, str], Branches] = {}
        self._gone: dict[tuple[str, str], str] = {}
        self._calls: dict[tuple[str, str], list[Choice]] = {}
        service.is_taken = lambda tenant, name: self.find(tenant, name) is not None
        service.held_elsewhere = self.count

    # --- requests in flight -----------------------------------------------------------------------

    def enter(self, tenant: str, choice: Choice) -> None:
        """An answer is in flight."""
        for name in choice.names:
            self._calls.setdefault((tenant, name), []).append(choice)

    def leave(self, tenant: str, choice: Choice) -> None:
        """An answer is over, or nobody waits for it."""
        for name in choice.names:
            calls = self._calls.get((tenant, name), [])
            if choice in calls:
                calls.remove(choice)
            if not calls:
                self._calls.pop((tenant, name), None)
        if choice.record is not None:
            choice.record.add((), finished=True)

    def stop(self, tenant: str, name: str, reason: str) -> None:
        """Stop what is in flight by a name; nothing, if nothing is."""
        for choice in self._calls.get((tenant, name), []):
            self.service.link.end(choice.feed, None, reason)

    # --- ordinary sessions ------------------------------------------------------------------------

    def open(self, caller: Caller, name: str | None, ttl: float | None) -> str:
        """Open an ordinary session."""
        name = require_name(name, "session_id") if name is not None else new_name("s")
        if ttl is not None:
            check_timeout(ttl)
        self.service.require_room(caller.tenant)
        key = (caller.tenant, name)
        self._gone.pop(key, None)
        self._sessions[key] = Branches(caller.tenant, name, self.ttl if ttl is None else ttl)
        return name

    def count(self, tenant: str) -> int:
        """How many ordinary sessions a tenant has; those whose time is over are removed first."""
        self._sweep()
        return sum(owner == tenant for owner, _ in self._sessions)

    def exists(self, tenant: str, name: str) -> bool:
        """Whether a session of either kind is open under this name, or being opened."""
        return self.find(tenant, name) is not None or self.service.table.is_taken(tenant, name)

    def find(self, tenant: str, name: str) -> Branches | None:
        """An ordinary session; None if there is none."""
        branches = self._sessions.get((tenant, name))
        if branches is not None and branches.expired:
            self._remove(branches, "expired")
            return None
        return branches

    def gone(self, tenant: str, name: str) -> str | None:
        """Why an ordinary session of that name is no more."""
        return self._gone.get((tenant, name))

    def close(self, branches: Branches) -> None:
        """Close an ordinary session; its requests in flight are stopped."""
        for rid, log in branches.tree.logs.items():
            if not log.finished:
                self.stop(branches.tenant, rid, "the session was closed")
        self._remove(branches, "closed")

    def require_open(self, branches: Branches) -> None:
        """Raise if an ordinary session was closed since it was found."""
        if branches.closed:
            raise Problem(*GONE["closed"], "session_params.id")

    def _remove(self, branches: Branches, why: str) -> None:
        assert why in GONE, "a reason that clients can be told"
        branches.closed = True
        key = (branches.tenant, branches.name)
        del self._sessions[key]
        self._gone[key] = why
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def _sweep(self) -> None:
        for branches in [each for each in self._sessions.values() if each.expired]:
            self._remove(branches, "expired")

    def compose(
        self, branches: Branches, asked: Asked, params: SessionParams, tokens: list[int]
    ) -> list[int]:
        """The whole prompt of a request on an ordinary session; changes nothing."""
        self.require_open(branches)
        if asked.rid in branches.tree.logs:
            raise Problem(409, "turn_exists", "a request of this name is in the session already", "rid")
        try:
            prompt = branches.tree.compose(
                params.rid,
                tokens,
                params.offset or 0,
                params.replace or False,
                params.drop_previous_output or False,
            )
        except Refused as refusal:
            raise from_refusal(refusal.code, str(refusal), refusal.param) from refusal
        held = sum(each.tree.held for key, each in self._sessions.items() if key[0] == branches.tenant)
        if held + len(prompt) > TENANT_TOKENS_MAX:
            raise Problem(429, "over_quota", f"{TENANT_TOKENS_MAX} tokens may be held by a key's sessions")
        return prompt

    def begin(self, branches: Branches, asked: Asked, params: SessionParams, prompt: list[int]) -> Record:
        """Enter a request that the engine has accepted; what it replaces is stopped."""
        stopped = branches.tree.begin(asked.rid, params.rid, prompt, params.replace or False)
        for rid in stopped:
            self.stop(branches.tenant, rid, "another request took its place")
        return Record(branches, asked.rid)


def check_timeout(seconds: float) -> None:
    """How long a session may be idle; raises the problem with it."""
    if not 0 < seconds <= TTL_MAX:
        raise bad_field("timeout", f"must be more than 0 and at most {TTL_MAX:.0f} seconds")
