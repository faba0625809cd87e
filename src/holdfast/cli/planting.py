"""The mutants of the simulations: the options that plant and list them, and their descriptions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.sim.planting import Mutant, Patcher, planted_of

__all__ = ["NO_MUTANT", "MutantOptions", "list_all", "planting", "reached_field", "say_reached"]

WHAT = "what"
HEADINGS = {WHAT: "what goes wrong"}


@dataclass(frozen=True, slots=True)
class MutantOptions:
    """The mutant to plant, or the wish to see all."""

    mutant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plant a known bug, which the simulation must find.")
    ] = None
    list_mutants: Annotated[bool, typer.Option("--list-mutants", help="List the known bugs.")] = False

    @property
    def replay(self) -> str:
        """The option that plants it again."""
        return "" if self.mutant is None else f" --mutant {self.mutant}"


NO_MUTANT = MutantOptions()


def planting(mutants: Mapping[str, Mutant], name: str | None) -> AbstractContextManager[Patcher | None]:
    """Plants the mutant that is named, if one is; an unknown name is a parse error."""
    if name is None:
        return nullcontext()
    if name not in mutants:
        near = difflib.get_close_matches(name, mutants, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise typer.BadParameter(f"unknown mutant {name!r}; {meant}--list-mutants shows them all")
    return planted_of(mutants, name)


def list_all(mutants: Mapping[str, Mutant], fields: Sequence[str], as_json: bool) -> None:
    """Print these fields of all mutants."""
    rows = [{name: str(getattr(mutant, name)) for name in fields} for mutant in mutants.values()]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = Table(title=f"{len(mutants)} mutants")
    for name in fields:
        table.add_column(HEADINGS.get(name, name))
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def reached_field(patcher: Patcher | None) -> dict[str, object]:
    """How often a planted mutant took effect, as a field of a summary."""
    return {} if patcher is None else {"mutant_reached": patcher.reached}


def say_reached(patcher: Patcher | None, caught: bool) -> None:
    """Print what became of a planted mutant."""
    if patcher is not None:
        typer.echo(f"the mutant was reached {patcher.reached} times, and {'' if caught else 'not '}caught")
