"""The API processes that are connected to an engine over TCP: the engine's end of their links.

    stranger --handshake, Greeting--> member --silence, an error, or too much unsent--> gone
        ├── another key, no TLS, another protocol or model: refused, with a line in the log
    └── Content: no link; it brings a file, and is received by a thread (`snapshot_receiver`)

Only members' frames are commands. A call's number has the prefix of its API process, so an answer finds its
link without a table, and one `Step` serves a single member as it is. What one member changes is told to the
others (`Elsewhere`): each API process knows all sessions, in the order of the engine's own reports.

When a member is gone its turns are ended, each by its own policy, and what nobody else can know of is closed:
sessions of chats that it found by their content, and inputs that it had computed ahead. These are commands
like any others (`receive`), after those that the member has sent. Nothing here waits but `wait`. Used by the
engine process alone.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from holdfast.core.turn import KEEP_ALL
from holdfast.server.link import wire
from holdfast.server.link.frames import watch
from holdfast.server.link.lived_time import LivedTime
from holdfast.server.link.missed_messages import MissedMessages
from holdfast.server.link.refusal_log import RefusalLog
from holdfast.server.link.secure_socket import SecureSocket, set_timeouts

__all__ = ["STRANGERS_MAX", "UNSENT_MAX", "Host", "Peer", "Peers"]

log = logging.getLogger("holdfast.engine")

TICK_SECONDS = 1.0
GREETING_SECONDS = 5.0
"""Time for the handshake and the greeting."""

STRANGERS_MAX = 32
"""Connections that have not greeted yet; a new one takes the place of an older one (`_make_room`)."""

UNSENT_MAX = 64 << 20
"""Bytes that wait for a member; one that falls further behind is dropped."""

GREETING_MAX = 4096
"""The longest first frame."""

ACCEPTED_AT_ONCE = 8
"""Connections that are accepted between two reads.

A handshake and a greeting take three reads where the network is faster than a step, so an API process is
heard before `STRANGERS_MAX` others have come."""

HANDSHAKES_AT_ONCE = 2
"""Connections without the key that are read at a time: the first message of a handshake takes 0.4 ms. While
more of them have something to be read, one connection is accepted at a time: a new one is read at once, and
once more before `STRANGERS_MAX` others have come."""

NEW = (wire.StartTurn, wire.OpenSession, wire.Fork, wire.Stage)
"""Commands that begin something: an engine that drains declines them."""


class Host(Protocol):
    """The engine that the peers speak to."""

    def welcome(self, greeting: wire.Greeting) -> wire.Welcome | str:
        """The answer to a greeting, or why it is refused."""

    def introduction(self) -> list[wire.Report]:
        """What a new member is told."""

    def pulse(self) -> wire.Pulse:
        """The engine's counters and gauges."""

    def untold(self) -> Iterator[wire.Elsewhere | None]:
        """The sessions that a new member is not told of in its introduction, in portions; None: wait."""

    def stored(self, name: str) -> wire.StoredSession | None:
        """An open session with all that API processes keep of it."""

    def take(self, content: wire.Content, secure: SecureSocket) -> str | None:
        """Take a connection over that brings a file, or return why it is refused."""


