"""Where options come from: the line before the environment, that before the file, that before defaults."""

import os
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from holdfast.cli import chat, serve
from holdfast.cli.config import SECTIONS, ConfigError, config_paths, find_config, read_config
from holdfast.cli.options import (
    COMPANIONS,
    ENGINE_OPTIONS,
    SERVER_OPTIONS,
    option_kinds,
    parse_bytes,
    require_companions,
    takes_options,
    write_bytes,
)
from holdfast.cli.serve import make_server_options
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.server.http.keys import Keys
from holdfast.server.options import ServerOptions
from tests.preloaded.commands import run

Seen = list[tuple[str, dict[str, object], dict[str, object]]]


@pytest.fixture(autouse=True)
def nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, no configuration of the user's own, no variables."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def given(*arguments: str, name: str = "serve") -> tuple[str, dict[str, object], dict[str, object]]:
    """What reaches a command that takes all options."""
    seen: Seen = []
    app = typer.Typer(add_completion=False)

    @app.command(name)
    @takes_options
    def command(
        model: str = "small",
        engine_options: dict[str, object] | None = None,
        server_options: dict[str, object] | None = None,
    ) -> None:
        seen.append((model, engine_options or {}, server_options or {}))

    app(list(arguments), standalone_mode=False)
    return seen[0]


def test_nothing_said_is_nothing_given() -> None:
    assert given() == ("small", {}, {})


def test_the_line_goes_before_the_environment_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("holdfast.toml").write_text("page_size = 4\nkv_tokens = 5\nmax-running = 6\nport = 7\n")
    monkeypatch.setenv("HOLDFAST_PAGE_SIZE", "40")
    monkeypatch.setenv("HOLDFAST_KV_TOKENS", "50")
    model, engine, server = given("--page-size", "400")
    assert (model, server) == ("small", {"port": 7})
    assert engine == {"page_size": 400, "kv_tokens": 50, "max_running": 6}


