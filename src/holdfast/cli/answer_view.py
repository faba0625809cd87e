"""Shows one answer in a terminal: text as it comes, reasoning folded into a line, tool calls with arguments.

Reasoning is one dim line with its length, rewritten while it grows; with `expanded` it is shown as it comes.
Text of the model loses its control characters. Used by `terminal`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from holdfast.client.values import ToolCall, TurnEvent, TurnEventKind

__all__ = ["AnswerView", "printable"]

COMPLETE = "complete"


def printable(text: str) -> str:
    """Text without control characters."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


class AnswerView:
    """The answer on display. `reasoning` is the model's whole reasoning."""

    def __init__(self, console: Console, *, expanded: bool = False) -> None:
        self._console = console
        self._expanded = expanded
        self.reasoning = ""
        self._folded = False
        """Whether the line of the reasoning is the current one."""
        self._column = 0
        """Whether the current line has text: its length, or more."""

    def show(self, events: Iterable[TurnEvent]) -> bool:
        """Show new output; returns whether there was any."""
        shown = False
        for event in events:
            shown = True
            match event.kind:
                case TurnEventKind.REASONING:
                    self._think(event.text)
                case TurnEventKind.TEXT:
                    self._unfold()
                    self._say(event.text)
                case TurnEventKind.CALL:
                    assert event.call is not None, "a call begins with its name"
                    self._begin(event.call)
                case TurnEventKind.ARGUMENTS:
                    self._say(event.text)
                case TurnEventKind.CALL_DONE:
                    self._end(event.outcome)
        self._console.file.flush()
        return shown

    def close(self) -> None:
        """The answer is over: the next line begins."""
        self._unfold()
        self._break_line()

    def _think(self, text: str) -> None:
        self.reasoning += text
        if self._expanded:
            self._say(text, style="dim")
            return
        if not self._folded:
            self._break_line()
        self._folded = True
        if self._console.is_terminal:
            self._console.out(f"\r{self._folded_line()}", end="", style="dim", highlight=False)

    def _folded_line(self) -> str:
        return f"[thought {len(self.reasoning)} characters; /thinking shows them]"

    def _unfold(self) -> None:
        """End the line of the reasoning, or the expanded reasoning, before something else."""
        if self._folded:
            if not self._console.is_terminal:
                self._console.out(self._folded_line(), end="", highlight=False)
            self._console.out("", highlight=False)
            self._folded = False
        elif self._expanded and self.reasoning and self._column:
            self._break_line()
            self._expanded = False

    def _begin(self, call: ToolCall) -> None:
        self._unfold()
        self._break_line()
        self._console.out(f"calls {printable(call.name)} ", end="", style="bold cyan", highlight=False)
        self._column = 1

    def _end(self, outcome: str) -> None:
        if outcome != COMPLETE:
            self._console.out(f"  [{outcome}: not a whole call]", end="", style="red", highlight=False)
        self._break_line()

    def _say(self, text: str, style: str | None = None) -> None:
        clean = printable(text)
        self._console.out(clean, end="", style=style, highlight=False)
        if clean:
            self._column = 0 if clean.endswith("\n") else 1

    def _break_line(self) -> None:
        if self._column:
            self._console.out("", highlight=False)
            self._column = 0
