"""Options that belong together as one object: a command takes a dataclass, and gets an option for each field.

A field's annotation is what Typer reads, its default is the option's. The options stand in the help where the
parameter stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

__all__ = ["presented", "with_groups"]

Command = TypeVar("Command", bound=Callable[..., None])


def with_groups(command: Command) -> Command:
    """Give a command an option for each field of the dataclasses among its parameters."""
    own, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hints[name] for name in own.parameters if is_dataclass(hints[name])}
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        name = parameter.name
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        command(**arguments)

    return presented(command, run, parameters)


def presented(command: Command, run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Command:
    """`run` with the name and the help of `command`, and with these parameters, as Typer reads a command."""
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run  # type: ignore[return-value]


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(
            field.name,
            keyword_only,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