def test_every_kind_of_value(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("holdfast.toml").write_text(
        'model = "big"\nhost_memory = "2K"\noverlap = false\nallow_anonymous = true\n'
        'cors_origin = ["http://a", "http://b"]\nbody_limit = 99\nmemory_fraction = 1\n'
    )
    assert given() == (
        "big",
        {"host_memory": 2048, "overlap": False, "memory_fraction": 1.0},
        {"allow_anonymous": True, "cors_origin": ["http://a", "http://b"], "body_limit": 99},
    )
    monkeypatch.setenv("HOLDFAST_CORS_ORIGIN", "http://c http://d")
    monkeypatch.setenv("HOLDFAST_API_KEYS", "secret")
    monkeypatch.setenv("HOLDFAST_API_KEYS_FILE", "keys.txt")
    server = given()[2]
    assert server["cors_origin"] == ["http://c", "http://d"]
    assert server["api_keys"] == "keys.txt"


def test_which_file_is_read(nothing_around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = nothing_around / "user" / "holdfast" / "holdfast.toml"
    user.parent.mkdir(parents=True)
    user.write_text("page_size = 1")
    assert given()[1] == {"page_size": 1}
    Path("holdfast.toml").write_text("page_size = 2")
    assert given()[1] == {"page_size": 2}
    other = nothing_around / "other.toml"
    other.write_text("page_size = 3")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(other))
    assert given()[1] == {"page_size": 3}
    Path("named.toml").write_text("page_size = 4")
    assert given("--config", "named.toml")[1] == {"page_size": 4}
    with pytest.raises(ConfigError, match="does not exist"):
        find_config(Path("absent.toml"))


def test_a_relative_configuration_directory_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification asks."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_paths()[-1] == Path.home() / ".config" / "holdfast" / "holdfast.toml"


def test_a_command_has_a_table_of_its_own() -> None:
    Path("holdfast.toml").write_text(
        'page_size = 2\n[chat]\npage_size = 8\nsystem = "s"\n[serve]\nport = 9\n'
    )
    assert given()[1:] == ({"page_size": 2}, {"port": 9})
    assert read_config(Path("holdfast.toml"), option_kinds(), ["chat"]) == {"page_size": 8, "system": "s"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("page_sice = 4", "unknown keys: page_sice (did you mean page_size?)"),
        ("zzz = 1\nyyy = 2", "unknown keys: zzz, yyy"),
        ("url = 'x'", "unknown keys: url"),
        ("[chat]\nurls = 'x'", "unknown keys: [chat] urls (did you mean url?)"),
        ("[server]\nport = 1", "unknown keys: server"),
        ("page_size = '4'", "page_size must be a whole number"),
        ("page_size = true", "page_size must be a whole number"),
        ("session_ttl = 'x'", "session_ttl must be a number"),
        ("overlap = 1", "overlap must be true or false"),
        ("host_memory = 1.5", "host_memory must be a whole number or a text"),
        ("cors_origin = [1]", "cors_origin must be a list of texts"),
        ("page_size = 1\npage-size = 1", "sets page_size twice"),
        ("page_size = ", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, said: str) -> None:
    path = Path("holdfast.toml")
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, option_kinds(), ["serve"])
    assert said in str(caught.value)
    assert "holdfast.toml" in str(caught.value)


def test_a_bad_file_ends_the_command_with_one_clear_line() -> None:
    Path("holdfast.toml").write_text("page_sice = 4")
    for command in ("serve", "chat"):
        done = run(command, text=True, timeout=240, env={**os.environ, "COLUMNS": "200"})
        assert done.returncode == 2
        assert "holdfast.toml has unknown keys: page_sice (did you mean page_size?)" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_tables_are_the_dataclasses() -> None:
    assert {option.name for option in ENGINE_OPTIONS} <= set(EngineOptions.__dataclass_fields__)
    assert {option.name for option in SERVER_OPTIONS} <= set(ServerOptions.__dataclass_fields__)
    assert not {option.name for option in ENGINE_OPTIONS} & {option.name for option in SERVER_OPTIONS}
    assert not set(SECTIONS["chat"]) & set(option_kinds())


@pytest.mark.parametrize("app", [chat.app, serve.app], ids=["chat", "serve"])
def test_every_option_can_be_given_in_all_ways(app: typer.Typer) -> None:
    """The model is an argument, whose variable `--model` shares; the file cannot name itself."""
    name = app.registered_commands[0].callback.__name__  # type: ignore[union-attr]
    in_a_file = {**option_kinds(), **SECTIONS[name]}
    parameters = {parameter.name: parameter for parameter in get_command(app).params}
    for parameter in ("help", "named_model"):
        parameters.pop(parameter, None)
    assert [name for name, parameter in parameters.items() if parameter.envvar is None] == []
    assert set(parameters) - {"config"} <= set(in_a_file)


@pytest.mark.parametrize(
    ("stated", "option"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "::"}, "host"),
        ({"host": "example.org"}, "host"),
        ({"api_keys": "absent.txt"}, "api_keys"),
        ({"api_keys": "none.txt"}, "api_keys"),
        ({"host": "0.0.0.0", "api_keys": "none.txt"}, "api_keys"),
        ({"port": 70000}, "port"),
        ({"log_level": "loud"}, "log_level"),
        ({"host": "0.0.0.0", "api_keys": "keys.txt", "allow_anonymous": True}, "allow_anonymous"),
    ],
)
def test_options_that_cannot_be_meant(stated: dict[str, object], option: str) -> None:
    Path("keys.txt").write_text("me:secret\n")
    Path("none.txt").write_text("# Nobody yet.\n")
    with pytest.raises(OptionError) as caught:
        Keys.read(make_server_options(stated))
    assert caught.value.option == option


@pytest.mark.parametrize(("name", "companion"), sorted(COMPANIONS.items()))
def test_an_option_without_its_companion_is_refused(name: str, companion: str) -> None:
    with pytest.raises(OptionError, match=f"needs --{companion}"):
        require_companions({name: 1})
    require_companions({name: 1, companion: "here"})
    require_companions({})


def test_options_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("keys.txt").write_text("me:secret\n")
    assert make_server_options({}) == ServerOptions()
    assert make_server_options({"host": "::1", "cors_origin": ["a"]}).cors_origin == ("a",)
    assert not Keys.read(make_server_options({})).required
    assert Keys.read(make_server_options({"host": "0.0.0.0", "api_keys": "keys.txt"})).required
    assert not Keys.read(make_server_options({"host": "0.0.0.0", "allow_anonymous": True})).required
    monkeypatch.setenv("HOLDFAST_API_KEYS", "secret")
    assert Keys.read(make_server_options({"host": "0.0.0.0"})).required


@pytest.mark.parametrize(
    ("count", "written"), [(0, "0"), (1000, "1000"), (1024, "1K"), (16 << 20, "16M"), (3 << 40, "3T")]
)
def test_sizes_are_shown_as_they_are_read(count: int, written: str) -> None:
    assert write_bytes(count) == written
    assert parse_bytes(written) == count
