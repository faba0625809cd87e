"""A draft model changes nothing but the number of steps: the same tokens, no memory lost."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.core.session import Session
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.draft import proposer as proposing
from holdfast.engine.draft.passes import Asked
from holdfast.engine.draft.reporting import draft_gauges
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from tests.engine.drafting import PROMPT, check_cache, check_empty, drafting_engine, proposer_of, write_draft
from tests.engine.tiny import VOCABULARY, greedy, tiny_engine, write_model

PAIRS = [("llama", "llama"), ("bamba", "llama"), ("mistral", "mistral"), ("olmo3", "olmo3")]
"""Targets of every layout of memory, and drafts with and without sliding windows."""


def pair(directory: Path, target: str, draft: str, **options: object) -> tuple[Engine, Engine]:
    path = write_model(directory / target, target)
    return tiny_engine(path), drafting_engine(path, write_draft(directory, draft), **options)


def steps(engine: Engine) -> int:
    return engine.loop.scheduler.registry.ledger.step


def beside(engine: Engine, prompts: list[list[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    """What is said after each prompt with each sampling, all of it at once."""
    sessions = [(engine.session(), prompt, each) for prompt in prompts for each in samplings]
    turns = [session.say(prompt, each) for session, prompt, each in sessions]
    said = [turn.token_ids for turn in turns]
    for session, _, _ in sessions:
        session.close()
    return said


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_tokens_are_the_same(tmp_path: Path, target: str, draft: str, overlap: bool) -> None:
    plain, drafting = pair(tmp_path, target, draft, overlap=overlap)
    prompts = [PROMPT, [5, 6, 7, 8, 5, 6, 7], [30, 31] * 10]
    samplings = (
        greedy(40),
        Sampling(max_tokens=40, temperature=0.7, top_p=0.9, seed=5, ignore_eos=True),
        Sampling(max_tokens=40, temperature=1.0, min_p=0.05, logit_bias={40: 3.0}, seed=6, ignore_eos=True),
    )
    assert beside(drafting, prompts, samplings) == beside(plain, prompts, samplings)
    counters = drafting.loop.scheduler.registry.counters
    assert counters.drafted_tokens > 100
    assert drafting.audit() == []
    check_empty(drafting)


def test_a_draft_model_that_agrees_saves_steps(tmp_path: Path) -> None:
    """Its weights are the target's, and it samples with the target's random numbers."""
    path = write_model(tmp_path, "llama")
    plain, drafting = tiny_engine(path), drafting_engine(path, path)
    sampling = Sampling(max_tokens=64, temperature=1.0, seed=3, ignore_eos=True)
    (expected,), (found,) = (engine.generate([PROMPT], sampling) for engine in (plain, drafting))
    assert found.token_ids == expected.token_ids
    counters = drafting.loop.scheduler.registry.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 48
    assert steps(drafting) <= 12 and steps(plain) >= 64


def test_log_probabilities_are_the_targets(tmp_path: Path) -> None:
    plain, drafting = pair(tmp_path, "llama", "llama")
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=8, logprobs=3, ignore_eos=True)
    (expected,), (found,) = (engine.generate([PROMPT], sampling) for engine in (plain, drafting))
    assert [each.token for each in found.logprobs] == [each.token for each in expected.logprobs]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert drafting.loop.scheduler.registry.counters.accepted_tokens > 0


def test_penalised_turns_do_not_draft(tmp_path: Path) -> None:
    plain, drafting = pair(tmp_path, "llama", "llama")
    sampling = greedy(24, frequency_penalty=0.5)
    (expected,), (found,) = (engine.generate([PROMPT], sampling) for engine in (plain, drafting))
    assert found.token_ids == expected.token_ids
    assert drafting.loop.scheduler.registry.counters.drafted_tokens == 0


@pytest.mark.parametrize(("target", "draft"), [("llama", "llama"), ("bamba", "mistral")])
def test_constraints_and_stops(tmp_path: Path, target: str, draft: str) -> None:
    plain, drafting = pair(tmp_path, target, draft)
    grammar = Grammar.of(Kind.REGEX, "[a-z]{5,40}")
    sampling = Sampling(max_tokens=60, temperature=1.0, seed=11)
    said: list[object] = []
    for engine in (plain, drafting):
        with engine.session() as session:
            text = session.say(PROMPT, sampling, grammar=grammar).text
            free = Sampling(max_tokens=60, temperature=1.0, seed=12, ignore_eos=True)
            whole = session.say([7, 8, 9], free).token_ids
            session.rewind(1)
            stops = Sampling(
                max_tokens=60, temperature=1.0, seed=12, stop_token_ids=(whole[20],), ignore_eos=True
            )
            said.append((text, whole, session.say([7, 8, 9], stops).token_ids))
        assert engine.audit() == []
    assert said[0] == said[1]
    check_empty(drafting)


def story(engine: Engine, after: Callable[[Engine], None] = lambda engine: None) -> list[list[int]]:
    """What a session says that is interrupted, rewound, forked, compacted and spilled on the way."""
    said: list[list[int]] = []
    sampling = Sampling(max_tokens=20, temperature=0.8, seed=4, ignore_eos=True)
    session = engine.session()
    said.append(session.say(PROMPT, sampling).token_ids)
    turn = session.say([7, 8, 9], sampling)
    while turn._turn.generated < 6:
        engine.drive()
    after(engine)
    session.interrupt(keep=4)
    said.append(session.say([40, 41], sampling).token_ids)
    after(engine)
    with session.fork() as child:
        said.append(child.say([50], sampling).token_ids)
        said.append(session.say([50], sampling).token_ids)
        after(engine)
    assert session.spill("host")
    said.append(session.say([60, 61], sampling).token_ids)
    session.rewind(1)
    said.append(session.say([70], sampling).token_ids)
    session.compact(1, 1, "a river")
    said.append(session.say([71, 72], sampling).token_ids)
    after(engine)
    session.close()
    after(engine)
    return said


@pytest.mark.parametrize(
    ("target", "draft", "draft_tokens"),
    [
        pytest.param(*names, size, marks=() if (place + turn) % 2 == 0 else pytest.mark.soak)
        for place, names in enumerate(PAIRS)
        for turn, size in enumerate((4096, 128))
    ],
)
def test_a_story_with_cuts(tmp_path: Path, target: str, draft: str, draft_tokens: int) -> None:
    """With room for every session in the draft model's cache, and with too little."""
    path = write_model(tmp_path / target, target)
    options = {"host_memory": 1 << 24}
    plain = tiny_engine(path, **options)
    drafting = drafting_engine(path, write_draft(tmp_path, draft), draft_tokens=draft_tokens, **options)
    assert story(drafting, check_cache) == story(plain)
    assert drafting.loop.scheduler.registry.counters.drafted_tokens > 50
    assert drafting.audit() == []
    check_empty(drafting)


