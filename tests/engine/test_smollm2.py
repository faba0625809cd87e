"""The embedded default through the engine: a short conversation."""

import pytest

from holdfast import Engine, Sampling
from holdfast.engine.pull import PullError, pull


@pytest.fixture(scope="module")
def smollm2() -> str:
    try:
        return str(pull("smollm2"))
    except PullError as error:
        pytest.skip(str(error))


def test_a_short_conversation(smollm2: str) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.0)
    with Engine(smollm2, context_length=1024, kv_tokens=2048, audit="strict") as engine:
        with engine.session(system="You answer in one word.") as session:
            first = session.say("What is the capital of France?", sampling)
            assert "Paris" in "".join(first)
            second = session.say("And of Italy?", sampling)
            assert "Rome" in second.text
            assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
            assert second.usage.computed_tokens < 20 + second.usage.completion_tokens
        assert engine.audit() == []
