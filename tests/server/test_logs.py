"""Log lines that no client can forge: whatever its text holds, an event stays one line."""

import json
import logging
import sys
from collections.abc import Callable

import pytest

from holdfast.server.telemetry.logs import JsonFormatter, TextFormatter
from tests.server.conftest import Serve

NASTY = "/x\n12:00:00 ERROR   forged\r\x1b[31m\x7f\x9b\u2028\u202e\ud800 end"
HIDDEN = "\n\r\x1b\x7f\x9b\u2028\u202e\ud800"


def record(message: str = "request", failed: bool = False, **fields: object) -> logging.LogRecord:
    try:
        raise ValueError(NASTY)
    except ValueError:
        problem = sys.exc_info() if failed else None
    made = logging.LogRecord("holdfast.server", logging.INFO, "x", 1, message, (), problem)
    made.fields = fields
    return made


@pytest.mark.parametrize("make", [TextFormatter, JsonFormatter])
def test_a_text_of_a_client_s_stays_in_its_line(make: Callable[[], logging.Formatter]) -> None:
    for each in (record(path=NASTY), record(NASTY), record(path="a b", status=200)):
        line = make().format(each)
        assert len(line.splitlines()) == 1 and not set(line) & set(HIDDEN)
        line.encode("utf-8")


def test_a_field_is_not_taken_for_several() -> None:
    line = TextFormatter().format(record(path="/x status=200", tenant='"', turn="t-1", tokens=12))
    assert line.endswith(r' path="/x status=200" tenant="\"" turn=t-1 tokens=12')


def test_a_traceback_is_indented_and_its_text_is_harmless() -> None:
    first, *rest = TextFormatter().format(record(failed=True)).split("\n")
    assert first.endswith("request") and len(rest) > 2
    assert all(line.startswith("  ") and not set(line) & set(HIDDEN) for line in rest)


def test_json_says_what_was_said() -> None:
    line = JsonFormatter().format(record(path=NASTY.replace("\ud800", ""), count=3))
    assert json.loads(line)["path"] == NASTY.replace("\ud800", "") and json.loads(line)["count"] == 3


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_path_forges_no_line(serve: Serve, form: str) -> None:
    server = serve("echo", "--log-level", "debug", "--log-format", form)
    before = len(server.lines)
    assert server.get("/x%0a12:00:00%20ERROR%20%20%20forged%1b%5b31m").status_code == 404
    assert server.stop() == 0
    found = [line for line in server.lines[before:] if "forged" in line]
    assert len(found) == 1 and "\x1b" not in found[0] and "\\u001b" in found[0]
    assert '"status":404' in found[0] if form == "json" else "status=404" in found[0]
