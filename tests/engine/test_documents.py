"""The examples of the documents run as they stand, one after the other, here and against a server."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.start.pull import PullError, pull
from tests.models.small import write_small_model
from tests.server.serving import Server

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("model", ["small", pytest.param("smollm2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("page", ["docs/sessions.md"])
def test_examples_run(page: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand, but for the model in `make test`: the embedded default takes seconds to load."""
    if model == "small":
        model = str(write_small_model(tmp_path / "model"))
    else:
        try:
            pull(model)
        except PullError as error:
            pytest.skip(str(error))
    examples = EXAMPLE.findall((ROOT / page).read_text())
    assert examples, f"{page} has no example"
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example.replace('"smollm2"', repr(model)), page, "exec"), names)
    assert capsys.readouterr().out.strip(), "the examples say nothing"


def shell(script: str, folder: Path) -> list[Any]:
    """Run lines of a page; those of its answers that are objects, as such, and the others as they are."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) if line.startswith("{") else line for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("family", ["llama", pytest.param("bamba", marks=pytest.mark.soak)])
def test_examples_of_the_wire_run_against_a_server(tmp_path: Path, family: str) -> None:
    def serve() -> Server:
        sizes = ("--kv-tokens", "8192", "--state-slots", "32", "--audit", "strict")
        kept = ("--journal", str(tmp_path / "sessions.journal"), "--disk", str(tmp_path / "memory"))
        return Server(tmp_path / "model", *sizes, *kept)

    write_small_model(tmp_path / "model", family)
    verbs, leaving, restarted, _ = SHELL.findall((ROOT / "docs" / "sessions.md").read_text())
    server = serve()
    definitions = "\n".join(verbs.splitlines()[:4]).replace(ADDRESS, server.url) + "\n"
    assert ADDRESS in verbs
    opened, first, again, second, cut, fork, other, rewound, _spilled, kept, shown, memory = shell(
        verbs.replace(ADDRESS, server.url), tmp_path
    )
    assert opened["id"] == "talk"
    assert (first["text"], first["usage"]["completion_tokens"]) == (again["text"], 24)
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 24
    assert cut["tokens"]["known"] == second["usage"]["prompt_tokens"] + 5
    assert (fork["id"], fork["turns"]) == ("aside", 1)
    assert other["usage"]["cached_tokens"] == second["usage"]["cached_tokens"]
    assert rewound["turns"] == 1
    settings = ("ttl", "pin", "priority")
    assert [kept[name] for name in settings] == [shown[name] for name in settings] == [86400, True, 1]
    assert memory["findings"] == []

    heard = shell(definitions + leaving, tmp_path)
    assert heard[0] == "event: delta"
    wait_until(lambda: server.state("aside")["state"] == "IDLE")
    assert server.state("aside")["turns"] == 3, "what was sent stays"
    wait_until(lambda: server.state("talk")["tier"] == "disk")
    assert server.stop() == 0

    server = serve()
    definitions = "\n".join(verbs.splitlines()[:4]).replace(ADDRESS, server.url) + "\n"
    repeated, third, *listed = shell(definitions + restarted, tmp_path)
    assert repeated["token_ids"] == first["token_ids"]
    assert [server.state("talk")[name] for name in settings] == [86400, True, 1]
    assert third["usage"]["cached_tokens"] == second["usage"]["cached_tokens"], "nothing is computed again"
    assert {line["id"].rpartition("/")[2] for line in listed if isinstance(line, dict)} >= {"talk", "aside"}
    server.check_clean()
    assert server.stop() == 0


def test_the_example_of_quotas_runs_against_a_server(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sessions.md").read_text()
    (printed,) = re.findall(r"^\$ (printf 'ann:.*)$", page, re.MULTILINE)
    (options,) = re.findall(r"^\$ holdfast serve --api-keys keys (.*) --port 8001$", page, re.MULTILINE)
    assert shell(printed, tmp_path) == []
    write_small_model(tmp_path / "model", "llama")
    server = Server(tmp_path / "model", "--api-keys", str(tmp_path / "keys"), *options.split())
    example = SHELL.findall(page)[-1]
    assert "http://127.0.0.1:8001" in example
    opened, turn, tenants, other, refused = shell(
        example.replace("http://127.0.0.1:8001", server.url), tmp_path
    )
    assert (opened["id"], other["id"], other["turns"]) == ("talk", "talk", 0)
    assert turn["usage"]["completion_tokens"] == 8
    (ann,) = json.loads("{" + tenants[: tenants.index("]}]") + 3] + "}")["tenants"]
    assert ann["tenant"] == "ann"
    assert [pool["limit"] for pool in ann["pools"]] == [8192 // 16 // 2]
    assert ann["pools"][0]["units"] > 0
    assert refused["error"]["code"] == "over_quota"
    assert server.stop() == 0


def wait_until(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)
