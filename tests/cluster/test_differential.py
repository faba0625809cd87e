"""What the rules of ownership decide and what PostgreSQL's statements decide is the same.

Random operations of several lives, right and wrong ones, go through `Ownership` and through PostgreSQL. Every
answer is compared, and the tables at the end.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.cluster.lives import LifeState
from holdfast.cluster.ownership import Claimed, Kind, Offer, Ownership, Write
from tests.databases import shared_cluster

psycopg = pytest.importorskip("psycopg")
from holdfast.engine.durable.postgres import lives, owners, tables  # noqa: E402
from holdfast.engine.durable.postgres.changes import About, Change, Known, Part, TurnRow  # noqa: E402
from holdfast.engine.durable.postgres.commit import COMMIT, parameters  # noqa: E402
from holdfast.engine.durable.postgres.link import connect  # noqa: E402

NOW = 1000.0
NAMES = ("anna", "bert", "carl")
SESSIONS = tuple(f"s{number}" for number in range(7))
TENANTS = ("red", "blue")
ABOUT = About(None, "{}", None, 1.0, None)


@pytest.fixture(scope="module")
def connection() -> Iterator[Any]:
    opened = connect(shared_cluster().url(shared_cluster().new_database()))
    tables.upgrade(opened)
    yield opened
    opened.close()


class Pair:
    """The rules and the database side by side."""

    def __init__(self, connection: Any, seed: int) -> None:
        self.connection = connection
        self.dice = random.Random(seed)
        self.rules = Ownership()
        self.numbers: dict[int, int] = {}
        """The database's numbers of the lives."""
        self.turns: set[int] = set()
        self.seen: dict[str, int] = {}
        """How often an answer of each kind was given."""
        self.sent: dict[int, list[Write]] = {}
        """The last batch of each life."""
        connection.execute(
            "TRUNCATE holdfast.lives, holdfast.sessions, holdfast.turns, holdfast.finished, "
            "holdfast.requests, holdfast.snapshots, holdfast.tenants"
        )

    def note(self, *what: object) -> None:
        key = " ".join(map(str, what))
        self.seen[key] = self.seen.get(key, 0) + 1

    def life(self) -> int:
        return self.dice.choice([*self.rules.lives, len(self.rules.lives) + 7])

    def number(self, life: int) -> int:
        return self.numbers.get(life, -1)

    def act(self) -> None:
        """One operation on both."""
        dice = self.dice.random()
        if not self.rules.lives or dice < 0.06:
            self.begin()
        elif dice < 0.50:
            self.commit()
        elif dice < 0.58:
            self.repeat()
        elif dice < 0.72:
            self.claim()
        elif dice < 0.84:
            self.hand_over()
        elif dice < 0.92:
            self.bury()
        else:
            self.change_life()

    def begin(self) -> None:
        name = self.dice.choice(NAMES)
        life = self.rules.begin(name, NOW)
        values = {"name": name, "host": "", "process": 1, "address": ""}
        found = self.connection.execute(lives.BEGIN, values).fetchone()
        assert (life is None) == (found is None)
        if life is not None:
            self.numbers[life] = found[0]

    def change_life(self) -> None:
        life = self.life()
        kind = self.dice.choice(("renew", "drain", "drain", "end"))
        if kind == "renew":
            answers = (self.rules.renew(life, NOW), lives.renew_life(self.connection, self.number(life)))
        elif kind == "drain":
            answers = (self.rules.drain(life), lives.drain_life(self.connection, self.number(life)))
        else:
            answers = (self.rules.end(life), lives.end_life(self.connection, self.number(life)))
        assert answers[0] == answers[1], kind
        self.note(kind, answers[0])

    def bury(self) -> None:
        """The lease is moved on both sides, so that the verdict does not depend on how long the test runs."""
        life, connected, heard = self.life(), self.dice.random() < 0.5, self.dice.random() < 0.5
        left = self.dice.choice((10.0, 5.0, -1.0))
        if life in self.rules.lives:
            self.rules.lives[life].lease = NOW + left
            self.connection.execute(
                "UPDATE holdfast.lives SET lease = clock_timestamp() + %s * interval '1 second' "
                "WHERE life = %s",
                (left, self.number(life)),
            )
            number = self.number(life)
            self.connection.execute("SELECT pg_advisory_unlock_all()")
            if connected:
                lives.hold_life(self.connection, number)
        answer = self.rules.bury(life, connected, heard, NOW)
        assert lives.bury_life(self.connection, self.number(life), heard) == answer
        self.note("bury", left, connected, heard, answer)

    def writes(self) -> list[Write]:
        """Writes as an owner would send them, some of them off by one."""
        made: list[Write] = []
        for name in self.dice.sample(SESSIONS, self.dice.randint(1, 4)):
            row = self.rules.sessions.get(name)
            turn = len(self.turns) * 16 + len(made) + 1
            tenant = self.dice.choice(TENANTS)
            if row is None or self.dice.random() < 0.08:
                others = [other.session for other in made]
                needs = self.dice.choice(others) if others and self.dice.random() < 0.4 else None
                made.append(Write(name, Kind.CREATE, 1, 1, turn, tenant, needs))
                continue
            kind = Kind.REMOVE if self.dice.random() < 0.15 else Kind.CHANGE
            wrong = self.dice.choice((-1, 1)) if self.dice.random() < 0.15 else 0
            late = self.dice.choice((-1, 1)) if self.dice.random() < 0.15 else 0
            made.append(Write(name, kind, row.epoch + wrong, row.commits + 1 + late, turn, row.tenant))
        return made

    def part(self, writes: list[Write]) -> Part:
        part = Part()
        for write in writes:
            assert isinstance(write.content, int)
            known = Known(write.tenant, 0, ABOUT, write.epoch, write.commits)
            known.numbers.append(write.content)
            known.sums.append(0)
            part.changes[write.session] = Change(write.kind, known, write.needs, describes=True, moves=True)
            row = (write.session, write.content, None, 1, "t", b"", b"", "stop", 0, "")
            part.turns.append(TurnRow(*row))
        return part

    def commit(self) -> None:
        rows = self.rules.sessions.values()
        busy = [row.owner for row in rows] or [self.life()]
        life = self.dice.choice(busy) if self.dice.random() < 0.7 else self.life()
        known = self.rules.lives.get(life)
        batch = (known.batch if known is not None else 0) + self.dice.choice((1, 1, 1, 1, 1, 1, 0, 2))
        limit = self.dice.choice((None, 2, 3))
        writes = self.writes()
        answer = self.rules.commit(life, batch, writes, limit, NOW)
        values = parameters(self.part(writes), self.number(life), batch - 1, batch, limit)
        found = self.connection.execute(COMMIT, values).fetchall()
        stored = {name for (name,) in found if name is not None} if found else None
        assert stored == answer
        self.note("commit", answer is not None)
        if answer is None:
            return
        self.sent[life] = writes
        for write in writes:
            self.note(write.kind, write.session in answer)
            if write.session in answer:
                assert isinstance(write.content, int)
                self.turns.add(write.content)

    def repeat(self) -> None:
        """Ask what became of the last batch of a life, or of another."""
        life = self.life()
        writes = self.sent.get(life, []) if self.dice.random() < 0.7 else self.writes()
        standing = self.rules.standing(life, NOW)
        assert lives.life_of(self.connection, self.number(life)) == standing
        stored = self.rules.stored(life, writes)
        assert owners.stored(self.connection, self.number(life), writes) == stored
        for write in writes:
            self.note("repeat", write.session in stored)

    def answer(self, answer: Any) -> dict[str, Claimed]:
        """An answer of the rules with the database's numbers."""
        return {name: Claimed(self.number(at.owner), at.epoch, at.commits) for name, at in answer.items()}

    def claim(self) -> None:
        life = self.life()
        names = self.dice.sample(SESSIONS, self.dice.randint(1, 3))
        before = {name: row.owner for name, row in self.rules.sessions.items()}
        answer = self.rules.claim(life, names)
        assert owners.claim(self.connection, self.number(life), names) == self.answer(answer)
        for name, at in answer.items():
            self.note("claim", at.owner == life, before[name] != at.owner)
        located = owners.locate(self.connection, names)
        assert {name: each.life for name, each in located.items()} == {
            name: at.owner for name, at in self.answer(answer).items()
        }

    def hand_over(self) -> None:
        owned = [row.owner for row in self.rules.sessions.values()] or [self.life()]
        life = self.dice.choice(owned)
        offers: list[Offer] = []
        for name, row in self.rules.sessions.items():
            if self.dice.random() < 0.5:
                wrong = self.dice.choice((-1, 1)) if self.dice.random() < 0.2 else 0
                late = -1 if self.dice.random() < 0.2 else 0
                offers.append(Offer(name, row.epoch + wrong, row.commits + late, self.life()))
        answer = self.rules.hand_over(life, offers)
        moved = [offer._replace(target=self.number(offer.target)) for offer in offers]
        assert owners.hand_over(self.connection, self.number(life), moved) == self.answer(answer)
        for offer in offers:
            self.note("hand over", answer[offer.session].owner == offer.target)

    def compare(self) -> None:
        """The tables."""
        rows = self.connection.execute(
            "SELECT id, tenant, owner, epoch, commits, counted, head FROM holdfast.sessions"
        ).fetchall()
        assert {row[0]: tuple(row[1:]) for row in rows} == {
            name: (row.tenant, self.number(row.owner), row.epoch, row.commits, row.counted, row.content)
            for name, row in self.rules.sessions.items()
        }
        rows = self.connection.execute("SELECT life, name, state, batch FROM holdfast.lives").fetchall()
        assert {row[0]: tuple(row[1:]) for row in rows} == {
            self.number(life): (each.name, each.state.value, each.batch)
            for life, each in self.rules.lives.items()
        }
        rows = self.connection.execute("SELECT tenant, sessions FROM holdfast.tenants").fetchall()
        assert dict(rows) == self.rules.tenants
        rows = self.connection.execute("SELECT number FROM holdfast.turns").fetchall()
        assert {number for (number,) in rows} == self.turns


