"""The model that is served: its facts and its prompt writer, once an engine has told them."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.server.http.problems import engine_unavailable
from holdfast.server.limits import Room
from holdfast.server.link import wire
from holdfast.server.prompts import Prompts
from holdfast.server.turn_writer import TurnWriter

__all__ = ["ServedModel"]


class ServedModel:
    """Facts and prompts of the model of all engines. Before the first is ready, to ask for them is a 503."""

    def __init__(self, find_facts: Callable[[], wire.ModelFacts | None]) -> None:
        """`find_facts`: what an engine has told of the model, or None."""
        self._find_facts = find_facts
        self._prompts: Prompts | None = None

    @property
    def is_known(self) -> bool:
        """Whether an engine was ready."""
        return self._prompts is not None

    @property
    def facts(self) -> wire.ModelFacts:
        """Facts about the served model."""
        facts = self._find_facts()
        if facts is None:
            raise engine_unavailable()
        return facts

    @property
    def prompts(self) -> Prompts:
        """The prompt writer of the served model."""
        if self._prompts is None:
            raise engine_unavailable()
        return self._prompts

    @property
    def room(self) -> Room | None:
        """What the context has room for; None before the model is known."""
        return None if self._prompts is None else self._prompts.room

    def writer(self) -> TurnWriter:
        """What writes turns for the model."""
        return TurnWriter(self.prompts, self.facts)

    def told(self, ready: wire.Ready) -> None:
        """An engine is ready. The first starts the text processes."""
        if self._prompts is None:
            facts = ready.facts
            self._prompts = Prompts(
                ready.vocabulary, facts.context_length, calls=facts.calls, reasoning=facts.reasoning
            )
            self._prompts.warm_up()

    def close(self) -> None:
        """End the text processes."""
        if self._prompts is not None:
            self._prompts.close()
