"""The embedded default through the engine: a short conversation."""

from collections.abc import Iterator

import pytest
import torch

from holdfast import Engine, Sampling
from holdfast.engine.start.pull import PullError, pull
from holdfast.kernels.cpu.library import library


@pytest.fixture(scope="module")
def smollm2() -> str:
    try:
        return str(pull("smollm2"))
    except PullError as error:
        pytest.skip(str(error))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch has two threads; the kernels have as many as it had, afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    if (kernels := library()) is not None:
        kernels.hf_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_short_conversation(smollm2: str) -> None:
    """With kernels that run on as many threads as torch, whatever loading took."""
    sampling = Sampling(max_tokens=24, temperature=0.0)
    with Engine(smollm2, context_length=1024, kv_tokens=2048, audit="strict") as engine:
        kernels = library()
        if kernels is not None:
            assert kernels.hf_threads(0) == 2
        with engine.session(system="You answer in one word.") as session:
            first = session.say("What is the capital of France?", sampling)
            assert "Paris" in "".join(first)
            second = session.say("And of Italy?", sampling)
            assert "Rome" in second.text
            assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
            assert second.usage.computed_tokens < 20 + second.usage.completion_tokens
        assert engine.audit() == []
