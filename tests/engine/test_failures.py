"""Steps that fail, and rows that go wrong: turns are tried again once, one bad row harms nobody else."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType

import pytest
import torch

from holdfast import kernels
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.engine.engine import Engine, TurnFailed
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.inputs import Sample
from holdfast.engine.step.runner import DeviceLost
from holdfast.engine.text.tokenizer import Detokenizer
from holdfast.kernels import Batch
from holdfast.models.memory import Memory
from holdfast.models.model import Model
from tests.engine.conftest import Make
from tests.engine.direct import settle
from tests.engine.tiny import greedy, tiny_engine, tokenizer, word

PROMPTS = [[word("the")] * 9, [word("river")] * 21, [word("deep"), word("old")] * 7]
COUNT = 24

overlapped = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])

Fault = Callable[[int, torch.Tensor, Batch], torch.Tensor]


def break_forward(engine: Engine, fault: Fault) -> None:
    """Let `fault` change what each forward pass answers, given its number, or raise."""
    calls = 0

    def forward(
        model: Model, batch: Batch, memory: Memory, tapped: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fault(calls, Model.forward(model, batch, memory, tapped), batch)

    engine.loop.setup.model.forward = MethodType(forward, engine.loop.setup.model)  # type: ignore[method-assign]


def raising(*numbers: int) -> Fault:
    def fault(number: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        if number in numbers:
            raise RuntimeError("the device is on fire")
        return hidden

    return fault


def answers(make: Make) -> list[list[int]]:
    return [turn.token_ids for turn in make().generate(PROMPTS, greedy(COUNT))]


def undisturbed(make: Make) -> list[list[int]]:
    return make.once(answers)


@overlapped
@pytest.mark.parametrize("number", [1, 2, 5, 11])
def test_a_step_that_fails_once_is_tried_again(make: Make, overlap: bool, number: int) -> None:
    engine = make(overlap=overlap)
    break_forward(engine, raising(number))
    turns = engine.generate(PROMPTS, greedy(COUNT))
    assert [turn.token_ids for turn in turns] == undisturbed(make)
    assert [turn.text for turn in turns] == [tokenizer().decode(turn.token_ids) for turn in turns]


@overlapped
def test_a_step_that_fails_twice_fails_its_turns(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    session = engine.session()
    before = session.say(PROMPTS[0], greedy(4)).token_ids
    settle(engine, session.id)
    break_forward(engine, lambda number, hidden, batch: raising(number)(number, hidden, batch))
    with pytest.raises(TurnFailed, match="the executor failed: RuntimeError"):
        session.say(PROMPTS[1], greedy(4)).wait()
    break_forward(engine, lambda number, hidden, batch: hidden)
    assert engine.known_tokens(session.id) == len(PROMPTS[0]) + len(before)
    other = make().session()
    other.say(PROMPTS[0], greedy(4)).wait()
    assert session.say(PROMPTS[2], greedy(8)).token_ids == other.say(PROMPTS[2], greedy(8)).token_ids


@overlapped
@pytest.mark.parametrize("number", [1, 2, 5, 11, 18])
@pytest.mark.parametrize("where", ["before its words are brought", "while its tables change"])
def test_a_step_that_fails_before_its_tables_are_there_says_them_again_once(
    make: Make, overlap: bool, number: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, expected = make(overlap=overlap, page_size=1), undisturbed(make)
    executor = engine.loop.executor
    samples, change_tables, calls = executor._samples, kernels.change_tables, dict.fromkeys((0, 1), 0)
    written: list[list[int]] = []

    def fail(here: bool) -> None:
        calls[here] += 1
        if here and calls[here] == number:
            raise torch.OutOfMemoryError("no room")

    def sample(plan: Plan, tables: list[int], flight: Flight) -> list[Sample]:
        fail(where.startswith("before"))
        return samples(plan, tables, flight)

    def change(changes: torch.Tensor, table: torch.Tensor) -> None:
        written.append(changes[0].tolist())
        fail(where.startswith("while"))
        change_tables(changes, table)

    monkeypatch.setattr(executor, "_samples", sample)
    monkeypatch.setattr(kernels, "change_tables", change)
    assert [turn.token_ids for turn in engine.generate(PROMPTS, greedy(COUNT))] == expected
    assert calls[True] > number, "it failed once, and went on"
    assert all(len(places) == len(set(places)) for places in written), "a GPU would write them in no order"


def test_a_device_that_is_lost_ends_the_engine_and_one_that_is_not_does_not(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of a kernel a GPU fails all that it is asked: the supervisor has another process."""
    engine = tiny_engine(directories["llama"])
    break_forward(engine, raising(1, 3))
    engine.loop.executor.guard.device = torch.device("cuda", 0)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    turn = engine.session().say(PROMPTS[0], greedy(COUNT))
    engine.drive()
    engine.drive()
    assert asked == [torch.device("cuda", 0)], "it answered, and the step is tried again"

    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLost, match="cuda:0: the CUDA context is lost"):
        turn.wait()


