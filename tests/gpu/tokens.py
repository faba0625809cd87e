"""Greedy and seeded tokens of sessions on the CPU, on the GPU with single launches, and from CUDA graphs.

Graphs are captured before the first step, or between the steps, as a server does.

The sessions are interrupted, rewound, forked and spilled to the host, with the strict audit on. Constrained
turns run beside free ones, with toy matchers and, where llguidance is installed, under a JSON schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from holdfast.bench.constrained import ConstrainedTalk
from holdfast.bench.loops import Talk, open_loop, open_model
from holdfast.bench.small_models import SMALL_MODELS, saved_small_model
from holdfast.core.layout import Tier
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.matcher import Compiled
from holdfast.engine.constraints.toy import ToyCompiled
from holdfast.engine.constraints.vocabulary import Vocabulary, available
from holdfast.engine.loop import EngineLoop
from holdfast.engine.step.capturing import Capturing
from holdfast.engine.step.executor import Executor
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.model import Model


class Way(StrEnum):
    """How steps are launched."""

    LAUNCHES = "launches"
    GRAPHS = "graphs"
    LATE_GRAPHS = "graphs captured between steps"


def conversation(loop: EngineLoop, vocabulary: int) -> list[int]:
    """Turns, an interrupt, a rewind, a fork and spills to the host; returns all generated tokens."""
    said: list[int] = []
    talk = Talk(loop, "one")
    beside = [Talk(loop, f"beside {number}") for number in range(4)]
    for turn in range(3):
        talk.begin([(7 * turn + 3 * i) % vocabulary for i in range(41)], 24)
        for number, other in enumerate(beside):
            other.begin([(number + 5 * i) % vocabulary for i in range(7 + 4 * number)], 8 + 5 * number, 0.8)
        said += talk.finish()
        for other in beside:
            said += other.finish()
    talk.begin([5, 6, 7], 40)
    while len(talk.said) < 9:
        loop.step()
    loop.scheduler.interrupt("one", loop.now(), KEEP_ALL if len(talk.said) < 6 else 6)
    talk.finish()
    talk.begin([11, 12, 13], 16)
    said += talk.finish()
    while loop.scheduler.registry.seals or loop.scheduler.registry.flights:
        loop.step()
    loop.scheduler.fork("one", "two", loop.now(), 2)
    loop.scheduler.rewind("one", 1, loop.now())
    talk.begin([21, 22], 16)
    said += talk.finish()
    for calls_back in (False, True, False):
        while loop.scheduler.registry.seals or loop.scheduler.registry.flights:
            loop.step()
        assert loop.scheduler.spill("one", loop.now(), Tier.HOST)
        for number, other in enumerate(beside):
            other.begin([(number + 3 * i) % vocabulary for i in range(9)], 12, 0.8)
        while not calls_back and loop.scheduler.registry.transits:
            loop.step()
        loop.step()
        talk.begin([31, 32, 33], 16)
        said += talk.finish()
        for other in beside:
            said += other.finish()
    findings = loop.scheduler.audit.census()
    assert not findings, [str(finding) for finding in findings]
    return said


def strict_loop(model: Model, way: Way, page_size: int, overlap: bool, rows: int = 8) -> EngineLoop:
    """An engine for a few short sessions that audits after every step."""
    loop = open_loop(
        model,
        way is Way.GRAPHS,
        page_size=page_size,
        kv_tokens=2048,
        window_tokens=2048,
        state_slots=48,
        audit="strict",
        overlap=overlap,
        chunk_tokens=16,
        max_running=rows,
        host_memory=16 << 20,
    )
    if way is Way.LATE_GRAPHS:
        assert isinstance(loop.executor, Executor)
        loop.executor.capture(first_only=True)
        # The clock stands still: a graph is captured as soon as a step has lacked it.
        loop.capturing = Capturing(loop.executor, lambda: 0.0)
    return loop


def require_captures(loop: EngineLoop, way: Way) -> None:
    """Fail unless graphs were captured between the steps, if they were to be."""
    graphs = loop.executor.graphs
    if way is Way.LATE_GRAPHS:
        assert graphs is not None and graphs.captured > 5, "no graph was captured between steps"


def answers(model: Model, way: Way, page_size: int, overlap: bool) -> list[int]:
    """The tokens of the conversation on a strict engine."""
    loop = strict_loop(model, way, page_size, overlap)
    said = conversation(loop, 128)
    require_captures(loop, way)
    return said


VOCABULARY, END = 128, 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "identifier": {"type": "integer"},
        "kinds": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "identifier", "kinds"],
    "additionalProperties": False,
}


def small_tokenizer() -> Tokenizer:
    """The printable characters of ASCII."""
    letters = ["\u0120", *map(chr, range(33, 127))]
    encoder = Encoder(models.BPE(vocab={text: 1 + place for place, text in enumerate(letters)}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken("<|end|>", special=True)])
    end = encoder.token_to_id("<|end|>")
    return Tokenizer(encoder, template=None, names={}, eos_tokens=(end,))


def compiled_constraints() -> list[tuple[Compiled, int]]:
    """What the turns are constrained by, and the end-of-turn token of each."""
    found: list[tuple[Compiled, int]] = [(ToyCompiled(VOCABULARY, END, seed), END) for seed in range(4)]
    if available():
        tokenizer = small_tokenizer()
        vocabulary = Vocabulary(tokenizer, size=VOCABULARY, end_tokens=tokenizer.eos_tokens)
        schema = GuidanceBuilder(vocabulary).compile(Grammar.of(Kind.JSON_SCHEMA, SCHEMA))
        found += [(schema, tokenizer.eos_tokens[0])] * 2
    return found


def constrained_answers(model: Model, way: Way, overlap: bool) -> list[int]:
    """Constrained turns, greedy and sampled, beside free ones on a strict engine."""
    loop = strict_loop(model, way, 16, overlap)
    constraints = compiled_constraints()
    free = [Talk(loop, f"free {number}") for number in range(2)]
    talks = [
        ConstrainedTalk(loop, f"constrained {number}", compiled, [end])
        for number, (compiled, end) in enumerate(constraints)
    ]
    said: list[int] = []
    for turn in range(2):
        for number, talk in enumerate([*talks, *free]):
            tokens = [(number + turn + 5 * place) % VOCABULARY for place in range(7 + 3 * number)]
            talk.begin(tokens, 40, 0.9 * (number % 2))
        for talk in [*talks, *free]:
            said += talk.finish()
        for talk, (compiled, _) in zip(talks, constraints, strict=True):
            assert talk.said and compiled.matcher().accept(talk.said), "a token that the constraint refuses"
    assert not loop.scheduler.audit.census()
    require_captures(loop, way)
    return said


def check_constrained_tokens() -> Iterator[tuple[str, bool]]:
    """Each layout and mode, and whether the tokens of constrained turns agree."""
    for name in SMALL_MODELS:
        with saved_small_model(name) as path:
            here = open_model(path, "cpu", "float32", dummy=False)
            there = open_model(path, "cuda", "float32", dummy=False)
        expected = constrained_answers(here, Way.LAUNCHES, False)
        for overlap in (False, True):
            for way in Way:
                same = constrained_answers(there, way, overlap) == expected
                yield f"{name}, constrained, overlap {overlap}, {way}: {len(expected)} tokens", same


def check_tokens() -> Iterator[tuple[str, bool]]:
    """Each layout, page size and mode, and whether the CPU, the GPU and the GPU's graphs agree."""
    for name in SMALL_MODELS:
        with saved_small_model(name) as path:
            here = open_model(path, "cpu", "float32", dummy=False)
            there = open_model(path, "cuda", "float32", dummy=False)
        for overlap in (False, True):
            for page_size in (1, 16, 64):
                expected = answers(here, Way.LAUNCHES, page_size, overlap)
                for way in Way:
                    same = answers(there, way, page_size, overlap) == expected
                    yield f"{name}, page {page_size}, overlap {overlap}, {way}: {len(expected)} tokens", same
