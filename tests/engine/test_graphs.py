"""Steps in shapes with room to spare say what steps of their own size say.

On a CPU a recorded step is run again instead of a graph: the packing, the reserved units and the drawing
inside the step are those of the GPU.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from holdfast import kernels
from holdfast.core.registry import Plan
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.step import graphs
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.graphs import Outcome, Recorded, decode_rows, largest_of, shapes, small_step_of
from holdfast.engine.step.inputs import Shape
from holdfast.models.model import Model

Make = Callable[..., Engine]


class Replayed:
    """A step that runs anew at each replay and leaves its results where the first run did."""

    def __init__(self, step: Callable[[], Outcome]) -> None:
        self._step = step
        self.outcome = step()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        again = self._step()
        self.outcome.hidden.copy_(again.hidden)
        self.outcome.tokens.copy_(again.tokens)


def capture(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Give an engine shapes for few rows and tokens."""
    made: list[Replayed] = []

    def record(step: Callable[[], Outcome]) -> tuple[Recorded, Outcome]:
        made.append(Replayed(step))
        return made[-1], made[-1].outcome

    monkeypatch.setattr(graphs, "MIXED_TOKENS", (8, 32))
    monkeypatch.setattr(graphs, "MIXED_ROWS", (4, 6))
    engine.loop.executor.capture(record=record)
    return made


