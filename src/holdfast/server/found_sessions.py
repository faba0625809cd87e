"""Conversations whose history clients resend with each request, and the hidden sessions with their memory.

A chat client resends its history with every request. Each such conversation has a *hidden session* on the
engine: volatile (in no journal), in no list, with a name that no client can use. A request continues in the
session with the longest common prefix.

    candidates   sessions of the tenant whose latest requests had the same first messages: an index by
                 digests of messages (`conversation_keys`), since comparing texts is work for a text process
    trail        the text of a session in stretches (`session_trail`)
    claim        a session and the length from which a request continues; it is busy until the turn ends

At the end of the last turn, or inside it, a request continues in place and cuts the rest. At an older
place it forks. A busy session is no candidate: the conversation is computed in another one.
Everything here is a cache: if the engine has lost a claimed session, the request is written again for a
new one. All methods run on the event loop. Used by `service` and `turn_starter`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.server.link.turn_feed import TurnFeed
from holdfast.server.session_trail import NO_TRAIL, Trail
from holdfast.server.sessions import found_name
from holdfast.server.text import jobs
from holdfast.server.turn_request import TurnAsked
from holdfast.server.turn_writer import WrittenTurn

__all__ = ["STALE", "Candidate", "Claim", "Conversation", "Conversations", "turn_fields"]

CANDIDATES_MAX = 4
LIKELY_MAX = 2 * CANDIDATES_MAX
KEYS_MAX = 192
"""Keys by which a conversation can be found, three a request; older ones are forgotten."""
LEAVING_SECONDS = 5.0
"""How long a request waits for the end of a turn that its client has left."""

STALE = frozenset(
    {"session_not_found", "session_expired", "session_busy", "history_changed", "turn_not_found"}
)
"""Refusals of a claim after which the request is written for a new session."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A hidden session: its trail, the requests by which it is found, and the turn that it is busy with."""

    tenant: str
    name: str
    trail: Trail = NO_TRAIL
    known: int = 0
    """How many tokens the session has."""
    inherited: int = 0
    """How many of them it had when it was forked: checkpoints of these are its parent's."""
    turns: int = 0
    """Turns that have ended: what was found before the last of them is stale."""
    keys: list[bytes] = field(default_factory=list)
    call: int | None = None
    """The call that started its turn in flight."""
    asked: Trail = NO_TRAIL
    """Its trail with the input of that turn."""
    before: int | None = None
    """The last token of that input."""
    over: asyncio.Event | None = None
    """Set at the end of a turn that its client has left."""


class Candidate(NamedTuple):
    """A conversation as it was when a request was compared with it."""

    conversation: Conversation
    trail: Trail
    turns: int


class Claim(NamedTuple):
    """A conversation claimed by a request, and the history that its turn follows.

    `keep` tokens of the session, or of `parent`, come before `tokens`. `how`: found, forked or new.
    """

    conversation: Conversation
    how: str
    tokens: list[int]
    keep: int
    known: int
    parent: str | None = None


