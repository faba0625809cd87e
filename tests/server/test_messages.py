"""Messages over HTTP: their roles, and contents that are null."""

from pathlib import Path

import pytest

from holdfast.server.prompts import ROLES
from tests.models.small import write_small_model
from tests.server.bad_values import SECRET
from tests.server.conftest import Serve
from tests.server.serving import Server

PATHS = {
    "/v1/chat/completions": "messages",
    "/tokenize": "messages",
    "/v1/sessions/{}/turns": "input",
}


@pytest.mark.parametrize("path", PATHS)
def test_roles_are_from_a_list(echo: Server, path: str) -> None:
    session, field = echo.open(), PATHS[path]
    for role in (*ROLES, SECRET, "", "User", "user\n", "x" * 100):
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        if role == "tool":
            continue  # It answers a call: see test_tool_messages.
        answer = echo.post(path.format(session), {field: messages})
        if role == "assistant" and field == "input":
            continue  # What a session says itself is another matter.
        if role in ROLES:
            assert answer.status_code == 200, answer.text
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"{field}[1].role"), answer.text
        assert "must be one of system, developer, user" in error["message"] and SECRET not in answer.text


def test_an_assistant_message_may_have_no_content(echo: Server) -> None:
    before = {"role": "user", "content": "a"}
    counts = set()
    for empty in (
        {"content": None},
        {"content": ""},
        {},
        {"content": []},
        {"content": None, "tool_calls": []},
    ):
        messages = [before, {"role": "assistant", **empty}, before]
        answer = echo.post("/tokenize", {"messages": messages})
        assert answer.status_code == 200, answer.text
        counts.add(answer.json()["count"])
    assert len(counts) == 1
    for role in ROLES:
        if role != "assistant":
            answer = echo.post("/v1/chat/completions", {"messages": [{"role": role, "content": None}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[0].content"


def test_a_message_that_the_model_would_not_see_is_refused(serve: Serve, tmp_path: Path) -> None:
    write_small_model(tmp_path / "llama", "llama")
    (tmp_path / "llama" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "w7 {{ m.content }} {% endif %}{% endfor %}"
    )
    server = serve(tmp_path / "llama")
    count = {}
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "w8 w9"}, {"role": "user", "content": "w9"}]
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        count[role] = answer.json()["usage"]["prompt_tokens"]
    assert count["developer"] == count["system"]
    messages = [{"role": "user", "content": "w8"}, {"role": "function", "content": "w9"}]
    refused = server.post("/v1/chat/completions", {"messages": messages})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "chat_template", "messages")
    assert error["message"].startswith("messages[1]: ") and "function" in error["message"]
    session = server.open()
    refused = server.post(f"/v1/sessions/{session}/turns", {"input": messages})
    assert refused.json()["error"]["message"].startswith("input[1]: "), refused.text
