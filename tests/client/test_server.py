"""Both clients against a real server process: sessions, turns, interruptions, rewinds, forks, errors."""

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from holdfast.client import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    ConnectionFailed,
    NotFound,
    Retries,
    Unauthorized,
)
from tests.client.serving import serving

LONG = 30_000


def test_a_conversation(client: Client) -> None:
    with client.session(system="Be brief.", ttl=60, metadata={"who": "me"}) as session:
        first = session.say("one two three", max_tokens=50)
        assert "".join(first) == first.text == "one two three"
        assert first.finish_reason == "stop"
        assert first.usage.cached_tokens == 0
        assert first.timing.total_ms is not None
        second = session.say("four", max_tokens=50)
        assert second.text == "four"
        assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        view = session.view()
        assert (view.turns, view.ttl, view.metadata) == (2, 60, {"who": "me"})
        assert view.state in ("IDLE", "SEALING"), "the last token may still be on its way into memory"
        assert [listed.id for listed in client.sessions()] == [session.id]
        again = client.resume(session.id)
        assert again.turns == 2


def test_what_can_be_said(client: Client) -> None:
    with client.session() as session:
        assert session.say([{"role": "user", "content": "hello"}], max_tokens=50).text == "hello"
        assert len(session.say([104, 105, 106], max_tokens=2).token_ids) == 2
        assert session.say("stop here. no further", stop=".", max_tokens=50).text == "stop here"


def test_an_interrupted_turn_keeps_what_was_heard(client: Client) -> None:
    with client.session() as session:
        turn = session.say("tell me a long story ", max_tokens=LONG, ignore_eos=True)
        heard = "".join(next(turn) for _ in range(3))
        tokens = turn.tokens_shown
        session.interrupt()
        assert turn.text == heard
        assert (len(turn.token_ids), turn.finish_reason) == (tokens, "abort")
        view = session.view()
        assert (view.turns, view.tokens_known) == (1, turn.usage.prompt_tokens + tokens)
        following = session.say("and then?", max_tokens=50)
        assert following.usage.cached_tokens >= turn.usage.prompt_tokens


@pytest.mark.parametrize(("keep", "turns", "tokens"), [("none", 0, 0), ("all", 1, 9), (4, 1, 4), (0, 1, 0)])
def test_a_finished_turn_is_cut(client: Client, keep: int | str, turns: int, tokens: int) -> None:
    with client.session() as session:
        turn = session.say("abcdefghi", max_tokens=9)
        turn.wait()
        session.interrupt(keep)  # type: ignore[arg-type]
        assert len(turn.token_ids) == tokens
        view = session.view()
        assert view.turns == turns
        assert view.tokens_known == (turn.usage.prompt_tokens + tokens if turns else 0)


def test_one_thread_interrupts_what_another_reads(client: Client) -> None:
    with client.session() as session:
        turn = session.say("on and on ", max_tokens=LONG, ignore_eos=True)
        begun, pieces = threading.Event(), []

        def read() -> None:
            for piece in turn:
                pieces.append(piece)
                if turn.tokens_shown >= 5:
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        session.interrupt(keep=5)
        reader.join(60)
        assert not reader.is_alive()
        assert (turn.finish_reason, len(turn.token_ids)) == ("abort", 5)
        assert session.turns == 1


@pytest.mark.parametrize("on_abort", ["rollback", "keep"])
def test_a_turn_that_is_left_is_ended_as_it_asked(client: Client, on_abort: str) -> None:
    with client.session() as session:
        session.say("first", max_tokens=50).wait()
        with session.say("x ", max_tokens=LONG, ignore_eos=True, on_abort=on_abort) as turn:  # type: ignore[arg-type]
            next(turn)
        following = _when_idle(session, "next")
        assert following.text == "next"
        assert session.turns == (2 if on_abort == "rollback" else 3)


def _when_idle(session, words):  # type: ignore[no-untyped-def]
    """Say something as soon as the server has noticed that the turn before was left."""
    for _ in range(1000):
        try:
            turn = session.say(words, max_tokens=50)
            turn.wait()
            return turn
        except Conflict:
            continue
    raise AssertionError("the session stays busy")


def test_rewind_and_fork(client: Client) -> None:
    with client.session() as session:
        for words in ("one", "two", "three"):
            session.say(words, max_tokens=50).wait()
        with session.fork(at_turn=1) as early, session.fork() as late:
            assert (early.turns, late.turns, session.turns) == (1, 3, 3)
            assert early.say("other", max_tokens=50).text == "other"
            assert session.rewind(2).turns == 2
            assert late.turns == 3
            assert len(client.sessions()) == 3


def test_spill_and_restore(client: Client) -> None:
    with client.session() as session:
        first = session.say("to be kept for long " * 8, max_tokens=50)
        first.wait()
        assert session.spill("host").tier == "host"
        with pytest.raises(Conflict) as there:
            session.spill("disk")
        assert there.value.code == "cannot_spill"
        assert session.restore().tier == "device"
        second = session.say("and?", max_tokens=50)
        assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        session.spill()
        assert session.say("comes back by itself", max_tokens=50).usage.cached_tokens > 0


def test_turn_ids_are_applied_once(client: Client) -> None:
    with client.session() as session:
        first = session.say("only once", turn_id="t-a", max_tokens=50)
        first.wait()
        again = session.say("only once", turn_id="t-a", max_tokens=50)
        assert (again.text, again.token_ids) == (first.text, first.token_ids)
        assert session.turns == 1
        with pytest.raises(Conflict) as caught:
            session.say("something else", turn_id="t-a", max_tokens=50)
        assert (caught.value.code, caught.value.param) == ("turn_conflict", "turn_id")


