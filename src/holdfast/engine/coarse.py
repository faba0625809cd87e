"""What one tenant may know of what the others hold: their total in a pool, rounded down to a sixteenth of it.

Only what others hold is rounded, never a total that includes the asker's own: by taking and giving back units
of its own a tenant could move such a total over the nearest step, and count from there.
"""

from __future__ import annotations

__all__ = ["COARSE_PARTS", "coarse"]

COARSE_PARTS = 16


def coarse(units: int, size: int) -> int:
    """A number of units of a pool of `size`, as other tenants may know it."""
    part = max(1, size // COARSE_PARTS)
    return units // part * part
