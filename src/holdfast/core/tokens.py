"""The token log: the known tokens of a sequence, in order.

It is appended to and cut at its end; nothing here ever walks the history. The prefix tree compares the packed
form (four bytes a token). A digest of the history continues from earlier digests, as long as no cut went
below them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

TOKEN_BYTES = 4
TOKEN_MAX = 2**31 - 1
DIGESTS_KEPT = 4

assert array("I").itemsize == TOKEN_BYTES, "the token log needs four-byte unsigned integers"


def pack(tokens: Iterable[int]) -> bytes:
    """Tokens as bytes, four each: the key form of the prefix tree."""
    return array("I", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The tokens of `pack`."""
    return array("I", packed).tolist()


class Hash(Protocol):
    """The state of a hash, as `hashlib` has it."""

    def copy(self) -> Hash:
        """A copy that continues from here."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """The digest of the tokens so far."""


class TokenLog:
    """An append-only list of tokens that can be cut at its end."""

    __slots__ = ("_digests", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("I", tokens)
        self._digests: list[tuple[int, Hash]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> int:
        return self._tokens[index]

    def append(self, token: int) -> None:
        """One more token."""
        self._tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens, at the cost of those tokens alone."""
        self._tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot cut {len(self._tokens)} tokens to {length}")
        del self._tokens[length:]
        while self._digests and self._digests[-1][0] > length:
            del self._digests[-1]

    def digest(self, length: int) -> str:
        """A digest of the first `length` tokens, at the cost of those that are new since the last one."""
        assert 0 <= length <= len(self._tokens), "only what is known"
        fresh: tuple[int, Hash] = (0, sha256())
        known, state = next((each for each in reversed(self._digests) if each[0] <= length), fresh)
        found = state.copy()
        found.update(self._tokens[known:length].tobytes())
        if not self._digests or length > self._digests[-1][0]:
            self._digests = [*self._digests[1 - DIGESTS_KEPT :], (length, found)]
        return found.hexdigest()

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens `start..stop` as a list."""
        return self._tokens[start:stop].tolist()

    def packed(self, start: int, stop: int) -> bytes:
        """Tokens `start..stop` in the key form of the prefix tree."""
        return self._tokens[start:stop].tobytes()


def all_known(tokens: Sequence[int], vocabulary: int) -> bool:
    """Whether every token is in a vocabulary: tables have no rows for others."""
    return not tokens or 0 <= min(tokens) <= max(tokens) < vocabulary


def common_bytes(key: bytes, packed: bytes, at: int, stop: int, page_bytes: int) -> int:
    """How many bytes, in whole pages, `key` shares with `packed` from `at`, not past `stop`."""
    if at + len(key) <= stop and packed.startswith(key, at):
        return len(key)
    low, high = 1, min(len(key), stop - at) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if packed.startswith(key[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
