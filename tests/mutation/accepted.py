"""Statements of the core whose removal nothing notices, each with the reason why it stays.

The soak test fails when a statement survives that is not listed here, and when a listed one is noticed.
Keys are those of `Statement.key`: file, function, text, and the occurrence of that text in the function.
"""

JUDGED = (
    "__init__.py",
    "admission.py",
    "audit.py",
    "copies.py",
    "cuts.py",
    "deadlines.py",
    "errors.py",
    "events.py",
    "eviction.py",
    "fallback.py",
    "findings.py",
    "forest.py",
    "healing.py",
    "hold.py",
    "holders.py",
    "in_flight.py",
    "layout.py",
    "lease.py",
    "lease_table.py",
    "ledger.py",
    "listening.py",
    "lock_census.py",
    "moves.py",
    "node.py",
    "plan.py",
    "planner.py",
    "points.py",
    "policy.py",
    "pool.py",
    "prefetch.py",
    "prefix.py",
    "pressure.py",
    "prompts.py",
    "queues.py",
    "recalls.py",
    "registry.py",
    "requirements.py",
    "retention.py",
    "scheduler.py",
    "sequence.py",
    "session.py",
    "settler.py",
    "sharing.py",
    "slices.py",
    "step_size.py",
    "tiers.py",
    "tokens.py",
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
