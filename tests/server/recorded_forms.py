"""What a recording keeps of an answer: its form, without texts and counts, and its ids in order."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["form_of", "ids_of", "read_events"]

_ID = re.compile(r'"((?:resp|msg|fc|rs|call|conv|toolu)_[0-9a-zA-Z]+)"')


def ids_of(answer: Any) -> list[str]:
    """The ids of an answer, each once, in their order."""
    return list(dict.fromkeys(_ID.findall(json.dumps(answer))))


def form_of(answer: Any) -> Any:
    """The form of an answer: kinds of its values; of a stream the kinds of its events, adjacent ones once."""
    if not isinstance(answer, list):
        return _kinds(answer)
    shown: list[Any] = []
    for event in answer:
        delta = event.get("delta")
        choices = [sorted(choice.get("delta", {})) for choice in event.get("choices", ())]
        kind = delta.get("type") if isinstance(delta, dict) else None
        entry = [event.get("type", "chunk"), event.get("output_index", event.get("index")), kind, choices]
        if not shown or shown[-1] != entry:
            shown.append(entry)
    return shown


def _kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kinds(inner) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [_kinds(inner) for inner in value]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def read_events(text: str) -> list[Any]:
    """The events of a stream, without its end mark."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
