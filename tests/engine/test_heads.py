"""A draft head changes nothing but the number of steps: the same tokens, no memory lost."""

from pathlib import Path

import pytest

from holdfast.core.turn import Turn
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.draft import proposer as proposing
from holdfast.engine.draft.gain import LENGTH_MAX
from holdfast.engine.draft.head_proposer import FEED_LEAST
from holdfast.engine.draft.passes import Asked
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from tests.engine.drafting import PROMPT, check_cache, check_empty
from tests.engine.heads import (
    cache_of,
    head_engine,
    head_of,
    mtp_engine,
    plant,
    write_eagle3,
    write_llama,
    write_qwen,
)
from tests.engine.test_draft import steps, story
from tests.engine.tiny import greedy, tiny_engine, write_model

LONG = pytest.mark.soak
TARGETS = ["next", "llama", "mistral", "bamba", "dense", "olmo3"]
"""Targets of every layout of memory, the first three too: Qwen's two have a head, others an EAGLE-3 head."""

SAMPLED = Sampling(max_tokens=24, temperature=1.0, seed=6, min_p=0.02, logit_bias={40: 2.0}, ignore_eos=True)


def pair(directory: Path, kind: str, **options: object) -> tuple[Engine, Engine]:
    """An engine without drafts and one with a head."""
    common = {name: options.pop(name) for name in ("host_memory", "overlap") if name in options}
    if kind in ("next", "dense"):
        path = write_qwen(directory / kind, kind)
        return tiny_engine(path, load_format="auto", **common), mtp_engine(path, **common, **options)
    path = write_model(directory / kind, kind)
    head = write_eagle3(directory / "head")
    dummy = {"load_format": "dummy", **common}
    return tiny_engine(path, **dummy), head_engine(path, draft=str(head), **dummy, **options)


def told(
    plain: Engine, engine: Engine, prompts: list[list[int]], sampling: Sampling, agreement: float
) -> list[list[int]]:
    """Let the head of an engine say mostly what an engine without one says to these prompts: that."""
    said = [result.token_ids for result in plain.generate(prompts, sampling)]
    by_prompt = dict(zip(map(tuple, prompts), said, strict=True))
    streams = engine.loop.dispatcher.live

    def answer(turn: Turn) -> list[int]:
        return by_prompt[tuple(streams.stream_of(turn).prompt_tokens)]

    plant(engine, answer, agreement)
    return said


@pytest.mark.parametrize("kind", [*TARGETS[:3], *(pytest.param(kind, marks=LONG) for kind in TARGETS[3:])])
def test_tokens_are_the_same(tmp_path: Path, kind: str) -> None:
    """With drafts that are mostly refused, as random weights make them, and with drafts mostly accepted."""
    plain, engine = pair(tmp_path, kind, overlap=TARGETS.index(kind) % 2 == 1)
    prompts = [PROMPT, [5, 6, 7, 8, 5, 6, 7], [30, 31] * 10]
    for sampling in (greedy(24), SAMPLED):
        expected = [result.token_ids for result in plain.generate(prompts, sampling)]
        assert [result.token_ids for result in engine.generate(prompts, sampling)] == expected
    counters = engine.loop.scheduler.registry.counters
    refused = counters.drafted_tokens - counters.accepted_tokens
    assert refused > 100
    expected = told(plain, engine, prompts, SAMPLED, 0.7)
    assert [result.token_ids for result in engine.generate(prompts, SAMPLED)] == expected
    assert counters.accepted_tokens > 30
    assert engine.audit() == []
    check_empty(engine)
    assert not cache_of(engine).pieces and not head_of(engine).states.fresh


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_head_that_agrees_saves_steps(tmp_path: Path, kind: str) -> None:
    """It says what the model says after the same token, with the model's random numbers.

    Also in a fork, whose memory in the head begins where it is fed.
    """
    if kind == "mtp":
        path = write_qwen(tmp_path / "model", "dense", markov=True)
        engine = mtp_engine(path)
    else:
        path = write_llama(tmp_path / "model", markov=True)
        head = write_eagle3(tmp_path / "head", form="speculators", like=path)
        engine = head_engine(path, draft=str(head))
    plain = tiny_engine(path, load_format="auto")
    sampling = Sampling(max_tokens=64, temperature=1.0, seed=3, ignore_eos=True)
    (expected,), (found,) = (each.generate([PROMPT], sampling) for each in (plain, engine))
    assert found.token_ids == expected.token_ids and len(set(found.token_ids)) > 32
    counters = engine.loop.scheduler.registry.counters
    assert counters.accepted_tokens >= (0.98 if kind == "mtp" else 0.85) * counters.drafted_tokens > 40
    assert steps(engine) <= 14 and steps(plain) >= 64
    session = engine.session()
    session.say(PROMPT, greedy(8)).wait()
    before = counters.drafted_tokens, counters.accepted_tokens
    child = session.fork()
    child.say([9], sampling).wait()
    assert cache_of(engine).entries[child.id].base > len(PROMPT)
    drafted, accepted = counters.drafted_tokens - before[0], counters.accepted_tokens - before[1]
    assert accepted >= 0.8 * drafted > 40


