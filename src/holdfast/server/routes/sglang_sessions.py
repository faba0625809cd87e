"""Requests of `/generate` in flight by name, and their effects on ordinary sessions.

Used by the SGLang routes, on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import Refused
from holdfast.engine.options import make_options
from holdfast.server.branching import RequestLog
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem, bad_field, from_refusal
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.options import TTL_MAX
from holdfast.server.ordinary_sessions import Branches
from holdfast.server.routes.sglang_body import Asked, SessionParams
from holdfast.server.routes.sglang_format import Said
from holdfast.server.service import Service
from holdfast.server.sessions import GONE, SessionRecord, new_name, require_name

__all__ = ["Choice", "Native", "Record", "check_timeout"]

TENANT_TOKENS_MAX = 1 << 25
"""Tokens that a tenant's ordinary sessions may hold."""


class Record:
    """Records the output of one request in its session's tree."""

    def __init__(self, branches: Branches, rid: str) -> None:
        self._branches = branches
        self._rid = rid
        self._log: RequestLog = branches.tree.logs[rid]
        self._over = False
        branches.running += 1

    def add(self, tokens: Sequence[int], finished: bool = False) -> None:
        """Add output; `finished` with the last of it."""
        tree = self._branches.tree
        if tree.logs.get(self._rid) is self._log and not self._log.finished:
            tree.record(self._rid, tokens, finished)
        if finished and not self._over:
            self._over = True
            self._branches.running -= 1
            self._branches.used = time.monotonic()


@dataclass(slots=True, eq=False)
class Choice:
    """One answer in flight: its feed, its format and its record."""

    said: Said
    feed: TurnFeed
    record: Record | None = None
    session: SessionRecord | None = None
    """The streaming session that it is a turn of."""
    names: set[str] = field(default_factory=set)
    """Names that it can be aborted by."""


class Native:
    """The state of the SGLang routes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.ordinary = service.ordinary
        self._calls: dict[tuple[str, str], list[Choice]] = {}

    @property
    def ttl(self) -> float:
        """The time to live of a session that gives none."""
        return make_options(**self.service.supervisor.engine_options).session_ttl

    # --- requests in flight -----------------------------------------------------------------------

    def enter(self, tenant: str, choice: Choice) -> None:
        """Register an answer."""
        for name in choice.names:
            self._calls.setdefault((tenant, name), []).append(choice)

    def leave(self, tenant: str, choice: Choice) -> None:
        """Remove an answer that has ended or was left."""
        for name in choice.names:
            calls = self._calls.get((tenant, name), [])
            if choice in calls:
                calls.remove(choice)
            if not calls:
                self._calls.pop((tenant, name), None)
        if choice.record is not None:
            choice.record.add((), finished=True)

    def stop(self, tenant: str, name: str, reason: str) -> None:
        """Abort the answers in flight under a name, if any."""
        for choice in self._calls.get((tenant, name), []):
            self.service.link.end(choice.feed, None, reason)

    # --- ordinary sessions ------------------------------------------------------------------------

    def open(self, caller: Caller, name: str | None, ttl: float | None) -> str:
        """Open an ordinary session."""
        name = require_name(name, "session_id") if name is not None else new_name("s")
        if ttl is not None:
            check_timeout(ttl)
        self.service.sessions.require_room(caller.tenant)
        self.ordinary.add(caller.tenant, name, self.ttl if ttl is None else ttl)
        return name

    def exists(self, tenant: str, name: str) -> bool:
        """Whether a session of either kind is open under this name, or being opened."""
        return self.ordinary.find(tenant, name) is not None or self.service.table.is_taken(tenant, name)

    def close(self, branches: Branches) -> None:
        """Close an ordinary session and abort its requests in flight."""
        for rid, log in branches.tree.logs.items():
            if not log.finished:
                self.stop(branches.tenant, rid, "the session was closed")
        self.ordinary.remove(branches, "closed")

    def require_open(self, branches: Branches) -> None:
        """Raise if an ordinary session was closed since it was found."""
        if branches.closed:
            raise Problem(*GONE["closed"], "session_params.id")

    def compose(
        self, branches: Branches, asked: Asked, params: SessionParams, tokens: list[int]
    ) -> list[int]:
        """The whole prompt of a request on an ordinary session; changes nothing."""
        self.require_open(branches)
        if asked.rid in branches.tree.logs:
            raise Problem(409, "turn_exists", "the session already has a request with this id", "rid")
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
        if self.ordinary.tokens(branches.tenant) + len(prompt) > TENANT_TOKENS_MAX:
            raise Problem(
                429,
                "over_quota",
                f"the ordinary sessions of a key may hold at most {TENANT_TOKENS_MAX} tokens",
            )
        return prompt

    def begin(self, branches: Branches, asked: Asked, params: SessionParams, prompt: list[int]) -> Record:
        """Add a request that the engine has accepted, and abort those that it replaces."""
        stopped = branches.tree.begin(asked.rid, params.rid, prompt, params.replace or False)
        for rid in stopped:
            self.stop(branches.tenant, rid, "replaced by another request")
        return Record(branches, asked.rid)


def check_timeout(seconds: float) -> None:
    """Raise for an invalid idle time."""
    if not 0 < seconds <= TTL_MAX:
        raise bad_field("timeout", f"must be more than 0 and at most {TTL_MAX:.0f} seconds")
