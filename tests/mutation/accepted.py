"""Statements of the core whose removal nothing notices, each with the reason why it stays.

The soak test fails when a statement survives that is not listed here, and when a listed one is noticed.
Keys are those of `Statement.key`: file, function, text, and the occurrence of that text in the function.
"""

JUDGED = (
    "deadlines.py",
    "eviction.py",
    "forest.py",
    "holders.py",
    "lease_table.py",
    "points.py",
    "policy.py",
    "prefix.py",
    "queues.py",
    "registry.py",
    "requirements.py",
    "session.py",
    "sharing.py",
    "turn.py",
    "waiting.py",
)
"""Files that the soak test judges: every statement must be missed. The others are still to be judged."""

Key = tuple[str, str, str, int]

ACCEPTED: dict[Key, str] = {
    (
        "points.py",
        "give_down",
        "break",
        1,
    ): "Saves a walk over older points when no page is left to hand down.",
}
