"""Every field of every request, filled with far too much; the server's OpenAPI document says which there are.

A field is refused with a 4xx, or it is one of the few that are ignored; whatever it is, nothing large is
kept, no engine is lost and neighbours go on.
"""

import json
from typing import Any, NamedTuple

import httpx
import pytest

from tests.hostile import demands
from tests.hostile.neighbours import Watch
from tests.plain import NO_TLS
from tests.server.serving import Server

pytestmark = pytest.mark.soak

BULK = 2_000_000
SHAPES: dict[str, Any] = {
    "text": "x" * BULK,
    "numbers": [7] * (BULK // 2),
    "texts": ["x"] * (BULK // 4),
    "lists": [[7]] * (BULK // 4),
    "objects": [{"role": "user", "content": "x"}] * (BULK // 40),
    "keys": {str(number): 1.0 for number in range(BULK // 16)},
    "deep": None,
    "digits": 10**4000,
}
DEEP = "[" * 100_000 + "]" * 100_000

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1},
    "/v1/sessions/{session_id}/turns": {"input": "abc", "sampling": {"max_tokens": 1}},
    "/v1/sessions/{session_id}/interrupt": {"keep": "all"},
    "/v1/sessions/{session_id}/rewind": {"to_turn": 0},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65]},
    "/close_session": {"session_id": "nobody"},
    "/v1/storm": {},
    "/v1/sessions/{session_id}/input": {"text": "abc"},
    "/v1/responses": {"input": "abc", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/conversations/{conversation_id}/items": {
        "items": [{"type": "message", "role": "user", "content": "abc"}]
    },
}
"""What each call needs besides the field that is attacked."""

IGNORED = {
    ("/abort_request", "rid"),
    ("/generate", "rid"),
    ("/open_session", "capacity_of_str_len"),
    ("/v1/completions", "model"),
    ("/v1/chat/completions", "model"),
}
"""Fields whose value may be anything: nothing has that name, or the value is of no use; none is kept."""

IGNORED_KEYS = {
    ("/v1/completions", "stream_options"),
    ("/v1/chat/completions", "stream_options"),
    ("/v1/messages", "output_config"),
    ("/v1/messages/count_tokens", "output_config"),
    ("/generate", "sampling_params"),
    ("/generate", "session_params"),
}
"""Objects whose unknown fields are ignored, as those of the body itself: they are read and not kept."""

NESTED = {
    "/v1/sessions/{session_id}/turns": ("sampling",),
    "/generate": ("sampling_params", "session_params"),
}
"""Fields whose own fields are attacked too."""


class Field(NamedTuple):
    """A field of a request, as a path of names in its body."""

    method: str
    path: str
    names: tuple[str, ...]


def fields_of(server: Server) -> list[Field]:
    """Every field of every body."""
    document = server.get("/openapi.json").json()
    found: list[Field] = []
    for path, methods in document["paths"].items():
        for method in ("post", "patch"):
            content = methods.get(method, {}).get("requestBody", {}).get("content", {})
            for described in content.values():
                for name, field in _properties(document, described["schema"]).items():
                    found.append(Field(method, path, (name,)))
                    if name in NESTED.get(path, ()):
                        inner = _properties(document, field)
                        found += [Field(method, path, (name, each)) for each in inner]
    return found


def _properties(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object, wherever its schema stands."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    properties = dict(schema.get("properties", {}))
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(kind, []):
            properties |= _properties(document, part)
    return properties


def filled(path: str, names: tuple[str, ...], shape: str) -> bytes:
    """A body whose one field has far too much in it."""
    body = json.loads(json.dumps(VALID.get(path, {})))
    place = body
    for name in names[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[names[-1]] = "HERE" if shape == "deep" else SHAPES[shape]
    text = json.dumps(body, separators=(",", ":"))
    return (text.replace('"HERE"', DEEP) if shape == "deep" else text).encode()


@pytest.mark.parametrize("shape", SHAPES)
def test_no_field_of_any_request_keeps_what_is_far_too_much(echo: Server, shape: str) -> None:
    fields = fields_of(echo)
    assert len(fields) > 60, "the document describes the bodies"
    assert {field.path for field in fields} >= set(VALID) - {"/v1/storm"}
    conversation = echo.post("/v1/conversations", {}).json()["id"]

    def attack() -> list[tuple[str, tuple[str, ...], int, str]]:
        answers = []
        with httpx.Client(base_url=echo.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
            for method, path, names in fields:
                sent = filled(path, names, shape)
                answer = http.request(
                    method,
                    path.format(session_id="attacked", conversation_id=conversation, response_id="resp_none"),
                    content=sent,
                    headers={"content-type": "application/json"},
                )
                answers.append((path, names, answer.status_code, answer.text[:200]))
        return answers

    with Watch(echo, growth_bytes=2 * demands.GROWTH_BYTES) as watch:
        echo.open("attacked")
        answers = watch.during(attack)
        wrong = [each for each in answers if each[2] >= 500]
        assert not wrong, wrong
        ignored = IGNORED | IGNORED_KEYS if shape == "keys" else IGNORED
        kept = [each for each in answers if each[2] < 400 and (each[0], each[1][-1]) not in ignored]
        assert not kept, kept
        shown = echo.get("/v1/sessions").text + echo.get("/v1/memory").text
        assert len(shown) < 100_000, "something large is kept"


def test_names_in_paths_are_bounded(echo: Server) -> None:
    for name in ("x" * 200, "x" * 20_000, "..", "a%2fb", "%00", "%ff", "a b".replace(" ", "%20")):
        for method, path in (
            ("GET", f"/v1/sessions/{name}"),
            ("DELETE", f"/v1/sessions/{name}"),
            ("POST", f"/v1/sessions/{name}/turns"),
            ("GET", f"/v1/models/{name}"),
        ):
            answer = echo.http.request(method, path, json={"input": "x"} if method == "POST" else None)
            assert demands.refused(answer.status_code), (method, path[:60], answer.status_code)
