"""Ends server processes, and tells the suites what machine this is."""

from sglang.test.test_utils import end_by_pid

kill_process_tree = end_by_pid


def is_hip() -> bool:
    """Whether this is an AMD machine: nothing depends on it here."""
    return False
