"""Turn options: the declaration of a request's turn fields besides sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.engine.fields import Bound, declared

__all__ = ["TIMEOUT_MAX", "TurnOptions"]

TIMEOUT_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What becomes of a turn that ends early, how long it may take, and how its messages are read."""

    on_abort: Literal["rollback", "keep"] = declared(
        "rollback", None, "Whether an aborted turn is rolled back, or its tokens so far are kept."
    )
    timeout: float | None = declared(
        None, Bound(0.0, TIMEOUT_MAX, above=True), "Seconds after which the turn is aborted."
    )
    append_history: bool = declared(
        False, None, "Append the messages to the session even if they repeat a conversation from its start."
    )
    continue_final_message: bool = declared(
        False, None, "Continue the last message, which is the assistant's, instead of answering it."
    )
    add_generation_prompt: bool | None = declared(
        None,
        None,
        "End the prompt with the beginning of the assistant's answer, as the chat template writes it; true "
        "if left out, unless the last message is continued.",
    )

    @property
    def keeps(self) -> bool:
        """Whether an aborted turn keeps its tokens."""
        return self.on_abort == "keep"
