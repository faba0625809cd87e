"""What may stop a process whose clients wait for the next token: the garbage collector, and other threads.

A collection stops the process for about half a microsecond per object that it visits. What start-up
loaded is excluded, collections that run by themselves visit few objects, and full ones wait for idle time.
A thread that waits for the interpreter lock gets it after a fraction of a step, not after 5 ms: the loop
waits less for other threads, and the thread that fills masks begins at once.
"""

import gc
import sys

SWITCH_SECONDS = 0.0002
"""How long a thread keeps the interpreter lock while another waits for it."""

YOUNG_OBJECTS = 4_000
YOUNG_ROUNDS = 5
SURVIVORS_MIN = 5
"""Collections of the middle generation after which a full one is worth its time."""
SURVIVORS_MAX = 1_000
"""As many of them run a full collection although clients wait: cycles must not fill the memory."""


def bound_pauses() -> None:
    """Exclude the objects that exist, keep other collections short, and let threads take turns quickly."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, SURVIVORS_MAX)
    sys.setswitchinterval(SWITCH_SECONDS)


def collect_when_idle() -> None:
    """Run a full collection if enough objects have survived since the last; call it while no client waits."""
    if gc.get_count()[2] >= SURVIVORS_MIN:
        gc.collect()