def test_refusals_are_typed_and_change_nothing(client: Client) -> None:
    with client.session() as session:
        before = session.view()
        with pytest.raises(BadRequest) as bad:
            session.say("x", temperature=-1.0)
        assert (bad.value.status, bad.value.param) == (400, "sampling.temperature")
        assert bad.value.request_id
        with pytest.raises(BadRequest) as long:
            session.say("x", max_tokens=10**6)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(BadRequest) as empty:
            session.say("")
        assert empty.value.code == "empty_turn"
        with pytest.raises(NotFound) as far:
            session.rewind(7)
        assert far.value.code == "turn_not_found"
        with pytest.raises(Conflict):
            client.session(id=session.id)
        running = session.say("x ", max_tokens=LONG, ignore_eos=True)
        with pytest.raises(Conflict) as busy:
            session.say("y", max_tokens=5)
        assert busy.value.code == "session_busy"
        session.interrupt("none")
        running.wait()
        after = session.view()
        assert (after.turns, after.tokens_known) == (before.turns, before.tokens_known)
    with pytest.raises(NotFound):
        session.view()
    session.close()


def test_completions_models_and_metrics(client: Client) -> None:
    assert client.models() == ["echo"]
    one = client.generate("say this", max_tokens=50)
    assert one.text == "say this"
    assert one.usage.completion_tokens == len("say this") + 1
    two = client.generate(["a b", "c d e"], max_tokens=3)
    assert two.texts == ("a b", "c d")
    assert two.finish_reasons[1] == "length"
    with client.session() as session:
        tokens = session.say("by tokens", max_tokens=9).token_ids
    assert client.generate(tokens, max_tokens=9).text == "by tokens"
    assert client.metrics()["holdfast_engine_up"] == 1.0


def test_asynchronous(client: Client, url: str) -> None:
    async def talk(number: int, remote: AsyncClient) -> str:
        async with await remote.session(system=f"You are {number}.") as session:
            turn = await session.say(f"hello {number}", max_tokens=50)
            said = "".join([piece async for piece in turn])
            assert (said, turn.finish_reason) == (turn.text, "stop")
            long = await session.say("on ", max_tokens=LONG, ignore_eos=True)
            heard = await anext(long)
            await session.interrupt()
            assert (await long.wait()).text == heard
            other = await session.fork(at_turn=1)
            assert (await (await other.say("fork", max_tokens=50)).wait()).text == "fork"
            assert (await other.view()).turns == 2
            await other.close()
            assert (await session.rewind(0)).turns == 0
            return said

    async def run() -> list[str]:
        async with AsyncClient(url) as remote:
            assert await remote.models() == ["echo"]
            assert (await remote.generate("x y", max_tokens=50)).text == "x y"
            assert (await remote.memory())["findings"] == []
            assert "holdfast_sessions" in await remote.metrics()
            answers = await asyncio.gather(*(talk(number, remote) for number in range(16)))
            assert await remote.sessions() == []
            with pytest.raises(NotFound):
                await remote.resume("s-none")
            return list(answers)

    assert asyncio.run(run()) == [f"hello {number}" for number in range(16)]


def test_the_engine_dies_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    """The client asks again until the engine is back: the turn is said once, and counts once."""
    words = "all that is said comes back " * 100
    options = ("--journal", str(tmp_path / "journal"), "--audit", "strict", "--kv-tokens", "65536")
    with (
        serving(tmp_path / "log", "echo", *options) as address,
        Client(address, retries=Retries(attempts=60, first_seconds=0.25, longest_seconds=1.0)) as client,
        client.session() as session,
    ):
        assert session.say("before", max_tokens=50).text == "before"
        turn = session.say(words, max_tokens=5000)
        heard = next(turn)
        os.kill(_engine_process(), signal.SIGKILL)
        heard += "".join(turn)
        assert heard == turn.text == words
        assert session.turns == 2
        assert session.say("after", max_tokens=50).text == "after"
        assert client.memory()["findings"] == []
        assert client.metrics()["holdfast_engine_restarts_total"] == 1.0


def _engine_process() -> int:
    """The process that computes, of the newest server that this one has started."""
    parents, engines, started = {}, set(), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition(" (")
            number, fields = int(name), rest.rpartition(")")[2].split()
            parents[number], started[number] = int(fields[1]), int(fields[19])
            if b"holdfast.server.link.worker" in path.with_name("cmdline").read_bytes():
                engines.add(number)
    servers = [parents[number] for number in engines if parents.get(parents[number]) == os.getpid()]
    newest = max(servers, key=started.__getitem__)
    return next(number for number in engines if parents[number] == newest)


def test_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("keys") / "log"
    variables = {"HOLDFAST_API_KEYS": "ann:a-key,bob:b-key", "HOLDFAST_ADMIN_KEY": "root"}
    with serving(log, "echo", environment=variables) as address:
        with Client(address) as nobody, pytest.raises(Unauthorized):
            nobody.sessions()
        with (
            Client(address, "a-key") as ann,
            Client(address, "b-key") as bob,
            ann.session(id="mine") as session,
        ):
            session.say("x", max_tokens=4).wait()
            assert bob.sessions() == []
            with pytest.raises(NotFound):
                bob.resume("mine")
            with bob.session(id="mine") as same:
                assert same.turns == 0
    with (
        Client(address, retries=Retries(attempts=1)) as gone,
        pytest.raises(ConnectionFailed),
    ):
        gone.models()
