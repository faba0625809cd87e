"""The commands that talk to a server, as real processes: `chat --url` in a terminal, and `top`."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cli.chat_local import chat_sampling
from holdfast.client import Client
from holdfast.engine.sampling import Sampling
from holdfast.models.generation import GenerationDefaults
from tests.client.scripted import Scripted, answer, delta, done, stream
from tests.client.serving import assert_nothing_is_held, serving
from tests.engine.terminal import Terminal
from tests.engine.tiny import write_model
from tests.preloaded.commands import run

NOBODY = "http://127.0.0.1:1"
PROMPT = r"\d?> $"
NAMES = {"serve", "sessions", "ls", "sim", "bench", "core"}
COST = r"\[computed (\d+), cached (\d+), first token [\d.]+ s(?:, [\d.]+ tokens/s)?\]"
CUT = r"\[computed (\d+), cached (\d+), .*interrupted, (\d+) tokens kept\]"


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables}
    return run(*arguments, text=True, timeout=240, env=settings)


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [int(group) for group in found.groups()]


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_chat_goes_on_after_bytes_that_are_no_text(url: str, encoding: str) -> None:
    """Neither a line that cannot be read nor an answer that cannot be shown ends the conversation."""
    told = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "chat", "--url", url, "--max-tokens", "8"],
        input=b"caf\xe9\n/\xff\nhello\n", capture_output=True, check=False, timeout=240,
        env={**os.environ, "COLUMNS": "200", "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    shown = told.stdout.decode()
    assert (told.returncode, told.stderr) == (0, b"")
    assert shown.count("the input is not valid text in this terminal's encoding") == 2
    assert len(re.findall(COST, shown)) == 1


def test_chat_with_a_server(client: Client, url: str) -> None:
    with Terminal("chat", "--url", url, "--max-tokens", "2000") as terminal:
        terminal.until(PROMPT)
        terminal.type("hello there\n")
        shown = terminal.until(COST)
        assert shown.count("hello there") == 2, "what was typed, and what was answered"
        computed, cached = numbers(COST, shown)
        assert (cached, computed > 0) == (0, True)
        terminal.until(PROMPT)
        terminal.type("again\n")
        assert numbers(COST, terminal.until(COST))[1] > computed
        terminal.until(PROMPT)
        terminal.type("/memory\n")
        assert "0 findings" in terminal.until(PROMPT)
        terminal.type("/rewind\n")
        terminal.until("1 turns remain")
        terminal.until(PROMPT)
        terminal.type("/fork\n")
        terminal.until("conversation 2, 1 turns")
        terminal.until("2> $")
        assert len(client.sessions()) == 2
        terminal.type("/rewind 9\n")
        terminal.until("the conversation has only 1 turn")
        terminal.until("2> $")
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0
    assert client.sessions() == [], "whoever leaves closes what was opened"


def test_a_server_is_interrupted(tmp_path: Path) -> None:
    """A model that speaks for long: only its context, or an interruption, ends an answer."""
    config = tmp_path / "holdfast.toml"
    model = str(write_model(tmp_path / "tiny", "llama"))
    sizes = ("--context-length", "20000", "--kv-tokens", "40000", "--load-format", "dummy")
    with serving(tmp_path / "log", model, *sizes, "--audit", "strict") as address:
        config.write_text(f'[chat]\nurl = "{address}"\nsystem = "Be brief."\ntemperature = 0\n')
        with Terminal("chat", "--config", str(config)) as terminal:
            terminal.until(PROMPT)
            terminal.type("hello there\n")
            terminal.until(r"hello there\n[^\n]{3,}")
            terminal.interrupt()
            computed, cached, kept = numbers(CUT, terminal.until(CUT))
            assert (cached, computed > 0, kept > 0) == (0, True, True)
            terminal.until(PROMPT)
            terminal.type("and now?\n")
            terminal.until(r"now\?\n[^\n]{2,}")
            terminal.interrupt()
            assert numbers(CUT, terminal.until(CUT))[1] >= computed + kept - 1
            terminal.until(PROMPT)
            terminal.type("\x04")
            assert terminal.end()[0] == 0
        with Client(address) as client:
            assert_nothing_is_held(client)


SILENT = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("suggested", "arguments", "sampling"),
    [
        (SILENT, [], {"temperature": 0.2, "top_p": 0.9}),
        (SILENT, ["--temperature", "0"], {"temperature": 0.0, "top_p": 0.9}),
        ({**SILENT, "temperature": 0.7}, [], {}),
        ({**SILENT, "top_k": 20}, ["--top-p", "0.5"], {"top_p": 0.5}),
        (None, [], {}),
    ],
)
def test_sampling_is_pleasant_where_the_model_suggests_none(
    suggested: dict[str, float | None] | None, arguments: list[str], sampling: dict[str, float]
) -> None:
    model: dict[str, object] = (
        {"id": "m"} if suggested is None else {"id": "m", "sampling_defaults": suggested}
    )
    spoken = stream(delta("hi", 1), done("hi", 1))
    answers = (answer({"data": [model]}), answer({"id": "s"}), spoken, answer({"id": "s"}))
    with Scripted(*answers) as server, Terminal("chat", "--url", server.url, *arguments) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until(COST)
        terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0
    assert server.asked[2].body["sampling"] == sampling


def test_sampling_is_pleasant_in_this_process_too() -> None:
    silent = GenerationDefaults((2,), repetition_penalty=1.1)
    chosen = chat_sampling(Sampling(top_p=0.5), silent)
    assert (chosen.temperature, chosen.top_p) == (0.2, 0.5)
    told = chat_sampling(Sampling(), GenerationDefaults((2,), top_k=5))
    assert (told.temperature, told.top_p) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "--model", "nowhere"], "holdfast chat: unknown model 'nowhere'"),
        (["top", "--url", NOBODY], f"holdfast top: {NOBODY}: "),
        (["top", "--url", NOBODY], "is a server running there? `holdfast serve` starts one"),
        (["chat", "--url", NOBODY], "is a server running there? `holdfast serve` starts one"),
        (["bench", "sessions", "--url", NOBODY], f"holdfast bench sessions: {NOBODY}: "),
        (["bench", "sessions", "--url", NOBODY], "is a server running there? `holdfast serve` starts one"),
        (["bench", "sessions", "--here", "nowhere"], "holdfast bench sessions: 'nowhere' cannot be pulled"),
        (["bench", "turns", "nowhere"], "holdfast bench turns: 'nowhere' cannot be pulled"),
        (["pull", "nowhere"], "holdfast pull: 'nowhere' cannot be pulled; choose one of smollm2"),
        (["sessions", "ls", "--journal", "{folder}/none"], "holdfast sessions: {folder}/none does not exist"),
        (
            ["sessions", "ls", "--journal", "{folder}/text"],
            "holdfast sessions: {folder}/text cannot be read as a journal",
        ),
    ],
)
def test_errors_are_one_clear_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no journal at all, and long enough to be looked at" * 8)
    done = command(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.returncode == 1
    assert said.format(folder=tmp_path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


CHAT_TALKS = "--url uses the model of a server"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "--url", "ftp://x"], "the address of a server begins with http"),
        (["chat", "--url", "http://x:many"], "the address of a server is such as http://127.0.0.1:8000"),
        (["chat", "some-model", "--url", "http://x"], CHAT_TALKS),
        (["chat", "--model", "m", "--url", "http://x"], CHAT_TALKS),
        (["top", "--url", "ftp://x"], "the address of a server begins with http"),
        (["chat", "echo", "--temperature", "-1"], "--temperature must be between 0.0 and 100.0"),
        (["chat", "echo", "--top-p", "7"], "--top-p must be more than 0.0 and at most 1.0"),
        (["chat", "--url", NOBODY, "--temperature", "-1"], "--temperature must be between 0.0 and 100.0"),
        (["chat", "--url", NOBODY, "--top-p", "7"], "--top-p must be more than 0.0 and at most 1.0"),
        (["chat", "--url", NOBODY, "--max-tokens", "-1"], "--max-tokens must be between 0 and"),
        (["chat", "nowhere", "--device", "tpu"], "--device must be one of auto, cpu, cuda, not 'tpu'"),
        (["chat", "nowhere", "--device", "cuda:99"], "--device cuda:99 cannot be used: torch finds "),
        (["chat", "nowhere", "--page-size", "0"], "--page-size must be a whole number of at least 1, not 0"),
        (["chat", "nowhere", "--durability", "fsync"], "--durability needs --journal"),
        (["chat", "nowhere", "--journal", ""], "--journal must name a file, not ''"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_anything_is_done(
    arguments: list[str], said: str
) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"holdfast {arguments[0]}: {said}")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_history_that_a_model_has_no_positions_for_is_not_measured(tmp_path: Path) -> None:
    done = command("bench", "sessions", "--here", str(write_model(tmp_path / "tiny")), "--history", "6000")
    assert done.returncode == 1
    assert "context_length must be at most 2048" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("holdfast bench sessions: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["--version"], "No such option: --version"),
        (["serve", "echo", "--port", "many"], "Invalid value for '--port'"),
        (["serve", "echo", "--no-such-option"], "No such option: --no-such-option"),
        (["serve", "echo", "--model", "smollm2"], "leave one out"),
        (["serve", "echo", "--host-memory", "x"], "'x' is not a size such as 512M or 4GiB"),
        (["serve", "--config", "/nonexistent.toml"], "/nonexistent.toml does not exist"),
        (["sessions", "ls"], "give the journal with --journal, or a server with --url"),
        (["bench", "nosuch"], "No such command 'nosuch'"),
        (["sim", "--mutant", "close-forgets-a-state-slot"], "did you mean close-forgets-state-slot?"),
        (["sim", "--layout", "round"], "unknown layout 'round'; known: dense, "),
        (["bench", "core", "--only", "speed"], "unknown: speed; known: turn, "),
    ],
)
def test_a_line_that_cannot_be_meant_says_how_to_learn_more(arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    called = " ".join(["holdfast", *(word for word in arguments[:2] if word in NAMES)])
    assert done.stderr.startswith(f"{called}: ")
    assert done.stderr.endswith(f"; see `{called} --help`\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["bench"], ["sessions"]])
def test_a_line_without_a_command_shows_those_there_are(arguments: list[str]) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Commands" in done.stdout


def test_a_server_that_wants_a_key_is_said_so(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "echo", environment={"HOLDFAST_API_KEYS": "alice:secret"}) as address:
        for arguments in (["chat"], ["top", "--once"]):
            done = command(*arguments, "--url", address)
            assert done.returncode == 1
            assert "give its key with --api-key or HOLDFAST_API_KEY" in done.stderr
            assert "is a server running" not in done.stderr
        assert command("top", "--once", "--url", address, "--api-key", "secret").returncode == 0


def test_a_model_on_the_line_goes_before_a_server_in_the_environment() -> None:
    done = command("chat", "nowhere", HOLDFAST_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "holdfast chat: unknown model 'nowhere'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--port", "0"], "unknown model 'nowhere'"),
        (["--model", "nowhere", "--port", "0"], "unknown model 'nowhere'"),
        (
            ["echo", "--port", "{taken}"],
            "--port {taken} on 127.0.0.1 is not available: Address already in use; ",
        ),
        (
            ["echo", "--host", "192.0.2.1", "--allow-anonymous"],
            "--host 192.0.2.1 is not an address of this machine",
        ),
        (["echo", "--journal", "/proc/none/journal", "--port", "0"], "--journal cannot be used: "),
        (["echo", "--disk", "/proc/none", "--port", "0"], "--disk cannot be used: "),
        (
            ["{folder}", "--device", "tpu", "--port", "0"],
            "--device must be one of auto, cpu, cuda, not 'tpu'",
        ),
        (
            ["echo", "--host", "0.0.0.0"],
            "--host 0.0.0.0 is reachable from other machines, and there are no keys",
        ),
        (["echo", "--durability", "fsync"], "--durability needs --journal"),
        (["echo", "--page-size", "300"], "--page-size must be at most 256, not 300"),
        (["echo", "--journal", ""], "--journal must name a file, not ''"),
        (["echo", "--journal", "."], "--journal must name a file, not '.'"),
        (["echo", "--disk", ""], "--disk must name a directory, not ''"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], said: str, tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = str(busy.getsockname()[1])
        done = command("serve", *(argument.format(taken=taken, folder=tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith(f"holdfast serve: {said.format(taken=taken)}")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("version",), ("serve", "--help")])
def test_output_that_nobody_can_keep_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "holdfast: No space left on device: standard output\n"


def wait_until_quiet(client: Client) -> None:
    """The engine tells its figures once a second: wait for those that no longer count a turn."""
    deadline = time.monotonic() + 120.0
    while client.metrics().get("holdfast_turns_running") != 0.0:
        assert time.monotonic() < deadline, "a turn is said to run that has ended"
        time.sleep(0.1)


def test_top_once(client: Client, url: str) -> None:
    with client.session(id="watched") as session:
        session.say("hello", max_tokens=50).wait()
        wait_until_quiet(client)
        done = command("top", "--url", url, "--once")
        assert done.returncode == 0, done.stderr
        assert f"{url}  echo  sessions 1  running 0  queued 0" in done.stdout
        assert "0 findings" in done.stdout
        assert re.search(r"watched\s+│\s+IDLE\s+│\s+device\s+│\s+1 ", done.stdout)
        assert re.search(r"full\s+│\s+device\s+│\s+4096 pages", done.stdout)


def test_top_shows_a_session_that_listens(client: Client, url: str) -> None:
    with client.session(id="hearing") as session:
        session.append("many words that are computed before the last one has been said ")
        deadline = time.monotonic() + 60
        while (view := session.view()).tokens_ahead < 8:
            assert time.monotonic() < deadline, "nothing is computed ahead"
            time.sleep(0.05)
        assert view.state == "LISTENING" and view.tokens_heard >= view.tokens_ahead and view.tokens_known == 0
        row = rf"hearing\s+│\s+LISTENING .*│\s+{view.tokens_heard} \(\d+ computed\) "
        done = command("top", "--url", url, "--once", COLUMNS="140")
        assert "listening 1" in done.stdout
        assert re.search(row, done.stdout)
        lines = command("top", "--json", "--once", HOLDFAST_URL=url).stdout.splitlines()
        values = {line["name"]: line["value"] for line in map(json.loads, lines)}
        assert (values["listening"], values["heard"]) == (1, view.tokens_heard)
        listed = command("sessions", "ls", "--url", url, COLUMNS="140")
        assert re.search(row, listed.stdout)
        (shown,) = map(json.loads, command("sessions", "ls", "--url", url, "--json").stdout.splitlines())
        assert (shown["id"], shown["state"], shown["heard"]) == ("hearing", "LISTENING", view.tokens_heard)


def test_top_as_json(client: Client, url: str) -> None:
    with client.session() as session:
        session.say("hello", max_tokens=50).wait()
        wait_until_quiet(client)
        lines = [
            json.loads(line)
            for line in command("top", "--json", "--once", HOLDFAST_URL=url).stdout.splitlines()
        ]
        assert all({"name", "value", "unit", "url", "step"} <= line.keys() for line in lines)
        values = {line["name"]: line["value"] for line in lines}
        assert (values["sessions"], values["running"], values["findings"]) == (1, 0, 0)
        pages = {
            line["holder"]: line["value"]
            for line in lines
            if (line["name"], line.get("component"), line.get("tier")) == ("units", "full", "device")
        }
        assert sum(pages.values()) == 4096
        assert pages["SESSION"] >= 1


def test_top_watches_until_it_is_interrupted(client: Client, url: str) -> None:
    with Terminal("top", "--url", url, "--interval", "0.1") as terminal:
        terminal.until("sessions 0")
        with client.session(id="new"):
            terminal.until("sessions 1")
            terminal.until("new")
            terminal.until(r"tokens/s")
        terminal.interrupt()
        assert terminal.end()[0] == 0
