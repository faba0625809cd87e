"""Recorded requests of clients of Node, sent again in their order: they get answers of the recorded form.

`tests/clients/node/record.py` writes the recordings by running the clients. A request that names an id of an
earlier answer gets the id that this server gave at that place.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.recorded_forms import form_of, ids_of, read_events
from tests.server.serving import Server

RECORDED = sorted((Path(__file__).parent / "recorded" / "node").glob("*.json"))
LONG_MARK, LONG = "(long)", "x" * 100
"""The text that clients were cut in: recorded as a mark, and shorter here, where nobody leaves."""
CLIENTS = ("ai-sdk-openai-4", "ai-sdk-openai-compatible", "ai-sdk-anthropic", "openai-7", "anthropic-ai-sdk")
AGENTS = ("openai-codex", "anthropic-ai-claude-code", "opencode-ai", "qwen-code-qwen-code")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose stored responses, and so their sessions, stay from test to test.

    opencode and Qwen Code reserve 32,000 tokens for each answer, which the context length must have room for.
    """
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "think", "--audit", "strict")
    made = Server("echo", *parsers, "--kv-tokens", "131072", "--context-length", "65536")
    yield made
    assert made.stop() == 0
    assert made.complaints() == []


def test_every_client_is_recorded() -> None:
    names = [path.stem for path in RECORDED]
    assert all(any(name.startswith(client) for name in names) for client in (*CLIENTS, *AGENTS)), names


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_requests_get_answers_of_the_recorded_form(server: Server, path: Path) -> None:
    names: dict[str, str] = {}
    for number, exchange in enumerate(json.loads(path.read_text())):
        request = json.dumps(exchange["request"]).replace(LONG_MARK, LONG)
        for recorded, name in names.items():
            request = request.replace(recorded, name)
        answer = server.post(exchange["path"], json.loads(request), headers=exchange["headers"])
        assert answer.status_code == exchange["status"], (number, answer.text)
        streamed = isinstance(exchange["form"], list)
        told: Any = read_events(answer.text) if streamed else answer.json()
        assert form_of(told) == exchange["form"], number
        names |= dict(zip(exchange["ids"], ids_of(told), strict=True))
