"""`holdfast bench agents`: what the agents do, and what a real server computes for them."""

import json
import sys

import pytest

from holdfast.bench.agents.beside import context_of
from holdfast.bench.agents.drive import summarise
from holdfast.bench.agents.workload import SYSTEM_SHARE, AgentLoad, plan
from holdfast.bench.url.load import Sample
from holdfast.client import Client
from tests.client.test_commands import command


def test_a_plan_has_the_sizes_that_were_asked_for() -> None:
    load = AgentLoad(sessions=25)
    agents = plan(load)
    assert agents == plan(load) != plan(AgentLoad(sessions=25, seed=2))
    assert len(agents) == 25 and all(len(agent.steps) == 43 for agent in agents)
    assert sum(any(step.fork for step in agent.steps) for agent in agents) == 11  # 44 %
    for agent in agents:
        words = sum(step.words for step in agent.steps)
        assert words == pytest.approx(load.input_tokens * (1 - SYSTEM_SHARE), rel=0.01)
        assert sum(step.wanted for step in agent.steps) == pytest.approx(440, abs=43)
        assert not agent.steps[0].fork, "there is nothing to fork from yet"
        sizes = sorted(step.words for step in agent.steps)
        assert sizes[-1] > 3 * sizes[len(sizes) // 2] > 0, "results differ in size"


def test_what_turns_come_to() -> None:
    turns = [
        Sample(0, [0.1], 0.2, tokens=2, prompt_tokens=100),
        Sample(1, [0.3], 0.4, tokens=2, prompt_tokens=300, cached_tokens=290, known_tokens=102),
        Sample(2, [0.3], 0.4, tokens=2, prompt_tokens=300, cached_tokens=290, known_tokens=302),
        Sample(3, error="Conflict: busy", prompt_tokens=10**6),
    ]
    figures = {figure["name"]: figure["value"] for figure in summarise(turns, 4.0)}
    assert (figures["prefix_hits"], figures["computed_prompt"]) == (0.8286, 120)
    assert figures["computed_again"] == 12, "of the history of the third turn"
    assert (figures["ttft"], figures["turns"], figures["errors"]) == (300.0, 0.75, 1)


def test_a_session_computes_what_is_new_and_so_does_its_fork(client: Client, url: str) -> None:
    sizes = ("--sessions", "3", "--turns", "6", "--scale", "0.002", "--pause", "0", "--forks", "1")
    done = command("bench", "agents", "--url", url, *sizes, "--output-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    figures = {(line["system"], line["name"]): line["value"] for line in lines}
    for system in ("sessions", "chat"):
        assert figures[system, "errors"] == 0
        assert 0.5 < figures[system, "prefix_hits"] < 1
    assert client.sessions() == []


def test_servers_that_are_started_have_room_for_the_longest_conversation() -> None:
    load = AgentLoad(input_tokens=2800, output_tokens=86)
    longest = max(sum(step.words for step in agent.steps) for agent in plan(load))
    assert context_of(load) >= longest + load.output_tokens + load.turns * 10
    assert context_of(load) < 2 * longest


def test_a_llama_server_alone_is_refused() -> None:
    done = command("bench", "agents", "--llama-server", sys.executable)
    assert done.returncode == 1 and "--here MODEL" in done.stderr
