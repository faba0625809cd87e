"""The reply to a verb, for callers in this process who wait for it."""

from __future__ import annotations

from holdfast.engine.listeners import Refusal

__all__ = ["Answer"]


class Answer:
    """The reply to a verb: `value` is its answer once it is `over`."""

    __slots__ = ("_refusal", "over", "value")

    def __init__(self) -> None:
        self.over = False
        self.value: object = None
        self._refusal: Refusal | None = None

    def done(self, session_id: str | None, answer: object = None) -> None:  # noqa: ARG002
        """The verb was carried out."""
        self.over, self.value = True, answer

    def refused(self, refusal: Refusal) -> None:
        """The verb was refused."""
        self.over, self._refusal = True, refusal

    def raise_refusal(self) -> None:
        """Raise why the verb was refused, if it was."""
        if self._refusal is not None:
            raise self._refusal
