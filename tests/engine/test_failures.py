"""Steps that fail, and rows that go wrong: turns are tried again once, one bad row harms nobody else."""

from collections.abc import Callable
from types import MethodType

import pytest
import torch

from holdfast.core.registry import Plan
from holdfast.core.turn import TurnRequest
from holdfast.engine.engine import Engine, Turn, TurnFailed
from holdfast.kernels import Batch
from holdfast.models.memory import Memory
from holdfast.models.model import Model
from tests.engine.conftest import Make
from tests.engine.tiny import greedy, tokenizer, word

PROMPTS = [[word("the")] * 9, [word("river")] * 21, [word("deep"), word("old")] * 7]
COUNT = 24

overlapped = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])

Fault = Callable[[int, torch.Tensor, Batch], torch.Tensor]


def break_forward(engine: Engine, fault: Fault) -> None:
    """Let `fault` change what each forward pass answers, given its number, or raise."""
    calls = 0

    def forward(model: Model, batch: Batch, memory: Memory) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fault(calls, Model.forward(model, batch, memory), batch)

    engine.loop.model.forward = MethodType(forward, engine.loop.model)  # type: ignore[method-assign]


def raising(*numbers: int) -> Fault:
    def fault(number: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        if number in numbers:
            raise RuntimeError("the device is on fire")
        return hidden

    return fault


def undisturbed(make: Make) -> list[list[int]]:
    return [turn.token_ids for turn in make().generate(PROMPTS, greedy(COUNT))]


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
    engine.settle_seal(session.id)
    break_forward(engine, lambda number, hidden, batch: raising(number)(number, hidden, batch))
    with pytest.raises(TurnFailed, match="the executor failed: RuntimeError"):
        session.say(PROMPTS[1], greedy(4)).wait()
    break_forward(engine, lambda number, hidden, batch: hidden)
    assert engine.known_tokens(session.id) == len(PROMPTS[0]) + len(before)
    other = make().session()
    other.say(PROMPTS[0], greedy(4)).wait()
    assert session.say(PROMPTS[2], greedy(8)).token_ids == other.say(PROMPTS[2], greedy(8)).token_ids


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
    urgent, session = Turn(engine), engine.session()
    chosen, limit = engine.settle_sampling(greedy(COUNT), len(PROMPTS[2]))
    request = TurnRequest("urgent", tuple(PROMPTS[2]), limit, priority=9)
    urgent.attach(engine.loop.submit(session.id, request, chosen, urgent.hear))
    break_forward(engine, raising(1))
    assert [turn.token_ids for turn in (*turns, urgent)] == expected
    assert len(lent) >= 1
