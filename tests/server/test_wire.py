"""What crosses between the two processes says everything that the values on either side say."""

from dataclasses import fields

import msgspec

from holdfast.engine.sampling import Sampling
from holdfast.server.link import wire
from holdfast.server.turn_request import wire_sampling


def test_sampling_crosses_whole() -> None:
    assert wire.SamplingFields.__struct_fields__ == tuple(field.name for field in fields(Sampling))
    asked = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.1, "frequency_penalty": -1.0, "presence_penalty": 2.0,
        "logit_bias": {3: -100.0, 5: 1.5}, "seed": -(1 << 63), "stop": ["a", "b"], "stop_token_ids": [1, 2],
        "ignore_eos": True, "n": 2, "logprobs": 4, "prompt_logprobs": 0, "skip_special_tokens": False,
        "keep_stop": True,
    }  # fmt: skip
    crossed = wire_sampling(Sampling(**asked))
    assert msgspec.structs.asdict(crossed) == asked
    assert all(value != getattr(Sampling(), name) for name, value in asked.items()), (
        "nothing is as by default"
    )
