"""Which conversations to compare a request with: digests of its first messages.

A request that brings its whole history is compared with the texts of a few sessions, in a text process. These
keys choose them at the cost of a digest of the messages, however many conversations there are. Used by
`turn_starter` for `found_sessions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from holdfast.engine.portions import Portions

__all__ = ["Keys", "keys_of"]

KEY_CHARACTERS = 256
"""Characters of each message in the keys that do not depend on its end."""


PORTION = 128
"""Messages in one portion."""


class Keys(NamedTuple):
    """Digests of the first messages of a request: those by which a conversation is looked up, the least
    likely first, and those under which its own is noted.
    """

    look_up: list[bytes]
    note: list[bytes]


def keys_of(
    tenant: str, messages: Sequence[Mapping[str, Any]], tools: object, kwargs: object
) -> Portions[Keys]:
    """The keys of a request: of whole messages, and of their first characters. In portions.

    Clients change messages: they drop the reasoning of the assistant's, which are left out here, and move
    notes from the end of an old message to the new one. What a session has in common with a request is found
    by their texts; this only says which sessions to compare.
    """
    try:
        about = repr((tenant, tools, kwargs))
    except RecursionError:
        about = tenant  # Values that are nested so deeply are refused where they are used.
    seed = blake2b(about.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    said = [message for message in messages if message["role"] != "assistant"]
    short = yield from _keys(seed + b"short", said, KEY_CHARACTERS)
    whole = yield from _keys(seed, said, None)
    return Keys([*short, *whole] or [seed], [*short[-2:], *whole[-1:]] or [seed])


def _keys(seed: bytes, messages: Sequence[Mapping[str, Any]], most: int | None) -> Portions[list[bytes]]:
    state, found = blake2b(seed, digest_size=16), []
    for number, message in enumerate(messages, 1):
        for part in (message["role"], message.get("content")):
            content = str(part)[:most].encode("utf-8", "surrogatepass")
            state.update(len(content).to_bytes(8, "big") + content)
        found.append(state.copy().digest())
        if number % PORTION == 0:
            yield
    return found