@pytest.mark.parametrize("agreement", [0.6, 0.8, pytest.param(1.0, marks=LONG)])
def test_planted_agreement_saves_steps(tmp_path: Path, agreement: float) -> None:
    """Steps per token at eight drafts a step that are right with a probability."""
    plain, engine = pair(tmp_path, "dense")
    prompts, sampling = [PROMPT], greedy(120)
    expected = told(plain, engine, prompts, sampling, agreement)
    before = steps(engine)
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == expected
    expected_steps = 120 / sum(agreement**place for place in range(LENGTH_MAX + 1))
    assert 0.85 * expected_steps < steps(engine) - before < 1.2 * expected_steps + 3


def test_log_probabilities_constraints_and_stops(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "next")
    said: list[object] = []
    logged = Sampling(max_tokens=24, temperature=1.0, seed=8, logprobs=3, ignore_eos=True)
    told(plain, engine, [PROMPT], logged, 0.7)
    values: list[list[float]] = []
    for each in (plain, engine):
        (result,) = each.generate([PROMPT], logged)
        values.append([entry.logprob for entry in result.logprobs])
        said.append([(entry.token, [token for token, _ in entry.top]) for entry in result.logprobs])
    assert said[0] == said[1] and values[1] == pytest.approx(values[0], abs=1e-4)
    assert engine.loop.scheduler.registry.counters.accepted_tokens > 5
    plain, engine = pair(tmp_path, "next")
    grammar = Grammar.of(Kind.REGEX, "[a-z]{5,40}")
    said.clear()
    for each in (plain, engine):
        with each.session() as session:
            text = session.say(
                PROMPT, Sampling(max_tokens=60, temperature=1.0, seed=11), grammar=grammar
            ).text
            free = Sampling(max_tokens=60, temperature=1.0, seed=12, ignore_eos=True)
            whole = session.say([7, 8, 9], free).token_ids
            session.rewind(1)
            stops = Sampling(
                max_tokens=60, temperature=1.0, seed=12, stop_token_ids=(whole[20],), ignore_eos=True
            )
            said.append((text, whole, session.say([7, 8, 9], stops).token_ids))
        assert each.audit() == []
    assert said[0] == said[1] and engine.loop.scheduler.registry.counters.drafted_tokens > 50
    check_empty(engine)


