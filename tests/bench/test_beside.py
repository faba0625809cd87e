"""What `bench throughput`, `turns` and `abort` make of their systems: rounds, ratios, streams cut short."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.bench.beside import rounds
from holdfast.bench.beside.cases import abort, prefill, throughput, turns
from holdfast.bench.beside.http import HOST, BenchError, Timing, ask, stream
from holdfast.bench.beside.rounds import run
from holdfast.bench.beside.run import Limits, Others, make_systems, run_systems
from holdfast.bench.beside.systems import Conversation, LlamaServer, System, _HoldfastSession
from holdfast.bench.machine import ForeignLoad, processor_seconds, run_queue_seconds
from holdfast.bench.models import BenchModel
from holdfast.bench.prompts import prompt
from holdfast.bench.tables import comparison_table


class Clockwork:
    """A system whose answers take exactly as long as it says, without taking any time."""

    def __init__(self, name: str, first: float) -> None:
        self.name = name
        self.first = first
        self.asked: list[tuple[int, int]] = []
        self.left: list[int] = []

    async def start(self) -> None:
        raise AssertionError("started by whoever made it")

    async def stop(self) -> None:
        raise AssertionError("stopped by whoever made it")

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        assert len({tuple(each) for each in prompts}) == len(prompts), "no two streams share a prompt"
        self.asked += [(len(each), count) for each in prompts]
        return [Timing(self.first, self.first * 2) for _ in prompts]

    async def conversation(self) -> Conversation:
        return Talk(self)


class Talk:
    def __init__(self, system: Clockwork) -> None:
        self.system = system
        self.turn = 0

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        self.turn += 1
        if leave_after is not None:
            self.system.left.append(leave_after)
        return Timing(self.system.first * self.turn, 1.0)

    async def close(self) -> None:
        self.turn = 0


def ignore(_line: str) -> None:
    """Progress that is not shown."""


def measured(systems: Sequence[System], *cases: Any) -> tuple[list[dict[str, Any]], list[str]]:
    told: list[str] = []
    return asyncio.run(run(cases, systems, 3, told.append)).figures, told


def test_every_round_measures_every_system_and_the_first_does_not_count() -> None:
    ours, theirs = Clockwork("holdfast", 0.1), Clockwork("other", 0.4)
    figures, told = measured([ours, theirs], prefill(512))
    assert ours.asked == theirs.asked == [(512, 1)] * 4
    assert [("holdfast" in line) for line in told] == [True, False, False, True, True, False, False, True]
    mine, his = figures
    assert (mine["system"], mine["value"], mine["unit"]) == ("holdfast", 512 / 0.2, "tokens/s")
    assert mine["ratio_to_other"] == 4.0
    assert mine["rounds"] == his["rounds"] == 3
    assert "ratio_to_holdfast" not in his
    assert mine["foreign_load"] >= 0.0


def test_an_interruption_leaves_what_was_measured() -> None:
    class Interrupted(Clockwork):
        async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
            if len(self.asked) == 2:
                raise asyncio.CancelledError
            return await super().complete(prompts, count)

    systems = [Clockwork("holdfast", 0.1), Interrupted("other", 0.4)]
    measured = asyncio.run(run([prefill(16)], systems, 3, ignore))
    assert (measured.ended, measured.failed) == ("interrupted", False)
    assert [(figure["system"], figure["rounds"]) for figure in measured.figures] == [
        ("holdfast", 2),
        ("other", 1),
    ]
    assert measured.figures[0]["ratio_to_other"] == 4.0


def test_an_answer_that_is_broken_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would count as computed."""

    async def broken(_port: int, _path: str, _body: dict[str, Any]) -> Timing:
        return Timing(0.1, 0.2, [b'{"choices": []}', b'{"error": {"message": "no valid text"}}'])

    monkeypatch.setattr("holdfast.bench.beside.systems.stream", broken)
    with pytest.raises(BenchError, match=r"llama-server broke an answer off: .*no valid text"):
        asyncio.run(LlamaServer(Path("binary"), Path("model"), 1).complete([[1]], 4))


