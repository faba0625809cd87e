"""What rank 0 sends the other ranks: frames over a Unix socket, one stream per rank.

A frame is a kind, whole numbers, and bytes: the words of a step as they go to the device, or a setup in JSON.
In a strict audit each frame carries a checksum of all frames so far, which the receiver compares with its
own. The end of the stream tells each side that the other has ended.
"""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np

from holdfast.core.layout import Component, Tier
from holdfast.core.plan import TierMove
from holdfast.engine.ranks.units import GatheredUnits
from holdfast.engine.step.inputs import Limits, Shape
from holdfast.engine.step.lead import StepCall
from holdfast.engine.step.tables import TableForm

__all__ = ["Channel", "Digest", "Frame", "Kind", "RankEnded", "encode"]

_HEADER = struct.Struct("<IIII")
_NAMES = tuple(component.name.lower() for component in Component)


class RankEnded(RuntimeError):
    """The process at the other end of a channel has ended, or has stalled."""


class Kind(IntEnum):
    """The request or answer of a frame."""

    SETUP = auto()
    """The model, its options, and which rank this is; in JSON."""
    ANSWER = auto()
    """Of a rank: what it was asked for is done, or why not; in JSON."""
    MEASURE = auto()
    PLAN = auto()
    """The sizes of pools and steps; in JSON."""
    STEP = auto()
    LOGITS = auto()
    TAKE = auto()
    COPY = auto()
    MOVE = auto()
    FENCE = auto()
    REST = auto()
    WAKE = auto()
    GRAPHS = auto()
    CAPTURE = auto()
    GATHER = auto()
    SCATTER = auto()
    STOP = auto()


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    numbers: list[int]
    body: bytes = b""

    @classmethod
    def of_json(cls, kind: Kind, value: Any) -> Frame:
        """A frame whose body is JSON."""
        return cls(kind, [], json.dumps(value).encode())

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Digest:
    """A checksum of all frames of a stream so far; zero unless frames are `checked`."""

    __slots__ = ("_value", "checked")

    def __init__(self) -> None:
        self.checked = False
        self._value = 0

    def next(self, content: bytes) -> int:
        """The checksum after a frame."""
        if not self.checked:
            return 0
        self._value = zlib.crc32(content, self._value)
        return self._value


def encode(frame: Frame, digest: Digest) -> bytes:
    """The bytes of a frame."""
    content = np.asarray(frame.numbers, dtype=np.int64).tobytes() + frame.body
    return _HEADER.pack(frame.kind, len(frame.numbers), len(frame.body), digest.next(content)) + content


class Channel:
    """One end of a stream of frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.digest = Digest()

    def send(self, content: bytes, seconds: float | None = None) -> None:
        """Send an encoded frame; raises `RankEnded` if the other side is gone, or does not read in time."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(content)
        except TimeoutError as error:
            raise RankEnded("does not read") from error
        except OSError as error:
            raise RankEnded("has ended") from error

    def receive(self) -> Frame:
        """Wait for the next frame; raises `RankEnded` at the end of the stream."""
        self._socket.settimeout(None)
        kind, count, size, digest = _HEADER.unpack(self._take(_HEADER.size))
        content = self._take(8 * count + size)
        if digest != self.digest.next(content):
            raise RuntimeError("the digest of a plan does not match: ranks do not run the same steps")
        numbers: list[int] = np.frombuffer(content, dtype=np.int64, count=count).tolist()
        return Frame(Kind(kind), numbers, content[8 * count :])

    def _take(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except OSError as error:
                raise RankEnded("has ended") from error
            if not part:
                raise RankEnded("has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# --- the numbers of each kind ---------------------------------------------------------------------


def write_step(call: StepCall) -> list[int]:
    """The numbers of a step."""
    limits = (0, 0, 0) if call.limits is None else call.limits[:3]
    tables = call.tables
    return [*call.shape, call.limits is None, *limits, tables.rows, *tables.widths, *tables.counts]


def read_step(numbers: list[int]) -> StepCall:
    """A step from its numbers."""
    rows, tokens, samples, decode, in_graph, *others = numbers
    count_max, context_max, rows_of_one, table_rows, full, window, full_count, window_count = others
    return StepCall(
        Shape(rows, tokens, samples, bool(decode)),
        None if in_graph else Limits(count_max, context_max, rows_of_one),
        TableForm(table_rows, (full, window), (full_count, window_count)),
    )


class _Reader:
    """Takes numbers one after the other."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._place = 0

    def one(self) -> int:
        self._place += 1
        return self._numbers[self._place - 1]

    def several(self) -> list[int]:
        """A list that begins with its length."""
        count = self.one()
        self._place += count
        return self._numbers[self._place - count : self._place]


def _listed(values: Sequence[int]) -> list[int]:
    return [len(values), *values]


def write_copy(name: str, sources: list[int], destinations: list[int]) -> list[int]:
    """The numbers of copies of units."""
    return [_NAMES.index(name), *_listed(sources), *_listed(destinations)]


def read_copy(numbers: list[int]) -> tuple[str, list[int], list[int]]:
    """Copies of units from their numbers."""
    reader = _Reader(numbers)
    return _NAMES[reader.one()], reader.several(), reader.several()


def write_moves(moves: Sequence[TierMove]) -> list[int]:
    """The numbers of moves between tiers."""
    numbers = [len(moves)]
    for move in moves:
        numbers += [move.number, move.component, move.source_tier, *_listed(move.sources)]
        numbers += [move.destination_tier, *_listed(move.destinations)]
    return numbers


def read_moves(numbers: list[int]) -> list[TierMove]:
    """Moves between tiers from their numbers."""
    reader = _Reader(numbers)
    moves = []
    for _ in range(reader.one()):
        number, component, source = reader.one(), Component(reader.one()), Tier(reader.one())
        sources = reader.several()
        moves.append(TierMove(number, component, source, sources, Tier(reader.one()), reader.several()))
    return moves


def write_units(units: Sequence[GatheredUnits]) -> list[int]:
    """The numbers of a session's units."""
    numbers = [len(units)]
    for name, on_host, leased, own in units:
        numbers += [_NAMES.index(name), on_host, *_listed(leased), *_listed(own)]
    return numbers


def read_units(numbers: list[int]) -> list[GatheredUnits]:
    """A session's units from their numbers."""
    reader = _Reader(numbers)
    return [
        GatheredUnits(_NAMES[reader.one()], bool(reader.one()), reader.several(), reader.several())
        for _ in range(reader.one())
    ]
