"""Drafting where it pays: how many tokens, when it is switched off, and when it is tried again."""

from pathlib import Path

import pytest

from holdfast.engine.draft.gain import LENGTH_MAX, REST_FIRST, REST_MAX, Acceptance, Costs, best_length
from holdfast.engine.draft.passes import Asked, DraftPasses
from holdfast.engine.sampling import Sampling
from tests.engine.drafting import PROMPT, drafting_engine, proposer_of, write_draft
from tests.engine.tiny import greedy, tiny_engine, write_model

CHEAP = Costs(0.1, 0.01)


@pytest.mark.parametrize(
    ("rate", "cost", "length"),
    [(0.0, 0.1, 0), (0.1, 0.2, 0), (0.3, 0.2, 1), (0.8, 0.1, 6), (0.99, 0.01, LENGTH_MAX), (1.0, 1.0, 0)],
)
def test_the_length_with_the_highest_gain(rate: float, cost: float, length: int) -> None:
    assert best_length(rate, cost, LENGTH_MAX) == length
    gains = [sum(rate**k for k in range(n + 1)) / (1 + n * cost) for n in range(LENGTH_MAX + 1)]
    assert gains[length] == pytest.approx(max(gains))
    assert best_length(rate, cost, 2) <= 2


def test_more_rows_make_drafts_dearer() -> None:
    costs = Costs(0.1, 1 / 256)
    assert costs.each(1) < costs.each(16) < costs.each(256) < 1.0
    assert best_length(0.7, costs.each(1), LENGTH_MAX) > best_length(0.7, costs.each(64), LENGTH_MAX)


def test_a_session_that_does_not_pay_rests_twice_as_long_each_time() -> None:
    acceptance, rests = Acceptance(), list[int]()
    for _ in range(4000):
        before = acceptance.rests
        if acceptance.length(CHEAP, 1, LENGTH_MAX):
            acceptance.note([1, 2, 3], [9])
        elif acceptance.rests > before:
            rests.append(acceptance.rest + 1)
    doubled = [min(REST_MAX, REST_FIRST << times) for times in range(len(rests))]
    assert rests == doubled and rests[-1] == REST_MAX


def test_a_session_that_pays_again_is_drafted_for_again() -> None:
    acceptance = Acceptance()
    while not acceptance.rest:
        acceptance.length(CHEAP, 1, LENGTH_MAX)
        acceptance.note([1], [2])
    waited = 0
    while not (length := acceptance.length(CHEAP, 1, LENGTH_MAX)):
        waited += 1
    assert waited == REST_FIRST - 1
    for _ in range(30):
        made = [7] * length
        assert acceptance.note(made, made) == length
        length = acceptance.length(CHEAP, 1, LENGTH_MAX)
    assert length == LENGTH_MAX and acceptance.rests == 1 and acceptance.next_rest == REST_FIRST


def test_drafts_that_do_not_pay_among_many_rows_are_no_evidence() -> None:
    """A session goes without in such a step, and drafts again once it has the device to itself."""
    acceptance, costs = Acceptance(), Costs(0.1, 1.0)
    assert acceptance.length(costs, 1, LENGTH_MAX) > 0
    assert Acceptance().length(Costs(0.1, 0.5), 100, LENGTH_MAX) == 0
    acceptance = Acceptance()
    acceptance.length(Costs(0.1, 0.5), 100, LENGTH_MAX)
    assert not acceptance.rest and not acceptance.rests


def test_what_the_model_was_not_asked_for_is_no_evidence() -> None:
    acceptance = Acceptance()
    before = acceptance.rate
    assert acceptance.note([1, 2, 3], []) == 0 and acceptance.rate == before
    assert acceptance.note([1, 2, 3], [1]) == 1 and acceptance.rate > before


def test_a_draft_model_that_is_never_right_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tried again, now and then: also in the session's next turn. Other sessions are on their own."""
    path = write_model(tmp_path, "llama")
    engine = drafting_engine(path, path, costs=CHEAP, context_length=2048)
    proposer = proposer_of(engine)
    run, wrong = DraftPasses.run, True

    def contrary(self: DraftPasses, asked: list[Asked]) -> list[list[int]]:
        made = run(self, asked)
        return [[(token + 1) % 200 for token in drafts] for drafts in made] if wrong else made

    monkeypatch.setattr(DraftPasses, "run", contrary)
    session, counters = engine.session(), engine.loop.scheduler.registry.counters
    session.say(PROMPT, greedy(180)).wait()
    acceptance = proposer.records[session.id].acceptance
    assert counters.drafted_tokens < 120 and acceptance.rests >= 3
    assert counters.accepted_tokens == 0
    drafted = counters.drafted_tokens
    session.say([7], greedy(REST_FIRST)).wait()
    assert counters.drafted_tokens - drafted <= 40, "what was measured in a turn holds in the next"
    wrong = False
    other = engine.session()
    other.say(PROMPT, greedy(40)).wait()
    assert counters.accepted_tokens > 20 and not proposer.records[other.id].acceptance.rests
    accepted = counters.accepted_tokens
    session.say([8], greedy(250)).wait()
    assert counters.accepted_tokens - accepted > 50, "it was tried again, and pays now"
    assert proposer.resting == 0
    engine.close()


@pytest.mark.parametrize(("agreement", "fewer"), [(0.6, 0.62), (0.8, 0.45)])
def test_planted_agreement_saves_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreement: float, fewer: float
) -> None:
    """A draft is right with a given probability: the steps of an answer fall as they should."""
    path = write_model(tmp_path / "llama", "llama")
    plain = tiny_engine(path)
    sampling = Sampling(max_tokens=240, temperature=1.0, seed=2, ignore_eos=True)
    answer = plain.generate([PROMPT], sampling)[0].token_ids
    engine = drafting_engine(path, write_draft(tmp_path), costs=Costs(0.1, 0.01))

    def planted(self: DraftPasses, asked: list[Asked]) -> list[list[int]]:
        made: list[list[int]] = []
        for each in asked:
            each.entry.tokens.extend(each.tokens)
            first = each.turn.generated
            made.append(
                [
                    token if (first + place) * 0.6180339887 % 1.0 < agreement else (token + 1) % 200
                    for place, token in enumerate(answer[first : first + each.drafts])
                ]
            )
        return made

    monkeypatch.setattr(DraftPasses, "run", planted)
    before = engine.loop.scheduler.registry.ledger.step
    assert engine.generate([PROMPT], sampling)[0].token_ids == answer
    steps = engine.loop.scheduler.registry.ledger.step - before
    assert steps < fewer * 240
    counters = engine.loop.scheduler.registry.counters
    assert counters.drafted_tokens and counters.accepted_tokens + steps >= 240