SAMPLINGS = [
    Sampling(temperature=0, max_tokens=12, ignore_eos=True),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=7, max_tokens=17, ignore_eos=True),
    Sampling(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    Sampling(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
]


def talk(engine: Engine) -> list[list[int]]:
    """Sessions of several turns side by side, each sampled in its own way."""
    said: list[list[int]] = []
    sessions = [engine.session() for _ in SAMPLINGS]
    for turn in range(2):
        turns = [
            session.say([5 + turn, 9, 11 + number, *range(20, 20 + 3 * number)], sampling)
            for number, (session, sampling) in enumerate(zip(sessions, SAMPLINGS, strict=True))
        ]
        said += [each.wait().token_ids for each in turns]
    return said


@pytest.mark.parametrize("overlap", [False, True])
def test_shapes_with_room_to_spare_change_no_token(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    options = {"max_running": 6, "chunk_tokens": 16, "overlap": overlap, "audit": "strict"}
    expected = talk(make(**options))
    engine = make(**options)
    made = capture(engine, monkeypatch)
    assert talk(engine) == expected
    assert sum(each.replays for each in made) >= 20
    assert len([each for each in made if each.replays]) >= 3


def test_a_step_that_brings_too_much_goes_without_a_shape(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed in the tables travels behind a step's words, as far as there is room for it."""
    options = {"max_running": 6, "chunk_tokens": 16, "audit": "strict"}
    expected = talk(make(**options))
    engine = make(**options)
    made = capture(engine, monkeypatch)
    recorded = engine.loop.executor._graphs
    assert recorded is not None
    most = largest_of(shapes(6)).words
    assert recorded.words.numel() > most
    shape = recorded.find(6, 32, 6, False, recorded.words.numel() - most)
    assert shape is not None and shape.words == most
    assert recorded.find(6, 32, 6, False, recorded.words.numel() - most + 1) is None
    recorded.words = recorded.words[: Shape(4, 8, 4, False).words]
    assert talk(engine) == expected
    assert any(each.replays for each in made)


def test_shapes_cover_every_number_of_rows() -> None:
    for rows_max in (1, 2, 3, 5, 31, 64, 100, 256, 300, 512, 1000, 65_536):
        known = decode_rows(rows_max)
        assert known == sorted(set(known))
        assert known[-1] == rows_max and len(known) <= 54, "capturing takes seconds, not hours"
        assert all(b - a <= max(4, a // 4) for a, b in pairwise(known)), "few rows are nobody's"
        mixed = {shape.rows for shape in shapes(rows_max) if shape.tokens == 512 and not shape.decode}
        assert max(mixed) == min(rows_max, graphs.MIXED_ROWS[-1]), "small steps come from graphs"
        assert len(mixed) <= len(graphs.MIXED_ROWS)
    largest = [shape.tokens for shape in shapes(256)]
    assert largest == sorted(largest, reverse=True)
    assert all(shape.rows <= shape.tokens for shape in shapes(256))


def steps_of(engine: Engine) -> list[list[int]]:
    """The tokens of each row of each step, as the engine goes on."""
    steps: list[list[int]] = []
    start = engine.loop.executor.start

    def noted(plan: Plan) -> Flight:
        if plan.rows:
            steps.append([row.count for row in plan.rows])
        return start(plan)

    engine.loop.executor.start = noted  # type: ignore[method-assign]
    return steps


def test_inputs_ride_along_with_answers_in_small_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_running": 6, "chunk_tokens": 200, "step_tokens": 200, "overlap": False}
    engine = make(**sizes, mixed_tokens=16, audit="strict")
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    capture(engine, monkeypatch)
    steps = steps_of(engine)
    # Alone, a long input goes in large steps: one, or two where a state is to be kept on the way.
    speaking = engine.session().say([9] * 100, sampling)
    while len(steps) < 2 or sum(map(sum, steps)) <= 100:
        engine.loop.step()
    assert steps[0][0] > 90
    del steps[:]
    # Beside an answer it goes in small ones, and the answer gets on in each.
    asking = engine.session().say([11] * 40, sampling)
    speaking.wait()
    inputs = [step[1] for step in steps if len(step) == 2 and step[1] > 1]
    assert all(step[0] == 1 and sum(step) <= 16 for step in steps)
    assert sum(inputs) == 40 and len(inputs) <= 4
    asking.wait()
    while engine.loop.busy:
        engine.loop.step()
    # Short inputs that come at once go in small steps as well: the first ones are answered first.
    del steps[:]
    turns = [engine.session().say([13 + number] * 8, sampling) for number in range(4)]
    for turn in turns:
        turn.wait()
    assert [sum(step) for step in steps[:3]] == [16, 16, 5]
    # On a CPU steps beside answers are as large as others.
    plain = make(**sizes)
    steps = steps_of(plain)
    first = plain.session().say([9] * 20, sampling)
    plain.loop.step()
    second = plain.session().say([11] * 40, sampling)
    first.wait()
    second.wait()
    assert max(sum(step) for step in steps if len(step) == 2) > 30


@pytest.mark.parametrize(
    ("experts", "eight_bits", "kernel", "tokens"),
    [
        (False, False, True, 192),
        (False, False, False, 256),
        (False, True, True, 256),
        (True, False, True, 384),
        (True, True, False, 384),
    ],
)
def test_steps_are_as_small_as_suits_the_weights(
    monkeypatch: pytest.MonkeyPatch, experts: bool, eight_bits: bool, kernel: bool, tokens: int
) -> None:
    monkeypatch.setattr(Model, "has_experts", experts)
    monkeypatch.setattr(Model, "in_eight_bits", eight_bits)
    monkeypatch.setattr(kernels, "takes_products", lambda dtype, device: kernel)
    model = object.__new__(Model)
    model.dtype, model.device = torch.bfloat16, torch.device("cuda")
    assert small_step_of(model) == tokens
    assert tokens in graphs.MIXED_TOKENS, "steps of that size come from a graph"


def test_guesses_are_not_kept_out_by_small_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_running": 6, "step_tokens": 200, "mixed_tokens": 4}
    engine = make(**sizes, overlap=False, audit="strict", speculate="ngram")
    capture(engine, monkeypatch)
    steps = steps_of(engine)
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    turns = [engine.session().say([13, 14, 15] * 5, sampling) for _ in range(6)]
    for turn in turns:
        assert len(turn.wait().token_ids) == 12
    assert all(len(step) == 6 for step in steps if len(step) > 1), "nobody is left out of a step"
