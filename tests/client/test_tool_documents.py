"""The examples of pages about tools, grammars and responses run as they stand, on the default model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from holdfast.engine.start.pull import PullError, pull
from holdfast.engine.tools.formats import CALL_FORMATS, REASONING_FORMATS
from tests.engine.test_documents import shell
from tests.server.serving import Server

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
SIZES = ("--kv-tokens", "16384", "--context-length", "2048", "--audit", "strict", "--seed", "3")

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start servers of the default model; they end with the file."""
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    started: list[Server] = []

    def start(*more: str) -> Server:
        started.append(Server("smollm2", *SIZES, *more))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            assert server.stop() == 0


@pytest.fixture(scope="module")
def shared_server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A server of the default model, with nothing in memory before and after each test."""
    yield shared_server
    shared_server.check_clean()


def run_python(page: str, server: Server) -> dict[str, Any]:
    """Run the Python examples of a page in order; the names that they leave."""
    names: dict[str, Any] = {}
    examples = PYTHON.findall((ROOT / "docs" / page).read_text())
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example.replace(ADDRESS, server.url), page, "exec"), names)
    return names


def test_python_examples_of_tools(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python("tools.md", server)
    shown = capsys.readouterr().out
    first = shown.splitlines()[0]
    assert first.startswith("tool_calls weather {")
    schema = names["weather"]["function"]["parameters"]
    jsonschema_rs.validate(schema, json.loads(names["call"].function.arguments))
    assert "0 weather" in shown, "the name comes first"
    assert "tool_call.done" in shown
    assert names["turn"].finish_reason == "tool_calls"


def test_shell_examples_of_tools_across_a_restart(serve: Serve, tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "sessions.journal"))
    server = serve(*journal)
    calling, answering = SHELL.findall((ROOT / "docs" / "tools.md").read_text())
    assert ADDRESS in calling
    opened, called = shell(calling.replace(ADDRESS, server.url), tmp_path)
    assert (opened["id"], called["finish_reason"]) == ("trip", "tool_calls")
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert server.stop() == 0

    server = serve(*journal)
    definitions = "\n".join(calling.splitlines()[:3]).replace(ADDRESS, server.url) + "\n"
    (answered,) = shell(definitions + answering, tmp_path)
    assert answered["finish_reason"] in ("stop", "length", "tool_calls")
    assert answered["usage"]["prompt_tokens"] > called["usage"]["prompt_tokens"]
    assert server.state("trip")["turns"] == 2
    server.check_clean()


def test_python_examples_of_structured_output(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("structured-output.md", server)
    shown = capsys.readouterr().out
    assert re.search(r"^(Rome|Oslo), [1-7] days$", shown, re.MULTILINE)
    assert re.search(r"^(yes|no|perhaps)$", shown, re.MULTILINE)
    assert re.search(r"^(Rome|Oslo) in (May|June)$", shown, re.MULTILINE)
    assert re.search(r"^go to (Rome|Oslo)$", shown, re.MULTILINE)
    assert "unsupported_grammar grammar.value" in shown


def test_python_examples_of_responses(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python("responses.md", serve())  # Its own server: stored responses stay in memory.
    shown = capsys.readouterr().out.splitlines()
    assert shown.count("True") >= 3, (
        "nothing is computed again, forks keep the response, a steer continues it"
    )
    assert "user My name is Ann." in shown
    assert any(line.startswith("price {") for line in shown)
    assert {"response.completed", "response.incomplete"} & set(shown), "a background response came to its end"
    assert names["event"].response.id != names["running"]


def test_shell_examples_of_structured_output(server: Server, tmp_path: Path) -> None:
    (example,) = SHELL.findall((ROOT / "docs" / "structured-output.md").read_text())
    opened, choice, date, plan = shell(example.replace(ADDRESS, server.url), tmp_path)
    assert opened["id"] == "plans"
    assert choice["text"] in ("Rome", "Oslo")
    assert re.fullmatch("(May|June) [1-9]", date["text"])
    assert json.loads(plan["text"])["city"] in ("Rome", "Oslo")


def test_the_page_names_every_format() -> None:
    page = (ROOT / "docs" / "tools.md").read_text()
    assert [name for name in (*CALL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in page] == []
