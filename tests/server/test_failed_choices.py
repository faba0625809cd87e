"""One choice of a completion fails: the answer says so, and the others end, for nobody hears them."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.small import FIRST_WORD
from tests.server.serving import Server

BAD = FIRST_WORD
GOOD = FIRST_WORD + 1
LENGTH = 3000
OUTCOMES = ("finished", "aborted", "failed")


@pytest.fixture(scope="module")
def poisoned(
    small_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a real model that computes what is no number for prompts with the token `BAD`."""
    model = tmp_path_factory.mktemp("poisoned") / "llama"
    shutil.copytree(small_models("llama"), model)
    poisoned = 0
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        table = tensors.get("model.embed_tokens.weight")
        if table is not None:
            table[BAD] = torch.nan
            save_file(tensors, file, metadata={"format": "pt"})
            poisoned += 1
    assert poisoned == 1
    server = Server(model, "--audit", "strict", "--kv-tokens", "16384")
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)


def ended(server: Server) -> dict[str, int]:
    """How many turns have ended, by how they did."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for line in server.get("/metrics").text.splitlines():
        for outcome in OUTCOMES:
            if line.startswith(f'holdfast_turns_total{{outcome="{outcome}"}} '):
                counts[outcome] = int(float(line.rpartition(" ")[2]))
    return counts


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_ends_the_others(poisoned: Server, stream: bool) -> None:
    before = ended(poisoned)
    body = {
        "prompt": [[GOOD], [BAD], [GOOD, GOOD]],
        "max_tokens": LENGTH,
        "logit_bias": {str(BAD): -100},
        "ignore_eos": True,
        "stream": stream,
    }
    answer = poisoned.post("/v1/completions", body)
    assert answer.status_code == (200 if stream else 500)
    last = answer.text.removesuffix("\n\n").rpartition("data: ")[2]
    assert msgspec.json.decode(last)["error"]["code"] == "numeric_error"
    deadline = time.monotonic() + 120
    while sum((after := ended(poisoned)).values()) < sum(before.values()) + 3:
        assert time.monotonic() < deadline, after
        time.sleep(0.05)
    assert {outcome: after[outcome] - before[outcome] for outcome in OUTCOMES} == {
        "finished": 0,
        "aborted": 2,
        "failed": 1,
    }
    poisoned.check_clean()