def test_a_turn_computes_what_is_new_to_the_draft_model(tmp_path: Path) -> None:
    """The second turn of a session does not compute the first again, and a fork does."""
    _, engine = pair(tmp_path, "llama", "llama")
    passes = proposer_of(engine).passes
    session = engine.session()
    session.say(PROMPT * 4, greedy(12)).wait()
    first = passes.tokens_computed
    assert first >= len(PROMPT) * 4
    session.say([7, 8], greedy(12)).wait()
    second = passes.tokens_computed - first
    assert second < len(PROMPT) * 2
    child = session.fork()
    child.say([9], greedy(12)).wait()
    assert passes.tokens_computed - first - second >= len(PROMPT) * 4
    check_cache(engine)


def test_a_history_that_is_said_anew_is_read_anew(tmp_path: Path) -> None:
    """Nothing of a turn before is taken for granted: its tokens are compared."""
    _, engine = pair(tmp_path, "llama", "llama")
    passes = proposer_of(engine).passes
    session = engine.session()
    session.say(PROMPT * 4, greedy(12)).wait()
    before = passes.tokens_computed
    session.rewind(0)
    session.say([9] * len(PROMPT * 4), greedy(12)).wait()
    assert passes.tokens_computed - before >= len(PROMPT * 4)


def test_pages_that_a_cut_gave_to_another_session_are_not_read(tmp_path: Path) -> None:
    """The draft model is the model: as long as it reads its own memory, every draft is right."""
    path = write_model(tmp_path, "llama")
    engine = drafting_engine(path, path)
    one, other = engine.session(), engine.session()
    one.say(PROMPT, greedy(4)).wait()
    one.say(PROMPT * 6, greedy(12)).wait()
    one.rewind(1)
    one.say([9, *PROMPT], greedy(8)).wait()
    other.say([5, *PROMPT * 12], greedy(12)).wait()
    one.say([6], greedy(30)).wait()
    counters = engine.loop.scheduler.registry.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 30
    check_cache(engine)


