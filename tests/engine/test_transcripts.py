"""Whatever happens between and during turns, a conversation says what it would have said without it.

Scripts of turns, interruptions, cuts, rewinds, forks, moves between tiers, restarts and deaths are drawn at
random and run on small models of every layout, with every durability of the journal, with copies that take
their time, and with so little memory that sessions give way to one another. Each turn is held against the
same tokens as one prompt, which another engine computes from nothing.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast.core.layout import Tier
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.sampling import Sampling
from tests.engine.direct import direct, settle
from tests.engine.slow_copies import slow_down
from tests.models.small import (
    CLEAR_MARGIN,
    FIRST_WORD,
    SMALL_FAMILIES,
    WORDS,
    least_margin,
    write_small_model,
)

SESSIONS_MAX = 4
TOKENS_MAX = 300
MAIN = ("llama", "mistral", "bamba")
SIZES: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "audit": "strict",
    "page_size": 8,
    "kv_tokens": 720,
    "window_tokens": 720,
    "state_slots": 14,
    "max_running": 8,
    "chunk_tokens": 13,
}

Script = list[tuple[Any, ...]]
which = st.integers(0, SESSIONS_MAX - 1)
length, count = st.integers(1, 30), st.integers(1, 9)
keep = st.one_of(st.sampled_from(["all", "none"]), st.integers(0, 9))
tier = st.sampled_from(["host", "disk", None])
acts = st.one_of(
    st.tuples(st.just("say"), which, length, count),
    st.tuples(st.just("say"), which, length, count),
    st.tuples(st.just("talk"), length, count),
    st.tuples(st.just("barge"), which, length, count, st.integers(0, 12), keep),
    st.tuples(st.just("cut"), which, keep),
    st.tuples(st.just("rewind"), which, st.floats(0, 1)),
    st.tuples(st.just("fork"), which, st.floats(0, 1)),
    st.tuples(st.just("spill"), which, tier),
    st.tuples(st.just("restore"), which),
    st.tuples(st.just("rest")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("die")),
    st.tuples(st.just("fall"), which, length, count, st.integers(0, 14)),
    st.tuples(st.just("close"), which),
)
scripts = st.lists(acts, min_size=6, max_size=22)


class Tie(Exception):
    """Two tokens were nearly as likely: which of them is said is a matter of rounding."""


def greedy(limit: int) -> Sampling:
    return Sampling(max_tokens=limit, temperature=0.0, ignore_eos=True, logprobs=2)


@dataclass(slots=True)
class Reference:
    """What a model says after some tokens, computed from nothing."""

    engine: Engine
    known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def says(self, tokens: list[int], limit: int) -> list[int]:
        asked = (tuple(tokens), limit)
        if asked not in self.known:
            self.engine.loop.scheduler.flush()
            (turn,) = self.engine.generate([tokens], greedy(limit))
            assert turn.usage.cached_tokens == 0
            if least_margin(turn) < CLEAR_MARGIN:
                raise Tie
            self.known[asked] = turn.token_ids
        return self.known[asked]


class Play:
    """One script on one engine after another; `histories` is what everybody must have heard."""

    def __init__(
        self,
        directory: Path,
        folder: Path,
        reference: Reference,
        overlap: bool,
        durability: str,
        patience: int | None,
    ) -> None:
        self.directory = directory
        self.folder = folder
        self.reference = reference
        self.overlap = overlap
        self.durability = durability
        self.patience = patience
        self.histories: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.serial = 0
        self.lives = 0
        self.engine = self.come_alive()

    def come_alive(self) -> Engine:
        """An engine on what the one before has left."""
        self.lives += 1
        engine = Engine(
            str(self.directory),
            **{
                **SIZES,
                "overlap": self.overlap,
                "host_memory": 1 << 19,
                "session_tokens": 256,
                "journal": str(self.folder / "sessions.journal"),
                "durability": self.durability,
                "disk": str(self.folder / "disk"),
                "disk_limit": 4 << 20,
                "snapshot_seconds": 0.0,
            },
        )
        if self.patience is not None:
            slow_down(engine, self.patience)
        assert sorted(engine.sessions()) == sorted(self.histories)
        for name in self.histories:
            assert tokens_of(engine, name) == self.transcript(name)
        return engine

    def transcript(self, name: str) -> list[int]:
        return [token for said, heard in self.histories[name] for token in (*said, *heard)]

    def session(self, place: int) -> Session:
        """One of those that are open; opened where there is none."""
        if place >= len(self.histories):
            self.serial += 1
            name = f"s{self.serial}"
            self.engine.session(id=name)
            self.histories[name] = []
        return self.engine.resume(list(self.histories)[place % len(self.histories)])

    def words(self, size: int) -> list[int]:
        self.serial += 1
        return [FIRST_WORD + (self.serial * 37 + place * place * 11) % len(WORDS) for place in range(size)]

    # --- acts -------------------------------------------------------------------------------------

    def start(self, session: Session, size: int, limit: int) -> tuple[Turn, list[int], list[int]] | None:
        """Begin a turn: what was said, and what should be heard."""
        history = self.transcript(session.id)
        if len(history) + size + limit > TOKENS_MAX:
            return None
        said = self.words(size)
        expected = self.reference.says([*history, *said], limit)
        return session.say(said, greedy(limit)), said, expected

    def say(self, place: int, size: int, limit: int) -> None:
        session = self.session(place)
        if (begun := self.start(session, size, limit)) is not None:
            turn, said, expected = begun
            assert turn.token_ids == expected
            self.histories[session.id].append((said, expected))

    def talk(self, size: int, limit: int) -> None:
        """Everybody at once."""
        self.session(SESSIONS_MAX - 1 if len(self.histories) < SESSIONS_MAX else 0)
        begun = [(name, self.start(self.engine.resume(name), size, limit)) for name in list(self.histories)]
        for name, each in begun:
            if each is not None:
                turn, said, expected = each
                assert turn.token_ids == expected
                self.histories[name].append((said, expected))

    def barge(self, place: int, size: int, limit: int, steps: int, kept: int | str) -> None:
        """Cut in after some steps."""
        session = self.session(place)
        started = self.start(session, size, limit)
        if started is None:
            return
        turn, said, expected = started
        for _ in range(steps):
            self.engine.drive()
        core = turn._turn
        if isinstance(kept, int):
            kept = min(kept, core.generated)
        begun = core.admitted is not None
        session.interrupt(kept)
        if kept == "none" or not begun:  # A turn that still waited never was.
            return
        heard = tokens_of(self.engine, session.id)[len(self.transcript(session.id)) + len(said) :]
        assert heard == expected[: len(heard)]
        if isinstance(kept, int):
            assert len(heard) == kept
        self.histories[session.id].append((said, heard))

    def cut(self, place: int, kept: int | str) -> None:
        """Cut the last finished turn, where it can still be."""
        session = self.session(place)
        core = self.engine.loop.scheduler.registry.find(session.id)
        if core.last is None or not self.histories[session.id]:
            return
        said, heard = self.histories[session.id][-1]
        if isinstance(kept, int):
            kept = min(kept, len(heard))
        session.interrupt(kept)
        if kept == "none":
            self.histories[session.id].pop()
        elif isinstance(kept, int):
            self.histories[session.id][-1] = (said, heard[:kept])

    def rewind(self, place: int, share: float) -> None:
        session = self.session(place)
        turns = int(share * len(self.histories[session.id]))
        session.rewind(turns)
        del self.histories[session.id][turns:]

    def fork(self, place: int, share: float) -> None:
        if len(self.histories) >= SESSIONS_MAX:
            return
        session = self.session(place)
        turns = round(share * len(self.histories[session.id]))
        child = session.fork(turns)
        self.histories[child.id] = list(self.histories[session.id][:turns])

    def spill(self, place: int, where: str | None) -> None:
        session = self.session(place)
        settle(self.engine, session.id)
        direct(self.engine.loop, "spill", session.id, None if where is None else Tier[where.upper()])
        self.engine.drive()

    def restore(self, place: int) -> None:
        self.session(place).restore()

    def rest(self) -> None:
        while self.engine.loop.busy:
            self.engine.drive()

    def restart(self) -> None:
        """Ended as it should be; the next engine has everything."""
        self.end()
        self.engine = self.come_alive()

    def die(self) -> None:
        """What lies in the files now is all that is left."""
        grave = self.bury()
        self.end()
        self.folder = grave
        self.engine = self.come_alive()

    def fall(self, place: int, size: int, limit: int, steps: int) -> None:
        """Die in the middle of a turn: it is there as it was, or it never was."""
        session = self.session(place)
        started = self.start(session, size, limit)
        if started is None:
            return
        turn, said, expected = started
        for _ in range(steps):
            self.engine.drive()
        told = turn.done
        self.folder, before = self.bury(), self.engine
        stored = {each.id: each for each in read_sessions(self.folder / "sessions.journal")}
        if len(stored[session.id].turns) > len(self.histories[session.id]):
            self.histories[session.id].append((said, expected))
        else:
            assert not told, "what was told is there"
        before.close()
        assert before.audit() == []
        self.engine = self.come_alive()

    def bury(self) -> Path:
        """Keep the files as they are now; some may be half written, or go while they are copied.

        With durability `off` answers do not wait for their records: death comes when those are written.
        """
        if self.durability == "off":
            self.engine.loop.session_log.sync()
        grave = self.folder.with_name(f"life-{self.lives}")
        (grave / "disk").mkdir(parents=True)
        for place in (".", "disk"):
            for file in (self.folder / place).iterdir():
                if file.is_file():
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copy(file, grave / place / file.name)
        return grave

    def close(self, place: int) -> None:
        if self.histories:
            session = self.session(place % len(self.histories))
            session.close()
            del self.histories[session.id]

    def end(self) -> None:
        for name in self.histories:
            assert tokens_of(self.engine, name) == self.transcript(name)
        assert self.engine.audit() == []
        assert self.engine.loop.scheduler.audit.findings == []
        self.engine.close()
        assert self.engine.audit() == []

    def run(self, script: Script) -> None:
        """All acts, and one more turn of everybody."""
        try:
            for name, *arguments in script:
                getattr(self, name)(*arguments)
            self.talk(3, 4)
        except Tie:
            self.engine.close()
        else:
            self.end()


def tokens_of(engine: Engine, name: str) -> list[int]:
    tokens = engine.loop.scheduler.registry.find(name).sequence.tokens
    return tokens.slice(0, len(tokens))


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Reference]]]:
    """The directory of a family and its reference, made when first asked for."""
    made: dict[str, tuple[Path, Reference]] = {}

    def get(family: str) -> tuple[Path, Reference]:
        if family not in made:
            directory = write_small_model(tmp_path_factory.mktemp("small") / family, family)
            sizes = {**SIZES, "kv_tokens": 2048, "window_tokens": 2048, "chunk_tokens": 512}
            made[family] = (directory, Reference(Engine(str(directory), **sizes)))
        return made[family]

    yield get
    for _, reference in made.values():
        reference.engine.close()


def play(
    family_of: Callable[[str], tuple[Path, Reference]],
    factory: pytest.TempPathFactory,
    family: str,
    examples: int,
) -> None:
    """Run so many scripts, the same ones every time."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        scripts,
        st.booleans(),
        st.sampled_from(["commit", "fsync", "off"]),
        st.sampled_from([None, 0, 3, 12]),
    )
    def scripted(script: Script, overlap: bool, durability: str, patience: int | None) -> None:
        directory, reference = family_of(family)
        folder = factory.mktemp("play") / "life-0"
        folder.mkdir()
        Play(directory, folder, reference, overlap, durability, patience).run(script)

    scripted()


@pytest.mark.parametrize("family", MAIN)
def test_transcripts_are_the_same_whatever_happens(
    family_of: Callable[[str], tuple[Path, Reference]], tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    play(family_of, tmp_path_factory, family, 4)


@pytest.mark.soak
@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_many_transcripts_are_the_same_whatever_happens(
    family_of: Callable[[str], tuple[Path, Reference]], tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    play(family_of, tmp_path_factory, family, 150)
