"""Compile and mask times of llguidance, and of xgrammar where it is installed, on a hundred schemas.

    PYTHONPATH=src python -m tests.constraints.measure [--tokens 151936]

Times are CPU times of the process, so that other work on the machine does not count. Masks are taken at every
token of an instance of each schema, spelled as the tokenizer spells it. `--tokens` widens the vocabulary of
SmolLM2 with texts of two of its words, which makes the trie as large as a vocabulary trained to that size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from random import Random
from statistics import median
from typing import Any

from holdfast.bench.constrained import widened
from holdfast.bench.schemas import FIXED_KEYS, Made, make_schema
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.vocabulary import Vocabulary
from holdfast.engine.start.pull import pull
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.models.checkpoint import open_checkpoint


@dataclass
class Figures:
    """What was measured of one library, in milliseconds."""

    name: str
    compiles: list[float] = field(default_factory=list)
    first_masks: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    accepts: list[float] = field(default_factory=list)
    refused_schemas: int = 0
    refused_instances: int = 0

    def show(self) -> None:
        measured = {
            "compile": self.compiles,
            "first mask": self.first_masks,
            "mask": self.masks,
            "accept a token": self.accepts,
        }
        for name, values in measured.items():
            ordered = sorted(values)
            high = ordered[math.ceil(len(ordered) * 0.99) - 1]
            numbers = f"{median(ordered):.3f} | {high:.3f} | {ordered[-1]:.3f} | {len(values)}"
            print(f"| {self.name} | {name} | {numbers} |")
        print(f"\n{self.name} refused {self.refused_schemas} schemas, {self.refused_instances} instances\n")


def timed(into: list[float], work: Callable[..., Any], *arguments: object) -> Any:
    before = time.process_time_ns()
    result = work(*arguments)
    into.append((time.process_time_ns() - before) / 1e6)
    return result


class Guidance:
    """Compiles and matches through this project's own classes."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._builder = GuidanceBuilder(vocabulary)
        self._rows = MaskRows.allocated(1, vocabulary.size)

    def compile(self, schema: object) -> Any:
        return self._builder.compile(Grammar.of(Kind.JSON_SCHEMA, schema))

    def begin(self, compiled: Any) -> Any:
        return compiled.matcher()

    def fill(self, matcher: Any) -> None:
        matcher.fill(self._rows, 0)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept([token]))


class XGrammar:
    """xgrammar with the same layout of JSON, one thread and no cache."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._package = package = import_module("xgrammar")
        words = [vocabulary.tokenizer.decode_bytes([token]) for token in range(vocabulary.size)]
        ends = sorted(vocabulary.end_tokens)
        raw = package.VocabType.RAW
        info = package.TokenizerInfo(words, raw, vocab_size=vocabulary.size, stop_token_ids=ends)
        self._compiler = package.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = package.allocate_token_bitmask(1, vocabulary.size)

    def compile(self, schema: object) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)

    def begin(self, compiled: Any) -> Any:
        return self._package.GrammarMatcher(compiled)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask, 0)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


def measure(system: Guidance | XGrammar, made: list[Made], texts: list[list[int]]) -> Figures:
    figures = Figures(system.name)
    for each, tokens in zip(made, texts, strict=True):
        try:
            compiled = timed(figures.compiles, system.compile, each.schema)
        except (RuntimeError, ValueError):
            figures.refused_schemas += 1
            continue
        matcher = system.begin(compiled)
        for index, token in enumerate(tokens):
            timed(figures.masks if index else figures.first_masks, system.fill, matcher)
            if not timed(figures.accepts, system.accept, matcher, token):
                figures.refused_instances += 1
                break
    return figures


def forced_share(vocabulary: Vocabulary) -> str:
    """Steps of an object with six fixed keys: a forced run of tokens costs none of its own."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in FIXED_KEYS},
        "required": FIXED_KEYS,
        "additionalProperties": False,
    }
    matcher = GuidanceBuilder(vocabulary).compile(Grammar.of(Kind.JSON_SCHEMA, schema)).matcher()
    tokens = vocabulary.tokenizer.tokenize_str(json.dumps(dict.fromkeys(FIXED_KEYS, 42)))
    steps = position = 0
    while position < len(tokens):
        forced = matcher.forced()
        taken = tokens[position : position + len(forced) + 1]
        assert taken[: len(forced)] == forced
        assert matcher.accept(taken)
        position += len(taken)
        steps += 1
    return f"six fixed keys: {len(tokens)} tokens in {steps} steps ({steps / len(tokens):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=49_152)
    size = parser.parse_args().tokens
    tokenizer = open_tokenizer(open_checkpoint(pull("smollm2")))
    if size > tokenizer.vocabulary_size:
        tokenizer = widened(tokenizer, size)
    built: list[float] = []
    vocabulary = timed(built, lambda: Vocabulary(tokenizer, size=size, end_tokens=tokenizer.eos_tokens))
    made = [make_schema(Random(seed), depth=1 + seed % 4) for seed in range(100)]
    spell = vocabulary.tokenizer.tokenize_str
    texts = [spell(each.text(Random(seed))) for seed, each in enumerate(made)]
    print(f"{size} tokens; llguidance's tokenizer took {built[0]:.0f} ms; {forced_share(vocabulary)}\n")
    systems: list[Guidance | XGrammar] = [Guidance(vocabulary)]
    if find_spec("xgrammar") is not None:
        systems.append(XGrammar(vocabulary))
    print("| library | | median ms | p99 ms | longest ms | count |\n| --- | --- | --- | --- | --- | --- |")
    for system in systems:
        measure(system, made[:5], texts[:5])
        measure(system, made, texts).show()


if __name__ == "__main__":
    main()
