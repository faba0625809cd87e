"""Constrained turns in the executor: masks, forced tokens, graphs, failures, and what plain steps pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Event
from types import MethodType

import pytest
import torch

from holdfast import kernels
from holdfast.core.registry import Plan
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.toy import ToyCompiled, ToyMatcher
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.engine import Engine, Turn, TurnFailed
from holdfast.engine.sampling import Sampling
from holdfast.engine.step import constrained, results
from holdfast.engine.step.constrained import ConstrainedRows
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.masks import Ahead, StepMasks, Wanted
from holdfast.models.model import Model
from tests.engine.conftest import Make
from tests.engine.test_graphs import capture
from tests.engine.tiny import END, VOCABULARY, byte_tokens, word

PROMPTS = [[word("the")] * 5, [word("river")] * 21, [word("deep"), word("old")] * 7, byte_tokens("a stone")]
SAMPLINGS = [
    Sampling(temperature=0.0, max_tokens=24),
    Sampling(temperature=0.9, top_k=40, top_p=0.9, seed=7, max_tokens=30),
    Sampling(temperature=1.0, min_p=0.01, seed=8, max_tokens=17, logit_bias={9: 3.0, 11: -5.0}),
    Sampling(temperature=0.7, seed=3, max_tokens=22, min_tokens=20),
]
overlapped = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def matcher(seed: int, tokens: Sequence[int] = ()) -> ToyMatcher:
    return ToyCompiled(VOCABULARY, END, seed).matcher(tokens)


def constrain(turn: Turn, constraint: TurnConstraint) -> Turn:
    """Constrain a turn that is queued."""
    turn._stream.constraint = constraint
    return turn


def begin(
    engine: Engine, takes_runs: bool = True, samplings: Sequence[Sampling] = SAMPLINGS
) -> Iterator[Turn]:
    """A constrained turn for each sampling."""
    for seed, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
        turn = engine.session().say(prompt, sampling)
        yield constrain(turn, TurnConstraint(matcher(seed), takes_runs=takes_runs))


def tokens_of(
    engine: Engine, takes_runs: bool = True, samplings: Sequence[Sampling] = SAMPLINGS
) -> list[list[int]]:
    """The tokens of constrained turns beside free ones. All tokens are as the matchers allow them."""
    free = [engine.session().say(prompt, SAMPLINGS[1]) for prompt in PROMPTS[:2]]
    turns = list(begin(engine, takes_runs, samplings))
    said = [turn.token_ids for turn in turns]
    for seed, tokens in enumerate(said):
        assert matcher(seed).accept(tokens), "a token that the constraint refuses"
        assert len(tokens) == samplings[seed].max_tokens or tokens[-1] == END
    return [*said, *(turn.token_ids for turn in free)]


def usual_tokens(make: Make) -> list[list[int]]:
    return tokens_of(make())


def steps_of(engine: Engine) -> list[Plan]:
    """The plans with rows that an engine starts."""
    plans: list[Plan] = []
    start = engine.loop.executor.start

    def noted(plan: Plan) -> Flight:
        if plan.rows:
            plans.append(plan)
        return start(plan)

    engine.loop.executor.start = noted  # type: ignore[method-assign]
    return plans


def test_tokens_are_the_same_with_overlap_graphs_runs_and_chunks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make(overlap=False))
    assert len(set(map(tuple, expected))) == len(expected)
    plain = make(overlap=False).generate(PROMPTS[:2], SAMPLINGS[1])
    assert expected[-2:] == [turn.token_ids for turn in plain], "turns beside constrained ones are as alone"
    assert tokens_of(make(overlap=True)) == expected
    assert tokens_of(make(overlap=True, chunk_tokens=3), takes_runs=False) == expected
    assert tokens_of(make(overlap=False), takes_runs=False) == expected
    for overlap in (False, True):
        engine = make(overlap=overlap, max_running=6)
        made = capture(engine, monkeypatch)
        assert tokens_of(engine) == expected
        assert sum(each.replays for each in made) >= 10


def count_ahead(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fill masks ahead in every step; count them, and the questions for forced tokens."""
    monkeypatch.setattr(constrained, "AHEAD_MIN", 1)
    counts: Counter[str] = Counter()
    fill_ahead, forced = StepMasks.fill_ahead, ToyMatcher.forced

    def noted(masks: StepMasks, several: Sequence[Ahead]) -> None:
        counts["ahead"] += len(several)
        fill_ahead(masks, several)

    def asked(toy: ToyMatcher) -> list[int]:
        counts["asked"] += 1
        return forced(toy)

    monkeypatch.setattr(StepMasks, "fill_ahead", noted)
    monkeypatch.setattr(ToyMatcher, "forced", asked)
    return counts


