"""The cache: one compilation for all who wait, eviction by bytes, failures that are forgotten, limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.engine.constraints.compiler import Compilation, Compiler, CompilerLimits, State
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.toy import ToyCompiled, ToyMatcher

WAIT_SECONDS = 60


class Sized(ToyCompiled):
    """A compiled grammar of a given size."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(10, 0)
        self._size = size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size


class Panic(BaseException):
    """As a library in Rust raises: not an `Exception`."""


class Scripted:
    """A builder that counts, waits for leave where told to, and fails for patterns that begin with `bad`."""

    def __init__(self) -> None:
        self.identity = "vocabulary"
        self.compiled: list[str] = []
        self.leave = threading.Event()
        self.leave.set()
        self.begun = threading.Event()
        self.finished = threading.Semaphore(0)

    def compile(self, grammar: Grammar) -> Sized:
        self.compiled.append(grammar.source)
        self.begun.set()
        assert self.leave.wait(WAIT_SECONDS)
        if grammar.source.startswith("bad"):
            raise GrammarError(Fault.INVALID, "is bad", "/place")
        if grammar.source.startswith("crash"):
            raise RuntimeError("a fault of the builder")
        if grammar.source.startswith("panic"):
            raise Panic
        return Sized(int(grammar.source.partition(" ")[2] or 1))


