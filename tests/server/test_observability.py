"""What operators see: metrics that the dashboard draws, log lines with ids, traces of turns."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed, traceparent
from holdfast.server.link.marks import Marks, marks
from holdfast.server.telemetry.tracing import (
    SPANS,
    NoTraces,
    SpanFile,
    TurnTraces,
    open_traces,
    spans_of,
)
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_sessions import long_turn, wait_known

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
NAME = re.compile(r"holdfast_[a-z_]+")


def metrics(server: Server) -> dict[str, float]:
    """Every sample of the page, by name and labels."""
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_dashboard_draws_only_what_is_measured(echo: Server) -> None:
    name = echo.open()
    echo.say(name, "some words")
    measured = {sample.partition("{")[0] for sample in metrics(echo)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    drawn = {
        found for panel in panels for target in panel["targets"] for found in NAME.findall(target["expr"])
    }
    assert len(drawn) > 12
    assert drawn <= measured, drawn - measured


def test_turns_are_counted_by_outcome(echo: Server) -> None:
    before = metrics(echo)
    name = echo.open()
    for _ in range(3):
        echo.say(name, "some words")
    call = long_turn(echo, name, "cut")
    wait_known(echo, name, 200)
    assert echo.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "cut", "keep": "none"}).status_code == 200
    call.join()
    after = metrics(echo)

    def grown(sample: str) -> float:
        return after[sample] - before.get(sample, 0.0)

    assert grown('holdfast_turns_total{outcome="finished"}') == 3
    assert grown('holdfast_turns_total{outcome="aborted"}') == 1
    assert grown("holdfast_time_to_first_token_seconds_count") == 4
    assert grown("holdfast_turn_seconds_count") == 4


def test_what_was_counted_is_not_lost_with_an_engine_process(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "4096")
    counted = ("holdfast_steps_total", "holdfast_computed_tokens_total", "holdfast_generated_tokens_total")
    name = server.open()
    said = server.say(name, "some words", sampling={"max_tokens": 5, "ignore_eos": True})
    expected = said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"]
    deadline = time.monotonic() + 20
    while metrics(server)["holdfast_computed_tokens_total"] < expected:
        assert time.monotonic() < deadline, "no pulse"
        time.sleep(0.05)
    before = metrics(server)
    server.kill_engine()
    down = metrics(server)
    server.wait_ready()
    name = server.open()
    server.say(name, "some words", sampling={"max_tokens": 5, "ignore_eos": True})
    while metrics(server)["holdfast_generated_tokens_total"] < 10:
        assert time.monotonic() < deadline + 60, "counted anew"
        time.sleep(0.05)
    after = metrics(server)
    for each in counted:
        assert before[each] <= down[each] < after[each]


def test_a_turn_that_is_answered_again_is_not_counted_again(echo: Server) -> None:
    name = echo.open()
    said = echo.say(name, "some words", turn_id="t")
    before = metrics(echo)
    for _ in range(3):
        assert echo.say(name, "some words", turn_id="t")["text"] == said["text"]
    echo.say(name, "other words", turn_id="u")
    after = metrics(echo)
    for sample in (
        'holdfast_turns_total{outcome="finished"}',
        "holdfast_time_to_first_token_seconds_count",
        "holdfast_queue_seconds_count",
        "holdfast_turn_seconds_count",
    ):
        assert after[sample] - before[sample] == 1, sample


def test_log_lines_carry_ids_and_figures(serve: Serve) -> None:
    server = serve("echo", "--log-level", "debug", "--log-format", "json", "--kv-tokens", "4096")
    name = server.open("logged")
    server.say(name, "words", turn_id="t-42")
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    turns = [line for line in lines if line["message"] == "turn"]
    assert [(line["turn"], line["outcome"]) for line in turns] == [("t-42", "finished")]
    assert turns[0]["session"].endswith("/logged")
    assert turns[0]["completion_tokens"] == 6
    assert all("request" in line for line in lines if line["message"] == "request")


def ended_feed(parent: str | None) -> Any:
    """A turn that is over, without an engine."""

    async def make() -> TurnFeed:
        traceparent.set(parent)
        command = wire.StartTurn(7, "t-1", "public", [1], wire.SamplingFields(), session="public/s")
        feed = TurnFeed(command, lambda ended: None)
        feed.finish(
            wire.End(
                turn=7, outcome="finished", reason="stop", text="secret words", tokens=[1, 2, 3],
                prompt_tokens=9, cached_tokens=4, computed_tokens=5, queue_seconds=0.25, first_seconds=0.5,
                total_seconds=1.0,
            )
        )  # fmt: skip
        return feed

    return asyncio.run(make())


def test_a_turn_is_a_span_in_its_client_s_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace = "0af7651916cd43dd8448eb211c80319c"
    TurnTraces(provider).turn_ended(ended_feed(f"00-{trace}-b7ad6b7169203331-01"))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"turn", "queue", "first token", "generation"}
    turn = spans["turn"]
    assert f"{turn.context.trace_id:032x}" == trace
    assert turn.attributes is not None and turn.attributes["holdfast.cached_tokens"] == 4
    lengths = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert lengths == pytest.approx(
        {"turn": 1.0, "queue": 0.25, "first token": 0.25, "generation": 0.5}, abs=1e-6
    )
    assert all(span.parent is not None and span.parent.span_id == turn.context.span_id
               for name, span in spans.items() if name != "turn")  # fmt: skip
    assert "secret" not in str([span.to_json() for span in spans.values()])


def test_the_spans_of_a_turn_follow_its_request_from_the_socket_to_the_socket(tmp_path: Path) -> None:
    """One begins where the other ends; a file has the same spans as a trace."""
    feed = ended_feed(None)
    feed.marks = Marks(10.0)
    feed.marks.parsed, feed.marks.posted, feed.marks.heard = 10.1, 10.2, 11.0
    feed.end = msgspec.structs.replace(feed.end, arrived=10.3)
    begun = [(name, round(begins, 3), round(ends, 3)) for name, begins, ends in spans_of(feed)]
    assert begun == [
        ("parse", 10.0, 10.1),
        ("tokenize", 10.1, 10.2),
        ("post", 10.2, 10.3),
        ("queue", 10.3, 10.55),
        ("first token", 10.55, 10.8),
        ("report", 10.8, 11.0),
        ("generation", 10.8, 11.3),
    ]
    feed.marks.written = 11.25
    written = SpanFile(tmp_path / "spans")
    written.turn_ended(feed)
    written.close()
    line = json.loads((tmp_path / "spans").read_text())
    assert tuple(line["spans"]) == (*SPANS, "generation") and line["spans"]["write"] == 250_000
    assert "secret" not in str(line)


def test_marks_are_set_with_the_first_token_alone() -> None:
    """What comes after it sets, compares and allocates nothing for the spans."""

    async def pushed() -> None:
        marks.set(Marks(1.0))
        feed = TurnFeed(wire.StartTurn(7, "t-1", "public", [1], wire.SamplingFields()), lambda ended: None)
        assert feed.marks is not None and feed.marks.posted is not None and feed.marks.heard is None
        feed.push(wire.Delta(7, 0, "a", [1], prompt=(1, 0)))
        first = feed.marks.heard
        assert first is not None
        feed.marks.heard = 5.0
        feed.push(wire.Delta(7, 1, "b", [1]))
        assert feed.marks.heard == 5.0

    asyncio.run(pushed())


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert isinstance(open_traces(), NoTraces)
