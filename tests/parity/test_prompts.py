"""Prompts through the whole engine give the logits and the 64 greedy tokens of transformers."""

from tests.models.reference import GENERATED
from tests.parity.families import every, overlapped, sized, without_overlap
from tests.parity.subject import Subject, Watched, greedy


def check_batch(watched: Watched, subject: Subject) -> None:
    """All prompts of the reference at once, ragged, decoding while others are still in their prompts."""
    reference = subject.reference
    turns = watched.engine.generate(reference.prompts, greedy(GENERATED))
    assert [turn.token_ids for turn in turns] == reference.generated
    assert [turn.finish_reason for turn in turns] == ["length"] * len(turns)
    for turn, prompt in zip(turns, reference.prompts, strict=True):
        watched.check(turn, prompt)


@every
def test_the_reference_is_not_trivial(subject: Subject) -> None:
    """A model that repeats one token would agree with almost anything."""
    assert all(len(set(generated)) >= 20 for generated in subject.reference.generated)


@without_overlap(5)
def test_one_prompt(subject: Subject) -> None:
    prompt, generated = subject.reference.prompts[0], subject.reference.generated[0]
    with Watched(subject) as watched:
        (turn,) = watched.engine.generate([prompt], greedy(GENERATED))
        assert turn.token_ids == generated
        watched.check(turn, prompt)
        usage = turn.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(prompt), 0, 64)
        assert usage.computed_tokens == watched.computed == len(prompt) + GENERATED - 1


@overlapped(0)
def test_ragged_batch(subject: Subject, overlap: bool) -> None:
    with Watched(subject, overlap=overlap) as watched:
        check_batch(watched, subject)


@sized
def test_page_and_chunk_sizes(subject: Subject, page_size: int, chunk: int, overlap: bool) -> None:
    sizes = {"page_size": page_size, "chunk_tokens": chunk, "step_tokens": max(chunk, 16)}
    with Watched(subject, overlap=overlap, **sizes) as watched:
        check_batch(watched, subject)