@pytest.mark.parametrize(
    ("kind", "draft_tokens"),
    [
        ("next", 4096),
        ("bamba", 128),
        pytest.param("mistral", 4096, marks=LONG),
        pytest.param("dense", 128, marks=LONG),
    ],
)
def test_a_story_with_cuts(tmp_path: Path, kind: str, draft_tokens: int) -> None:
    """With room for every session in the head's cache, and with too little."""
    plain, engine = pair(tmp_path, kind, draft_tokens=draft_tokens, host_memory=1 << 24)
    assert story(engine, check_cache) == story(plain)
    assert engine.loop.scheduler.registry.counters.drafted_tokens > 50
    assert engine.audit() == []
    check_empty(engine)
    assert not cache_of(engine).pieces


def test_a_restart_begins_where_the_head_is_fed(tmp_path: Path) -> None:
    """Sessions come back from the journal with their tokens, and their memory is computed again or read."""
    path = write_qwen(tmp_path / "model", "dense")
    said: list[list[int]] = []
    for name, make in (("plain", tiny_engine), ("head", mtp_engine)):
        options = {
            "load_format": "auto",
            "journal": str(tmp_path / name),
            "disk": str(tmp_path / f"{name}-disk"),
        }
        engine = make(path, **options)
        first = engine.session(id="kept").say(PROMPT, greedy(20)).token_ids
        engine.close()
        engine = make(path, **options)
        said.append(first + engine.resume("kept").say([7, 8], greedy(20)).token_ids)
        if name == "head":
            entry = cache_of(engine).entries["kept"]
            assert entry.base >= len(PROMPT) and engine.loop.scheduler.registry.counters.drafted_tokens > 10
            check_cache(engine)
        engine.close()
    assert said[0] == said[1]


def test_memory_pressure_on_the_target_changes_no_token(tmp_path: Path) -> None:
    """Turns are retracted and queued again; what is computed twice is fed once."""
    plain, engine = pair(tmp_path, "llama", kv_tokens=256, leave_history=False)
    sampling = Sampling(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True)
    prompts = [PROMPT[place:] for place in range(6)]
    expected = [result.token_ids for result in plain.generate(prompts, sampling)]
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == expected
    assert engine.loop.scheduler.registry.counters.retracts > 0
    check_empty(engine)


def test_prompts_are_fed_as_they_are_computed(tmp_path: Path) -> None:
    """Each step feeds what it computed; a second turn feeds what is new; a fork begins where it is fed."""
    _, engine = pair(tmp_path, "llama", chunk_tokens=64, step_tokens=64)
    head_of(engine).costs = head_of(engine).costs._replace(draft=10.0)  # Nobody drafts.
    passes, cache = head_of(engine).passes, cache_of(engine)
    session = engine.session()
    turn = session.say(PROMPT * 5, greedy(1))
    fed: list[int] = []
    while not turn.done:
        engine.drive()
        fed.append(passes.tokens_computed)
    assert fed[1:4] == [64, 128, 192]
    session.say([7, 8, 9], greedy(1)).wait()
    engine.drive()
    known = len(PROMPT) * 5 + 1 + 3
    assert passes.tokens_computed == known
    entry = cache.entries[session.id]
    assert entry.base == 0 and entry.places == known
    child = session.fork()
    child.say([9, 10], greedy(2)).wait()
    engine.drive()
    entry = cache.entries[child.id]
    assert entry.base >= known - 1 and 1 <= entry.places <= 4
    check_cache(engine)


def test_a_resting_session_is_fed_in_portions(tmp_path: Path) -> None:
    """Drafts that do not pay are not made, and the head runs once for many tokens."""
    _, engine = pair(tmp_path, "llama")
    proposer = head_of(engine)
    proposer.costs = proposer.costs._replace(draft=10.0)
    passes = proposer.passes
    sessions = [engine.session() for _ in range(3)]
    turns = [
        session.say([50 + number, *PROMPT], greedy(2 * FEED_LEAST + 2))
        for number, session in enumerate(sessions)
    ]
    assert all(turn.token_ids for turn in turns)
    engine.drive()
    engine.drive()
    assert engine.loop.scheduler.registry.counters.drafted_tokens == 0 and proposer.resting == 3
    assert passes._step <= 3 * 5
    assert passes.tokens_computed == 3 * (len(PROMPT) + 1 + 2 * FEED_LEAST + 1)
    assert proposer.states.copies <= 3 * steps(engine), "one launch a step for each of three tensors"
    for kept in cache_of(engine).pieces.values():
        assert sum(len(piece.tokens) for piece in kept) <= 1 and all(piece.own for piece in kept)


