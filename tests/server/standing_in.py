"""Stands in for an engine process that serves echo: tests of the API process alone, without steps."""

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.server.link import wire
from holdfast.server.link.worker import model_facts, vocabulary_of
from tests.server.test_service import ANN, Engine

__all__ = ["ANN", "EchoEngine"]


class EchoEngine(Engine):
    """An engine that is ready, with the model that says what it was told."""

    def __init__(self) -> None:
        super().__init__()
        loop = open_echo("echo", make_options())
        facts = model_facts(loop, "echo")
        self.service.supervisor.facts = facts
        self.service.engine_ready(wire.Ready(facts, vocabulary_of(loop.setup.tokenizer), []))

    def started(self) -> list[wire.StartTurn]:
        """The turns that it was asked to start."""
        return [command for command in self.asked if isinstance(command, wire.StartTurn)]

    def ended(self) -> list[int]:
        """The turns that it was told to end."""
        return [command.turn for command in self.asked if isinstance(command, wire.EndTurn)]
