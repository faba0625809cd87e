"""Traces of turns for OpenTelemetry, where the `otel` extra is installed and an endpoint is named.

A turn is one span with its figures, with a span inside for the time it waited, for the time to its first
token, and for the rest. It belongs to the trace that the client named in `traceparent`. Spans are made when a
turn is over, from the times that the engine measured, so that nothing is traced while tokens are made. What
was said is never in a trace. Without the extra, or without OTEL_EXPORTER_OTLP_ENDPOINT, nothing happens here.
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
    """Who is told of turns that are over."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """A turn is over."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class NoTraces:
    """Nobody wants traces."""

    def turn_ended(self, feed: TurnFeed) -> None:
        """Nothing is traced."""

    def close(self) -> None:
        """Nothing is left."""


class TurnTraces:
    """Turns as spans, given to a provider of OpenTelemetry's."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("holdfast")
        self._propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        self._trace = import_module("opentelemetry.trace")

    def turn_ended(self, feed: TurnFeed) -> None:
        """Make the spans of a turn that is over."""
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
        """Send what is left."""
        self._provider.shutdown()


def open_traces() -> Traces:
    """Traces as the environment asks for them; a missing extra is said so."""
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
