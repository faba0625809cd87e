"""Token streams and the request trace of the core's benchmark, the same on every machine.

Token `i` of a stream is a hash of both numbers (splitmix64), so no two streams share a run of tokens by
chance, and any implementation of the same formulas gives the same requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

MASK_64 = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB

TOKEN_FIRST = 10
TOKEN_COUNT = 50_000
OUTPUT_STRIDE = 7919

TRACE_REQUESTS = 2_000
TRACE_GROUPS = 50

# A whole number whose 128-bit lanes are 64-bit values: one multiplication hashes all lanes at once.
LANES = 1024
LANE_BITS = 128
ONES = sum(1 << (LANE_BITS * lane) for lane in range(LANES))
IOTA = sum(lane << (LANE_BITS * lane) for lane in range(LANES))
LOW_HALVES = ONES * MASK_64


def splitmix64(value: int) -> int:
    """The standard splitmix64 hash of one number."""
    mixed = (value + INCREMENT) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * FIRST_FACTOR) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * SECOND_FACTOR) & MASK_64
    return mixed ^ (mixed >> 31)


def _hash_lanes(first: int) -> array[int]:
    """`splitmix64` of LANES consecutive numbers from `first` on, in one pass over a long integer.

    A product of two 64-bit values fits its lane, and what a shift carries over from the next lane lies in
    the upper half, which the mask clears.
    """
    mixed = (ONES * ((first + INCREMENT) & MASK_64) + IOTA) & LOW_HALVES
    mixed = (((mixed ^ (mixed >> 30)) & LOW_HALVES) * FIRST_FACTOR) & LOW_HALVES
    mixed = (((mixed ^ (mixed >> 27)) & LOW_HALVES) * SECOND_FACTOR) & LOW_HALVES
    mixed = (mixed ^ (mixed >> 31)) & LOW_HALVES
    return array("Q", mixed.to_bytes(LANES * LANE_BITS // 8, "little"))[::2]


def stream(number: int, count: int) -> list[int]:
    """The first `count` tokens of a stream."""
    tokens: list[int] = []
    for first in range(0, count, LANES):
        tokens += [TOKEN_FIRST + value % TOKEN_COUNT for value in _hash_lanes(number << 32 | first)]
    del tokens[count:]
    return tokens


def outputs(count: int) -> list[int]:
    """The tokens that every turn generates."""
    return [TOKEN_FIRST + (index * OUTPUT_STRIDE) % TOKEN_COUNT for index in range(count)]


def trace_total(index: int) -> int:
    """The tokens of request `index` of the trace, before it is cut to whole pages."""
    return 1024 + splitmix64(21_000 + index) % 7169


def trace_requests(count: int = TRACE_REQUESTS) -> Iterator[list[int]]:
    """The trace's requests in order: four of five begin with one of 50 shared prefixes."""
    prefixes: dict[int, list[int]] = {}
    for index in range(count):
        total = trace_total(index)
        drawn = splitmix64(14_000 + index)
        tokens: list[int] = []
        if drawn % 10 < 8:
            group = (drawn >> 8) % TRACE_GROUPS
            if group not in prefixes:
                prefixes[group] = stream(100_000 + group, 512 + splitmix64(7_000 + group) % 3585)
            tokens = prefixes[group][:total]
        yield tokens + stream(200_000 + index, total - len(tokens))
