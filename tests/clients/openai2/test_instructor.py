"""instructor: typed outputs in its default mode, which is a tool that must be called, and in its others."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI

from tests.clients.recording import Recorder
from tests.clients.shown import shows
from tests.clients.travel import Trip

MESSAGES = [{"role": "user", "content": "Plan a trip to Rome for two days."}]
PLAIN = {"model": "smollm2", "temperature": 0, "max_tokens": 300, "max_retries": 0}


def plain_client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)


@shows("instructor", "chat completions", "structured output")
def test_its_default_mode(url: str, recorder: Recorder) -> None:
    client = instructor.from_openai(plain_client(url))
    trip = client.chat.completions.create(response_model=Trip, messages=MESSAGES, **PLAIN)
    assert isinstance(trip, Trip)
    assert recorder.requests[-1]["tool_choice"]["function"]["name"] == "Trip"
    assert recorder.refused == []


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_its_other_modes_with_a_schema(url: str, recorder: Recorder, mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain_client(url), mode=mode)
    trip = client.chat.completions.create(response_model=Trip, messages=MESSAGES, **PLAIN)
    assert isinstance(trip, Trip)
    assert recorder.refused == []


@shows("instructor", "chat completions", "streamed calls")
def test_a_partial_output_grows(url: str, recorder: Recorder) -> None:
    client = instructor.from_openai(plain_client(url))
    seen = list(client.chat.completions.create_partial(response_model=Trip, messages=MESSAGES, **PLAIN))
    assert len(seen) > 1, "the arguments come in pieces"
    assert isinstance(Trip.model_validate(seen[-1].model_dump()), Trip)
    assert recorder.requests[-1]["stream"] is True


def test_parallel_outputs(url: str, recorder: Recorder) -> None:
    """The model is free to call the tool; where it does not, or talks for too long, instructor says so."""
    client = instructor.from_openai(plain_client(url), mode=instructor.Mode.PARALLEL_TOOLS)
    problem = ""
    try:
        trips = list(
            client.chat.completions.create(response_model=Iterable[Trip], messages=MESSAGES, **PLAIN)
        )
    except (IncompleteOutputException, InstructorRetryException) as error:
        trips, problem = [], str(error)
    assert trips or "No tool calls" in problem or "max_tokens" in problem
    assert all(isinstance(trip, Trip) for trip in trips)
    assert recorder.requests[-1]["tool_choice"] == "auto"
    assert recorder.refused == []