class Peer:
    """One connection."""

    __slots__ = (
        "address",
        "calls",
        "client",
        "engine",
        "heard",
        "link",
        "looked",
        "secure",
        "silence",
        "staged",
        "turns",
        "untold",
        "volatile",
    )

    def __init__(self, secure: SecureSocket, address: str) -> None:
        self.secure = secure
        self.address = address
        self.client = ""
        self.link = ""
        """The address under which it knows the engine."""
        self.calls = 0
        """The prefix of its calls; 0 for a stranger."""
        self.looked = 0
        """The look in which it was read last, while it is a stranger; 0: not yet."""
        self.silence = LivedTime(TICK_SECONDS)
        self.turns: dict[int, int | None] = {}
        """Turns that are not over, with what stays of each if this peer is gone."""
        self.volatile: set[str] = set()
        self.heard: set[str] = set()
        self.engine = False
        """Whether it is another engine."""
        self.staged: set[int] = set()
        """Files that it has announced."""
        self.untold: Iterator[wire.Elsewhere | None] | None = None
        """Sessions that it is still to be told of."""

    @property
    def host(self) -> str:
        """The address without the port."""
        return self.address.rpartition(":")[0]

    def note(self, command: wire.Command) -> None:
        """Remember what has to be ended with this peer."""
        match command:
            case wire.StartTurn():
                self.turns[command.call] = KEEP_ALL if command.keeps else None
                if command.session is not None:
                    self.heard.discard(command.session)
                    if command.volatile:
                        self.volatile.add(command.session)
            case wire.Stage():
                self.staged.add(command.call)
            case wire.Hear(soon=False):
                (self.heard.add if command.tokens else self.heard.discard)(command.session)

    def last_words(self, numbers: Iterator[int]) -> Iterator[wire.Command]:
        """The commands that end what only this peer knew of."""
        for call, keep in self.turns.items():
            yield wire.EndTurn(call, keep, "the API process was lost")
        for session in self.heard:
            yield wire.Hear(next(numbers), session, [])
        for session in self.volatile:
            yield wire.CloseSession(next(numbers), session)
        for stage in self.staged:
            yield wire.Abandon(next(numbers), stage)


