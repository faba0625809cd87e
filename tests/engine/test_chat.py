"""`holdfast chat` as a real process in a pseudo-terminal: it answers, is interrupted, and goes on."""

import json
import re
from pathlib import Path

import pytest
import typer

from holdfast.cli.options import ENGINE_OPTIONS, parse_bytes, takes_options
from holdfast.engine.options import EngineOptions
from holdfast.engine.start.pull import PullError, pull
from tests.engine.terminal import Terminal
from tests.preloaded.commands import run

PROMPT = r"\d?> $"
COST = r"\[computed (\d+), cached (\d+), first token [\d.]+ s(?:, [\d.]+ tokens/s)?\]"
CUT = r"\[computed (\d+), cached (\d+), .*interrupted, (\d+) tokens kept\]"


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [int(group) for group in found.groups()]


def talk(directory: Path, *more: str) -> Terminal:
    """A model that speaks for long: only its context, or an interruption, ends an answer."""
    sizes = ("--context-length", "20000", "--kv-tokens", "40000", "--state-slots", "40")
    return Terminal("chat", str(directory), "--load-format", "dummy", "--temperature", "0", *sizes, *more)


@pytest.mark.parametrize("family", ["llama", "bamba"])
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_an_interrupted_conversation_goes_on(directories: dict[str, Path], family: str, overlap: str) -> None:
    with talk(directories[family], overlap, "--audit", "strict") as terminal:
        terminal.until(PROMPT)
        terminal.type("hello there\n")
        terminal.until(r"hello there\n[^\n]{3,}")
        terminal.interrupt()
        computed, cached, kept = numbers(CUT, terminal.until(CUT))
        assert cached == 0
        assert computed > 0 and kept > 0
        terminal.until(PROMPT)
        terminal.type("/memory\n")
        assert "0 findings" in terminal.until(PROMPT)
        terminal.type("and now?\n")
        terminal.until(r"now\?\n[^\n]{2,}")
        terminal.interrupt()
        _, cached, more = numbers(CUT, terminal.until(CUT))
        # A recurrent state cannot be cut: what was heard of a short first turn may be computed again.
        assert cached > 0 or family == "bamba"
        assert more > 0
        terminal.until(PROMPT)
        terminal.type("/rewind 3\n")
        terminal.until("the conversation has only 2 turns")
        terminal.until(PROMPT)
        terminal.type("/rewind\n")
        terminal.until("1 turns remain")
        terminal.until(PROMPT)
        terminal.type("/fork\n")
        terminal.until("conversation 2, 1 turns")
        terminal.until("2> $")
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


def test_answers_that_end_by_themselves(directories: dict[str, Path]) -> None:
    with talk(directories["llama"], "--max-tokens", "6", "--system", "Be brief.") as terminal:
        terminal.until(PROMPT)
        terminal.type("one\n")
        computed, cached = numbers(COST, terminal.until(COST))
        assert cached == 0
        terminal.until(PROMPT)
        terminal.type("two\n")
        again, cached = numbers(COST, terminal.until(COST))
        assert cached == computed + 6, "the prompt before, and its answer"
        assert again < computed
        terminal.until(PROMPT)
        terminal.type("/nonsense\n")
        terminal.until("unknown command /nonsense")
        terminal.until(PROMPT)
        terminal.type("/help\n")
        terminal.until("/rewind N")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.end()[0] == 0


