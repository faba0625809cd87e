"""The table of sub-commands: names are unique, arguments arrive unread, and only what runs is imported."""

import sys
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import holdfast
from holdfast.cli import COMMANDS, Command, build


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command whose module exists only for the test and prints the arguments that reach it."""
    app = typer.Typer(add_completion=False)

    @app.callback()
    def group() -> None:
        """Echo."""

    @app.command("core")
    def core(words: list[str], json: bool = False) -> None:
        typer.echo(f"{words} {json}")
        raise typer.Exit(3)

    module = ModuleType("holdfast_echo")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "holdfast_echo", module)
    return Command("echo", "holdfast_echo", "Print the arguments.")


def test_version() -> None:
    result = CliRunner().invoke(build(), ["version"])
    assert (result.exit_code, result.output) == (0, f"{holdfast.__version__}\n")


def test_arguments_and_exit_status_pass_through(echo: Command) -> None:
    result = CliRunner().invoke(build((echo,)), ["echo", "core", "--json", "one", "--", "--two"])
    assert (result.exit_code, result.output) == (3, "['one', '--two'] True\n")


def test_help_belongs_to_the_command(echo: Command) -> None:
    result = CliRunner().invoke(build((echo,)), ["echo", "core", "--help"])
    assert result.exit_code == 0
    assert "holdfast echo core" in result.output


def test_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(build(), ["nothing-of-the-kind"]).exit_code == 2


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(build(), ["--help"])
    assert result.exit_code == 0
    assert all(command.name in result.output for command in COMMANDS)


def test_two_commands_of_one_name_are_refused(echo: Command) -> None:
    with pytest.raises(AssertionError, match="share a name"):
        build((echo, echo))


def test_a_module_is_imported_only_when_its_command_runs() -> None:
    absent = Command("absent", "holdfast_module_that_is_not_there", "Fails when it runs.")
    application = build((absent,))
    assert CliRunner().invoke(application, ["--help"]).exit_code == 0
    assert isinstance(CliRunner().invoke(application, ["absent"]).exception, ModuleNotFoundError)
