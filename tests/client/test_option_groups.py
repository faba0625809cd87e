"""Commands that take dataclasses: an option for each field, and the object as it was given."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from holdfast.cli.option_groups import with_groups

SEEN: list[object] = []


@dataclass(frozen=True)
class Sizes:
    width: Annotated[int, typer.Option(min=1, help="How wide.")] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True)
class Place:
    at: Annotated[str, typer.Argument()]
    deep: Annotated[bool, typer.Option("--deep")] = False


SIZES = Sizes()


@with_groups
def command(place: Place, plain: Annotated[int, typer.Option()] = 1, sizes: Sizes = SIZES) -> None:
    """Look."""
    SEEN.append((place, plain, sizes))


app = typer.Typer(add_completion=False)
app.command()(command)


def test_fields_are_options_in_the_place_of_their_group() -> None:
    run = CliRunner().invoke(app, ["here", "--width", "5", "--name", "a", "--name", "b", "--deep"])
    assert run.exit_code == 0, run.output
    assert SEEN.pop() == (Place("here", True), 1, Sizes(5, ["a", "b"]))
    assert CliRunner().invoke(app, ["there", "--plain", "2"]).exit_code == 0
    assert SEEN.pop() == (Place("there"), 2, Sizes())
    shown = CliRunner().invoke(app, ["--help"]).output
    assert [shown.index(each) for each in ("--deep", "--plain", "--width", "--name")] == sorted(
        shown.index(each) for each in ("--deep", "--plain", "--width", "--name")
    )
    assert "Look." in shown and "How wide." in shown


def test_a_field_s_own_limits_hold() -> None:
    run = CliRunner().invoke(app, ["here", "--width", "0"])
    assert run.exit_code == 2 and not SEEN