def test_a_turn_that_is_refused_changes_nothing(directories: dict[str, Path]) -> None:
    short = ("--context-length", "64", "--max-tokens", "8")
    with Terminal("chat", str(directories["llama"]), "--load-format", "dummy", *short) as terminal:
        terminal.until(PROMPT)
        terminal.type("a\n")
        terminal.until(COST)
        terminal.until(PROMPT)
        terminal.type("far too many words " * 10 + "\n")
        terminal.until("the turn needs a context length of")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.end()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "said"),
    [
        (["nowhere"], {}, 1, "unknown model 'nowhere'"),
        (["--page-size", "300"], {}, 2, "--page-size must be at most 256, not 300"),
        ([], {"HOLDFAST_PAGE_SIZE": "300"}, 2, "--page-size must be at most 256, not 300"),
        (["--temperature", "-1"], {}, 2, "--temperature must be between"),
        ([], {"HOLDFAST_TEMPERATURE": "-1"}, 2, "--temperature must be between"),
        (["--load-format", "pickle"], {}, 2, "--load-format must be one of auto, dummy"),
    ],
)
def test_errors_are_one_clear_line(
    arguments: list[str], variables: dict[str, str], status: int, said: str
) -> None:
    with Terminal("chat", *arguments, environment=variables) as terminal:
        ended, shown = terminal.end()
    assert ended == status
    assert f"holdfast chat: {said}" in shown
    assert "Traceback" not in shown


def test_the_embedded_default_is_interrupted_and_goes_on() -> None:
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    with Terminal(
        "chat", "--temperature", "0", "--context-length", "1024", "--kv-tokens", "4096"
    ) as terminal:
        terminal.until(PROMPT)
        terminal.type("Count from one to one hundred in words.\n")
        terminal.until(r"words\.\n[^\n]{12,}")
        terminal.interrupt()
        kept = numbers(CUT, terminal.until(CUT))[2]
        assert kept >= 2
        terminal.until(PROMPT)
        terminal.type("Now name a colour.\n")
        cached = numbers(r"cached (\d+)", terminal.until(r"cached \d+.*\]"))[0]
        assert cached > 40, "the question, what was heard of the answer, and no more"
        terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


def test_tools_of_a_model_in_this_process(tmp_path: Path) -> None:
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "price", "parameters": parameters}}
    (tmp_path / "tools.json").write_text(json.dumps([tool]))
    options = ("--tools", str(tmp_path / "tools.json"), "--tool-choice", "price", "--max-tokens", "30")
    sizes = ("--temperature", "0", "--context-length", "1024", "--kv-tokens", "4096")
    with Terminal("chat", *options, *sizes) as terminal:
        terminal.until(PROMPT)
        terminal.type("What does Rome cost?\n")
        assert 'calls price {"city": "Rome"}\n' in terminal.until(r"result of price> $")
        terminal.type("120 euros\n")
        before = numbers(r"cached (\d+)", terminal.until(COST))[0]
        assert before > 100, "the tools, the question and the call are in memory"
        terminal.type("\x04\x04")
        assert terminal.end()[0] == 0


def test_a_format_in_this_process(tmp_path: Path) -> None:
    try:
        pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    (tmp_path / "format.json").write_text(json.dumps(schema))
    sizes = ("--context-length", "1024", "--kv-tokens", "4096", "--no-thinking")
    with Terminal("chat", "--response-format", str(tmp_path / "format.json"), *sizes) as terminal:
        terminal.until(PROMPT)
        terminal.type("Which city?\n")
        assert '{"city": "Rome"}\n' in terminal.until(COST)
        terminal.until(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


def test_pull_finds_what_is_in_the_cache() -> None:
    try:
        path = pull("smollm2")
    except PullError as error:
        pytest.skip(str(error))
    done = run("pull", "smollm2", text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(path))
    refused = run("pull", "gpt-9", text=True, timeout=60)
    assert refused.returncode == 1
    assert "holdfast pull: 'gpt-9' cannot be pulled; choose one of smollm2" in refused.stderr


def test_options_of_the_command_are_options_of_the_engine() -> None:
    assert {option.name for option in ENGINE_OPTIONS} <= set(EngineOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1.5 kb", 1536), ("2t", 2 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "4 Gigs", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


def test_only_what_was_given_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, object]]] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @takes_options
    def command(name: str, engine_options: dict[str, object] | None = None) -> None:
        seen.append((name, engine_options or {}))

    monkeypatch.setenv("HOLDFAST_KV_TOKENS", "99")
    app(["me", "--page-size", "8", "--no-overlap", "--host-memory", "2K"], standalone_mode=False)
    assert seen == [("me", {"page_size": 8, "kv_tokens": 99, "overlap": False, "host_memory": 2048})]
