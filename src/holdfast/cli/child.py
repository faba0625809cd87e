"""Runs the `holdfast` command as a child that does not outlive its parent.

`python -m holdfast.cli.child PARENT engine …` is `holdfast engine …` that gets SIGTERM when the process
PARENT ends, however that ends: an engine without its replica would go on under a name that its successor
needs. It drains as it does at any SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from holdfast.cli import main

__all__ = ["end_with_parent"]

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel send a signal when the parent ends; exits if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one has ended")


if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    main()
