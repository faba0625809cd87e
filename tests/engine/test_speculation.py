"""Guesses change nothing but the number of steps: the same tokens, the same distribution, no memory lost."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.core.session import Session
from holdfast.core.tokens import TokenLog
from holdfast.core.turn import Turn
from holdfast.engine.constraints.toy import ToyMatcher
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.engine import Engine
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.step.speculation import LENGTH_FIRST, LENGTH_MAX, PAUSE_MAX, Speculator, Trace
from holdfast.engine.text.stream import TurnStream
from tests.engine.tiny import END, VOCABULARY, greedy, tiny_engine, tokenizer, write_model

FAMILIES = ["llama", "bamba", "mistral", "olmo3"]
REPEATING = [20, 21, 22, 23, 24, 25, 26] * 6


def engines(directory: Path, family: str, **options: object) -> tuple[Engine, Engine]:
    path = write_model(directory / family, family)
    return tiny_engine(path, **options), tiny_engine(path, speculate="ngram", **options)


def steps(engine: Engine) -> int:
    return engine.loop.scheduler.registry.ledger.step


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_same(tmp_path: Path, family: str) -> None:
    plain, guessing = engines(tmp_path, family)
    prompts = [REPEATING, [5, 6, 7, 8, 5, 6, 7], [30, 31] * 10]
    expected = [result.token_ids for result in plain.generate(prompts, greedy(60))]
    found = [result.token_ids for result in guessing.generate(prompts, greedy(60))]
    assert found == expected
    speculator = guessing.loop.speculator
    assert speculator is not None
    if family == "llama":
        assert speculator.accepted >= 5, "these weights go round in circles, and that can be guessed"
    assert guessing.audit() == plain.audit() == []


@pytest.mark.parametrize(
    ("speculate", "overlap", "expected"),
    [("none", None, True), ("ngram", None, False), ("ngram", True, True)],
)
def test_all_rows_are_in_each_step_of_an_engine_that_guesses(
    tmp_path: Path, speculate: str, overlap: bool | None, expected: bool
) -> None:
    """Rows that wait for the step in flight would stay behind others for ever, each half in its own steps."""
    loop = tiny_engine(write_model(tmp_path, "llama"), speculate=speculate).loop
    setup = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), options=SimpleNamespace(overlap=overlap)
    )
    again = EngineLoop(
        setup,  # type: ignore[arg-type]
        loop.scheduler,
        loop.executor,
        loop.session_log,
        loop.dispatcher,
        speculator=loop.speculator,
    )
    assert again._overlap is expected


def test_nothing_is_kept_of_the_histories_of_turns_that_are_over(tmp_path: Path) -> None:
    engine = tiny_engine(write_model(tmp_path, "llama"), speculate="ngram")
    engine.generate([REPEATING, REPEATING[2:]], greedy(9))
    session = engine.session()
    session.say(REPEATING, greedy(30))
    for _ in range(3):
        engine.drive()
    speculator = engine.loop.speculator
    assert speculator is not None and len(speculator._traces) == 1, "of the turn that speaks"
    session.interrupt(keep="none")
    assert not speculator._traces


def propose_half_right(engine: Engine, answers: dict[int, list[int]]) -> list[int]:
    """Let an engine guess what is known to come, by seed, every third token wrong; counts its guesses."""
    made: list[int] = []

    def propose(session: Session, turn: Turn) -> list[int]:
        seed = engine.loop.dispatcher.live.stream_of(turn).sampling.seed
        assert seed is not None
        guesses = answers[seed][turn.generated : turn.generated + 4]
        wrong = [
            (token + 1) % 200 if (turn.generated + i) % 3 == 2 else token for i, token in enumerate(guesses)
        ]
        made.append(len(wrong))
        return wrong

    engine.loop.scheduler.planner.propose = propose
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_the_same(tmp_path: Path, family: str) -> None:
    """A token is a function of logits, seed and position, so even what is drawn does not change."""
    plain, guessing = engines(tmp_path, family)
    sampling = [
        Sampling(max_tokens=30, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True) for seed in range(4)
    ]
    expected = [plain.generate([REPEATING], each)[0].token_ids for each in sampling]
    made = propose_half_right(guessing, dict(enumerate(expected)))
    found = [guessing.generate([REPEATING], each)[0].token_ids for each in sampling]
    assert found == expected
    assert sum(made) > 100
    assert steps(guessing) < 0.75 * steps(plain)
    assert guessing.audit() == []


def test_turns_stops_and_interruptions_with_guesses(tmp_path: Path) -> None:
    plain, guessing = engines(tmp_path, "bamba")
    said = []
    for engine in (plain, guessing):
        session = engine.session()
        first = session.say(REPEATING, greedy(30)).token_ids
        stop = Sampling(max_tokens=60, temperature=0.0, stop_token_ids=(first[-1],), ignore_eos=True)
        second = session.say([7, 8, 9], stop).token_ids
        turn = session.say(REPEATING, greedy(50))
        while len(turn._stream.tokens) < 9:
            engine.drive()
        session.interrupt()
        session.rewind(1)
        third = session.say([40, 41], greedy(20)).token_ids
        said.append((first, second, third))
        session.close()
        assert engine.audit() == []
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", id="full", marks=pytest.mark.soak),
        pytest.param("mistral", id="window", marks=pytest.mark.soak),
        pytest.param("bamba", id="state"),
    ],
)
def test_distribution_of_sampled_tokens(tmp_path: Path, family: str) -> None:
    """Chi-squared over many seeds: what is said with right and wrong guesses is distributed as without."""
    draws, rows = 400, 40
    plain, guessing = engines(tmp_path, family, max_running=rows, state_slots=4 * rows)
    likely = plain.generate([REPEATING[:30]], greedy(8))[0].token_ids
    made = propose_half_right(guessing, dict.fromkeys(range(10_000, 10_000 + draws), likely))
    counts: list[Counter[int]] = []
    for engine, first in ((plain, 0), (guessing, 10_000)):
        tokens: Counter[int] = Counter()
        for seed in range(first, first + draws, rows):
            turns = [
                engine.session().say(
                    REPEATING[:30],
                    Sampling(max_tokens=6, temperature=1.0, top_k=4, seed=seed + row, ignore_eos=True),
                )
                for row in range(rows)
            ]
            tokens.update(turn.token_ids[place] for turn in turns for place in (1, 2))
            engine.close()
        counts.append(tokens)
    assert sum(made) > draws
    common = [token for token, count in (counts[0] + counts[1]).items() if count >= 16]
    chance = sum((counts[0][t] - counts[1][t]) ** 2 / (counts[0][t] + counts[1][t]) for t in common)
    freedom = len(common) - 1
    assert freedom >= 3
    assert chance < freedom + 5 * (2 * freedom) ** 0.5


def test_penalised_turns_are_not_guessed(tmp_path: Path) -> None:
    plain, guessing = engines(tmp_path, "llama")
    sampling = greedy(40, frequency_penalty=0.5)
    (expected,), (found,) = (engine.generate([REPEATING], sampling) for engine in (plain, guessing))
    assert found.token_ids == expected.token_ids
    assert guessing.loop.speculator is not None
    assert guessing.loop.speculator.proposed == 0


def test_an_unknown_way_of_guessing_is_refused() -> None:
    with pytest.raises(OptionError, match="speculate"):
        make_options(speculate="oracle")


class Driver:
    """A speculator and one turn's history, without an engine."""

    def __init__(self) -> None:
        self.speculator = Speculator(lambda turn: TurnStream(tokenizer(), Sampling(), (END,)))
        self.trace = Trace()
        self.tokens = TokenLog()

    def guess(self) -> list[int]:
        self.speculator._learn(self.trace, self.tokens)
        self.speculator._read(self.trace, self.tokens)
        if self.trace.pause:
            self.trace.pause -= 1
            return []
        guesses = self.speculator._guess(self.trace, self.tokens)
        self.trace.asked, self.trace.pending = len(self.tokens), guesses
        return guesses