def test_the_cache_is_bounded_and_the_oldest_sessions_leave_it(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "dense", draft_tokens=192)
    cache = cache_of(engine)
    sessions = [engine.session() for _ in range(6)]
    for number, session in enumerate(sessions):
        prompt = [50 + number, *PROMPT]
        assert session.say(prompt, greedy(16)).token_ids == plain.generate([prompt], greedy(16))[0].token_ids
        check_cache(engine)
    assert cache.evicted >= 3 and sessions[-1].id in cache.entries and sessions[0].id not in cache.entries
    assert set(cache.pieces) <= set(cache.entries)
    turns = [session.say([7], greedy(16)) for session in sessions]
    while not all(turn.done for turn in turns):
        engine.drive()
        check_cache(engine)
    for session in sessions:
        session.close()
    check_empty(engine)
    assert not cache.pieces


def test_ngrams_come_first_and_penalised_turns_do_not_draft(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "mistral", speculate="ngram")
    proposer = head_of(engine)
    assert proposer.ngrams is not None
    for sampling in (greedy(60), greedy(24, frequency_penalty=0.5)):
        prompts = [PROMPT, [30, 31] * 10]
        expected = [result.token_ids for result in plain.generate(prompts, sampling)]
        drafted = engine.loop.scheduler.registry.counters.drafted_tokens
        assert [result.token_ids for result in engine.generate(prompts, sampling)] == expected
        more = engine.loop.scheduler.registry.counters.drafted_tokens - drafted
        assert bool(more) is not bool(sampling.frequency_penalty)
    assert proposer.ngrams.proposed > 0 and proposer.proposed > 0
    check_empty(engine)


@pytest.mark.parametrize("failures", [1, proposing.FAILURES_MAX])
def test_a_head_that_fails_costs_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    plain, engine = pair(tmp_path, "dense")
    proposer = head_of(engine)
    run, left = type(proposer.passes).run, [failures]

    def broken(self: object, asked: list[Asked]) -> list[list[int]]:
        if left[0]:
            left[0] -= 1
            raise MemoryError("no memory for the head")
        return run(proposer.passes, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(type(proposer.passes), "run", broken)
    expected = plain.generate([PROMPT], greedy(30))[0].token_ids
    session = engine.session()
    assert session.say(PROMPT, greedy(30)).token_ids == expected
    drafted = engine.loop.scheduler.registry.counters.drafted_tokens
    assert bool(drafted) is (failures < proposing.FAILURES_MAX)
    assert proposer.states.off is not bool(drafted)
    check_cache(engine)
    session.close()
    check_empty(engine)
    assert not proposer.states.fresh


def test_what_is_heard_ahead_is_fed_ahead(tmp_path: Path) -> None:
    """An input is computed and fed while it is being said; the answer drafts from all of it."""
    plain, engine = pair(tmp_path, "dense")
    said: list[list[int]] = []
    for each in (plain, engine):
        session = each.session()
        for _ in range(3):
            session.append(" the river runs cold and deep under old stones today" * 2)
            for _ in range(3):
                each.drive()
        if each is engine:
            places = cache_of(engine).entries[session.id].places
            assert places >= 50 and head_of(engine).passes.tokens_computed == places
        said.append(session.say(" and deep", greedy(20)).token_ids)
        if each is engine:
            assert cache_of(engine).entries[session.id].base == 0
            session.close()
    assert said[0] == said[1] and engine.loop.scheduler.registry.counters.drafted_tokens > 20
    check_empty(engine)
