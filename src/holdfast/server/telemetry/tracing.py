"""Traces of turns: OpenTelemetry spans, or one line of JSON for each turn.

With the `otel` extra and OTEL_EXPORTER_OTLP_ENDPOINT set, a turn is one span with child spans for its way to
the first token and for generation, in the trace of the client's `traceparent`. With HOLDFAST_SPANS set to a
file, the same child spans are appended to it; `holdfast bench wire` reads them. Spans are made after the
turn, from the marks of its request and the engine's times: tracing costs nothing per token. Text is never in
a trace.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from holdfast.server.link.engine_client import TurnFeed

__all__ = ["SPANS", "NoTraces", "SpanFile", "TurnTraces", "open_traces", "spans_of"]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SPANS_FILE = "HOLDFAST_SPANS"

SPANS = ("parse", "tokenize", "post", "queue", "first token", "report", "write")
"""The way of a turn to its first token, in order: each span begins where the one before it ends."""


def spans_of(feed: TurnFeed) -> Iterator[tuple[str, float, float]]:
    """The spans of an ended turn with their begin and end on the clock of `marks`; the last is generation.

    A turn that ended before its first token has those that it came to. `post` is the way to the engine
    process, where a step may be under way; `queue` ends with the plan that admits the turn.
    """
    end, marked = feed.end, feed.marks
    if end is None:
        return
    admitted = end.arrived + end.queue_seconds
    first = None if end.first_seconds is None else end.arrived + end.first_seconds
    over = end.arrived + end.total_seconds
    points = (
        (end.arrived, admitted, first)
        if marked is None
        else (
            marked.arrived,
            marked.parsed,
            marked.posted,
            end.arrived,
            admitted,
            first,
            marked.heard,
            marked.written,
        )
    )
    names = SPANS[3:5] if marked is None else SPANS
    for name, begins, ends in zip(names, points, points[1:], strict=False):
        if begins is None or ends is None:
            break
        yield name, begins, max(begins, ends)
    if first is not None:
        yield "generation", first, max(first, over)


class Traces(Protocol):
    """Receives ended turns."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """Record an ended turn."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class NoTraces:
    """Tracing is off."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """Ignore the turn."""

    def close(self) -> None:
        """Nothing to flush."""


class SpanFile:
    """One line of JSON for each turn: its tokens, and its spans in microseconds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def turn_ended(self, feed: TurnFeed) -> None:
        """Write the spans of an ended turn."""
        if feed.end is None:
            return
        spans = {name: round((ends - begins) * 1e6) for name, begins, ends in spans_of(feed)}
        line = {"turn": feed.name, "prompt_tokens": feed.end.prompt_tokens, "tokens": len(feed.end.tokens)}
        self._file.write(json.dumps({**line, "outcome": feed.end.outcome, "spans": spans}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TurnTraces:
    """Turns as spans of an OpenTelemetry provider."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("holdfast")
        self._propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        self._trace = import_module("opentelemetry.trace")

    def turn_ended(self, feed: TurnFeed) -> None:
        """Make the spans of an ended turn."""
        end = feed.end
        if end is None:
            return
        now = time.time_ns()
        start = now - int(end.total_seconds * 1e9)
        carrier = {} if feed.traceparent is None else {"traceparent": feed.traceparent}
        context = self._propagation.TraceContextTextMapPropagator().extract(carrier)
        attributes = {
            "holdfast.turn": feed.name,
            "holdfast.outcome": end.outcome,
            "holdfast.prompt_tokens": end.prompt_tokens,
            "holdfast.cached_tokens": end.cached_tokens,
            "holdfast.completion_tokens": len(end.tokens),
            "holdfast.retracts": end.retracts,
        }
        if feed.session is not None:
            attributes["holdfast.session"] = feed.session
        span = self._tracer.start_span("turn", context, start_time=start, attributes=attributes)
        inside = self._trace.set_span_in_context(span)
        shift = start - int(end.arrived * 1e9)
        for name, begins, ends in spans_of(feed):
            child = self._tracer.start_span(name, inside, start_time=shift + int(begins * 1e9))
            child.end(shift + int(ends * 1e9))
        span.end(now)

    def close(self) -> None:
        """Flush and close."""
        self._provider.shutdown()


def open_traces() -> Traces:
    """Traces as the environment configures them; raises if the extra is missing."""
    if not os.environ.get(ENDPOINT):
        return SpanFile(Path(os.environ[SPANS_FILE])) if os.environ.get(SPANS_FILE) else NoTraces()
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        raise RuntimeError(f"{ENDPOINT} is set: install holdfast[otel] to send traces") from error
    name = os.environ.get("OTEL_SERVICE_NAME", "holdfast")
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": name}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return TurnTraces(provider)
