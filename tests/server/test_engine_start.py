"""An engine that cannot start: at first the server says why and ends; later it tries again."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.damage import DAMAGES, damaged_file
from tests.preloaded.commands import run
from tests.server.conftest import Serve


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--kv-tokens", "2000000000", "--kv-tokens is too large: pools need "),
        ("--host-memory", "1000TB", "--host-memory is too large: "),
    ],
)
def test_memory_that_the_machine_does_not_have_is_refused_by_its_option(
    small_models: Callable[[str], Path], option: str, value: str, said: str
) -> None:
    arguments = ["serve", str(small_models("llama")), "--port", "0", option, value]
    done = run(*arguments, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"holdfast serve: {said}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "what",
    [
        "tokenizer.json cut short",
        "a template that cannot be parsed",
        "config.json nested too deeply",
        "a header without end",
    ],
)
def test_a_model_that_cannot_be_read_is_said_in_one_line_and_not_tried_again(
    small_models: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_models("llama"), model)
    ((named, change),) = [(named, change) for name, named, change in DAMAGES if name == what]
    change(damaged_file(model, named))
    done = run("serve", str(model), "--port", "0", text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("holdfast serve: ") and named in line


def test_an_engine_that_cannot_come_back_at_once_is_tried_again(
    serve: Serve, small_models: Callable[[str], Path]
) -> None:
    """The weights are out of reach for a while, as a file system or a GPU's memory may be."""
    model = small_models("llama")
    server = serve(model)
    hidden = model / "elsewhere.json"
    (model / "config.json").rename(hidden)
    try:
        server.kill_engine()
        deadline = time.monotonic() + 60
        while not any("the engine cannot start" in line for line in server.lines):
            assert time.monotonic() < deadline and server.process.poll() is None, "\n".join(server.lines)
            time.sleep(0.1)
        refused = server.post("/v1/sessions", {})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    finally:
        hidden.rename(model / "config.json")
    server.wait_ready()
    assert server.say(server.open(), "hello", sampling={"max_tokens": 4})["finish_reason"]