def test_guesses_grow_where_they_are_right() -> None:
    driver = Driver()
    driver.tokens.extend(range(10, 40))
    driver.tokens.extend([10, 11, 12])
    lengths = []
    for _ in range(5):
        guesses = driver.guess()
        lengths.append(len(guesses))
        assert guesses == [(token - 10) % 33 + 10 if token < 43 else token for token in guesses]
        driver.tokens.extend(guesses)
    assert lengths[0] == LENGTH_FIRST
    assert lengths[-1] == LENGTH_MAX
    assert lengths == sorted(lengths)


def test_wrong_guesses_are_made_ever_more_rarely() -> None:
    driver = Driver()
    driver.tokens.extend([1, 2, 3, 4])
    made = 0
    for step in range(1000):
        driver.tokens.extend([1, 2, 3])
        made += bool(driver.guess())
        driver.tokens.append(1000 + step)
    assert made <= 6 + 1000 // PAUSE_MAX + 2


def test_a_shorter_history_is_never_read_past_its_end() -> None:
    driver = Driver()
    driver.tokens.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 50])
    driver.guess()
    driver.tokens.cut(3)
    assert driver.guess() == []
    driver.tokens.extend([70, 1, 2, 3])
    assert driver.guess()[:1] == [70]


@pytest.mark.parametrize(("forced", "kept"), [([], 2), ([7], 0)])
def test_drafts_of_a_constrained_turn_end_where_its_constraint_does(
    engine: Engine, forced: list[int], kept: int
) -> None:
    """Two more tokens may come; nothing is drafted where a token is forced."""

    class Two(ToyMatcher):
        def validate(self, tokens: Sequence[int]) -> int:
            return min(2, len(tokens))

        def accept(self, tokens: Sequence[int]) -> bool:
            return True

        def rollback(self, count: int) -> None:
            assert count <= 2

        def forced(self) -> list[int]:
            return forced

    constraint = TurnConstraint(Two(VOCABULARY, END))
    speculator = Speculator(lambda _: TurnStream(tokenizer(), Sampling(), (END,), constraint=constraint))
    free = Speculator(lambda _: TurnStream(tokenizer(), Sampling(), (END,)))
    turn = engine.session(id="s").say(REPEATING, greedy(2))
    session, core = engine.loop.scheduler.registry.find("s"), turn._turn
    turn.wait()
    tokens = session.sequence.tokens
    length = len(tokens)
    tokens.extend(REPEATING)
    drafts = free(session, core)
    assert len(drafts) > 2 and speculator(session, core) == drafts[:kept]
    tokens.cut(length)
