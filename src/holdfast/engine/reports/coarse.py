"""Other tenants' units as shown to one tenant: their total in a pool, rounded down to a sixteenth of it.

Only the units of others are rounded, never a total that includes the tenant's own: by allocating and freeing
its own units a tenant could move such a total over the nearest step, and derive the exact figure.
"""

from __future__ import annotations

__all__ = ["COARSE_PARTS", "coarse"]

COARSE_PARTS = 16


def coarse(units: int, size: int) -> int:
    """A number of units of a pool of `size`, as other tenants may know it."""
    part = max(1, size // COARSE_PARTS)
    return units // part * part
