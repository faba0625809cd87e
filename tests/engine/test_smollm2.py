"""The embedded default through the engine: a short conversation."""

import pytest
import torch

from holdfast import Engine, Sampling
from holdfast.engine.start.pull import PullError, pull
from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.matrix import available


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


@pytest.mark.skipif(not available(), reason="this machine has no C kernels")
def test_the_kernels_run_on_as_many_threads_as_torch_whatever_loading_took(smollm2: str) -> None:
    kernels = library()
    assert kernels is not None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Engine(smollm2, context_length=256, kv_tokens=512):
            assert kernels.hf_threads(0) == 2
    finally:
        torch.set_num_threads(before)
        kernels.hf_threads(before)