def break_penalties(engine: Engine, *numbers: int) -> None:
    """Let the device have no room for what a penalised turn has said, at these attempts to count it."""
    sampler = engine.loop.executor.sampler
    remember, calls = sampler._remember, 0

    def counted(row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        if calls in numbers:
            raise torch.OutOfMemoryError("no room for the counts")
        remember(row, prompt, generated)

    sampler._remember = counted


@overlapped
def test_turns_that_find_no_room_for_their_penalties_take_no_row_with_them(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap, max_running=2)
    break_penalties(engine, *range(1, 7))
    for prompt in PROMPTS:
        with pytest.raises(TurnFailed, match="OutOfMemoryError"):
            engine.generate([prompt], greedy(COUNT, frequency_penalty=1.0))
    assert [turn.token_ids for turn in engine.generate(PROMPTS, greedy(COUNT))] == undisturbed(make)


@overlapped
def test_a_turn_finds_no_room_for_its_penalties_when_its_step_is_tried_again(
    make: Make, overlap: bool
) -> None:
    engine = make(overlap=overlap)
    break_forward(engine, raising(6))
    break_penalties(engine, 2)
    with pytest.raises(TurnFailed, match="OutOfMemoryError"):
        engine.generate(PROMPTS[:1], greedy(COUNT, frequency_penalty=1.0))
    assert [turn.token_ids for turn in engine.generate(PROMPTS, greedy(COUNT))] == undisturbed(make)


@overlapped
@pytest.mark.parametrize("number", [2, 4, 9])
def test_a_row_that_is_not_finite_fails_alone(make: Make, overlap: bool, number: int) -> None:
    """The second prompt's hidden states turn into NaN in one step; the others never notice."""
    engine = make(overlap=overlap)

    def fault(call: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        if call == number:
            hidden = hidden.clone()
            hidden[int(batch.row_start[1]) : int(batch.row_start[2])] = torch.nan
        return hidden

    break_forward(engine, fault)
    with pytest.raises(TurnFailed, match="numeric_error"):
        engine.generate(PROMPTS, greedy(COUNT))
    while engine.loop.busy:
        engine.drive()
    break_forward(engine, lambda call, hidden, batch: hidden)
    counters = engine.loop.scheduler.registry.counters
    assert counters.retracts == 0
    assert engine.generate(PROMPTS[:1], greedy(COUNT))[0].token_ids == undisturbed(make)[0]


@overlapped
def test_others_in_the_batch_of_a_bad_row_say_what_they_would_have(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    sessions = [engine.session() for _ in PROMPTS]
    turns = [session.say(prompt, greedy(COUNT)) for session, prompt in zip(sessions, PROMPTS, strict=True)]

    def fault(call: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        if call == 6:
            hidden = hidden.clone()
            hidden[int(batch.row_start[1])] = torch.nan
        return hidden

    break_forward(engine, fault)
    expected = undisturbed(make)
    assert turns[0].token_ids == expected[0]
    assert turns[2].token_ids == expected[2]
    with pytest.raises(TurnFailed, match="numeric_error"):
        turns[1].wait()
    assert engine.known_tokens(sessions[1].id) == 0, "a failed turn is rolled back"
    assert sessions[1].say(PROMPTS[1], greedy(COUNT)).token_ids == expected[1]


class Crashing:
    """Makes text of tokens, except of the third and from there on."""

    def __init__(self, whole: Detokenizer) -> None:
        self.whole = whole
        self.added = 0

    def add(self, tokens: Iterable[int]) -> str:
        self.added += 1
        if self.added >= 3:
            raise ValueError("no such character")
        return self.whole.add(tokens)

    def finish(self) -> str:
        raise ValueError("no such character")


@overlapped
@pytest.mark.parametrize("bad", range(len(PROMPTS)))
def test_a_tokenizer_that_fails_costs_its_own_turn_alone(make: Make, overlap: bool, bad: int) -> None:
    """Those before it in the batch have said their token of the step, and must not say it again."""
    engine = make(overlap=overlap)
    sessions = [engine.session() for _ in PROMPTS]
    turns = [session.say(prompt, greedy(COUNT)) for session, prompt in zip(sessions, PROMPTS, strict=True)]
    stream = turns[bad]._stream
    stream._detokenizer = Crashing(stream._detokenizer)
    expected = undisturbed(make)
    for number, turn in enumerate(turns):
        if number != bad:
            assert turn.token_ids == expected[number]
            assert turn.text == tokenizer().decode(expected[number])
    with pytest.raises(TurnFailed, match="the tokenizer failed: ValueError"):
        turns[bad].wait()
    assert engine.known_tokens(sessions[bad].id) == 0, "a failed turn is rolled back"
    assert engine.loop.scheduler.registry.counters.retracts == 0
    assert sessions[bad].say(PROMPTS[bad], greedy(COUNT)).token_ids == expected[bad]


@overlapped
def test_a_tokenizer_that_fails_at_the_very_end_keeps_no_end_from_being_told(
    make: Make, overlap: bool
) -> None:
    engine = make(overlap=overlap)
    turns = [engine.session().say(prompt, greedy(2)) for prompt in PROMPTS]
    for turn in turns:
        stream = turn._stream
        stream._detokenizer = Crashing(stream._detokenizer)
    expected = undisturbed(make)
    assert [turn.token_ids for turn in turns] == [each[:2] for each in expected]


@overlapped
def test_a_failure_while_a_session_seals_costs_nothing_but_work(make: Make, overlap: bool) -> None:
    engine, other = make(overlap=overlap), make()
    sessions = engine.session(), other.session()
    for session in sessions:
        session.say(PROMPTS[0], greedy(5)).wait()
    break_forward(engine, raising(1))
    while engine.loop.busy:
        engine.drive()
    first, second = (session.say(PROMPTS[1], greedy(9)).token_ids for session in sessions)
    assert first == second


def test_a_turn_that_waits_again_lends_its_sampler_row(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may run and have the two rows; after a lost step a more urgent turn runs before one of them."""
    engine = make(max_running=2)
    expected = undisturbed(make)
    lent: list[int] = []
    take = engine.loop.executor._take_idle_row

    def counted(plan: Plan) -> int:
        lent.append(plan.step)
        return take(plan)

    monkeypatch.setattr(engine.loop.executor, "_take_idle_row", counted)
    turns = [engine.session().say(prompt, greedy(COUNT)) for prompt in PROMPTS[:2]]
    for _ in range(5):
        engine.drive()
    submit = Scheduler.submit
    with monkeypatch.context() as patch:
        patch.setattr(
            Scheduler,
            "submit",
            lambda self, name, request, now: submit(self, name, replace(request, priority=9), now),
        )
        urgent = engine.session().say(PROMPTS[2], greedy(COUNT))
    break_forward(engine, raising(1))
    assert [turn.token_ids for turn in (*turns, urgent)] == expected
    assert len(lent) >= 1
