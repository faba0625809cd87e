"""Text processes: turns for tenants, replacements for those that die, bounds for templates that explode."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.engine.echo import echo_tokenizer
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.worker import vocabulary_of
from holdfast.server.prompts import SMALL_CHARACTERS, WAITLESS_BYTES, Prompts
from holdfast.server.text import jobs
from holdfast.server.text import lanes as text_lanes
from holdfast.server.text import process as text_process
from holdfast.server.text.lanes import Lane, TextProcess, TextProcessLost
from tests.server.conftest import Serve


class Worker:
    """Stands for a process: answers each job with its own text, or does what it was told to."""

    def __init__(self, done: list[str], act: Callable[[], Awaitable[None]] | None = None) -> None:
        self.done = done
        self.act = act
        self.killed = False

    async def ask(self, frame: jobs.Frame) -> jobs.Answer:
        job = jobs.decode_job(frame.message[jobs.LENGTHS.size :], frame.attached)
        assert isinstance(job, jobs.Text)
        if self.act is not None:
            await self.act()
        self.done.append(job.text)
        await asyncio.sleep(0)
        return jobs.Spelled(job.text)

    def kill(self) -> None:
        self.killed = True


class Hall:
    """A lane with workers that are started as they are needed."""

    def __init__(self, *acts: Callable[[], Awaitable[None]] | None, seconds: float = 60.0) -> None:
        self.done: list[str] = []
        self.workers: list[Worker] = []
        self.acts = list(acts)
        self.lane = Lane(self.start, seconds)

    async def start(self) -> Worker:
        self.workers.append(Worker(self.done, self.acts.pop(0) if self.acts else None))
        return self.workers[-1]

    def ask(self, text: str, tenant: str = "ann") -> "asyncio.Task[jobs.Answer]":
        return asyncio.create_task(self.lane.ask(jobs.Text(text, False), tenant))


async def lost() -> None:
    raise TextProcessLost("it died")


async def hang() -> None:
    await asyncio.Event().wait()


def test_tenants_take_turns() -> None:
    async def story() -> list[str]:
        hall = Hall()
        many = [hall.ask(f"a{number}") for number in range(4)]
        await asyncio.gather(*many, hall.ask("b0", "bob"), hall.ask("b1", "bob"), hall.ask("c0", "cat"))
        return hall.done

    assert asyncio.run(story()) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_process_that_dies_is_replaced_and_its_job_tried_once_more() -> None:
    async def story() -> Hall:
        hall = Hall(lost)
        assert await hall.ask("x") == jobs.Spelled("x")
        assert await hall.ask("y") == jobs.Spelled("y")
        return hall

    hall = asyncio.run(story())
    assert [worker.killed for worker in hall.workers] == [True, False]


def test_a_job_that_kills_processes_is_refused_and_the_next_is_done() -> None:
    async def story() -> Hall:
        hall = Hall(lost, lost)
        with pytest.raises(Problem) as caught:
            await hall.ask("x")
        assert (caught.value.status, caught.value.code) == (400, "tokenizer")
        assert await hall.ask("y") == jobs.Spelled("y")
        return hall

    assert len(asyncio.run(story()).workers) == 3


def test_a_job_that_takes_too_long_is_refused_and_its_process_killed() -> None:
    async def story() -> Hall:
        hall = Hall(hang, seconds=0.01)
        with pytest.raises(Problem) as caught:
            await hall.ask("x")
        assert (caught.value.status, caught.value.code) == (400, "tokenizer")
        assert await hall.ask("y") == jobs.Spelled("y")
        return hall

    assert [worker.killed for worker in asyncio.run(story()).workers] == [True, False]


def test_a_process_that_cannot_be_started_is_a_503() -> None:
    async def story() -> None:
        async def start() -> Worker:
            raise TextProcessLost("no memory")

        lane = Lane(start)
        for _ in range(2):
            with pytest.raises(Problem) as caught:
                await lane.ask(jobs.Text("x", False), "ann")
            assert caught.value.status == 503

    asyncio.run(story())


def test_what_waits_for_one_tenant_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lanes, "WAITING_BYTES_MAX", 100)

    async def story() -> None:
        hall = Hall()
        first = hall.ask("x" * 60)
        await asyncio.sleep(0)
        with pytest.raises(Problem) as caught:
            await hall.lane.ask(jobs.Text("x" * 60, False), "ann")
        assert caught.value.status == 429
        await asyncio.gather(first, hall.ask("y" * 60, "bob"))
        await hall.ask("z" * 60)

    asyncio.run(story())


def test_a_job_whose_client_has_gone_is_not_done() -> None:
    async def story() -> list[str]:
        hall = Hall()
        first, second, third = hall.ask("1"), hall.ask("2"), hall.ask("3")
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)
        return hall.done

    assert asyncio.run(story()) == ["1", "3"]


def test_the_end_of_a_lane_is_told() -> None:
    async def story() -> None:
        hall = Hall(hang)
        tasks = [hall.ask("1"), hall.ask("2", "bob")]
        for _ in range(5):
            await asyncio.sleep(0)
        hall.lane.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Problem) and result.status == 503
        with pytest.raises(Problem):
            await hall.ask("3")
        assert hall.workers[0].killed

    asyncio.run(story())


# --- prompts --------------------------------------------------------------------------------------


def vocabulary(template: str | None = None) -> wire.Vocabulary:
    made = vocabulary_of(echo_tokenizer())
    return made if template is None else wire.Vocabulary(made.encoder, template, made.names, made.eos_tokens)


def test_nothing_is_tokenised_in_the_server_and_small_inputs_have_a_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    async def story() -> None:
        prompts = Prompts(vocabulary(), 1 << 16)
        lanes = {id(prompts._small): "small", id(prompts._large): "large"}

        async def ask(lane: Lane, job: jobs.Job, tenant: str) -> jobs.Answer:
            asked.append((lanes[id(lane)], jobs.frame(job).size // 1000))
            assert tenant == "ann"
            return jobs.Written([1]) if isinstance(job, jobs.Chat) else jobs.Tokens([1])

        monkeypatch.setattr(Lane, "ask", ask)
        monkeypatch.setattr(prompts.tokenizer, "encode", None)
        monkeypatch.setattr(prompts.tokenizer, "encode_chat", None)
        await prompts.text("x" * SMALL_CHARACTERS, first=True, tenant="ann")
        await prompts.text("x" * (SMALL_CHARACTERS + 1), first=True, tenant="ann")
        said = [{"role": "user", "content": "x" * 20_000}]
        await prompts.chat(jobs.Chat(said, None, first=True), "ann")
        for attempt in (
            prompts.text("x" * (prompts.room.text_bytes + 1), first=True, tenant="ann"),
            prompts.chat(jobs.Chat([said[0]] * 40, None, first=True), "ann"),
        ):
            with pytest.raises(Problem) as caught:
                await attempt
            assert caught.value.code == "context_length_exceeded"

    asyncio.run(story())
    assert asked == [("small", 16), ("large", 16), ("large", 20)]


def test_a_large_body_does_not_wait_for_a_process_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    async def story() -> None:
        prompts = Prompts(vocabulary(), 1 << 16)
        lanes = {id(prompts._small): "small", id(prompts._large): "large"}
        up: set[str] = set()

        async def ask(lane: Lane, job: jobs.Job, _tenant: str) -> jobs.Answer:
            assert isinstance(job, jobs.Body)
            asked.append((lanes[id(lane)], len(job.content)))
            return jobs.Read(memoryview(b""))

        monkeypatch.setattr(Lane, "ask", ask)
        monkeypatch.setattr(Lane, "warm_up", lambda lane: up.add(lanes[id(lane)]))
        monkeypatch.setattr(Lane, "is_up", property(lambda lane: lanes[id(lane)] in up))
        for size in (WAITLESS_BYTES + 1, WAITLESS_BYTES, WAITLESS_BYTES):
            await prompts.read_body(memoryview(b" " * size))

    asyncio.run(story())
    assert asked == [
        ("large", WAITLESS_BYTES + 1),
        ("small", WAITLESS_BYTES),  # It has the other one started.
        ("large", WAITLESS_BYTES),
    ]


EXPLODING = {
    "a wide text": "{{ 'x'.ljust(4000000000) }}",
    "a wide number": "{{ '%4000000000d' % 1 }}",
    "a wide format": "{{ '{:>4000000000}'.format(1) }}",
    "doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "doubling of what is said": (
        "{% set ns = namespace(x=messages[0].content) %}"
        "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "endless output": (
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"
    ),
    "a wide filter": "{{ 'x' | center(4000000000) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a wide list": "{{ (range(99999) | list) * 10000 }}",
}


def test_templates_that_explode_are_refused_and_their_process_lives_on() -> None:
    cases = [
        f"{{% if messages[0].content == '{case}' %}}{exploding}{{% endif %}}"
        for case, exploding in EXPLODING.items()
    ]

    async def story() -> None:
        template = "".join(cases) + "{{ messages[0].content }}"
        setup = jobs.Setup(vocabulary(template), 1000, 256 << 20, 0.5, 60.0)
        process = await TextProcess.start(setup)
        try:
            for said in (*EXPLODING, "calm"):
                chat = jobs.Chat([{"role": "user", "content": said}], None, True)
                answer = await process.ask(jobs.frame(chat))
                if said in EXPLODING:
                    assert isinstance(answer, jobs.Refused) and answer.code == "chat_template", said
                else:
                    assert answer == jobs.Written(echo_tokenizer().encode("calm"))
        finally:
            process.kill()

    asyncio.run(story())


def test_a_template_takes_no_more_memory_than_it_may() -> None:
    most = 256 << 20

    async def story() -> None:
        wide = "{% if messages[0].content == 'much' %}{{ 'x'.ljust(1000000000) }}{% endif %}"
        template = wide + "{{ messages[0].content }}"
        process = await TextProcess.start(jobs.Setup(vocabulary(template), 1000, most, 10.0, 60.0))
        try:
            peaks = []
            for said in ("little", "much"):
                chat = jobs.Chat([{"role": "user", "content": said}], None, True)
                answer = await process.ask(jobs.frame(chat))
                status = Path(f"/proc/{process._transport.get_pid()}/status").read_text()
                peaks.append(int(status.partition("VmPeak:")[2].split()[0]) << 10)
            assert isinstance(answer, jobs.Refused) and "memory" in answer.message
            assert peaks[1] - peaks[0] <= most
        finally:
            process.kill()

    asyncio.run(story())


def test_a_job_that_fails_unexpectedly_is_answered_and_so_is_the_next() -> None:
    async def broken() -> None:
        raise RuntimeError("nobody expected that")

    async def story() -> None:
        hall = Hall(broken)
        with pytest.raises(Problem) as caught:
            await hall.ask("x")
        assert (caught.value.status, caught.value.code) == (503, "tokenizer_unavailable")
        assert await hall.ask("y") == jobs.Spelled("y")

    asyncio.run(story())


def test_a_process_that_was_killed_between_two_jobs_is_replaced(serve: Serve) -> None:
    server = serve("echo")
    body = {"model": "echo", "messages": [{"role": "user", "content": "again"}]}
    for _ in range(3):
        answer = server.post("/v1/chat/completions", body)
        assert answer.json()["choices"][0]["message"]["content"] == "again"
        before = server.children("holdfast.server.text.process")
        assert len(before) == 1
        os.kill(before[0], signal.SIGKILL)
        while before[0] in server.children("holdfast.server.text.process"):
            time.sleep(0.01)


def test_a_job_that_nobody_ends_is_ended_by_the_system() -> None:
    """As when the API process was killed while a template renders."""

    async def story() -> None:
        setup = jobs.Setup(vocabulary(EXPLODING["loops in loops"]), 1000, 256 << 20, 600.0, 1.0)
        process = await TextProcess.start(setup)
        try:
            chat = jobs.Chat([{"role": "user", "content": "x"}], None, True)
            with pytest.raises(TextProcessLost):
                await process.ask(jobs.frame(chat))
        finally:
            process.kill()

    asyncio.run(story())


def test_a_process_says_what_its_tokenizer_says() -> None:
    made = echo_tokenizer()
    messages = [{"role": "user", "content": "what <|end|> is"}]

    async def story() -> list[jobs.Answer]:
        process = await TextProcess.start(jobs.Setup(vocabulary(), 40, 256 << 20, 5.0, 60.0))
        try:
            asked = (
                jobs.Text("hé <|end|>", True),
                jobs.Chat(messages, None, True),
                jobs.Chat(messages, made.eos_tokens[0], False),
                jobs.Spell([1, 2, 256]),
                jobs.Text("x" * 41, True),
                jobs.Text("x" * 1_000_000, True),
                jobs.Body(memoryview(b'{"x": [1, 2.0, "y", null]}'), 100),
                jobs.Body(memoryview(b'{"y": 1, "x": [' + b"1," * 200 + b"1]}"), 100),
                jobs.Body(memoryview(b'{"x": ' + b"[" * 50_000), 100),
                jobs.Body(memoryview(b'{"x": 1' + b"0" * 30 + b"}"), 100),
                jobs.Body(memoryview(b'"\xff"'), 100),
            )
            return [await process.ask(jobs.frame(job)) for job in asked]
        finally:
            process.kill()

    answers = asyncio.run(story())
    assert answers[:4] == [
        jobs.Tokens(made.encode("hé <|end|>")),
        jobs.Written(made.encode_chat(messages)),
        jobs.Written(made.encode_continuation(messages, last_token=made.eos_tokens[0])),
        jobs.Spelled(made.decode([1, 2, 256], skip_special_tokens=False)),
    ]
    codes = [
        (answer.code, answer.tokens, answer.param) for answer in answers if isinstance(answer, jobs.Refused)
    ]
    assert codes == [
        ("context_length_exceeded", 41, None),
        ("context_length_exceeded", None, None),
        ("too_many_values", None, "x"),
        ("invalid_json", None, None),
        ("invalid_json", None, None),
        ("invalid_json", None, None),
    ]
    assert isinstance(answers[6], jobs.Read)


@pytest.mark.parametrize("kind", [jobs.Body, jobs.Read])
def test_content_is_attached_as_it_is(kind: type[jobs.Body | jobs.Read]) -> None:
    """The message has none of it, and both ends see the memory that they were given."""
    content = bytearray(1 << 20)
    more = (100,) if kind is jobs.Body else ()
    sent = jobs.frame(kind(memoryview(content), *more))
    assert sent.attached.obj is content and len(sent.message) < 100
    assert sent.size == len(sent.message) + len(content)
    assert jobs.LENGTHS.unpack_from(sent.message) == (len(sent.message) - jobs.LENGTHS.size, len(content))
    decode = jobs.decode_job if kind is jobs.Body else jobs.decode_answer
    found = decode(sent.message[jobs.LENGTHS.size :], sent.attached)
    assert isinstance(found, kind) and found.content.obj is content
    small = jobs.frame(jobs.Text("x", True))
    assert not small.attached and jobs.decode_job(
        small.message[jobs.LENGTHS.size :], small.attached
    ) == jobs.Text("x", True)


def test_other_tasks_have_turns_while_a_body_goes_to_a_process_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megabytes are written and read in portions, of which no two pass in one turn of the event loop."""
    size = 4 << 20
    values = ["x" * 1000] * (size // 1000)
    moved: dict[str, list[tuple[int, int]]] = {"written": [], "read": []}
    turn = 0

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    write, read = asyncio.StreamWriter.write, asyncio.StreamReader.readexactly

    def writing(sink: asyncio.StreamWriter, data: memoryview) -> None:
        moved["written"].append((turn, len(data)))
        write(sink, data)

    async def reading(source: asyncio.StreamReader, count: int) -> bytes:
        data = await read(source, count)
        moved["read"].append((turn, len(data)))
        return data

    async def story() -> jobs.Answer:
        process = await TextProcess.start(jobs.Setup(vocabulary(), 40, 256 << 20, 5.0, 60.0))
        others = asyncio.ensure_future(count_turns())
        monkeypatch.setattr(asyncio.StreamWriter, "write", writing)
        monkeypatch.setattr(asyncio.StreamReader, "readexactly", reading)
        try:
            return await process.ask(jobs.frame(jobs.Body(memoryview(json.dumps(values).encode()), 10_000)))
        finally:
            others.cancel()
            process.kill()

    answer = asyncio.run(story())
    assert isinstance(answer, jobs.Read) and msgspec.msgpack.decode(answer.content) == values
    for portions in moved.values():
        large = [(when, count) for when, count in portions if count > 100]
        assert sum(count for _, count in large) >= size
        assert max(count for _, count in large) <= size // 16
        assert len({when for when, _ in large}) == len(large)


class Unread(list[int]):
    """A list whose entries must not be looked at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is long enough by itself")


def test_values_are_counted_no_further_than_needed() -> None:
    assert text_process.count_values({"a": [1, {"b": None}]}, 100) == 7
    assert text_process.count_values(7, 100) == text_process.count_values([], 100) == 1
    assert text_process.count_values({"a": Unread(range(101))}, 100) == 104
    assert text_process.count_values([[1] * 50] * 50, 10) > 10
