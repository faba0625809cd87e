"""Compiles grammars in threads and caches them: the engine's loop never waits for one.

`request` returns a `Compilation` at once: ready if the grammar is cached, failed if it failed a moment ago,
waiting otherwise. Concurrent requests for one grammar get the same object. The loop calls `poll`
between steps, which returns the finished compilations. Everything but the compilation
itself happens in the thread that calls `request` and `poll`, so there are no locks.

Compiled grammars are evicted least recently used first, by bytes. Failures are cached for some seconds,
so that a client that repeats a bad request does not keep the threads busy. A compilation cannot be
stopped: after its time limit it fails for all waiting turns, but its late result is still cached.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Protocol

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.constraints.matcher import Compiled

__all__ = ["Builder", "Compilation", "Compiler", "CompilerLimits", "State"]

log = logging.getLogger("holdfast.constraints")


class Builder(Protocol):
    """Compiles grammars for one vocabulary; called in threads."""

    @property
    def identity(self) -> str:
        """The vocabulary that grammars are compiled for."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar; raises `GrammarError`."""


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Bounds on memory, time and concurrency."""

    cache_bytes: int = 64 << 20
    compile_seconds: float = 5.0
    threads: int = 2
    waiting_max: int = 64
    """Compilations that may run or wait for a thread at once."""
    failure_seconds: float = 10.0
    failures_max: int = 256


class State(Enum):
    """How far a compilation has come."""

    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"


class Compilation:
    """A grammar on its way. Changes only in `Compiler.poll`."""

    __slots__ = ("compiled", "error", "grammar", "started")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.compiled: Compiled | None = None
        self.error: GrammarError | None = None
        self.started: float | None = None
        """When a thread took it up."""

    @property
    def state(self) -> State:
        if self.error is not None:
            return State.FAILED
        return State.WAITING if self.compiled is None else State.READY

    def result(self) -> Compiled:
        """The compiled grammar; raises the error of one that failed. Only when it no longer waits."""
        if self.error is not None:
            raise self.error
        assert self.compiled is not None, "the grammar is still being compiled"
        return self.compiled


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a compilation in a thread."""

    key: str
    work: Compilation
    compiled: Compiled | None
    error: GrammarError | None


class Compiler:
    """The cache and its threads, for one vocabulary."""

    def __init__(
        self,
        builder: Builder,
        limits: CompilerLimits | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called in a thread when a compilation has finished, to end the sleep of an idle loop."""
        self._builder = builder
        self._limits = limits or CompilerLimits()
        self._wake = wake
        self._clock = clock
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="holdfast-grammar")
        self._cached: OrderedDict[str, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[str, Compilation] = {}
        self._failures: OrderedDict[str, _Failure] = OrderedDict()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._running = 0

    @property
    def cached_bytes(self) -> int:
        return self._cached_bytes

    @property
    def running(self) -> int:
        """Compilations that run or wait for a thread."""
        return self._running

    def request(self, grammar: Grammar) -> Compilation:
        """Have a grammar compiled; returns at once."""
        key = f"{grammar.digest}:{self._builder.identity}"
        known = Compilation(grammar)
        if (compiled := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            known.compiled = compiled
            return known
        if (waiting := self._waiting.get(key)) is not None:
            return waiting
        if (error := self._recent_failure(key)) is not None:
            known.error = error
            return known
        if self._running >= self._limits.waiting_max:
            known.error = GrammarError(Fault.BUSY, "too many grammars are being compiled; try again later")
            return known
        self._waiting[key] = known
        self._running += 1
        self._threads.submit(self._work, key, known)
        return known

    def poll(self) -> list[Compilation]:
        """Compilations that have finished, or exceeded their time, since the last call."""
        ended: list[Compilation] = []
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                break
            self._running -= 1
            self._settle(outcome)
            if self._waiting.get(outcome.key) is outcome.work:
                del self._waiting[outcome.key]
                outcome.work.compiled, outcome.work.error = outcome.compiled, outcome.error
                ended.append(outcome.work)
        if self._waiting:
            ended += self._overdue()
        return ended

    def close(self) -> None:
        """Start no more compilations. Those that run finish on their own."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, key: str, work: Compilation) -> None:
        """In a thread: compile, and report whatever comes of it, a panic of the library included."""
        work.started = self._clock()
        compiled: Compiled | None = None
        error: GrammarError | None = GrammarError(
            Fault.UNAVAILABLE, "internal error while compiling the grammar; see the server log"
        )
        try:
            compiled = self._builder.compile(work.grammar)
            error = None
        except GrammarError as found:
            error = found
        except Exception:
            log.exception("the compilation of a grammar failed")
        finally:
            self._outcomes.put(_Outcome(key, work, compiled, error))
            self._wake()

    def _settle(self, outcome: _Outcome) -> None:
        if outcome.compiled is not None:
            self._failures.pop(outcome.key, None)
            self._keep(outcome.key, outcome.compiled)
        elif outcome.error is not None and outcome.error.fault.of_request:
            self._remember(outcome.key, outcome.error)

    def _keep(self, key: str, compiled: Compiled) -> None:
        """Cache a grammar and evict others until all fit. One that alone is too large is not cached."""
        if compiled.size_bytes > self._limits.cache_bytes:
            return
        assert key not in self._cached
        self._cached[key] = compiled
        self._cached_bytes += compiled.size_bytes
        while self._cached_bytes > self._limits.cache_bytes:
            _, evicted = self._cached.popitem(last=False)
            self._cached_bytes -= evicted.size_bytes

    def _overdue(self) -> list[Compilation]:
        """Fail those whose thread takes too long."""
        now = self._clock()
        late = {
            key: work
            for key, work in self._waiting.items()
            if work.started is not None and now - work.started > self._limits.compile_seconds
        }
        for key, work in late.items():
            problem = f"compilation took longer than {self._limits.compile_seconds:g} seconds"
            work.error = GrammarError(Fault.TOO_SLOW, problem)
            self._remember(key, work.error)
            del self._waiting[key]
        return list(late.values())

    def _remember(self, key: str, error: GrammarError) -> None:
        self._failures[key] = _Failure(error, self._clock() + self._limits.failure_seconds)
        self._failures.move_to_end(key)
        while len(self._failures) > self._limits.failures_max:
            self._failures.popitem(last=False)

    def _recent_failure(self, key: str) -> GrammarError | None:
        failure = self._failures.get(key)
        if failure is None:
            return None
        if failure.until < self._clock():
            del self._failures[key]
            return None
        return failure.error


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error and until when it is repeated without trying again."""

    error: GrammarError
    until: float