class Peers:
    """All connections of one engine."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, host: Host, silence_seconds: float
    ) -> None:
        listener.setblocking(False)
        self.draining = False
        """Whether turns and sessions that begin are declined."""
        self._listener = listener
        self._context = context
        self._host = host
        self._silence_seconds = silence_seconds
        self._strangers: dict[int, Peer] = {}
        self._members: dict[int, Peer] = {}
        """Members by the prefix of their calls."""
        self._by_descriptor: dict[int, Peer] = {}
        self._wants_room: set[int] = set()
        self._came: deque[tuple[wire.Command, int]] = deque()
        self._numbers = itertools.count(1)
        """Numbers of calls whose answers go nowhere."""
        self._shared: set[int] = set()
        """Calls that change what other API processes keep of a session."""
        self._missed = MissedMessages()
        self._refusals = RefusalLog(log)
        self._ticked = time.monotonic()
        self._looks = 0
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._watched: tuple[int, ...] = ()

    @property
    def members(self) -> list[Peer]:
        """The API processes that are connected."""
        return list(self._members.values())

    # --- what comes -------------------------------------------------------------------------------

    def wait(self, seconds: float, others: Iterable[int] = ()) -> bool:
        """Wait for a command, or for news on other descriptors, in whole milliseconds; whether any came."""
        if self._came:
            return True
        self._watched = watch(self._poll, self._watched, others)
        return self._look(int(1000 * seconds)) or bool(self._came)

    def receive(self) -> tuple[wire.Command, int] | None:
        """The next command that has come, and its size in bytes."""
        if not self._came:
            self._look(0)
        return self._came.popleft() if self._came else None

    def _look(self, milliseconds: int) -> bool:
        """Read what has come; whether there is news on other descriptors."""
        news = knocks = False
        keyless: list[Peer] = []
        for descriptor, events in self._poll.poll(milliseconds):
            peer = self._by_descriptor.get(descriptor)
            if peer is not None:
                if events & select.POLLOUT:
                    self._flush(peer)
                if events & ~select.POLLOUT and not peer.secure.shaken:
                    keyless.append(peer)
                elif events & ~select.POLLOUT:
                    self._read(peer)
            elif descriptor == self._listener.fileno():
                knocks = True
            else:
                news = True
        left = self._shake_hands(keyless)
        if knocks:
            self._accept(1 if left else ACCEPTED_AT_ONCE)
        if time.monotonic() - self._ticked >= TICK_SECONDS:
            self._tick()
        for peer in self.members:
            if peer.untold is not None and not peer.secure.unsent:
                self._tell_more(peer)
        return news

    def _tell_more(self, peer: Peer) -> None:
        """Tell a member of some more sessions."""
        assert peer.untold is not None
        try:
            portion = next(peer.untold)
        except StopIteration:
            peer.untold = None
            return
        if portion is not None:
            peer.secure.send(wire.encode(portion))
            self._ask_room(peer)

    def _shake_hands(self, keyless: list[Peer]) -> bool:
        """Read some connections without the key: new ones first, then those that were read longest ago.

        Those that ended without a word are all dropped, which takes little. Returns whether any are left.
        """
        self._looks += 1
        shaken = 0
        for peer in sorted(keyless, key=lambda peer: peer.looked):
            if shaken == HANDSHAKES_AT_ONCE:
                return True
            peer.looked = self._looks
            self._read(peer)
            shaken += peer.secure.heard
        return False

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                connected, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._refusals.tell(f"a connection cannot be accepted: {error.strerror}")
                return
            shown = f"{address[0]}:{address[1]}"
            if len(self._strangers) >= STRANGERS_MAX:
                self._make_room()
            set_timeouts(connected, self._silence_seconds)
            peer = Peer(SecureSocket(connected, self._context), shown)
            peer.secure.frames.longest = GREETING_MAX
            self._strangers[connected.fileno()] = self._by_descriptor[connected.fileno()] = peer
            self._poll.register(connected, select.POLLIN)

    def _make_room(self) -> None:
        """Drop a stranger, so that silent connections never keep an API process out.

        Those without the key go first, and of these the oldest of the address that has most.
        """
        waiting = list(self._strangers.values())
        waiting = [peer for peer in waiting if not peer.secure.shaken] or waiting
        crowds = Counter(peer.host for peer in waiting)
        most = max(crowds.values())
        oldest = next(peer for peer in waiting if crowds[peer.host] == most)
        self._drop(oldest, f"{STRANGERS_MAX} connections have not greeted yet, and a new one has come")

    def _read(self, peer: Peer) -> None:
        """Hear the frames that have come: up to one that is refused, or to the end of the connection."""
        secure = peer.secure
        if secure.read() and peer.calls:
            peer.silence.reset()
        closed = secure.ended
        while secure.ended is closed and (frame := secure.take()) is not None:
            try:
                self._hear(peer, wire.decode_command(frame), len(frame))
            except msgspec.MsgspecError as error:
                secure.end(f"a message that cannot be read: {error}")
        if secure.ended is not None:
            self._drop(peer, secure.ended)
        else:
            self._flush(peer)

    def _hear(self, peer: Peer, command: wire.Command, size: int) -> None:
        if not peer.calls:
            match command:
                case wire.Greeting():
                    self._greet(peer, command)
                case wire.Content():
                    self._hand_on(peer, command)
                case _:
                    peer.secure.end("the first message is not a greeting")
            return
        match command:
            case wire.Beat():
                pass
            case wire.Greeting() | wire.Content() | wire.Configure() | wire.Stop():
                peer.secure.end(f"a message that no member may send: {command.__struct_config__.tag}")
            case wire.FetchMissed(call=call) if call >> wire.CALL_BITS == peer.calls:
                self._fetch_missed(peer, command)
            case wire.Missed():
                self._answer(self._missed.hear(peer.calls, command))
            case wire.KeepMissed():
                self._missed.keep(command)
            case wire.EndTurn(turn=call) | wire.StartTurn(call=call) | wire.OpenSession(call=call):
                self._take(peer, command, call, size)
            case _:
                self._take(peer, command, command.call, size)

    def _take(self, peer: Peer, command: wire.Command, call: int, size: int) -> None:
        """A command of a member; refused without harm if the number of the call is another's."""
        if call >> wire.CALL_BITS != peer.calls:
            peer.secure.end("a call with the number of another API process")
            return
        if self.draining and isinstance(command, NEW):
            said = "the engine is shutting down; try again"
            peer.secure.send(wire.encode(wire.Declined(call, "engine_draining", said)))
            return
        peer.note(command)
        if isinstance(command, (wire.OpenSession, wire.Fork, wire.UpdateSession, wire.Claim)):
            self._shared.add(call)
        self._came.append((command, size))

    def _fetch_missed(self, peer: Peer, command: wire.FetchMissed) -> None:
        """Ask all other API processes for the realtime messages that they keep of a session."""
        others = [other for other in self.members if other is not peer and not other.engine]
        frame = wire.encode(wire.GiveMissed(command.call, command.session))
        for other in others:
            other.secure.send(frame)
            self._ask_room(other)
        self._answer(self._missed.ask(command, [other.calls for other in others]))

    def _answer(self, answers: list[wire.Done]) -> None:
        """Send answers that the engine itself has no part in."""
        for done in answers:
            asker = self._members.get(done.call >> wire.CALL_BITS)
            if asker is not None:
                asker.secure.send(wire.encode(done))
                self._ask_room(asker)

    def _greet(self, peer: Peer, greeting: wire.Greeting) -> None:
        answer = self._host.welcome(greeting)
        before = self._members.get(greeting.calls)
        if isinstance(answer, wire.Welcome) and before is not None:
            if before.client != greeting.client:
                answer = "another API process has these numbers of calls; restart this one"
            elif before.link != greeting.link:
                answer = f"the API process is connected already, to the same engine at {before.link}"
        if isinstance(answer, str):
            peer.secure.send(wire.encode(wire.Unable(answer)))
            peer.secure.end(answer)
            return
        if before is not None:
            self._drop(before, "its API process has connected again")
        del self._strangers[peer.secure.socket.fileno()]
        peer.client, peer.link, peer.calls = greeting.client, greeting.link, greeting.calls
        peer.engine = greeting.engine
        peer.secure.frames.longest = type(peer.secure.frames)().longest
        peer.silence.reset()
        self._members[peer.calls] = peer
        peer.secure.send(wire.encode(answer))
        if peer.engine:
            peer.secure.send(wire.encode(self._host.pulse()))
            return
        log.info("an API process is connected", extra={"fields": {"address": peer.address}})
        for report in self._host.introduction():
            peer.secure.send(wire.encode(report))
        peer.untold = self._host.untold()

    def _hand_on(self, peer: Peer, content: wire.Content) -> None:
        """A stranger brings a file: it is no peer any more."""
        self._forget(peer)
        refusal = self._host.take(content, peer.secure)
        if refusal is not None:
            peer.secure.close()
            self._refusals.tell(f"{peer.address}: {refusal}")

    # --- what goes --------------------------------------------------------------------------------

    def send(self, reports: list[wire.Report]) -> None:
        """Send each report to the API processes that it concerns."""
        for report in reports:
            match report:
                case wire.Step():
                    self._send_step(report)
                case wire.Done() | wire.Declined():
                    self._send_answer(report)
                case _:
                    self._send_all(report)
        for peer in self.members:
            if peer.secure.unsent > UNSENT_MAX:
                peer.secure.end(f"it has not taken {peer.secure.unsent >> 20} MiB of reports")
            if peer.secure.ended is not None:
                self._drop(peer, peer.secure.ended)
            else:
                self._ask_room(peer)

    def _send_all(self, report: wire.Report) -> None:
        frame = wire.encode(report)
        for peer in self._members.values():
            if not peer.engine:
                peer.secure.send(frame)

    def _send_answer(self, report: wire.Done | wire.Declined) -> None:
        prefix = report.call >> wire.CALL_BITS
        peer = self._members.get(prefix)
        is_shared = report.call in self._shared
        self._shared.discard(report.call)
        if peer is not None:
            if isinstance(report, wire.Declined):
                peer.turns.pop(report.call, None)
            peer.secure.send(wire.encode(report))
        if isinstance(report, wire.Done) and report.view is not None:
            self._tell_others(prefix, [(report.view, is_shared)])

    def _send_step(self, step: wire.Step) -> None:
        told: dict[int, list[tuple[wire.SessionView, bool]]] = {}
        for end in step.ends:
            peer = self._members.get(end.turn >> wire.CALL_BITS)
            if peer is not None:
                peer.turns.pop(end.turn, None)
            if end.view is not None:
                # The first turn may have brought tools.
                told.setdefault(end.turn >> wire.CALL_BITS, []).append((end.view, end.view.turns <= 1))
        for session, _ in step.gone:
            for peer in self._members.values():
                peer.volatile.discard(session)
                peer.heard.discard(session)
        if len(self._members) == 1:
            self._send_all(step)  # A member ignores turns of members before it.
            return
        for peer in self._members.values():
            if peer.engine:
                continue
            deltas = [delta for delta in step.deltas if delta.turn >> wire.CALL_BITS == peer.calls]
            ends = [end for end in step.ends if end.turn >> wire.CALL_BITS == peer.calls]
            if deltas or ends or step.gone:
                peer.secure.send(wire.encode(wire.Step(deltas, ends, step.gone)))
        for prefix, views in told.items():
            self._tell_others(prefix, views)

    def _tell_others(self, prefix: int, views: list[tuple[wire.SessionView, bool]]) -> None:
        """Tell all but one API process what has become of sessions; those in whole that may be new."""
        others = [peer for peer in self._members.values() if peer.calls != prefix and not peer.engine]
        if not others:
            return
        stored = [found for view, whole in views if whole and (found := self._host.stored(view.name))]
        frame = wire.encode(wire.Elsewhere(stored, [view for view, whole in views if not whole]))
        for peer in others:
            peer.secure.send(frame)

    def _flush(self, peer: Peer) -> None:
        peer.secure.flush()
        self._ask_room(peer)

    def _ask_room(self, peer: Peer) -> None:
        """Have `wait` end when there is room for what is unsent."""
        descriptor, wants = peer.secure.socket.fileno(), peer.secure.unsent > 0
        if wants is not (descriptor in self._wants_room):
            (self._wants_room.add if wants else self._wants_room.discard)(descriptor)
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if wants else 0))

    # --- ends -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Drop peers that are silent; their bytes were read before this."""
        self._ticked = time.monotonic()
        for peer in self.members:
            if peer.silence.tick() > self._silence_seconds:
                self._drop(peer, f"nothing was heard of it for {peer.silence.seconds:.0f} s")
        for peer in list(self._strangers.values()):
            if peer.silence.tick() > GREETING_SECONDS:
                self._drop(peer, f"no greeting within {GREETING_SECONDS:.0f} s")
        self._answer(self._missed.tick())
        self._refusals.tick()

    def _forget(self, peer: Peer) -> bool:
        """Look at a connection no more; False if that is so already."""
        descriptor = peer.secure.socket.fileno()
        if self._by_descriptor.pop(descriptor, None) is None:
            return False
        self._poll.unregister(descriptor)
        self._wants_room.discard(descriptor)
        if peer.calls:
            del self._members[peer.calls]
        else:
            del self._strangers[descriptor]
        return True

    def _drop(self, peer: Peer, why: str) -> None:
        if not self._forget(peer):
            return
        peer.secure.close()
        if not peer.calls:
            self._refusals.tell(f"{peer.address}: {why}")
            return
        self._answer(self._missed.gone(peer.calls))
        fields = {"address": peer.address, "turns": len(peer.turns)}
        told = log.debug if peer.engine else log.warning
        told("the link to an API process is lost: %s", why, extra={"fields": fields})
        self._came.extend((command, 0) for command in peer.last_words(self._numbers))

    def close(self, seconds: float) -> None:
        """Close all connections; wait so long for what was sent."""
        self._listener.close()
        for peer in [*self._members.values(), *self._strangers.values()]:
            peer.secure.close(seconds)