class Hanging(Clockwork):
    """A system that is started and stopped, and whose third answer never comes; it may send us a signal."""

    def __init__(self, name: str, number: int | None) -> None:
        super().__init__(name, 0.1)
        self.number = number
        self.running: list[bool] = []

    async def start(self) -> None:
        self.running.append(True)

    async def stop(self) -> None:
        if self.number is not None:
            os.kill(os.getpid(), self.number)  # A second time, while it stops.
            await asyncio.sleep(0.01)
        self.running.append(False)

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        if len(self.asked) == 2:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
            await asyncio.Event().wait()
        return await super().complete(prompts, count)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_systems_and_shows_what_was_measured(number: int) -> None:
    systems = [Hanging("holdfast", number), Hanging("other", number)]
    measured, came = asyncio.run(run_systems([prefill(16)], systems, Limits(3, 60.0, 1), ignore))
    assert came == number
    assert measured.ended == "interrupted"
    assert {figure["rounds"] for figure in measured.figures} == {1}
    assert [system.running for system in systems] == [[True, False]] * 2


def test_the_end_of_the_time_stops_the_systems_and_shows_what_was_measured() -> None:
    system = Hanging("holdfast", None)
    measured, came = asyncio.run(run_systems([prefill(16)], [system], Limits(3, 0.2 / 60, 1), ignore))
    assert came == 0
    assert measured.ended is not None and measured.ended.startswith("ended after")
    assert not measured.failed
    assert system.running == [True, False]


def test_a_system_that_fails_leaves_what_was_measured() -> None:
    class Failing(Clockwork):
        async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
            if len(self.asked) == 3:
                raise BenchError("gone")
            return await super().complete(prompts, count)

    systems = [Clockwork("holdfast", 0.1), Failing("other", 0.4)]
    measured = asyncio.run(run([prefill(16)], systems, 3, ignore))
    assert (measured.ended, measured.failed) == ("gone", True)
    assert {figure["rounds"] for figure in measured.figures} == {2}


def test_rounds_that_do_not_fit_into_the_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    class Slow(Clockwork):
        async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
            clock[0] += 10.0
            return await super().complete(prompts, count)

    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    measured = asyncio.run(run([prefill(16)], [Slow("holdfast", 0.1)], 1000, ignore, 35.0))
    assert measured.ended == "no time for more than 2 rounds"
    assert [figure["rounds"] for figure in measured.figures] == [2]


def test_batches_alone_are_asked_for_where_nothing_else_is_offered() -> None:
    ours, batching = Clockwork("holdfast", 0.25), Clockwork("generate_batch", 0.5)
    figures, _ = measured([ours, batching], throughput(1, 64, 9), throughput(2, 64, 9), prefill(16))
    assert len(ours.asked) == 4 * 4
    assert batching.asked == [(64, 4)] * 2 + [(64, 9)] * 6
    theirs = [figure for figure in figures if figure["system"] == "generate_batch"]
    assert {figure["streams"] for figure in theirs} == {2}


def test_throughput_asks_for_as_many_streams_as_said() -> None:
    ours = Clockwork("holdfast", 0.25)
    figures, _ = measured([ours], throughput(4, 64, 9))
    assert ours.asked == [(64, 4)] * 4 + [(64, 9)] * 12, "warming up takes less"
    named = {figure["name"]: figure for figure in figures}
    assert set(named) == {"throughput", "first_token", "between_tokens"}
    assert named["first_token"]["value"] == 250.0
    assert named["between_tokens"]["value"] == round(1e3 * 0.25 / 8, 3)
    assert named["throughput"]["streams"] == 4


def test_turns_show_those_that_were_asked_for() -> None:
    figures, _ = measured([Clockwork("holdfast", 0.01)], turns(5, 8, 8, [2, 5]))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values == {"first_token_of_turn_2": 20.0, "first_token_of_turn_5": 50.0}


