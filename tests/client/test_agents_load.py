"""`holdfast bench agents`: what the agents do, and what a real server computes for them."""

import json
import random
import sys
from pathlib import Path

import pytest

from holdfast.bench.agents.beside import context_of, sized
from holdfast.bench.agents.drive import summarise
from holdfast.bench.agents.workload import SYSTEM_SHARE, AgentLoad, plan, words_of
from holdfast.bench.models import write_model
from holdfast.bench.url.load import Sample
from holdfast.client import Client
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from tests.client.test_commands import command

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}


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


@pytest.mark.parametrize(
    "template", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["template", "bare"]
)
def test_a_load_runs_on_a_model_without_weights(tmp_path: Path, template: bool) -> None:
    model = write_model(tmp_path / "tiny", TINY)
    if not template:
        (model / "tokenizer_config.json").unlink()  # Only the configuration and the vocabulary are left.
    sizes = ("--sessions", "3", "--turns", "6", "--scale", "0.01", "--pause", "0", "--forks", "1")
    room = ("--fit", "3", "--load-format", "dummy", "--device", "cpu", "--host-memory", "16MiB")
    done = command(
        "bench",
        "agents",
        "--here",
        str(model),
        *sizes,
        "--output-tokens",
        "12",
        *room,
        "--in-process",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, dict[str, float]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        figures.setdefault(line["system"], {})[line["name"]] = line["value"]
    ways = {"in process", "holdfast sessions", *(("holdfast chat",) if template else ())}
    assert set(figures) == ways
    for found in figures.values():
        assert found["errors"] == 0 and found["output"] > 0 and found["computed"] > 0
        assert 0.5 < found["prefix_hits"] < 1
        assert found["prompt_tokens"] == pytest.approx(figures["in process"]["prompt_tokens"], rel=0.02)


def test_a_written_model_has_a_token_for_each_word_of_a_load(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(open_checkpoint(write_model(tmp_path / "tiny", TINY)))
    words = words_of(random.Random(1), 500)
    assert len(tokenizer.encode(words)) == 500
    tokens = range(640)  # All of its vocabulary.
    assert [token for token in tokens if not tokenizer.decode([token])] == tokenizer.encode(
        "<|end|><|start|>"
    )
    said = [{"role": "system", "content": words}, {"role": "user", "content": words}]
    assert 1000 < len(tokenizer.encode_chat(said)) < 1100


def test_stated_options_replace_the_room_for_so_many_sessions() -> None:
    load = AgentLoad(input_tokens=2800, output_tokens=86)
    chosen = sized("DIRECTORY", {}, load, 4)
    assert chosen["kv_tokens"] == 4 * chosen["context_length"] == 4 * context_of(load)
    assert sized("DIRECTORY", {"context_length": 5000, "page_size": 64}, load, 4) == {
        **chosen,
        "context_length": 5000,
        "session_tokens": 5000,
        "kv_tokens": 20_000,
        "page_size": 64,
    }
    assert context_of(load, "echo") > 4 * context_of(load), "letters"


@pytest.mark.parametrize("flag", ["--in-process", "--no-http", "--page-size=64"])
def test_options_of_an_engine_without_one_are_refused(flag: str) -> None:
    done = command("bench", "agents", flag)
    assert done.returncode == 1 and "--here MODEL" in done.stderr
