"""Statements of the core whose removal nothing notices, each with the reason why it stays.

The soak test fails when a statement survives that is not listed here, and when a listed one is noticed.
Keys are those of `Statement.key`: file, function, text, and the occurrence of that text in the function.
"""

JUDGED = ("eviction.py", "forest.py", "lease_table.py", "prefix.py", "sharing.py")
"""Files that the soak test judges: every statement must be missed. The others are still to be judged."""

Key = tuple[str, str, str, int]

ACCEPTED: dict[Key, str] = {}