class Conversations:
    """All conversations of all tenants, at most `limit`; `close` ends a session on the engine."""

    def __init__(self, limit: int, close: Callable[[str], None], count: Callable[[str], None]) -> None:
        """`count` counts requests by how their session was found."""
        self._limit = limit
        self._close = close
        self._count = count
        self._by_name: dict[str, Conversation] = {}
        self._tenants: dict[str, OrderedDict[str, Conversation]] = {}
        """The conversations of each tenant, least recently used first."""
        self._found_by: dict[bytes, dict[Conversation, None]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str | None) -> bool:
        return name in self._by_name

    def all(self) -> list[Conversation]:
        """All conversations."""
        return list(self._by_name.values())

    def takes(self, asked: TurnAsked) -> bool:
        """Whether a request is a conversation that continues in a session."""
        sampling = asked.sampling
        whole = asked.input.messages is not None and sampling.n == 1 and not asked.goes_on
        scored = sampling.prompt_logprobs is not None or asked.computes_from is not None
        return whole and not scored and self._limit > 0

    # --- finding ----------------------------------------------------------------------------------

    async def candidates(self, keys: Sequence[bytes]) -> list[Candidate]:
        """Conversations that may have the beginning of a request, most likely first.

        One whose turn was left by its client is waited for: it ends within a step.
        """
        left = next((each.over for each in self._likely(keys)[:1]), None)
        if left is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), LEAVING_SECONDS)
        idle = [each for each in self._likely(keys) if each.call is None and each.trail.ends]
        return [Candidate(each, each.trail, each.turns) for each in idle[:CANDIDATES_MAX]]

    def _likely(self, keys: Sequence[bytes]) -> list[Conversation]:
        found: dict[Conversation, None] = {}
        for key in reversed(keys):
            for conversation in reversed(self._found_by.get(key, {})):
                found[conversation] = None
                if len(found) >= LIKELY_MAX:
                    return list(found)
        return list(found)

    def claim(
        self,
        tenant: str,
        keys: Sequence[bytes],
        call: int,
        written: WrittenTurn,
        candidates: Sequence[Candidate],
    ) -> Claim | None:
        """The session in which a request continues; None if it has changed meanwhile, or all are busy."""
        found, tokens = written.found, written.tokens
        assert found is not None, "the request was compared with trails"
        if found.trail is None:
            return self._new(tenant, keys, call, found, tokens)
        conversation, trail, _ = candidates[found.trail]
        if not self._is_as_found(candidates[found.trail]):
            return None
        whole = trail.first(found.stretches + 1)
        if found.is_all and found.is_known and len(whole.stretches) > trail.last and not whole.answered:
            # The prompt is there to its end: its last token is computed once more.
            return self._in_place(conversation, keys, call, whole, tokens[-1:], whole.known - 1)
        if not found.stretches:
            return self._new(tenant, keys, call, found, tokens)
        gone = 0 if found.merged is None else trail.merge[1] - trail.merge[0] - 1
        trail = conversation.trail = trail.settled(found)
        kept = trail.first(found.stretches - gone)
        asked = _with_input(kept, found, tokens)
        if len(kept.stretches) > trail.last:
            return self._in_place(conversation, keys, call, asked, tokens, kept.known)
        parent = next((each for each in candidates if self._computed(each, kept)), candidates[found.trail])
        self._tenants[tenant].move_to_end(parent.conversation.name)
        child = self._add(tenant)
        if child is None:
            return None
        child.inherited = kept.known
        for each in conversation.keys:
            self._note_key(child, each)
        self._begin(child, keys, call, asked, tokens)
        return Claim(child, "forked", tokens, kept.known, kept.known, parent.conversation.name)

    def _computed(self, candidate: Candidate, kept: Trail) -> bool:
        """Whether a session has a part of a trail, and has computed its end itself."""
        conversation = candidate.conversation
        same = candidate.trail.first(len(kept.stretches))[:2] == kept[:2]
        return same and conversation.inherited < kept.known and self._is_as_found(candidate)

    def _is_as_found(self, candidate: Candidate) -> bool:
        """Whether a session is idle and has had no turn since it was compared."""
        conversation = candidate.conversation
        present = self._by_name.get(conversation.name) is conversation
        return present and conversation.call is None and conversation.turns == candidate.turns

    def _in_place(
        self,
        conversation: Conversation,
        keys: Sequence[bytes],
        call: int,
        asked: Trail,
        tokens: list[int],
        keep: int,
    ) -> Claim:
        self._begin(conversation, keys, call, asked, tokens)
        return Claim(conversation, "found", tokens, keep, conversation.known)

    def _new(
        self, tenant: str, keys: Sequence[bytes], call: int, found: jobs.Found, tokens: list[int]
    ) -> Claim | None:
        conversation = self._add(tenant)
        if conversation is None:
            return None
        self._begin(conversation, keys, call, _with_input(NO_TRAIL, found, tokens), tokens)
        return Claim(conversation, "new", tokens, 0, 0)

    def _begin(
        self, conversation: Conversation, keys: Sequence[bytes], call: int, asked: Trail, tokens: list[int]
    ) -> None:
        conversation.call, conversation.asked, conversation.before = call, asked, tokens[-1]
        for key in keys:
            self._note_key(conversation, key)
        self._tenants[conversation.tenant].move_to_end(conversation.name)

    # --- turns ------------------------------------------------------------------------------------

    def started(self, claim: Claim) -> None:
        """The engine has accepted the turn of a claim."""
        self._count(claim.how)

    def release(self, claim: Claim) -> None:
        """The turn of a claim was refused, which has changed nothing."""
        conversation = claim.conversation
        conversation.call = None
        if claim.how != "found":
            self._remove(conversation)

    def drop(self, claim: Claim) -> None:
        """What became of the session of a claim is not known: it is closed."""
        self._close(claim.conversation.name)
        self._remove(claim.conversation)

    def left(self, feed: TurnFeed) -> bool:
        """Whether a turn that its client has left is a conversation's."""
        conversation = None if feed.session is None else self._by_name.get(feed.session)
        if conversation is None or conversation.call != feed.call:
            return False
        conversation.over = asyncio.Event()
        return True

    def ended(self, feed: TurnFeed) -> None:
        """A turn has ended: its session's trail is cut to the part that stays."""
        conversation = None if feed.session is None else self._by_name.get(feed.session)
        if conversation is None or conversation.call != feed.call:
            return
        asked, end = conversation.asked, feed.end
        conversation.call = None
        if conversation.over is not None:
            conversation.over.set()
            conversation.over = None
        known = 0 if end is None or end.view is None else end.view.known
        conversation.known = known
        conversation.turns += 1
        conversation.trail = asked.within(known)
        if end is not None and end.tokens and known == asked.known + len(end.tokens):
            conversation.trail = asked.with_answer(end.tokens, conversation.before)
        if not conversation.trail.ends:
            self._close(conversation.name)
            self._remove(conversation)

    def gone(self, name: str) -> None:
        """A session has ended on the engine."""
        conversation = self._by_name.get(name)
        if conversation is not None:
            self._remove(conversation)

    def clear(self) -> None:
        """The engine was restarted: all sessions are lost."""
        for conversation in list(self._by_name.values()):
            self._remove(conversation)

    def close_idle(self) -> None:
        """End all sessions that have no turn in flight."""
        for conversation in list(self._by_name.values()):
            if conversation.call is None:
                self._close(conversation.name)
                self._remove(conversation)

    # --- the table --------------------------------------------------------------------------------

    def _add(self, tenant: str) -> Conversation | None:
        """A new conversation; the least recently used of the tenant that has most makes room for it."""
        if len(self._by_name) >= self._limit:
            largest = max(self._tenants.values(), key=len)
            victim = next((each for each in largest.values() if each.call is None), None)
            if victim is None:
                return None
            self._close(victim.name)
            self._remove(victim)
        conversation = Conversation(tenant, found_name(tenant))
        self._by_name[conversation.name] = conversation
        self._tenants.setdefault(tenant, OrderedDict())[conversation.name] = conversation
        return conversation

    def _remove(self, conversation: Conversation) -> None:
        if self._by_name.pop(conversation.name, None) is None:
            return
        if conversation.over is not None:
            conversation.over.set()
        mine = self._tenants[conversation.tenant]
        del mine[conversation.name]
        if not mine:
            del self._tenants[conversation.tenant]
        for key in set(conversation.keys):
            self._forget_key(conversation, key)

    def _note_key(self, conversation: Conversation, key: bytes) -> None:
        if key in conversation.keys:
            conversation.keys.remove(key)
        conversation.keys.append(key)
        self._found_by.setdefault(key, {}).pop(conversation, None)
        self._found_by[key][conversation] = None
        if len(conversation.keys) > KEYS_MAX:
            self._forget_key(conversation, conversation.keys.pop(0))

    def _forget_key(self, conversation: Conversation, key: bytes) -> None:
        found = self._found_by[key]
        del found[conversation]
        if not found:
            del self._found_by[key]


def _with_input(kept: Trail, found: jobs.Found, tokens: list[int]) -> Trail:
    """A trail with the input of a turn that follows it."""
    assert found.ends[-1] == len(tokens), "the stretches are those of the tokens"
    return kept.with_turn(found.input, [kept.known + end for end in found.ends])


def turn_fields(claim: Claim) -> dict[str, Any]:
    """The fields of a `StartTurn` for the history that a turn follows."""
    return {
        "session": claim.conversation.name,
        "known": claim.known,
        "keep": claim.keep,
        "parent": claim.parent,
        "volatile": True,
    }