def test_sessions_that_are_closed_leave_no_block_table(tmp_path: Path) -> None:
    _, engine = pair(tmp_path, "llama", "llama")
    passes = proposer_of(engine).passes
    for _ in range(6):
        with engine.session() as session:
            session.say(PROMPT, greedy(6)).wait()
            assert len(passes.executor.tables._rows) == 1


def test_the_first_token_does_not_wait_for_the_draft_model(tmp_path: Path) -> None:
    """It reads a long prompt in portions beside the steps after the first token."""
    _, engine = pair(tmp_path, "llama", "llama", mixed_tokens=64)
    passes = proposer_of(engine).passes
    turn = engine.session().say(PROMPT * 6, greedy(30))
    while not turn._turn.generated:
        engine.drive()
        assert passes.tokens_computed == 0
    computed = [0]
    while not turn.done:
        engine.drive()
        computed.append(passes.tokens_computed)
    assert max(after - before for before, after in pairwise(computed)) <= 64 + 8
    assert proposer_of(engine).proposed > 0


def test_the_cache_is_bounded_and_the_oldest_sessions_leave_it(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "llama", "llama", draft_tokens=192)
    cache = proposer_of(engine).cache
    pages = sum(pool.size for pool in cache.ledger.pools.values())
    sampling = greedy(16)
    expected = plain.generate([PROMPT], sampling)[0].token_ids
    sessions = [engine.session() for _ in range(6)]
    for session in sessions:
        assert session.say(PROMPT, sampling).token_ids == expected
        check_cache(engine)
    assert cache.evicted >= 3 and sessions[-1].id in cache.entries and sessions[0].id not in cache.entries
    turns = [session.say([7], sampling) for session in sessions]
    while not all(turn.done for turn in turns):
        engine.drive()
        check_cache(engine)
    assert len({tuple(turn.token_ids) for turn in turns}) == 1
    assert sum(pool.size for pool in cache.ledger.pools.values()) == pages
    for session in sessions:
        session.close()
    check_empty(engine)


def test_a_session_that_does_not_fit_beside_others_is_not_read(tmp_path: Path) -> None:
    """Two turns, and room for one of them: the other goes without drafts, and its history is read by none."""
    plain, engine = pair(tmp_path, "llama", "llama", draft_tokens=512, mixed_tokens=64)
    passes, cache = proposer_of(engine).passes, proposer_of(engine).cache
    prompts = [PROMPT * 8, [9, *PROMPT * 8]]
    expected = [result.token_ids for result in plain.generate(prompts, greedy(60))]
    idle = engine.session()
    idle.say([5, 6], greedy(3)).wait()
    sessions = [engine.session() for _ in prompts]
    turns = [session.say(prompt, greedy(60)) for session, prompt in zip(sessions, prompts, strict=True)]
    while not all(turn.done for turn in turns):
        engine.drive()
        check_cache(engine)
    assert [turn.token_ids for turn in turns] == expected
    assert proposer_of(engine).proposed > 0
    assert passes.tokens_computed < len(prompts[0]) + 9 * 60, "one history, and the drafts"
    assert cache.evicted == 0 and idle.id in cache.entries, "nobody has lost anything for a guess in vain"
    assert draft_gauges(proposer_of(engine))["draft_sessions"] == 2 < len(cache.entries)
    for session in (idle, *sessions):
        session.close()
    check_empty(engine)