def test_the_turn_after_an_abort_is_compared_with_normal_ones_among_them() -> None:
    ours = Clockwork("holdfast", 0.01)
    figures, _ = measured([ours], abort(6, 8, 10))
    assert ours.left == [5] * (2 + 3 * 6)
    values = {figure["name"]: figure["value"] for figure in figures}
    # Of the turns from 6 to 23, each longer than the one before, every third is normal: 6, 9, ... 21.
    assert values["first_token_of_a_turn"] == 135.0
    assert values["first_token_after_abort"] == 170.0
    assert values["after_abort_over_normal"] == round(17 / 13.5, 3)
    assert values["first_token_at_once_after_abort"] == 140.0
    assert values["at_once_after_abort_over_normal"] == round(14 / 13.5, 3)


def test_without_transformers_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    model = BenchModel(Path("model"))
    with pytest.raises(BenchError, match=r"pip install 'holdfast\[bench\]', or pass --alone"):
        make_systems([prefill(16)], model, Others(), 1)
    alone = make_systems([prefill(16)], model, Others(transformers=False), 1)
    assert [system.name for system in alone] == ["holdfast"]


def test_prompts_are_new_in_every_round() -> None:
    assert prompt(64, 1) != prompt(64, 2)
    assert prompt(64, 1) == prompt(64, 1)


def test_the_table_has_a_line_for_each_quantity() -> None:
    figures, _ = measured([Clockwork("holdfast", 0.1), Clockwork("other", 0.4)], prefill(16), prefill(32))
    table = comparison_table("throughput", figures, "model", 2)
    assert table.row_count == 2
    assert [column.header for column in table.columns][3:] == ["holdfast", "other", "to other", "foreign"]


EVENTS = b'data: {"token": 1}\n\n: a comment\n\ndata: {"token": 2}\n\ndata: {"token": 3}\n\ndata: [DONE]\n\n'


async def serve(answer: bytes) -> tuple[asyncio.Server, int, list[bytes]]:
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        heads.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, HOST, 0)
    return server, server.sockets[0].getsockname()[1], heads


def test_a_stream_is_noted_event_by_event_and_can_be_left() -> None:
    async def story() -> None:
        server, port, heads = await serve(b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n" + EVENTS)
        whole = await stream(port, "/path", {"prompt": [1, 2]})
        assert [payload["token"] for payload in whole.payloads()] == [1, 2, 3]
        assert 0 < whole.first <= whole.total
        assert heads[0].startswith(b"POST /path HTTP/1.1\r\n")
        assert json.loads(heads[0].partition(b"\r\n\r\n")[2]) == {"prompt": [1, 2]}
        left = await stream(port, "/path", {}, leave_after=2)
        assert len(left.events) == 2
        server.close()

    asyncio.run(story())


def test_a_refusal_is_an_error_with_its_words() -> None:
    async def story() -> None:
        server, port, _ = await serve(b'HTTP/1.1 429 Busy\r\n\r\n{"error": "too many"}')
        with pytest.raises(BenchError, match=r"429 Busy.*too many"):
            await stream(port, "/path", {})
        server.close()
        server, port, _ = await serve(b'HTTP/1.1 200 OK\r\n\r\n{"id": "s-1"}')
        assert await ask(port, "POST", "/v1/sessions", {}) == {"id": "s-1"}
        with pytest.raises(BenchError, match="without an event"):
            await stream(port, "/path", {})
        server.close()

    asyncio.run(story())


def test_a_session_that_is_busy_is_asked_again() -> None:
    async def story() -> None:
        answers = [
            b'HTTP/1.1 409 Conflict\r\n\r\n{"error": "busy"}',
            b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS,
        ]

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0))
            writer.close()

        server = await asyncio.start_server(handle, HOST, 0)
        session = _HoldfastSession(server.sockets[0].getsockname()[1], "s-1")
        timing = await session.say([1, 2, 3], 3)
        assert len(timing.events) == 3
        assert not answers
        server.close()

    asyncio.run(story())


def test_foreign_load_is_never_negative() -> None:
    assert ForeignLoad().cores() >= 0.0


def test_processor_time_of_a_process_counts_its_children() -> None:
    before = processor_seconds(os.getpid())
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert processor_seconds(os.getpid()) - before >= 0.2
        assert 0.2 <= processor_seconds(child.pid) < before + 10
        assert run_queue_seconds(child.pid) >= 0.0
        child.stdin.close()
