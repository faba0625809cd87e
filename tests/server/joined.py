"""The API process's service and an engine in the test's own process, without sockets between them.

The service, its text processes and the engine are real; commands and reports are handed over as objects. So a
test can count the commands that a request sends and the tokens that the engine computes for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec

from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.startup import open_loop
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.http.keys import Caller
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.link.results import Outbox
from holdfast.server.link.worker import model_facts, vocabulary_of
from holdfast.server.options import ServerOptions
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, new_name
from holdfast.server.telemetry.metrics import Metrics
from holdfast.server.text.lanes import TextProcess
from holdfast.server.turn_request import Input, TurnAsked
from tests.preloaded.text import start_from_nursery

__all__ = ["ANN", "Joined", "Message", "joined"]

Message = dict[str, Any]
ANN = Caller("ann", admin=False)
SMALL = {"kv_tokens": 1 << 13, "window_tokens": 1 << 13, "state_slots": 64, "audit": "strict"}


class Joined:
    """One service on one engine."""

    def __init__(self, model: str, template: str | None, found_sessions: int, **options: object) -> None:
        outbox = Outbox()
        self.commands = EngineCommands(
            open_loop(model, make_options(**{**SMALL, **options}), None, outbox), outbox
        )
        self.loop = self.commands.loop
        self.service = Service(
            ServerOptions(seed=7, found_sessions=found_sessions),
            wire.Configure(model, {}),
            Metrics(),
            model,
            lambda *_: None,
        )
        self.sent: list[wire.Command] = []
        self.service.link.connect(self.take)
        self.connect(template)

    def connect(self, template: str | None = None) -> None:
        """Report that the engine is ready; `template` is used instead of the model's own."""
        facts = model_facts(self.loop, "model")
        vocabulary = vocabulary_of(self.loop.setup.tokenizer)
        if template is not None:
            vocabulary = msgspec.structs.replace(vocabulary, template=template)
        self.service.supervisor.facts = facts
        self.service.engine_ready(wire.Ready(facts, vocabulary, []))

    def take(self, command: wire.Command) -> None:
        """Take a command of the service."""
        self.sent.append(command)
        self.commands.receive(command)

    async def pump(self) -> None:
        """Step the engine while there is something to do, and hand its reports over; until cancelled."""
        while True:
            self.commands.retry()
            self.commands.report()
            if self.loop.busy:
                self.loop.step()
            for report in self.commands.take_reports():
                self.service.link.hear(report)
            await asyncio.sleep(0 if self.loop.busy else 0.002)

    # --- clients ----------------------------------------------------------------------------------

    async def start(self, messages: Sequence[Message], caller: Caller = ANN, **fields: Any) -> TurnFeed:
        """Start a conversation that is sent whole."""
        (feed,) = await self.service.start_requests(caller, [self.asked(messages, **fields)])
        return feed

    async def chat(self, messages: Sequence[Message], caller: Caller = ANN, **fields: Any) -> wire.End:
        """A conversation that is sent whole, to its end and its last row."""
        return await self.end_of(await self.start(messages, caller, **fields))

    async def say(self, record: SessionRecord, messages: Sequence[Message], **fields: Any) -> wire.End:
        """New messages on a session."""
        return await self.end_of(await self.service.start_turn(record, self.asked(messages, **fields)))

    async def end_of(self, feed: TurnFeed) -> wire.End:
        """The end of a turn, when the engine rests."""
        end = await feed.result()
        await self.rest()
        return end

    async def rest(self) -> None:
        """Wait until the engine has nothing to do."""
        while self.loop.busy or self.commands.waits:
            await asyncio.sleep(0)

    def asked(self, messages: Sequence[Message], **fields: Any) -> TurnAsked:
        """A request of a client; fields of its answer are those of `AnswerOptions`."""
        answer = {name: fields.pop(name) for name in list(fields) if name in AnswerOptions.__slots__}
        sampling = Sampling(**{"max_tokens": 200, "temperature": 0.0, **fields})
        return TurnAsked(
            Input(messages=list(messages)), sampling, new_name("c"), answer=AnswerOptions(**answer)
        )

    # --- what is counted --------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        """All tokens that the engine has computed."""
        return self.loop.scheduler.registry.counters.computed_tokens

    def how(self) -> dict[str, int]:
        """How sessions of conversations were found."""
        family = next(iter(self.service.metrics.conversations.collect()))
        return {
            sample.labels["how"]: int(sample.value)
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }

    def hidden(self) -> int:
        """Hidden sessions that the engine has."""
        return self.loop.scheduler.registry.volatile


def joined(
    story: Callable[[Joined], Awaitable[None]],
    model: str = "echo",
    template: str | None = None,
    found_sessions: int = 8,
    **options: object,
) -> None:
    """Tell a story with a service on an engine; afterwards the audit finds nothing."""

    async def run() -> None:
        world = Joined(model, template, found_sessions, **options)
        pump = asyncio.create_task(world.pump())
        try:
            await asyncio.wait_for(story(world), 120)
            await world.rest()
            assert world.loop.scheduler.recount() == []
            world.service.conversations.close_idle()
            await world.rest()
            assert world.hidden() == len(world.service.conversations) == 0
        finally:
            pump.cancel()
            world.service.close()

    with patch.object(TextProcess, "start", start_from_nursery):
        asyncio.run(run())
