"""Engines of several ranks say what engines of one say, whatever happens to their sessions."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.engine import Engine, Session
from holdfast.engine.sampling import Sampling
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Forwarded
from holdfast.engine.step.graphs import StepGraphs
from holdfast.engine.step.inputs import Shape
from tests.engine.tiny import greedy as greedily
from tests.engine.tiny import tiny_engine
from tests.ranks.models import NAMES, write_talking_models

Make = Callable[..., Engine]
KINDS = ("llama", "olmo3", "bamba")
"""Pages, pages and windows, pages and states."""
FEW = 7
"""Tokens of a turn of a story. All that a session holds decides the first; a step of three ranks is slow."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_talking_models(tmp_path_factory.mktemp("models"))


def engine_of(path: Path, ranks: int, **options: object) -> Engine:
    chosen = {"load_format": "auto", "dtype": "float32", **options}
    return tiny_engine(path, tensor_parallel=ranks, **chosen)


@pytest.fixture
def make(request: pytest.FixtureRequest, directories: dict[str, Path], forked_ranks: None) -> Iterator[Make]:
    """Makes engines of a family; at the end each is closed and audited."""
    made: list[Engine] = []

    def engine(ranks: int, **options: object) -> Engine:
        made.append(engine_of(directories[request.param], ranks, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()
        assert each.audit() == []
        assert each.loop.scheduler.audit.findings == []


def tokens(turn: int, count: int = 21) -> list[int]:
    return [10 + (turn * 7 + place * 3) % 240 for place in range(count)]


def said(session: Session, turn: int, count: int = 12, **more: object) -> list[int]:
    return session.say(tokens(turn), greedily(count, **more)).wait().token_ids


def story(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Sessions are interrupted, forked, rewound, moved to the host and back, and sampled in many ways.

    The tokens of all turns, and the log-probabilities of one.
    """
    heard: list[list[int]] = []
    first, second = engine.session(id="first"), engine.session(id="second")
    turns = [first.say(tokens(1, 70), greedily(12)), second.say(tokens(2), greedily(9))]
    heard += [turn.wait().token_ids for turn in turns]
    running = first.say(tokens(3), greedily(30))
    for _ in range(6):
        engine.drive()
    first.interrupt(2)
    heard.append(running.token_ids)
    child = first.fork()
    heard += [said(first, 4, FEW), said(child, 5, FEW), said(child, 6, FEW)]
    child.rewind(2)
    heard.append(said(child, 7, FEW))
    assert second.spill("host")
    heard.append(said(first, 8, FEW))
    assert second.restore()
    heard.append(said(second, 9, FEW))
    special = second.say(
        tokens(10, 9), Sampling(max_tokens=8, temperature=0.8, seed=5, top_k=20, repetition_penalty=1.2)
    )
    heard.append(special.wait().token_ids)
    counted = second.say(tokens(11, 9), greedily(5, logprobs=2, prompt_logprobs=1)).wait()
    heard.append(counted.token_ids)
    values = [each.logprob for each in (*counted.logprobs, *counted.prompt_logprobs)]
    matched = first.say(
        tokens(12, 5), greedily(12), grammar=Grammar.of(Kind.REGEX, "(the|old) (river|stones) runs")
    )
    heard.append(matched.wait().token_ids)
    return heard, values


def tell_the_same(engine: Engine, alone: Engine) -> None:
    """Ranks add up in another order than one does."""
    heard, values = story(engine)
    wanted, of_one = story(alone)
    assert heard == wanted
    assert values == pytest.approx(of_one, abs=2e-3)


WAYS = [(2, False), (3, True), (2, True), (3, False)]
"""Ranks, and whether steps overlap. In `make test` families take turns."""
STORIES = [
    pytest.param(name, *way, marks=() if number == place % len(WAYS) else pytest.mark.soak)
    for place, name in enumerate(NAMES)
    for number, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("make", "ranks", "overlap"), STORIES, indirect=["make"])
def test_several_ranks_tell_the_story_of_one(make: Make, ranks: int, overlap: bool) -> None:
    options = {"overlap": overlap, "host_memory": 8 << 20, "chunk_tokens": 32}
    tell_the_same(make(ranks, **options), make(1, **options))


@pytest.mark.parametrize(
    "make", ["olmo3", "bamba", pytest.param("llama", marks=pytest.mark.soak)], indirect=True
)
def test_guesses_and_pressure_change_no_token(make: Make) -> None:
    """Drafts are verified, turns are retracted and sessions spilled where memory is short."""
    options = {"kv_tokens": 256, "window_tokens": 256, "state_slots": 8, "host_memory": 8 << 20}

    def talk(engine: Engine) -> list[list[int]]:
        sessions = [engine.session() for _ in range(5)]
        turns = [session.say(tokens(1, 6) * 6, greedily(24)) for session in sessions]
        heard = [turn.wait().token_ids for turn in turns]
        return heard + [said(session, 2) for session in sessions]

    together = make(2, speculate="ngram", **options)
    assert talk(together) == talk(make(1, **options))
    counters = together.loop.scheduler.registry.counters
    assert counters.retracts + counters.spills > 0


@pytest.mark.parametrize(
    "make",
    [*KINDS, *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES if name not in KINDS)],
    indirect=True,
)
def test_sessions_come_back_from_the_files_of_as_many_ranks(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file holds the parts of all ranks. Another number of ranks computes the session again."""
    kept = {"journal": tmp_path / "journal", "disk": tmp_path / "disk"}
    engine = make(2, **kept)
    session = engine.session(id="s")
    heard = [said(session, turn) for turn in range(2)]
    assert session.spill("disk")
    assert session.restore()
    heard.append(said(session, 2))
    engine.close()

    again = make(2, **kept)
    session = again.resume("s")
    assert session.restore(), "the file is used"
    turn = session.say(tokens(3), greedily(12)).wait()
    heard.append(turn.token_ids)
    assert turn.usage.computed_tokens <= 21 + 12 + 1
    again.close()

    alone = make(1, **kept)
    turn = alone.resume("s").say(tokens(4), greedily(12)).wait()
    heard.append(turn.token_ids)
    assert "layout does not match" in caplog.text
    assert turn.usage.computed_tokens > 4 * 21

    expected = make(1).session()
    assert heard == [said(expected, turn) for turn in range(5)]


def test_an_engine_closes_in_the_middle_of_a_turn(directories: dict[str, Path], forked_ranks: None) -> None:
    engine = engine_of(directories["bamba"], 2, overlap=True)
    turns = [engine.session().say(tokens(1), greedily(30)) for _ in range(3)]
    while not all(len(turn._stream.tokens) > 3 for turn in turns):
        engine.drive()
    engine.close()
    assert engine.audit() == []


def test_graphs_run_on_all_ranks(directories: dict[str, Path], recording_ranks: None) -> None:
    """Steps in captured shapes, those whose sampling is left to rank 0 included."""
    options = {"host_memory": 8 << 20, "chunk_tokens": 16, "max_running": 6, "overlap": True}
    alone = tiny_engine(directories["bamba"], **options)
    engine = tiny_engine(directories["bamba"], tensor_parallel=2, **options)
    assert isinstance(engine.loop.executor, Executor)
    engine.loop.executor.capture(first_only=True)
    while engine.loop.capturing.when_idle():
        pass
    replays = Counting(engine.loop.executor)
    tell_the_same(engine, alone)
    assert replays.count > 20
    for each in (engine, alone):
        each.close()


class Counting:
    """Counts the steps that an executor runs in a captured shape."""

    def __init__(self, executor: Executor) -> None:
        self.count = 0
        self._replay = executor.replay
        executor.replay = self  # type: ignore[method-assign,assignment]

    def __call__(self, graphs: StepGraphs, shape: Shape) -> Forwarded:
        self.count += 1
        return self._replay(graphs, shape)
