"""Switches that the suites set while they start a server: kept, so that the launcher can see them."""

import contextlib
from collections.abc import Iterator


class Switch:
    """One of them."""

    def __init__(self) -> None:
        self.value: object = None

    @contextlib.contextmanager
    def override(self, value: object) -> Iterator[None]:
        """Set it for a while."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


class Switches:
    """All that the suites know."""

    def __init__(self) -> None:
        self.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY = Switch()
        self.SGLANG_CHECK_KV_PAGE_INVARIANTS = Switch()
        self.SGLANG_TEST_RETRACT = Switch()
        self.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = Switch()


envs = Switches()
