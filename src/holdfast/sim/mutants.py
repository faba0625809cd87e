"""The registry of planted bugs: each is a failure that an engine shipped, and each must be caught.

`planted(name)` puts one into the core for as long as the context lasts. Tests plant them one at a time and
ask which check noticed; a simulation can run with one to see that its checks can fail.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from holdfast.sim.chat_mutants import CHAT_MUTANTS
from holdfast.sim.compute_mutants import COMPUTE_MUTANTS
from holdfast.sim.copy_mutants import COPY_MUTANTS
from holdfast.sim.forced_mutants import FORCED_MUTANTS
from holdfast.sim.listening_mutants import LISTENING_MUTANTS
from holdfast.sim.memory_mutants import MEMORY_MUTANTS
from holdfast.sim.planting import Mutant, Patcher, planted_of
from holdfast.sim.prefetch_mutants import PREFETCH_MUTANTS
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
        *COPY_MUTANTS,
        *PREFETCH_MUTANTS,
        *LISTENING_MUTANTS,
        *RETENTION_MUTANTS,
    )
}


def planted(name: str) -> AbstractContextManager[Patcher]:
    """Plant one mutant while the context lasts."""
    return planted_of(MUTANTS, name)
