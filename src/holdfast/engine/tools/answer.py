"""The specification and the result of parsing a turn's answer: plain values, for wire, journal and callers.

`AnswerSpec` goes with a turn to the engine, which parses the answer as it is generated. `Answer` is the
result: reasoning, text and tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.engine.tools.events import Call, Outcome

__all__ = ["Answer", "AnswerSpec"]


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """The formats of an answer, by their names in `formats`; None where it has no calls, or no reasoning.

    `tools` maps the offered tools to the JSON types of their parameters (`OfferedTools.types`).
    `reasoning_is_open` if the prompt ends inside the reasoning; `prompt_end` is the end of the prompt, for
    formats that look at it. After `thinking_tokens` tokens of reasoning
    its end marker is forced. Calls get ids from `seed`.
    """

    calls: str | None = None
    reasoning: str | None = None
    reasoning_is_open: bool = False
    thinking_tokens: int | None = None
    tools: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    seed: str = ""
    prompt_end: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its parts. `reasoning_tokens` were generated while the model reasoned.

    `call_ends` has, for each call, how many generated tokens there are up to its end.
    """

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    reasoning_tokens: int = 0
    call_ends: tuple[int, ...] = ()

    @property
    def complete_calls(self) -> tuple[Call, ...]:
        """The calls whose arguments are whole and valid."""
        return tuple(call for call in self.calls if call.outcome is Outcome.COMPLETE)
