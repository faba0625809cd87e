"""The sampling fields between the API process and the engine process: all declared fields, none renamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.engine.fields import declarations
from holdfast.engine.sampling import Sampling

__all__ = ["SamplingFields"]

MESSAGEPACK_TYPES: Mapping[Any, Any] = {
    str | Sequence[str]: list[str],
    Sequence[int]: list[int],
    Mapping[int, float]: dict[int, float],
}

if TYPE_CHECKING:

    class SamplingFields(msgspec.Struct):
        """The fields of `Sampling`, which checks them in both processes."""

        def __init__(self, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:

    def _fields() -> list[tuple[str, Any, Any]]:
        fields = []
        for name, each in declarations(Sampling).items():
            kind = MESSAGEPACK_TYPES.get(each.kind, each.kind)
            default = list(each.default) if isinstance(each.default, tuple) else each.default
            fields.append((name, kind | None if each.optional else kind, default))
        return fields

    SamplingFields = msgspec.defstruct(
        "SamplingFields", _fields(), module=__name__, omit_defaults=True, frozen=True
    )
