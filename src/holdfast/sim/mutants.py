"""The registry of planted bugs: each is a failure that an engine shipped, and each must be caught.

`planted(name)` puts one into the core for as long as the context lasts. Tests plant them one at a time and
ask which check noticed; a simulation can run with one to see that its checks can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.sim.chat_mutants import CHAT_MUTANTS
from holdfast.sim.compute_mutants import COMPUTE_MUTANTS
from holdfast.sim.forced_mutants import FORCED_MUTANTS
from holdfast.sim.listening_mutants import LISTENING_MUTANTS
from holdfast.sim.memory_mutants import MEMORY_MUTANTS
from holdfast.sim.planting import Mutant, Patcher
from holdfast.sim.retention_mutants import RETENTION_MUTANTS
from holdfast.sim.step_mutants import STEP_MUTANTS
from holdfast.sim.tier_mutants import TIER_MUTANTS
from holdfast.sim.tree_mutants import TREE_MUTANTS
from holdfast.sim.turn_mutants import TURN_MUTANTS

__all__ = ["MUTANTS", "Mutant", "Patcher", "planted"]

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for mutant in (
        *MEMORY_MUTANTS,
        *TREE_MUTANTS,
        *TURN_MUTANTS,
        *STEP_MUTANTS,
        *FORCED_MUTANTS,
        *COMPUTE_MUTANTS,
        *CHAT_MUTANTS,
        *TIER_MUTANTS,
        *LISTENING_MUTANTS,
        *RETENTION_MUTANTS,
    )
}


@contextmanager
def planted(name: str) -> Iterator[Patcher]:
    """Plant one mutant; the patcher that is yielded counts how often the faulty site was reached."""
    if name not in MUTANTS:
        raise ValueError(f"unknown mutant {name!r}; known: {', '.join(MUTANTS)}")
    patcher = Patcher()
    try:
        MUTANTS[name].plant(patcher)
        yield patcher
    finally:
        patcher.restore()
