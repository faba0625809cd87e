"""Messages about sessions that change engines: claims, hand-overs, drains, and files between engines; and
about realtime clients that change API processes.

Part of `wire`, which names them all.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Abandon",
    "Claim",
    "ClusterCommand",
    "Content",
    "Drain",
    "FetchMissed",
    "GiveMissed",
    "HandOver",
    "KeepMissed",
    "LocalFile",
    "Missed",
    "Stage",
]


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Find a session in the journal that the engines share, and take it over if its engine has ended.

    `lost` are names of engines that the API process cannot reach: their leases decide whether they have
    ended. Answered with `Found`; None if there is no such session.
    """

    call: int
    session: str
    lost: list[str] = []


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Hand a session at rest over to the engine that has a name, with its memory if that can be moved.

    Answered with the number of bytes that were moved. Refused with `session_busy` while a turn runs.
    """

    call: int
    session: str
    engine: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Drain an engine: it takes nothing new, hands its sessions over, and ends."""

    call: int


class LocalFile(msgspec.Struct, frozen=True):
    """An open file of a process on a machine, with the identity of the file."""

    machine: str
    process: int
    descriptor: int
    device: int
    inode: int


class Stage(msgspec.Struct, tag="stage", frozen=True):
    """Another engine announces the file of a session's memory: what it holds, and its size.

    Answered with a token, for a connection that brings its content (`Content`); or with True once the file is
    complete, where the engine could copy the sender's open file `local`.
    """

    call: int
    session: str
    model: str
    layout: str
    length: int
    tokens: str
    types: str
    bytes: int
    local: LocalFile | None = None


class Content(msgspec.Struct, tag="content", frozen=True):
    """The first message of a connection that is no link: it brings the file whose announcement got `token`.

    The content follows as plain bytes, as many as were announced, and ends the connection. Answered on the
    link that announced it, as call `call`, when the file is complete.
    """

    call: int
    token: str


class Abandon(msgspec.Struct, tag="abandon", frozen=True):
    """The file that call `stage` announced is not needed any more."""

    call: int
    stage: int


class FetchMissed(msgspec.Struct, tag="fetch_missed", frozen=True):
    """A realtime client of a session has come here: fetch the messages that another API process kept for it.

    Answered with the number of the last message and those that were kept; None if no process has any.
    """

    call: int
    session: str


class GiveMissed(msgspec.Struct, tag="give_missed", frozen=True):
    """To an API process: another one has the realtime client of a session now, and asks by call `asked`."""

    asked: int
    session: str


class Missed(msgspec.Struct, tag="missed", frozen=True):
    """The answer to `GiveMissed`: the number of the last message, 0 if there is none, and those kept."""

    asked: int
    seq: int = 0
    messages: list[tuple[int, str]] = []


class KeepMissed(msgspec.Struct, tag="keep_missed", frozen=True):
    """An API process ends: the number of a session's last realtime message, and those that it has kept."""

    session: str
    seq: int
    messages: list[tuple[int, str]]


ClusterCommand = Claim | HandOver | Drain | Stage | Content | Abandon | FetchMissed | Missed | KeepMissed
