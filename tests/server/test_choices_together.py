"""All prompts and choices of one request are sent between two steps, and begin in one step.

The further choices of a prompt begin a step later: they share the memory of the first one's prompt.
"""

from holdfast.server.link import wire
from tests.server.joined import ANN, Joined, joined

CHOICES = 3
PROMPTS = ("one", "two", "three", "four")
TURNS = CHOICES * len(PROMPTS)


def test_the_prompts_and_choices_of_a_request_begin_together() -> None:
    async def story(world: Joined) -> None:
        taken: dict[int, int] = {}
        spoke: dict[int, int] = {}
        take, hear = world.take, world.service.link.hear

        def step() -> int:
            return world.loop.scheduler.registry.ledger.step

        def note_command(command: wire.Command) -> None:
            if isinstance(command, wire.StartTurn):
                taken[command.call] = step()
            take(command)

        def note_report(report: wire.Report) -> None:
            if isinstance(report, wire.Step):
                for delta in report.deltas:
                    spoke.setdefault(delta.turn, step())
            hear(report)

        await world.start([{"role": "user", "content": "on " * 40}], max_tokens=400, ignore_eos=True)
        before = step()
        world.service.link.connect(note_command)
        world.service.link.hear = note_report
        asked = [
            world.asked([{"role": "user", "content": said}], n=CHOICES, max_tokens=4, ignore_eos=True)
            for said in PROMPTS
        ]
        feeds = await world.service.start_requests(ANN, asked)
        for feed in feeds:
            await world.end_of(feed)
        assert step() > before, "the engine went on meanwhile"
        calls = [feed.call for feed in feeds]
        assert len(calls) == len(set(calls)) == TURNS
        assert len({taken[call] for call in calls}) == 1, "all commands came between two steps"
        first = spoke[calls[0]]
        assert [spoke[call] for call in calls] == [first, first + 1, first + 1] * len(PROMPTS)

    joined(story, max_running=64)
