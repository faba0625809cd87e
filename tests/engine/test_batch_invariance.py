"""The small models say the same in any company: alone, in a crowd, in other chunks, on other pages.

What a test over many clients needs: a transcript under load can be held against the same conversation run
alone. Rounding depends on the shape of a batch, so equality needs two things, and both are shown here for
each family: rounding moves no logit by more than a small part of `CLEAR_MARGIN`, and nearly all conversations
stay clear of a tie by that margin at every token. Where both hold, the tokens cannot differ.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.engine.engine import Engine, Turn
from holdfast.engine.sampling import Sampling
from tests.models.small import (
    CLEAR_MARGIN,
    SMALL_FAMILIES,
    VOCABULARY,
    WORDS,
    conversation,
    least_margin,
    write_small_model,
)

CONVERSATIONS = 8
TURNS = 3
SAID = 16
SIZES = {"kv_tokens": 16384, "window_tokens": 8192, "state_slots": 128, "max_running": 32}
COMPANY: dict[str, dict[str, object]] = {
    "together": {},
    "small-chunks": {"page_size": 64, "chunk_tokens": 5, "step_tokens": 40, "overlap": True},
    "pages-of-one": {"page_size": 1, "chunk_tokens": 17, "step_tokens": 64},
}

MAIN = ("llama", "mistral", "bamba")
every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in MAIN else pytest.mark.soak) for name in SMALL_FAMILIES],
)
Transcripts = list[list[Turn]]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family, written when first asked for."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = write_small_model(tmp_path_factory.mktemp("small") / family, family)
        return written[family]

    return get


@pytest.fixture(scope="module")
def alone_of(directory_of: Callable[[str], Path]) -> Callable[[str], Transcripts]:
    """Every conversation of a family on its own, one after another."""
    run: dict[str, Transcripts] = {}

    def get(family: str) -> Transcripts:
        if family not in run:
            run[family] = []
            with open_engine(directory_of(family)) as engine:
                for number in range(CONVERSATIONS):
                    with engine.session() as session:
                        said = conversation(number, TURNS)
                        run[family].append([session.say(text, sampling()).wait() for text in said])
        return run[family]

    return get


def open_engine(directory: Path, **options: object) -> Engine:
    """In float32, strictly audited, and sharing nothing between conversations."""
    chosen = {"device": "cpu", "dtype": "float32", "audit": "strict", "leave_history": False, **SIZES}
    return Engine(str(directory), **{**chosen, **options})


def sampling() -> Sampling:
    return Sampling(max_tokens=SAID, temperature=0.0, logprobs=2)


def in_company(engine: Engine) -> Transcripts:
    """All conversations at once; each turn begins a step later than the one before it."""
    sessions = [engine.session() for _ in range(CONVERSATIONS)]
    said = [conversation(number, TURNS) for number in range(CONVERSATIONS)]
    transcripts: Transcripts = [[] for _ in sessions]
    for place in range(TURNS):
        for number, session in enumerate(sessions):
            transcripts[number].append(session.say(said[number][place], sampling()))
            engine.drive()
        for turns in transcripts:
            turns[place].wait()
    return transcripts


def clear(turns: list[Turn]) -> bool:
    """Whether a conversation stays away from ties."""
    return min(least_margin(turn) for turn in turns) >= CLEAR_MARGIN


@every_family
@pytest.mark.parametrize("company", COMPANY)
def test_tokens_do_not_depend_on_the_batch(
    directory_of: Callable[[str], Path],
    alone_of: Callable[[str], Transcripts],
    family: str,
    company: str,
) -> None:
    with open_engine(directory_of(family), **COMPANY[company]) as engine:
        transcripts = in_company(engine)
        assert engine.audit() == []
    alone = alone_of(family)
    compared = [number for number in range(CONVERSATIONS) if clear(alone[number])]
    assert len(compared) >= 0.9 * CONVERSATIONS
    noise = 0.0
    for number in compared:
        for expected, found in zip(alone[number], transcripts[number], strict=True):
            assert found.token_ids == expected.token_ids
            assert found.text == expected.text
            pairs = zip(expected.logprobs, found.logprobs, strict=True)
            noise = max(noise, *(abs(one.logprob - other.logprob) for one, other in pairs))
    assert 0.0 < noise <= CLEAR_MARGIN / 5, f"rounding moves logits by {noise:.1e}"


@every_family
def test_the_models_are_worth_comparing(alone_of: Callable[[str], Transcripts], family: str) -> None:
    """They say many different words, and different ones after different histories."""
    alone = alone_of(family)
    for turns in alone:
        assert len({token for turn in turns for token in turn.token_ids}) >= 20
    lasts = {tuple(turns[-1].token_ids) for turns in alone}
    assert len(lasts) >= 0.8 * CONVERSATIONS


@every_family
def test_what_is_far_back_is_heard(directory_of: Callable[[str], Path], family: str) -> None:
    """Another first word, and what is said three turns later is different."""
    said = conversation(1, TURNS)
    heard = []
    with open_engine(directory_of(family)) as engine:
        for word in ("bak", "tus"):
            with engine.session() as session:
                turns = [session.say(text, sampling()).wait() for text in (f"{word} {said[0]}", *said[1:])]
                heard.append([turn.logprobs[0].logprob for turn in turns])
    assert abs(heard[0][-1] - heard[1][-1]) > CLEAR_MARGIN


@every_family
def test_a_transcript_as_text_gives_the_same_tokens(directory_of: Callable[[str], Path], family: str) -> None:
    """Words only, and the whole conversation rendered afresh is what the session knows."""
    with open_engine(directory_of(family)) as engine, engine.session(system="bak") as session:
        messages = [{"role": "system", "content": "bak"}]
        for text in conversation(3, TURNS):
            turn = session.say(text, sampling())
            assert set(turn.text.split()) <= set(WORDS)
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn.text}]
        known = engine.loop.scheduler.registry.find(session.id).sequence.tokens
        rendered = engine.loop.setup.tokenizer.encode_chat(messages)
        assert rendered[: len(known)] == known.slice(0, len(known))


@every_family
def test_transformers_reads_the_directory(
    directory_of: Callable[[str], Path], alone_of: Callable[[str], Transcripts], family: str
) -> None:
    """The same directory, the chat template included, says the same there."""
    directory = directory_of(family)
    assert (directory / "model.safetensors.index.json").exists(), "the weights are in shards"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == VOCABULARY
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    message = {"role": "user", "content": conversation(0, TURNS)[0]}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=SAID, do_sample=False)
    assert generated[0, prompt["input_ids"].shape[1] :].tolist() == alone_of(family)[0][0].token_ids


def test_a_model_may_end_its_turns(tmp_path: Path) -> None:
    """With `ends`, some turns stop by themselves before their limit."""
    directory = write_small_model(tmp_path / "ends", ends=True)
    reasons = set()
    with open_engine(directory) as engine:
        for number in range(12):
            with engine.session() as session:
                reasons.add(
                    session.say(
                        conversation(number)[0], Sampling(max_tokens=48, temperature=0.0)
                    ).finish_reason
                )
    assert reasons == {"stop", "length"}
