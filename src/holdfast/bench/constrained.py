"""What constrained turns cost: rows under JSON schemas beside the same rows without, and steps per token.

Both kinds of rows run in one loop, in turn, so that load on the machine affects both. A schema is wrapped in
a long array, so that no turn ends while it is measured, and rows are measured until the first is done. The
tokenizer is SmolLM2's, or that of a `tokenizer.json`; for a wider model it is widened with made-up words, so
that masks cost what they cost in a vocabulary of that size. Used by `cpu.constrained` and by `gpu`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from holdfast.bench.loops import Talk
from holdfast.bench.prompts import prompt
from holdfast.bench.schemas import FIXED_KEYS, endless, hundred, object_of
from holdfast.bench.timing import in_turn
from holdfast.core.turn import Turn
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.matcher import Compiled
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.constraints.vocabulary import Vocabulary, control_tokens
from holdfast.engine.engine import Engine
from holdfast.engine.loop import EngineLoop
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.pull import pull
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer, read_encoder
from holdfast.models.checkpoint import open_checkpoint

__all__ = [
    "ConstrainedTalk",
    "Constraints",
    "Rates",
    "first_token_delay",
    "measure",
    "read_tokenizer",
    "steps_of_fixed_keys",
    "widened",
]

INPUT_TOKENS = 32
FORCED_MAX = 64
"""Forced tokens from which on a schema is taken for a constant."""

END_MARK = "<|im_end|>"


def read_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or SmolLM2's."""
    if path is None:
        return open_tokenizer(open_checkpoint(pull("smollm2")))
    encoder = read_encoder(path.read_text(encoding="utf-8"))
    bare = Tokenizer(encoder, template=None, names={}, eos_tokens=())
    return Tokenizer(encoder, template=None, names={}, eos_tokens=(control_tokens(bare)[END_MARK],))