def test_masks_that_are_filled_ahead_change_no_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(make(overlap=True))
    sampled = sum(len(tokens) for tokens in expected[:-2])
    counts = count_ahead(monkeypatch)
    for takes_runs in (True, False):
        counts.clear()
        assert tokens_of(make(overlap=True), takes_runs) == expected
        # One that is forced has no mask of its own, and one after a withdrawn sample was filled in vain.
        assert counts["ahead"] > sampled // 2
        assert counts["asked"] <= sampled + counts["ahead"], "once for each token"
    counts.clear()
    assert tokens_of(make(overlap=False)) == expected
    assert counts["ahead"] <= sampled


def test_nobody_waits_for_a_mask_before_its_step_is_sampled(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make(overlap=True))
    plans = steps_of(few := make(overlap=True))
    tokens_of(few)
    monkeypatch.setattr(constrained, "AHEAD_MIN", 1)
    sampling, launching = Event(), Event()
    reached: list[bool] = []
    ahead, fill_ahead = StepMasks.ahead, StepMasks.fill_ahead
    launch, sample = ConstrainedRows.launch, Executor.sample

    def after_tokens(masks: StepMasks, wanted: Sequence[Wanted]) -> list[Ahead]:
        return [] if launching.is_set() else ahead(masks, wanted)

    def launched(rows: ConstrainedRows, flight: Flight) -> None:
        launching.set()
        launch(rows, flight)
        launching.clear()

    def late(masks: StepMasks, several: Sequence[Ahead]) -> None:
        reached.append(sampling.wait(5))
        fill_ahead(masks, several)

    def sampled(executor: Executor, flight: Flight) -> None:
        sampling.set()
        sample(executor, flight)
        sampling.clear()

    monkeypatch.setattr(StepMasks, "ahead", after_tokens)
    monkeypatch.setattr(StepMasks, "fill_ahead", late)
    monkeypatch.setattr(ConstrainedRows, "launch", launched)
    monkeypatch.setattr(Executor, "sample", sampled)
    engine = make(overlap=True)
    steps = steps_of(engine)
    assert tokens_of(engine) == expected
    assert len(steps) == len(plans), "forced tokens are found all the same"
    assert len(reached) > 10 and all(reached), "the loop waits for a mask and does not sample"


def test_masks_that_fail_ahead_are_filled_when_the_step_is_sampled(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make(overlap=True))
    monkeypatch.setattr(constrained, "AHEAD_MIN", 1)
    failures: list[int] = []

    def failing(masks: StepMasks, several: Sequence[Ahead]) -> None:
        failures.append(len(several))
        raise RuntimeError("no thread today")

    monkeypatch.setattr(StepMasks, "fill_ahead", failing)
    assert tokens_of(make(overlap=True)) == expected
    assert len(failures) > 10


def test_masks_after_forced_tokens_are_begun_at_the_launch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constrained, "AHEAD_MIN", 1)
    late: list[int] = []
    fill = StepMasks.fill

    def noted(masks: StepMasks, wanted: Sequence[Wanted]) -> set[int]:
        late.append(
            sum(
                each.constraint.fillable and not each.constraint.forced() and each.first not in masks._ahead
                for each in wanted
            )
        )
        return fill(masks, wanted)

    monkeypatch.setattr(StepMasks, "fill", noted)
    tokens_of(make(overlap=True))
    assert sum(late) <= 4 and len(late) > 10, late


def test_drafts_are_checked_under_masks(make: Make) -> None:
    """With periodic text, so that drafts are proposed, and some accepted."""
    samplings = [Sampling(temperature=0.0, max_tokens=60, logit_bias={9: 40.0, 12: 39.0})] * 4
    expected = tokens_of(make(), samplings=samplings)
    engine = make(speculate="ngram")
    assert tokens_of(engine, samplings=samplings) == expected
    speculator = engine.loop.speculator
    assert speculator is not None and speculator.proposed > speculator.accepted > 0


