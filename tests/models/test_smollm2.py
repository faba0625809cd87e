"""The embedded default, the real file: tokens equal transformers', and the quantised path stays close."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models.paged import PagedRunner, Sequence, generate
from tests.models.reference_gguf import reference_of

CPU = torch.device("cpu")
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain 17 * 23 step by step.",
    "日本の首都はどこですか",
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. ",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "In 1969, Apollo 11 landed on the Moon. ",
    "  odd \t spacing\n\n\nand 😀 emoji, naïve café, 12345.678",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return open_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def dense(smollm2: Path) -> Model:
    return load_model(open_checkpoint(smollm2), Placement(CPU, torch.float32), context_length=1024)


@pytest.fixture(scope="module")
def quantised(smollm2: Path) -> Model:
    """Without dense copies: the least exact form of the weights."""
    placement = Placement(CPU, torch.float32, quantised=True, dense_copies=False)
    return load_model(open_checkpoint(smollm2), placement, context_length=1024)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    return reference_of(smollm2)


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_what_the_file_says(smollm2: Path, tokenizer: Tokenizer) -> None:
    config = open_checkpoint(smollm2).config
    assert (len(config.layers), config.width, config.vocabulary, config.context_length) == (
        30,
        576,
        49152,
        8192,
    )
    assert config.tied_embeddings
    assert config.eos_tokens == (2,)
    assert tokenizer.encode("Hello")[0] != 1, "no beginning-of-sequence token is added"
    assert tokenizer.names["eos_token"] == "<|im_end|>"


TOKENS = {
    "In 1969, Apollo": [788, 216, 33, 41, 38, 41, 28, 17600],
    "  odd \t spacing\n\n\nand 😀 naïve café": [
        216, 12365, 216, 197, 19972, 1116, 198, 397, 40303, 218, 15486, 46494, 37366,
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "日本の首都": [23274, 115, 40993, 26453, 180, 116, 240, 180, 38466],
}  # fmt: skip
"""As transformers encodes them."""
QUESTION_TOKENS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def test_tokens_and_chats_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    for text, tokens in TOKENS.items():
        assert tokenizer.encode(text) == tokens
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    chat = tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[0]}])
    assert chat[-len(QUESTION_TOKENS) :] == QUESTION_TOKENS


@pytest.mark.soak
def test_tokens_and_chats_equal_transformers(
    tokenizer: Tokenizer, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    for text in [*TEXTS, *QUESTIONS]:
        tokens = tokenizer.encode(text)
        assert tokens == reference_tokenizer.encode(text)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    expected = reference_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(chat) == expected


def check_greedy(
    dense: Model, tokenizer: Tokenizer, reference: PreTrainedModel, questions: list[str]
) -> None:
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    _, generated = generate(dense, prompts, page_size=16, chunk=64, count=24)
    for prompt, tokens in zip(prompts, generated, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.soak
def test_greedy_tokens_of_twenty_prompts(
    dense: Model, tokenizer: Tokenizer, reference: PreTrainedModel
) -> None:
    """`tests/parity/test_smollm2.py` checks the same through the engine, in every run."""
    check_greedy(dense, tokenizer, reference, QUESTIONS)
    topics = ["rivers", "prime numbers", "cheese", "sorting lists in Python", "the year 1848"]
    forms = [
        "Tell me about {}.",
        "List five facts on {}.",
        "Why do people like {}?",
        "Write a poem about {}.",
    ]
    questions = [form.format(topic) for topic in topics for form in forms]
    assert len(questions) == 20
    check_greedy(dense, tokenizer, reference, questions)


def agreement(dense: Model, quantised: Model, tokens: list[int], rows: int) -> tuple[float, float]:
    """Share of positions with the same most likely token, and the mean KL divergence, teacher-forced."""
    expected = PagedRunner(dense, 16, tokens=2048).run([(Sequence(), tokens)])[0].log_softmax(dim=-1)
    runner, sequence = PagedRunner(quantised, 16, tokens=2048), Sequence()
    same, divergence = 0, 0.0
    for start in range(0, len(tokens), rows):
        found = runner.run([(sequence, tokens[start : start + rows])])[0].log_softmax(dim=-1)
        wanted = expected[start : start + rows]
        same += int((found.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
        divergence += float((wanted.exp() * (wanted - found)).sum())
    return same / len(tokens), divergence / len(tokens)


def said_by(model: Model, tokenizer: Tokenizer, questions: list[str], count: int) -> list[list[int]]:
    """What the model itself says: text of the kind that it is used for."""
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    _, generated = generate(model, prompts, page_size=16, chunk=64, count=count)
    return [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]


def test_quantised_path_agrees(dense: Model, quantised: Model, tokenizer: Tokenizer) -> None:
    texts = said_by(dense, tokenizer, QUESTIONS[:3], 30)
    results = [agreement(dense, quantised, tokens, 16) for tokens in texts]
    total = sum(len(tokens) for tokens in texts)
    same = sum(share * len(tokens) for (share, _), tokens in zip(results, texts, strict=True)) / total
    divergence = sum(kl * len(tokens) for (_, kl), tokens in zip(results, texts, strict=True)) / total
    assert same >= 0.95, f"{same:.3f} over {total} positions"
    assert divergence < 0.01


@pytest.mark.soak
def test_quantised_path_agrees_over_two_thousand_positions(
    dense: Model, quantised: Model, tokenizer: Tokenizer
) -> None:
    topics = [
        "rivers",
        "prime numbers",
        "cheese",
        "sorting lists",
        "the Moon",
        "jazz",
        "bees",
        "law",
        "tea",
        "sleep",
    ]
    texts = said_by(dense, tokenizer, [f"Tell me about {topic}." for topic in topics], 180)
    positions = sum(len(tokens) for tokens in texts)
    assert positions >= 2000
    results = [(len(tokens), *agreement(dense, quantised, tokens, 16)) for tokens in texts]
    assert sum(count * same for count, same, _ in results) / positions >= 0.97
    assert sum(count * divergence for count, _, divergence in results) / positions < 0.01