def widened(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The tokenizer with more tokens: texts of two words of its own."""
    document = json.loads(tokenizer.written())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    words = [text for text in vocabulary if text.removeprefix("\u0120").isalpha()]
    random = Random(1)
    while len(vocabulary) < size:
        text = random.choice(words) + random.choice(words)
        vocabulary.setdefault(text, len(vocabulary))
    return Tokenizer(
        read_encoder(json.dumps(document)), template=None, names={}, eos_tokens=tokenizer.eos_tokens
    )


class Constraints:
    """Compiled schemas of the measurement, for one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Raises `GrammarError` where llguidance is missing."""
        if size > tokenizer.vocabulary_size:
            tokenizer = widened(tokenizer, size)
        self.ends = tokenizer.eos_tokens
        self._builder = GuidanceBuilder(Vocabulary(tokenizer, size=size, end_tokens=self.ends))
        self.fixed_keys = self._compile(object_of(FIXED_KEYS))

    def endless(self, count: int) -> list[Compiled]:
        """Different schemas that a turn does not come to the end of, and that leave it a choice."""
        found: list[Compiled] = []
        for schema in hundred():
            if len(found) == count:
                break
            try:
                compiled = self._compile(endless(schema))
            except GrammarError:
                continue  # Too large as an array.
            if len(compiled.matcher().forced()) < FORCED_MAX:
                found.append(compiled)
        return found

    def _compile(self, schema: dict[str, object]) -> Compiled:
        return self._builder.compile(Grammar.of(Kind.JSON_SCHEMA, schema))


class ConstrainedTalk(Talk):
    """A session whose turns are constrained, if `compiled` is given."""

    def __init__(self, loop: EngineLoop, name: str, compiled: Compiled | None, ends: Sequence[int]) -> None:
        super().__init__(loop, name)
        self._compiled = compiled
        self._ends = frozenset(ends)

    def begun(self, turn: Turn, stream: TurnStream) -> None:
        """Constrain the turn before its first step."""
        super().begun(turn, stream)
        if self._compiled is not None:
            stream.constraint = TurnConstraint(self._compiled.matcher())
            stream.ends = self._ends


class Rates(NamedTuple):
    """Medians over the rounds: tokens a second of rows without and with constraints, and their ratio."""

    free: float
    constrained: float
    ratio: float
    tokens_per_step: float
    """Tokens of a row in one step, of constrained rows: forced ones need none of their own."""


class Window(NamedTuple):
    """The tokens of all rows in some steps."""

    tokens: int
    steps: int
    seconds: float


def measure(loop: EngineLoop, constraints: Constraints, rows: int, tokens: int, rounds: int) -> Rates:
    """Run the rows of both kinds in turn, after a round that warms up."""
    schemas = constraints.endless(rows)
    assert schemas, "no schema could be compiled"
    free: list[Window] = []
    constrained: list[Window] = []
    for number in range(rounds + 1):
        masked: list[Compiled | None] = [schemas[row % len(schemas)] for row in range(rows)]
        kinds = [(free, list[Compiled | None]([None] * rows)), (constrained, masked)]
        for into, compiled in in_turn(kinds, number):
            into.append(_window(loop, compiled, constraints.ends, tokens, number))
    pairs = list(zip(free[1:], constrained[1:], strict=True))
    rates = [(one.tokens / one.seconds, other.tokens / other.seconds) for one, other in pairs]
    return Rates(
        median(rate for rate, _ in rates),
        median(rate for _, rate in rates),
        median(with_masks / without for without, with_masks in rates),
        median(other.tokens / other.steps / rows for _, other in pairs),
    )


def _window(
    loop: EngineLoop, compiled: Sequence[Compiled | None], ends: Sequence[int], tokens: int, number: int
) -> Window:
    """Decode rows side by side, until one of them has all its tokens."""
    kind = "free" if compiled[0] is None else "constrained"
    talks = [ConstrainedTalk(loop, f"{kind} {number} {row}", each, ends) for row, each in enumerate(compiled)]
    for row, talk in enumerate(talks):
        talk.begin(prompt(INPUT_TOKENS, 1000 * number + row), tokens)
    while not all(talk.said for talk in talks):
        loop.step()
    before, steps, begun = sum(len(talk.said) for talk in talks), 0, time.perf_counter()
    while not any(talk.over for talk in talks):
        loop.step()
        steps += 1
    took = time.perf_counter() - begun
    said = sum(len(talk.said) for talk in talks) - before
    for talk in talks:
        loop.scheduler.close(talk.name, loop.now())
    while loop.busy:
        loop.step()
    return Window(said, steps, took)


def first_token_delay(engine: Engine) -> tuple[float, float]:
    """Milliseconds to the first token without a schema, and what a hundred schemas add that are new; medians.

    Each schema is checked, compiled and used once, beside a turn of another input and none.
    """
    free: list[float] = []
    added: list[float] = []
    for number, schema in enumerate(hundred()):
        kinds: list[tuple[int, dict[str, object] | None]] = [(2 * number, None), (2 * number + 1, schema)]
        took = {seed % 2: _first_token(engine, seed, asked) for seed, asked in in_turn(kinds, number)}
        free.append(took[0])
        added.append(took[1] - took[0])
    return median(free), median(added)


def _first_token(engine: Engine, seed: int, schema: dict[str, object] | None) -> float:
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    with engine.session() as session:
        begun = time.perf_counter()
        turn = session.say(prompt(INPUT_TOKENS, seed), sampling, grammar=schema)
        next(iter(turn), None)
        return (time.perf_counter() - begun) * 1000


def steps_of_fixed_keys(loop: EngineLoop, constraints: Constraints) -> tuple[int, int]:
    """Tokens of an object with six fixed keys, and the steps that it takes after its input."""
    talk = ConstrainedTalk(loop, "fixed keys", constraints.fixed_keys, constraints.ends)
    talk.begin(prompt(INPUT_TOKENS, 5), 200)
    steps = 0
    while not talk.over:
        loop.step()
        steps += bool(talk.said)
    loop.scheduler.close(talk.name, loop.now())
    while loop.busy:
        loop.step()
    return len(talk.said), steps