@overlapped
@pytest.mark.parametrize("ahead_min", [1, 8], ids=["ahead", ""])
def test_forced_tokens_cost_no_steps(
    make: Make, overlap: bool, ahead_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens in fewer steps. With overlap the sample of a row in flight is withdrawn."""
    monkeypatch.setattr(constrained, "AHEAD_MIN", ahead_min)
    sampling = Sampling(temperature=0.0, max_tokens=60, logit_bias={END: -100.0})
    counts = {}
    for runs in (False, True):
        engine = make(overlap=overlap)
        steps = steps_of(engine)
        turn = engine.session().say(PROMPTS[0], sampling)
        tokens = constrain(turn, TurnConstraint(matcher(0), takes_runs=runs)).token_ids
        counts[runs] = (tokens, sum(1 for plan in steps if any(row.sample for row in plan.rows)), len(steps))
    forced = sum(1 for end in range(60) if matcher(0, counts[True][0][:end]).forced())
    assert counts[False][0] == counts[True][0] and len(counts[True][0]) == 60
    assert counts[False][1] == 60 and 3 < forced < 30
    assert 60 - forced <= counts[True][1] <= 60 - forced + 1
    assert counts[True][2] < counts[False][2] or overlap


def test_penalties_and_log_probabilities_are_right_under_a_mask(make: Make) -> None:
    """Greedy tokens are the best allowed ones; log-probabilities are of the model's own distribution."""
    engine = make()
    asked = Sampling(temperature=0.0, max_tokens=20, logprobs=2)
    punished = Sampling(temperature=0.0, max_tokens=20, repetition_penalty=1.6, frequency_penalty=0.5)
    turns = [engine.session().say(PROMPTS[0], sampling) for sampling in (asked, punished)]
    for turn in turns:
        constrain(turn, TurnConstraint(matcher(4), takes_runs=False))
    said = turns[0].token_ids
    assert [each.token for each in turns[0].logprobs] == said
    best = 0
    for place, each in enumerate(turns[0].logprobs):
        rows = MaskRows.allocated(1, VOCABULARY)
        matcher(4, said[:place]).fill(rows, 0)
        allowed = set(rows.allowed(0))
        likelier = [token for token, value in each.top if value > each.logprob]
        assert not allowed & set(likelier), "a likelier token was allowed"
        best += each.top[0][0] == each.token
    assert 2 < best < len(said), "the most likely tokens were often forbidden"
    assert matcher(4).accept(turns[1].token_ids)
    assert turns[1].token_ids != said


class Only:
    """A matcher that allows some tokens at each position, then END alone."""

    def __init__(self, *allowed: Sequence[int]) -> None:
        self._allowed = allowed
        self._place = 0
        self.failed, self.why = False, ""

    @property
    def accepting(self) -> bool:
        return self._place >= len(self._allowed)

    @property
    def complete(self) -> bool:
        return self.accepting

    def accept(self, tokens: Sequence[int]) -> bool:
        self._place += len(tokens)
        return True

    def validate(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def rollback(self, count: int) -> None:
        self._place -= count

    def forced(self) -> list[int]:
        return []

    def fill(self, rows: MaskRows, row: int) -> None:
        rows.clear(row)
        rows.allow(row, (END,) if self.accepting else self._allowed[self._place])


def test_an_end_token_that_is_banned_comes_where_nothing_else_may(make: Make) -> None:
    engine = make()
    sampling = Sampling(temperature=0.0, max_tokens=30, min_tokens=10, logit_bias={END: 50.0})
    turn = engine.session().say(PROMPTS[0], sampling)
    constrain(turn, TurnConstraint(Only([20, END], [21], [22, 23, END])))
    said = turn.token_ids
    assert said[0] == 20 and said[1] == 21 and said[2] in (22, 23) and said[3:] == [END]
    assert turn.finish_reason == "stop"
    free = engine.session().say(PROMPTS[0], sampling)
    assert END not in free.token_ids[:10], "bans hold for turns without a mask"


class Spent(TurnConstraint):
    """Forces some tokens after the fourth."""

    def __init__(self, takes_runs: bool) -> None:
        super().__init__(None, takes_runs=takes_runs)
        self.count = 0

    def accept(self, tokens: Sequence[int]) -> None:
        super().accept(tokens)
        self.count += len(tokens)
        if self.count == 4:
            self.force([31, 32, 33])


@overlapped
@pytest.mark.parametrize("runs", [False, True])
def test_tokens_are_forced_in_a_turn_without_a_grammar(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: bool, runs: bool
) -> None:
    """Its constraint is free before and after: these steps need no mask, and take the tokens of a graph."""
    engine = make(overlap=overlap, max_running=6)
    capture(engine, monkeypatch)
    sends = count_sends(monkeypatch)
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    free = engine.session().say(PROMPTS[0], sampling).token_ids
    said = constrain(engine.session().say(PROMPTS[0], sampling), Spent(runs)).token_ids
    assert said[:4] == free[:4] and said[4:7] == [31, 32, 33] and len(said) == 12
    assert len(sends) == (0 if runs else 3)
    assert engine.generate([[*PROMPTS[0], *said[:7]]], sampling)[0].token_ids[:5] == said[7:]


@overlapped
def test_a_constraint_that_fails_ends_its_turn_alone(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    bad, good = list(begin(engine))[:2]
    while len(bad._stream.tokens) < 3:
        engine.loop.step()
    constraint = bad._stream.constraint
    assert constraint is not None and isinstance(constraint.matcher, ToyMatcher)
    constraint.matcher.accept([VOCABULARY])
    with pytest.raises(TurnFailed, match=f"constraint: token {VOCABULARY} is refused after"):
        bad.wait()
    assert matcher(1).accept(good.token_ids)
    expected = make.once(usual_tokens)[1]
    assert good.token_ids == expected


def test_logits_that_are_not_finite_are_told_apart_from_failed_constraints(make: Make) -> None:
    engine = make()
    turns = list(begin(engine))
    model = engine.loop.setup.model

    def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
        found = Model.logits(model, hidden)
        found[0] = torch.nan
        return found

    model.logits = MethodType(logits, model)  # type: ignore[method-assign]
    with pytest.raises(TurnFailed, match=results.NUMERIC_ERROR):
        turns[0].wait()


@overlapped
@pytest.mark.parametrize("number", [1, 4])
def test_sampling_that_raises_fails_the_step_and_is_tried_again(
    make: Make, overlap: bool, number: int
) -> None:
    expected = make.once(usual_tokens)
    engine = make(overlap=overlap)
    rows = engine.loop.executor._constrained
    fill, calls = rows.fill, 0

    def failing(*given: object) -> set[int]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError("no masks today")
        return fill(*given)  # type: ignore[arg-type]

    rows.fill = failing  # type: ignore[method-assign]
    assert tokens_of(engine) == expected
    assert calls > number


@pytest.mark.parametrize("ahead_min", [1, 8], ids=["ahead", ""])
def test_a_void_step_is_not_sampled(make: Make, ahead_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap a step is void when the one before it fails: its matchers have not seen those tokens."""
    expected = make.once(usual_tokens)
    monkeypatch.setattr(constrained, "AHEAD_MIN", ahead_min)
    engine = make(overlap=True)
    executor = engine.loop.executor
    finish, sample, calls, sampled = executor.finish, executor.sample, 0, []

    def failing(flight: Flight) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("lost")
        return finish(flight)

    def noted(flight: Flight) -> None:
        sampled.append(flight.plan.void)
        sample(flight)

    executor.finish, executor.sample = failing, noted
    assert tokens_of(engine) == expected
    assert calls > 5 and not any(sampled)


def test_masks_of_a_void_step_say_nothing_about_the_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after a void one fills no mask ahead, and uses none that was filled for the void one."""
    expected = make.once(usual_tokens)
    engine = make(overlap=True)
    monkeypatch.setattr(constrained, "AHEAD_MIN", 1)
    finish, calls = engine.loop.executor.finish, 0

    def failing(flight: Flight) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            monkeypatch.setattr(constrained, "AHEAD_MIN", 100)
            raise RuntimeError("lost")
        return finish(flight)

    engine.loop.executor.finish = failing
    assert tokens_of(engine) == expected
    assert calls > 5


def count_sends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every copy of masks."""
    sends: list[int] = []
    send = StepMasks.send
    monkeypatch.setattr(StepMasks, "send", lambda masks: (sends.append(1), send(masks))[1])
    return sends


COUNTED = ("carry", "change_tables", "list_pieces", "note_sampled", "prepare_step", "sample_tokens")


def count_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches of a step's kernels and the products of logits."""
    calls: Counter[str] = Counter()
    for name in COUNTED:
        plain = getattr(kernels, name)
        monkeypatch.setattr(
            kernels,
            name,
            lambda *given, plain=plain, name=name, **named: (calls.update([name]), plain(*given, **named))[1],
        )
    model = engine.loop.setup.model

    def logits(model: Model, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        calls["logits"] += 1
        return Model.logits(model, hidden, out)

    model.logits = MethodType(logits, model)  # type: ignore[method-assign]
    return calls


@overlapped
def test_plain_steps_launch_what_they_always_did(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """One copy, one preparation, one graph; beside a constrained turn one more sampling, of its logits."""
    engine = make(overlap=overlap, max_running=6, page_size=64)
    capture(engine, monkeypatch)
    executor = engine.loop.executor
    assert isinstance(executor, Executor)
    calls = count_calls(engine, monkeypatch)
    graph = {"list_pieces": 1, "logits": 1, "sample_tokens": 1, "note_sampled": 1}
    plain = {"carry": 1, "prepare_step": 1} | graph
    sends = count_sends(monkeypatch)

    def step() -> dict[str, int]:
        calls.clear()
        engine.loop.step()
        calls.pop("change_tables", None)
        return dict(calls)

    turns = [
        engine.session().say([5, 6, 7 + number], Sampling(max_tokens=200, seed=1)) for number in range(3)
    ]
    step()
    assert [step() for _ in range(5)] == [plain] * 5
    assert not sends
    constraint = TurnConstraint(matcher(2), takes_runs=False)
    constrain(engine.session().say([9, 9], Sampling(max_tokens=40, seed=1, logit_bias={})), constraint)
    step()
    more = plain | {"sample_tokens": 2, "note_sampled": 2}
    assert [step() for _ in range(5)] == [more] * 5
    assert len(sends) == 6, "one copy of masks a step"
    assert all(not turn.done for turn in turns)
