"""`--seed`: a server of one seed says the same again to the same requests, and not the same twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.sampling import Sampling
from holdfast.server.seeds import Seeds
from tests.server.conftest import Serve
from tests.server.serving import Server

SAMPLED = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


def completions(server: Server, **fields: Any) -> list[str]:
    answer = server.post("/v1/completions", {"model": "llama", "prompt": "a b c", **SAMPLED, **fields})
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def turn(server: Server, session: str) -> list[int]:
    tokens: list[int] = server.say(session, [5, 6, 7], sampling=SAMPLED)["token_ids"]
    return tokens


def native(server: Server) -> list[list[int]]:
    """Three prompts in one call: which is tokenised first must not matter."""
    params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    answer = server.post("/generate", {"text": ["a b c"] * 3, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    return [each["output_ids"] for each in answer.json()]


def everything(server: Server, named: tuple[str, str]) -> list[Any]:
    """Some requests of every kind, and what came of them. The named sessions take turns in either order."""
    said: list[Any] = [completions(server), completions(server, n=2), native(server)]
    for name in named:
        server.open(name)
    talks = {name: [turn(server, name), turn(server, name)] for name in named}
    unnamed = server.open()
    said += [sorted(talks.items()), turn(server, unnamed)]
    assert server.get("/health_generate").status_code == 200
    said.append(completions(server))
    server.check_clean()
    return said


def test_the_same_seed_says_the_same_again(
    serve: Serve, small_models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = small_models("llama")
    sizes = ("--kv-tokens", "8192", "--audit", "strict")
    first = serve(model, "--seed", "7", "--journal", str(tmp_path / "journal.db"), *sizes)
    said = everything(first, ("ann", "bob"))
    first.open("kept")
    kept = [turn(first, "kept")]
    first.kill_engine()
    first.wait_ready()
    # A turn that is refused, and one that is answered again, leave the seeds of those that follow alone.
    assert (
        first.post("/v1/sessions/kept/turns", {"input": [5] * 9000, "sampling": SAMPLED}).status_code == 400
    )
    again_said = {"input": [5, 6, 7], "turn_id": "twice", "sampling": SAMPLED}
    answers = [first.post("/v1/sessions/kept/turns", again_said).json()["token_ids"] for _ in range(2)]
    assert answers[0] == answers[1]
    kept += [answers[0], turn(first, "kept")]
    assert first.post("/v1/completions", {"prompt": [5] * 9000, **SAMPLED}).status_code == 400
    params = {"max_new_tokens": 12, "temperature": 1.0}
    assert first.post("/generate", {"input_ids": [5] * 9000, "sampling_params": params}).status_code == 400
    kept.append(completions(first))

    # The same requests, where one session's turns may change places with another's, and no engine dies.
    again = serve(model, *sizes, environment={"HOLDFAST_SEED": "7"})
    assert everything(again, ("bob", "ann")) == said
    again.open("kept")
    assert [*(turn(again, "kept") for _ in range(3)), completions(again)] == kept
    # A request's own seed goes before the server's.
    assert completions(first, seed=3) == completions(again, seed=3) == completions(again, seed=3)

    (one,), choices, batch, talks, unnamed, (last,) = said
    assert len({one, last, *choices}) == 4
    turns = [tuple(tokens) for _, session in talks for tokens in session]
    assert len({*turns, tuple(unnamed), *map(tuple, kept)}) == 9
    assert len({tuple(tokens) for tokens in batch}) == 3


def test_every_sequence_of_every_seed_is_its_own() -> None:
    def drawn(seed: int) -> list[int | None]:
        seeds = Seeds(seed)
        sequences = [seeds.of_session("ann", "s"), seeds.of_session("bob", "s"), seeds.of_requests("ann")]
        sequences += [seeds.of_session("ann", None) for _ in range(2)]
        return [seeds.seeded(Sampling(), sequence).seed for sequence in sequences for _ in range(3)]

    assert drawn(7) == drawn(7)
    assert len({*drawn(7), *drawn(8)}) == 30
    assert None not in drawn(0)


def test_a_seed_that_is_given_back_is_the_next_ones_and_nobodys_twice() -> None:
    seeds = Seeds(7)
    sequence = seeds.of_session("ann", "s")
    with seeds.lend(Sampling(), sequence) as first, seeds.lend(Sampling(), sequence) as second:
        assert first.sampling.seed != second.sampling.seed, "two that begin at once"
        second.kept = True
    with pytest.raises(ValueError, match="refused"), seeds.lend(Sampling(), sequence) as refused:
        raise ValueError("refused")
    assert refused.sampling == seeds.seeded(Sampling(), sequence) == first.sampling
    plain = seeds.of_session("ann", "s")
    expected = [seeds.seeded(Sampling(), plain) for _ in range(3)]
    assert [first.sampling, second.sampling, seeds.seeded(Sampling(), sequence)] == expected


def test_turns_that_need_no_seed_draw_none() -> None:
    seeds = Seeds(7)
    sequence = seeds.of_requests("ann")
    assert seeds.seeded(Sampling(seed=3), sequence).seed == 3
    assert seeds.seeded(Sampling(temperature=0), sequence).seed is None
    assert sequence.drawn == 0
    assert Seeds(None).seeded(Sampling(), sequence).seed is None