def test_memory_pressure_on_the_target_changes_no_token(tmp_path: Path) -> None:
    """Turns are retracted and queued again; the draft model's cache goes on from there."""
    path = write_model(tmp_path / "llama", "llama")
    plain = tiny_engine(path)
    engine = drafting_engine(path, write_draft(tmp_path), kv_tokens=256, leave_history=False)
    sampling = Sampling(max_tokens=60, temperature=0.8, seed=4, ignore_eos=True)
    prompts = [PROMPT[place:] for place in range(6)]
    expected = [result.token_ids for result in plain.generate(prompts, sampling)]
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == expected
    assert engine.loop.scheduler.registry.counters.retracts > 0
    check_empty(engine)


def test_ngrams_come_first_where_both_are_asked_for(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "llama", "llama", speculate="ngram")
    proposer = proposer_of(engine)
    assert proposer.ngrams is not None
    prompts = [PROMPT, [30, 31] * 10]
    expected = [result.token_ids for result in plain.generate(prompts, greedy(60))]
    assert [result.token_ids for result in engine.generate(prompts, greedy(60))] == expected
    assert proposer.ngrams.accepted > 0 and proposer.proposed > 0
    assert not proposer.ngrams._traces
    check_empty(engine)


@pytest.mark.parametrize("failures", [1, proposing.FAILURES_MAX])
def test_a_draft_model_that_fails_costs_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    plain, engine = pair(tmp_path, "llama", "llama")
    passes = proposer_of(engine).passes
    run, left = type(passes).run, [failures]

    def broken(self: object, asked: list[Asked]) -> list[list[int]]:
        if left[0]:
            left[0] -= 1
            self.executor.tables.row(asked[0].entry.number)  # type: ignore[attr-defined]
            raise MemoryError("no memory for the draft model")
        return run(passes, asked)

    monkeypatch.setattr(type(passes), "run", broken)
    expected = plain.generate([PROMPT], greedy(30))[0].token_ids
    session = engine.session()
    assert session.say(PROMPT, greedy(30)).token_ids == expected
    drafted = engine.loop.scheduler.registry.counters.drafted_tokens
    assert bool(drafted) is (failures < proposing.FAILURES_MAX)
    check_cache(engine)
    session.close()
    check_empty(engine)


def test_a_history_that_the_draft_model_cannot_read_goes_without(tmp_path: Path) -> None:
    """Its tables may be shorter than the target's: padding, which no tokenizer writes, but a client may."""
    path = write_model(tmp_path / "llama", "llama", vocab_size=320)
    engine = drafting_engine(path, write_draft(tmp_path))
    plain = tiny_engine(path)
    for prompt in ([*PROMPT, 310], PROMPT):
        sampling = greedy(20, logit_bias={310: -100.0})
        (expected,), (found,) = (each.generate([prompt], sampling) for each in (plain, engine))
        assert found.token_ids == expected.token_ids
        drafted = engine.loop.scheduler.registry.counters.drafted_tokens
        assert bool(drafted) is (prompt is PROMPT)
    check_empty(engine)


def test_drafts_that_are_no_tokens_of_the_target_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model's table may have rows more: the drafts before such a one are of use."""
    path = write_model(tmp_path, "llama")
    plain, engine = tiny_engine(path), drafting_engine(path, path)
    passes = proposer_of(engine).passes
    run = type(passes).run

    def strange(self: object, asked: list[Asked]) -> list[list[int]]:
        return [drafts[:1] + [VOCABULARY] * len(drafts[1:]) for drafts in run(passes, asked)]

    monkeypatch.setattr(type(passes), "run", strange)
    (expected,), (found,) = (each.generate([PROMPT], greedy(30)) for each in (plain, engine))
    assert found.token_ids == expected.token_ids
    counters = engine.loop.scheduler.registry.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 10


def test_a_session_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    plain, engine = pair(tmp_path, "llama", "llama")
    for prompt in (PROMPT, [9, *PROMPT]):
        expected = plain.generate([prompt], greedy(12))[0].token_ids
        with engine.session(id="again") as session:
            assert session.say(prompt, greedy(12)).token_ids == expected
            found = engine.loop.scheduler.registry.find("again")
            assert isinstance(found, Session)
            assert proposer_of(engine).cache.entries["again"].number == found.number
    check_empty(engine)
