"""Fifty schemas, a weak model and temperature 1: what is finished is valid, and what is not says so."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from holdfast.bench.schemas import hundred
from holdfast.engine.start.pull import PullError, pull
from tests.server.serving import Server

SCHEMAS = 50
AT_ONCE = 8
TOKENS_MAX = 300


def answer(server: Server, number: int, schema: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Give me an example as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        "temperature": 1,
        "seed": number,
        "max_tokens": TOKENS_MAX,
    }
    found = server.post("/v1/chat/completions", body, timeout=900)
    assert found.status_code == 200, f"schema {number}: {found.text}"
    choice: dict[str, Any] = found.json()["choices"][0]
    return choice


def fault(choice: dict[str, Any], schema: dict[str, Any]) -> str:
    """What is wrong with an answer; empty if nothing is."""
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length":
        return ""
    if choice["finish_reason"] != "stop":
        return f"ended by {choice['finish_reason']}: {text!r}"
    try:
        jsonschema_rs.validate(schema, json.loads(text))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return f"{error}: {text!r}"
    return ""


def test_faults_are_found() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def ended(text: str, reason: str = "stop") -> dict[str, Any]:
        return {"finish_reason": reason, "message": {"content": text}}

    assert fault(ended('{"a": 1}'), schema) == ""
    assert fault(ended('{"a":', "length"), schema) == ""
    assert fault(ended('{"a":'), schema)
    assert fault(ended('{"a": "1"}'), schema)
    assert fault(ended('{"a": 1}', "abort"), schema)


@pytest.mark.soak
def test_every_finished_answer_is_valid() -> None:
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    schemas = hundred()[:SCHEMAS]
    server = Server("smollm2", "--kv-tokens", "32768", "--context-length", "2048", "--audit", "strict")
    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            choices = list(threads.map(lambda pair: answer(server, *pair), enumerate(schemas)))
        found = [fault(choice, schema) for choice, schema in zip(choices, schemas, strict=True)]
        assert {number: problem for number, problem in enumerate(found) if problem} == {}
        finished = sum(choice["finish_reason"] == "stop" for choice in choices)
        print(f"{finished} of {SCHEMAS} answers were finished, the others ended by length")
        assert finished >= SCHEMAS // 2, f"only {finished} answers were finished"
        server.check_clean()
    finally:
        assert server.stop() == 0
