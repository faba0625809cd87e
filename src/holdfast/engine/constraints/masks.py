"""Token masks: rows of packed bits in memory that the caller owns.

Bit `t % 32` of word `t // 32` says whether token `t` may follow. A row has a word for every 32 ids of the
model's vocabulary, padding included, and is zero in its unused bits. The memory is pinned host memory or an
ordinary buffer; a row is filled in place and nothing is allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

__all__ = ["WORD_BITS", "MaskRows", "words_for"]

WORD_BITS = 32
WORD_BYTES = 4


def words_for(vocabulary: int) -> int:
    """The words of a row over this many token ids."""
    return -(-vocabulary // WORD_BITS)


class MaskRows:
    """A block of rows at an address. The caller keeps the memory alive."""

    __slots__ = ("_owner", "address", "row_bytes", "rows", "words")

    def __init__(self, address: int, rows: int, words: int, owner: object = None) -> None:
        """`owner` is kept alive as long as this object, for callers who have nowhere else to keep it."""
        assert address % WORD_BYTES == 0
        self.address = address
        self.rows = rows
        self.words = words
        self.row_bytes = words * WORD_BYTES
        self._owner = owner

    @classmethod
    def allocated(cls, rows: int, vocabulary: int) -> MaskRows:
        """Rows in memory of their own, all zero."""
        words = words_for(vocabulary)
        memory = (ctypes.c_uint32 * (rows * words))()
        return cls(ctypes.addressof(memory), rows, words, memory)

    @classmethod
    def over(cls, buffer: memoryview, words: int) -> MaskRows:
        """Rows over a writable, contiguous buffer, whose length is a number of whole rows."""
        size = buffer.nbytes
        if not size or size % (words * WORD_BYTES):
            raise ValueError(
                f"a buffer of {size} bytes is not a number of rows of {words * WORD_BYTES} bytes"
            )
        memory = (ctypes.c_char * size).from_buffer(buffer)
        return cls(ctypes.addressof(memory), size // (words * WORD_BYTES), words, memory)

    def address_of(self, row: int) -> int:
        assert 0 <= row < self.rows
        return self.address + row * self.row_bytes

    def view(self, row: int) -> memoryview:
        """One row as writable words."""
        words = (ctypes.c_uint32 * self.words).from_address(self.address_of(row))
        return memoryview(words).cast("B").cast("I")

    def clear(self, row: int) -> None:
        """Allow nothing in a row."""
        ctypes.memset(self.address_of(row), 0, self.row_bytes)

    def allow(self, row: int, tokens: Iterable[int]) -> None:
        """Set the bits of some tokens."""
        view = self.view(row)
        for token in tokens:
            view[token // WORD_BITS] |= 1 << (token % WORD_BITS)

    def forbid(self, row: int, tokens: Iterable[int]) -> None:
        """Clear the bits of some tokens."""
        view = self.view(row)
        for token in tokens:
            view[token // WORD_BITS] &= ~(1 << (token % WORD_BITS)) & 0xFFFFFFFF

    def allowed(self, row: int) -> list[int]:
        """The tokens whose bits are set; for tests and error messages."""
        found: list[int] = []
        for index, word in enumerate(self.view(row)):
            while word:
                low = word & -word
                found.append(index * WORD_BITS + low.bit_length() - 1)
                word ^= low
        return found
