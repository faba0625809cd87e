"""The `--mutant` option of the simulations."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import typer

from holdfast.sim.planting import Mutant, Patcher, planted_of

__all__ = ["planting"]


def planting(mutants: Mapping[str, Mutant], name: str | None) -> AbstractContextManager[Patcher | None]:
    """Plants the mutant that is named, if one is; an unknown name is a parse error."""
    if name is None:
        return nullcontext()
    if name not in mutants:
        near = difflib.get_close_matches(name, mutants, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise typer.BadParameter(f"unknown mutant {name!r}; {meant}--list-mutants shows them all")
    return planted_of(mutants, name)
