"""OpenTelemetry traces of turns, with the `otel` extra and OTEL_EXPORTER_OTLP_ENDPOINT set.

A turn is one span with child spans for the queue, the time to the first token, and generation, in the trace
of the client's `traceparent`. Spans are made after the turn from the engine's timings, so tracing costs
nothing per token. Text is never in a trace.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any, Protocol

from holdfast.server.link.engine_client import TurnFeed

__all__ = ["NoTraces", "TurnTraces", "open_traces"]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


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
        admitted = start + int(end.queue_seconds * 1e9)
        first = now if end.first_seconds is None else start + int(end.first_seconds * 1e9)
        for name, begins, ends in (
            ("queue", start, admitted),
            ("first token", admitted, max(admitted, first)),
            ("generation", max(admitted, first), now),
        ):
            self._tracer.start_span(name, inside, start_time=begins).end(ends)
        span.end(now)

    def close(self) -> None:
        """Flush and close."""
        self._provider.shutdown()


def open_traces() -> Traces:
    """Traces as the environment configures them; raises if the extra is missing."""
    if not os.environ.get(ENDPOINT):
        return NoTraces()
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