def drive(connection: Any, seed: int, acts: int) -> Pair:
    pair = Pair(connection, seed)
    for _ in range(acts):
        pair.act()
    pair.compare()
    return pair


DECISIONS = {
    *("commit True", "commit False", "create True", "create False", "change True", "change False"),
    *("remove True", "remove False", "repeat True", "repeat False", "hand over True", "hand over False"),
    *("claim True True", "claim True False", "claim False False", "renew True", "renew False"),
    *("drain True", "drain False", "end True", "end False"),
    *("bury 10.0 True True False", "bury 10.0 False True False", "bury 10.0 True False False"),
    *("bury 10.0 False False True", "bury 5.0 True True False", "bury 5.0 False True True"),
    *("bury 5.0 True False True", "bury -1.0 True True True"),
}
"""What a run must have decided at least once."""


def test_rules_and_statements_decide_the_same(connection: Any) -> None:
    seen: dict[str, int] = {}
    for seed in range(10):
        for what, count in drive(connection, seed, 250).seen.items():
            seen[what] = seen.get(what, 0) + count
    assert seen.keys() >= DECISIONS
    assert min(seen[what] for what in DECISIONS) >= 3, seen


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_rules_and_statements_decide_the_same_for_long(connection: Any, first: int) -> None:
    for seed in range(first, first + 100):
        drive(connection, seed, 400)


def test_the_comparison_notices_a_rule_that_differs(connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "_is_free", lambda *_: False)
    with pytest.raises(AssertionError):
        drive(connection, 1, 2500)


def test_states_of_lives_are_those_of_the_table(connection: Any) -> None:
    check = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'lives_state_check'"
    ((stated,),) = connection.execute(check).fetchall()
    assert all(f"'{state.value}'" in stated for state in LifeState)