class World:
    """A compiler on a scripted builder and a clock that stands still."""

    def __init__(self, limits: CompilerLimits) -> None:
        self.builder = Scripted()
        self.now = 100.0
        self.compiler = Compiler(
            self.builder, limits, wake=self.builder.finished.release, clock=lambda: self.now
        )

    def request(self, source: str) -> Compilation:
        return self.compiler.request(Grammar.of(Kind.REGEX, source))

    def finish(self, count: int = 1) -> list[Compilation]:
        """Wait until threads have finished that many, and poll."""
        for _ in range(count):
            assert self.builder.finished.acquire(timeout=WAIT_SECONDS)
        return self.compiler.poll()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[World] = []

    def world(**limits: float) -> World:
        made.append(World(CompilerLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield world
    for each in made:
        each.builder.leave.set()
        each.compiler.close()


def test_a_request_returns_at_once_and_is_ready_after_a_poll(make: Make) -> None:
    world = make()
    world.builder.leave.clear()
    work = world.request("a")
    assert world.builder.begun.wait(WAIT_SECONDS)
    assert world.compiler.poll() == []
    assert work.state is State.WAITING
    world.builder.leave.set()
    assert world.finish() == [work]
    assert work.state is State.READY
    assert isinstance(work.result().matcher(), ToyMatcher)
    assert world.compiler.poll() == []


def test_one_compilation_for_all_who_wait(make: Make) -> None:
    world = make()
    world.builder.leave.clear()
    works = [world.request("a") for _ in range(50)]
    assert world.compiler.running == 1
    world.builder.leave.set()
    assert len(world.finish()) == 1
    assert {work.state for work in works} == {State.READY}
    assert world.request("a").state is State.READY
    assert world.builder.compiled == ["a"]


def test_kinds_with_the_same_text_and_other_vocabularies_are_kept_apart(make: Make) -> None:
    world = make()
    world.request("a")
    world.compiler.request(Grammar.of(Kind.LARK, "a"))
    world.finish(2)
    world.builder.identity = "another"
    assert world.request("a").state is State.WAITING
    world.finish()
    assert len(world.builder.compiled) == 3


def test_eviction_by_bytes_least_recently_used_first(make: Make) -> None:
    world = make(cache_bytes=100)
    for source in ("a 40", "b 40", "c 20"):
        world.request(source)
        world.finish()
    assert world.compiler.cached_bytes == 100
    assert world.request("a 40").state is State.READY
    world.request("d 50")
    world.finish()
    assert world.compiler.cached_bytes == 90
    assert [world.request(source).state for source in ("a 40", "d 50")] == [State.READY, State.READY]
    assert world.request("b 40").state is State.WAITING
    world.finish()
    assert world.compiler.cached_bytes == 90


def test_a_grammar_larger_than_the_cache_is_served_and_not_kept(make: Make) -> None:
    world = make(cache_bytes=100)
    world.request("a 30")
    world.finish()
    large = world.request("b 101")
    world.finish()
    assert large.state is State.READY
    assert world.compiler.cached_bytes == 30
    assert world.request("a 30").state is State.READY
    assert world.request("b 101").state is State.WAITING
    world.finish()


def test_failures_are_repeated_for_a_while_and_then_tried_again(make: Make) -> None:
    world = make(failure_seconds=10)
    work = world.request("bad")
    world.finish()
    assert work.state is State.FAILED
    with pytest.raises(GrammarError) as caught:
        work.result()
    assert caught.value.place == "/place"
    world.now += 9
    again = world.request("bad")
    assert again.state is State.FAILED
    assert again.error is work.error
    assert world.builder.compiled == ["bad"]
    world.now += 2
    assert world.request("bad").state is State.WAITING
    world.finish()
    assert world.builder.compiled == ["bad", "bad"]


def test_failures_take_bounded_memory(make: Make) -> None:
    world = make(failures_max=3)
    for index in range(5):
        world.request(f"bad{index}")
        world.finish()
    assert world.request("bad4").state is State.FAILED
    assert world.request("bad0").state is State.WAITING
    world.finish()


def test_a_crash_is_an_error_of_the_server_and_not_remembered(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    work = world.request("crash")
    world.finish()
    assert work.error is not None
    assert work.error.fault is Fault.UNAVAILABLE
    assert "a fault of the builder" in caplog.text
    assert world.request("crash").state is State.WAITING
    world.finish()


def test_a_panic_of_the_library_leaves_no_one_waiting(make: Make) -> None:
    world = make()
    work = world.request("panic")
    assert world.finish() == [work]
    assert work.error is not None
    assert work.error.fault is Fault.UNAVAILABLE
    assert world.compiler.running == 0


def test_too_many_at_once_are_told_to_come_back(make: Make) -> None:
    world = make(waiting_max=2, threads=1)
    world.builder.leave.clear()
    first, second = world.request("a"), world.request("b")
    busy = world.request("c")
    assert busy.error is not None
    assert busy.error.fault is Fault.BUSY and not busy.error.fault.of_request
    assert world.request("a") is first
    world.builder.leave.set()
    assert set(world.finish(2)) == {first, second}
    assert world.request("c").state is State.WAITING
    world.finish()


def test_no_more_threads_than_allowed_compile(make: Make) -> None:
    world = make(threads=2)
    world.builder.leave.clear()
    for source in "abcd":
        world.request(source)
    assert world.builder.begun.wait(WAIT_SECONDS)
    world.builder.leave.set()
    assert len(world.finish(4)) == 4
    assert len(world.compiler._threads._threads) == 2


def test_one_that_takes_too_long_fails_and_is_cached_when_it_comes(make: Make) -> None:
    world = make(compile_seconds=5, threads=1)
    world.builder.leave.clear()
    slow, behind = world.request("slow"), world.request("behind")
    assert world.builder.begun.wait(WAIT_SECONDS)
    world.now += 4
    assert world.compiler.poll() == []
    world.now += 2
    assert world.compiler.poll() == [slow]
    assert slow.error is not None
    assert slow.error.fault is Fault.TOO_SLOW
    assert behind.state is State.WAITING, "its time begins when a thread takes it up"
    assert world.request("slow").state is State.FAILED
    world.builder.leave.set()
    assert world.finish(2) == [behind]
    assert slow.state is State.FAILED
    assert world.request("slow").state is State.READY
    assert world.compiler.running == 0


def test_a_real_builder(builder: GuidanceBuilder) -> None:
    finished = threading.Semaphore(0)
    compiler = Compiler(builder, wake=finished.release)
    good = compiler.request(Grammar.of(Kind.JSON_SCHEMA, {"type": "integer"}))
    bad = compiler.request(Grammar.of(Kind.JSON_SCHEMA, {"type": "integre"}))
    for _ in range(2):
        assert finished.acquire(timeout=WAIT_SECONDS)
    assert len(compiler.poll()) == 2
    assert good.result().matcher().accept(builder.vocabulary.tokenizer.tokenize_str("12"))
    assert bad.error is not None
    assert (bad.error.place, bad.error.fault) == ("/type", Fault.INVALID)
    compiler.close()
