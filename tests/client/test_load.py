"""`holdfast bench sessions`: what it counts, and that a storm of cut turns leaves a real server empty."""

import json

import pytest

from holdfast.bench.url.load import Load, Sample, percentile
from holdfast.bench.url.summary import summarise
from holdfast.client import Client
from tests.client.scripted import Answer, Scripted, answer, refusal
from tests.client.test_commands import command


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.9, 90), (0.99, 99), (0.995, 100), (1.0, 100)]
)
def test_percentiles_are_values_that_were_measured(share: float, value: float) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value


def test_what_samples_come_to() -> None:
    samples = [
        Sample(0, [0.1, 0.2, 0.3], 0.4, tokens=3, prompt_tokens=9),
        Sample(1, [0.2, 0.4], 0.5, tokens=11, prompt_tokens=30, cached_tokens=20),
        Sample(1, [0.3], 0.3, tokens=1, cut=True),
        Sample(2, error="Conflict: busy"),
    ]
    figures = {figure["name"]: figure for figure in summarise(samples, 2.0, "sessions", "m", Load(idle=5))}
    assert (figures["ttft"]["p50"], figures["ttft"]["max"], figures["ttft"]["count"]) == (200.0, 300.0, 3)
    assert figures["ttft_later_turns"]["value"] == 200.0
    assert figures["inter_token"]["max"] == 100.0
    assert figures["turn"]["count"] == 2
    assert figures["throughput"]["value"] == 7.5
    assert figures["turns"]["value"] == 1.5
    assert figures["prompt_computed"]["value"] == 10.0
    assert (figures["cut_short"]["value"], figures["errors"]["value"]) == (1, 1)
    assert all(figure["idle"] == 5 and figure["system"] == "sessions" for figure in figures.values())


def test_a_storm_leaves_nothing_behind(client: Client, url: str) -> None:
    sizes = ("--sessions", "4", "--turns", "5", "--output-tokens", "160", "--aborts", "0.5", "--idle", "8")
    done = command("bench", "sessions", "--url", url, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    figures = {(line["system"], line["name"]): line for line in lines}
    for system in ("sessions", "chat"):
        assert figures[system, "errors"]["value"] == 0
        assert figures[system, "ttft"]["count"] == 20
        assert figures[system, "cut_short"]["value"] > 0
    assert figures["sessions", "findings"]["value"] == 0
    assert client.sessions() == []


def test_a_session_computes_only_what_is_new(client: Client, url: str) -> None:
    done = command(
        "bench", "sessions", "--url", url, "--api", "sessions", "--sessions", "2", "--turns", "8", "--json"
    )
    figures = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {line["system"] for line in figures.values()} == {"sessions"}
    # Thirty-two words of one byte a token, and the template around them: never the history.
    assert 32 < figures["prompt_computed"]["value"] < 350


def test_another_server_is_talked_to_over_chat() -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hel"}}]},
        {"choices": [{"index": 0, "delta": {"content": "lo"}}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
    ]
    body = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"
    streamed = Answer(200, (body,), {"content-type": "text/event-stream"})
    models = answer({"object": "list", "data": [{"id": "theirs"}]})
    with Scripted(models, refusal(404, "not_found"), streamed, refusal(500, "boom")) as server:
        done = command("bench", "sessions", "--url", server.url, "--sessions", "1", "--turns", "2", "--json")
    figures = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1, "a turn failed"
    assert (figures["errors"]["value"], figures["ttft"]["count"], figures["turn"]["count"]) == (1, 1, 1)
    asked = server.asked[-1].body
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert (asked["messages"][2]["content"], asked["model"]) == ("hello", "theirs")


def test_nobody_there() -> None:
    done = command("bench", "sessions", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("holdfast bench sessions: http://127.0.0.1:1: ")
