"""Recorded requests of Anthropic's clients, sent again: they get answers of the recorded form.

`tests/clients/record_messages.py` writes the recordings by running the clients.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.dialects.refused import ANTHROPIC_FIELDS, HINTS
from holdfast.server.routes.messages_body import MESSAGES_BODY
from tests.server.anthropic_wire import events_of
from tests.server.serving import Server

FOLDER = Path(__file__).parent / "recorded"
RECORDED = [*FOLDER.glob("anthropic-*.json"), *FOLDER.glob("claude-code-*.json")]
EXCHANGES = [
    (path.stem, number, exchange)
    for path in RECORDED
    for number, exchange in enumerate(json.loads(path.read_text()))
]


def form_of(answer: Any) -> Any:
    """The form of an answer: its keys and kinds, without texts, ids and counts; deltas of a block once."""
    if isinstance(answer, list):
        shown: list[Any] = []
        for event in answer:
            kind = event.get("delta", event.get("content_block", {})).get("type")
            entry = (event["type"], event.get("index"), kind, sorted(event))
            if not shown or shown[-1] != entry:
                shown.append(entry)
        return shown
    blocks = [(block["type"], sorted(block)) for block in answer.get("content", ())]
    error = answer.get("error", {})
    return sorted(answer), blocks, answer.get("stop_reason"), error.get("type"), error.get("code")


def test_there_are_recordings_of_both_clients() -> None:
    names = " ".join(path.stem for path in RECORDED)
    assert "anthropic-" in names and "claude-code-" in names and len(EXCHANGES) > 20


@pytest.mark.parametrize(
    ("client", "number", "exchange"), EXCHANGES, ids=[f"{name}-{number}" for name, number, _ in EXCHANGES]
)
def test_a_recorded_request_gets_an_answer_of_the_recorded_form(
    caller: Server, client: str, number: int, exchange: dict[str, Any]
) -> None:
    del client, number
    answer = caller.post(exchange["path"], exchange["request"], headers=exchange["headers"])
    assert answer.status_code == exchange["status"], answer.text
    streamed = isinstance(exchange["answer"], list)
    assert form_of(events_of(answer.text) if streamed else answer.json()) == form_of(exchange["answer"])


def test_a_conversation_of_claude_code_stays_cached(caller: Server) -> None:
    """Each request brings the whole conversation; what was computed before is found again."""
    turns = [
        exchange["request"]
        for client, _, exchange in EXCHANGES
        if client.startswith("claude-code") and "count_tokens" not in exchange["path"]
    ]
    assert len(turns) == 3
    computed = []
    for request in turns:
        usage = caller.post("/v1/messages?beta=true", {**request, "stream": False}).json()["usage"]
        computed.append(usage["input_tokens"])
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    again = caller.post("/v1/messages?beta=true", {**turns[-1], "stream": False}).json()["usage"]
    assert computed[2] < computed[0] / 4 and prompt > computed[0]
    assert again["input_tokens"] <= 16


def test_every_field_of_the_recorded_requests_is_built_refused_or_a_hint() -> None:
    known = {*MESSAGES_BODY.read.__struct_fields__, *ANTHROPIC_FIELDS, *HINTS}
    assert [
        (client, name)
        for client, _, exchange in EXCHANGES
        for name in exchange["request"]
        if name not in known
    ] == []
