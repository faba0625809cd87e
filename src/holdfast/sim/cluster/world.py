"""A world of the simulation: clients, API processes, replicas, a store, and the faults that happen to them.

Each client has one session and one request at a time; it sends a request again, with the same key, until it
is answered, by any API process. Every answer is compared with the client's expectation and with the store. At
the end the faults stop, and every client must get an answer; this finds sessions that cannot be claimed.
Used by the command and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.cluster.placement import Load, Move, choose
from holdfast.sim.cluster.events import Events
from holdfast.sim.cluster.faults import Faults
from holdfast.sim.cluster.history import MASK, NEW, Answer, Op, OpKind
from holdfast.sim.cluster.replica import Replica
from holdfast.sim.cluster.store import Finding, Found, Store

__all__ = ["Options", "Result", "World", "simulate"]

TIMEOUT = 3.0
"""After how many seconds a client sends its request again."""

SWEEP = 0.25
EXPIRE = 10.0
BACK_OFF_DOUBLINGS = 6
"""How often an API process doubles its wait before it asks again."""

QUIET_SECONDS = 60.0
"""Within which every client must be answered once the faults have ended."""
SAMPLE = 8
"""How many replicas an API process compares."""


@dataclass(frozen=True, slots=True)
class Options:
    """The size of a world. `faults` is the mean number of faults in a second, `loss` that of messages."""

    seed: int = 1
    replicas: int = 1000
    sessions: int = 20_000
    events: int = 1_000_000
    faults: float = 20.0
    loss: float = 0.002
    think: float = 4.0
    tenants: int = 50


@dataclass(slots=True)
class Result:
    """The counts and findings of a run."""

    events: int
    seconds: float
    acknowledged: int
    repeated: int
    faults: dict[str, int]
    store: dict[str, int]
    finding: Finding | None

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        found = self.finding
        return {
            "name": "summary",
            "events": self.events,
            "simulated_seconds": round(self.seconds, 3),
            "acknowledged": self.acknowledged,
            "repeated": self.repeated,
            "faults": self.faults,
            "store": self.store,
            "findings": int(found is not None),
            "kind": None if found is None else found.kind,
            "detail": None if found is None else found.detail,
        }


@dataclass(slots=True)
class Client:
    """A client: its session, what that must hold, and the request that it waits for."""

    number: int
    tenant: str
    session: str = ""
    generation: int = 0
    serial: int = 0
    turns: int = 0
    digests: list[int] = field(default_factory=list)
    op: Op | None = None
    sent: float = 0.0
    attempts: int = 0
    leftover: str = ""
    """The session that it forked and is to close."""


class World:
    """Everything, and the API processes, which keep nothing but where a session was last."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.events = Events(options.seed)
        per_tenant = -(-options.sessions // options.tenants)
        self.store = Store(self.events, per_tenant + max(1, per_tenant // 50))
        self.replicas = [self._replica(number) for number in range(options.replicas)]
        self.by_life: dict[int, Replica] = {}
        self.hints: dict[str, Replica] = {}
        self.clients = [
            Client(number, f"tenant {number % options.tenants}") for number in range(options.sessions)
        ]
        self.waiting: dict[int, float] = {}
        """Clients with a request, in the order of its sending."""
        self.resting: set[int] | None = None
        """At the end, the clients that were answered without faults."""
        self.acknowledged = 0
        self.repeated = 0
        self.faults = Faults(self)

    def _replica(self, number: int) -> Replica:
        return Replica(f"replica {number}", self.events, self.store, self, self.options.loss)

    def add_replica(self) -> None:
        """Scale up."""
        replica = self._replica(len(self.replicas))
        self.replicas.append(replica)
        replica.start()

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run with faults, then without, and report the first finding."""
        finding = None
        try:
            self._run()
        except Found as found:
            finding = found.finding
        return Result(
            self.events.count,
            self.events.now,
            self.acknowledged,
            self.repeated,
            dict(self.faults.counts),
            dict(self.store.counts),
            finding,
        )

    def _run(self) -> None:
        events = self.events
        for replica in self.replicas:
            replica.start()
        for client in self.clients:
            events.after(events.between(0.5, 0.5 + self.options.think), self._next, client)
        events.after(SWEEP, self._sweep)
        events.after(EXPIRE, self._expire)
        self.faults.start()
        events.run(self.options.events)
        self._quieten()

    def _quieten(self) -> None:
        """End all faults; then every client has one more request, which must be answered."""
        self.faults.stop()
        self.resting = set()
        deadline = self.events.now + QUIET_SECONDS
        while len(self.resting) < len(self.clients) and self.events.now < deadline:
            self.events.run(1 << 30, until=self.events.now + 1.0)
        stuck = [client.number for client in self.clients if client.number not in self.resting]
        if stuck:
            op = self.clients[stuck[0]].op
            assert op is not None
            located = self.store.locate(op.session)
            where = "nobody" if located is None else f"life {located.life}, over: {located.over}"
            self.store.find("stuck session", f"nobody serves {op.session}; its owner is {where}")

    # --- clients ----------------------------------------------------------------------------------

    def _next(self, client: Client) -> None:
        """A client sends its next request."""
        client.serial += 1
        dice = self.events.chance()
        kind, session, child = OpKind.TURN, client.session, ""
        if client.leftover:
            kind, session = OpKind.CLOSE, client.leftover
        elif not session:
            client.generation += 1
            kind, session = OpKind.OPEN, f"{client.number}.{client.generation}"
        elif dice < 0.06 and len(client.digests) > 1:
            kind = OpKind.REWIND
        elif dice < 0.08:
            client.generation += 1
            kind, child = OpKind.FORK, f"{client.number}.{client.generation}"
        elif dice < 0.09:
            kind = OpKind.CLOSE
        client.op = Op(client.number, client.serial, kind, session, client.tenant, child)
        client.attempts = 0
        client.sent = self.waiting[client.number] = self.events.now
        self._route(client, client.op)

    def _route(self, client: Client, op: Op) -> None:
        """An API process sends a request to where the session was last, or asks the store."""
        client.attempts += 1
        hint = self.hints.get(op.session) if client.attempts == 1 else None
        if hint is not None:
            self._deliver(hint, op)
        elif op.kind is OpKind.OPEN and client.attempts == 1:
            self._place(op, exists=False)
        else:
            self.repeated += 1
            self.events.after(self.events.between(0.002, 0.01), self._locate, op)

    def _deliver(self, replica: Replica, op: Op, exists: bool = True) -> None:
        self.events.after(self.events.between(0.0005, 0.003), replica.receive, op, exists)

    def _locate(self, op: Op) -> None:
        """Ask the store who owns a session; a life that is over or lapsed gives way to another."""
        if self.store.down or self.clients[op.client].op is not op:
            return
        at = self.store.locate(op.session)
        if at is None:
            self._missing(op)
            return
        replica = self.by_life.get(at.life)
        alive = replica is not None and replica.life == at.life
        if not at.over and self.clients[op.client].attempts > 1:
            there = replica if alive else None
            connected = there is not None and not there.cut_from_store
            heard = there is not None and not there.cut_from_front
            if self.store.bury(at.life, connected, heard):
                at = at._replace(over=True)
        if at.over:
            self._place(op, exists=True)
        elif alive and replica is not None:
            self._deliver(replica, op)

    def _missing(self, op: Op) -> None:
        """The store has no such session: not yet, or not any more."""
        if op.kind is OpKind.OPEN:
            self._place(op, exists=False)
        elif op.kind is OpKind.CLOSE:
            self.events.after(0.001, self.answer, op, NEW.answer)
        else:
            self.store.find("lost turn", f"session {op.session} is gone, and its client has not closed it")

    def _place(self, op: Op, exists: bool) -> None:
        """Choose a replica by the real placement, among a few."""
        loads = self.others(None, SAMPLE)
        if loads:
            self._deliver(self.by_life[choose(loads, ())], op, exists)

    def others(self, replica: Replica | None, most: int) -> Sequence[Load]:
        """Some replicas that take sessions."""
        found: dict[int, Load] = {}
        for _ in range(2 * most):
            other = self.replicas[int(self.events.chance() * len(self.replicas))]
            if other is not replica and other.owner is not None and not other.draining:
                found[other.life] = other.load
                self.by_life[other.life] = other
                if len(found) == most:
                    break
        return list(found.values())

    def rebalance(self, replica: Replica) -> None:
        """Hand some sessions at rest over to other replicas."""
        loads = self.others(replica, SAMPLE)
        idle = replica.idle()[:SAMPLE]
        replica.hand_over([Move(name, choose(loads, ())) for name, _ in idle] if loads else [])

    def moved(self, op: Op) -> None:
        """A replica does not have the session: an API process looks for it."""
        self.hints.pop(op.session, None)
        client = self.clients[op.client]
        if client.op is op:
            wait = 0.05 * 2 ** min(client.attempts, BACK_OFF_DOUBLINGS)
            self.events.after(wait * (0.5 + self.events.chance()), self._again, client, op)

    def _again(self, client: Client, op: Op) -> None:
        if client.op is op:
            self._route(client, op)

    def _sweep(self) -> None:
        """Requests without an answer are sent again."""
        now = self.events.now
        late: list[int] = []
        for number, sent in self.waiting.items():
            if sent > now - TIMEOUT:
                break
            late.append(number)
        for number in late:
            client = self.clients[number]
            op = client.op
            assert op is not None
            if client.sent <= now - TIMEOUT:
                client.sent = now
                self._route(client, op)
        self.events.after(SWEEP, self._sweep)

    def _expire(self) -> None:
        """Close sessions that no client has: an open may arrive late, after its client has closed it."""
        wanted: set[str] = set()
        for client in self.clients:
            wanted.update((client.session, client.leftover))
            if client.op is not None:
                wanted.update((client.op.session, client.op.child))
        for name in [name for name in self.store.rules.sessions if name not in wanted]:
            self.store.expire(name)
        self.events.after(EXPIRE, self._expire)

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, op: Op, answer: Answer) -> None:
        """A client hears that its request is done: it must be as it expects, and in the store."""
        client = self.clients[op.client]
        if client.op is not op:
            return
        self.acknowledged += 1
        if op.kind is not OpKind.CLOSE:
            self._expect(client, op, answer)
        located = self.store.locate(op.session)
        if located is not None and located.life in self.by_life:
            self.hints[op.session] = self.by_life[located.life]
        self._take(client, op)
        self._done(client)

    def _done(self, client: Client) -> None:
        client.op = None
        self.waiting.pop(client.number, None)
        if self.resting is not None and not client.leftover:
            self.resting.add(client.number)
            return
        self.events.after(self.options.think * (0.5 + self.events.chance()), self._next, client)

    def _expect(self, client: Client, op: Op, answer: Answer) -> None:
        """Compare an answer with what the client expects, and with the store at this moment."""
        turns, digests = client.turns, client.digests
        if op.kind is OpKind.TURN:
            turns, digest = turns + 1, ((digests[-1] * 1_000_003) ^ op.key) & MASK
        elif op.kind is OpKind.REWIND:
            turns, digest = turns - 1, digests[-2]
        elif op.kind is OpKind.OPEN:
            turns, digest = NEW.answer
        else:
            digest = digests[-1]
        for who, told in (("the client is told", answer), ("the store has", self._stored(op))):
            if told is None or told.turns < turns:
                short = "nothing" if told is None else f"{told.turns} turns"
                self.store.find("lost turn", f"{op.session}: {who} {short}, {turns} were acknowledged")
            if told.turns > turns:
                detail = f"{op.session}: {who} {told.turns} turns, the client has asked for {turns}"
                self.store.find("doubled turn", detail)
            if told.digest != digest:
                self.store.find("reordered turn", f"{op.session}: {who} other turns than were asked for")

    def _stored(self, op: Op) -> Answer | None:
        content = self.store.content(op.session)
        return None if content is None else content.answer

    def _take(self, client: Client, op: Op) -> None:
        """What the client knows from now on."""
        if op.kind is OpKind.OPEN:
            client.session, client.turns, client.digests = op.session, 0, [NEW.digests[-1]]
        elif op.kind is OpKind.TURN:
            client.turns += 1
            client.digests.append(((client.digests[-1] * 1_000_003) ^ op.key) & MASK)
            del client.digests[:-3]
        elif op.kind is OpKind.REWIND:
            client.turns -= 1
            client.digests.pop()
        elif op.kind is OpKind.FORK:
            client.leftover, client.session = op.session, op.child
        else:
            self.hints.pop(op.session, None)
            if client.leftover:
                client.leftover = ""
            else:
                client.session = ""


def simulate(options: Options) -> Result:
    """Run one world."""
    return World(options).run()
