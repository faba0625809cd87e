"""The grammars of an engine's turns: compiled in threads, while the loop goes on.

`Grammars` has the compiler of one vocabulary, or the reason why there is none: llguidance is not installed,
or cannot read the tokenizer. Its `descriptor` is readable when a compilation has ended, so that an idle loop
wakes up. `begin_grammars` builds it in a thread while the weights are loaded: reading a vocabulary takes
seconds of CPU time and holds the interpreter lock, which would stall streams later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.core.errors import Refused
from holdfast.engine.constraints.compiler import Builder, Compilation, Compiler, CompilerLimits
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.vocabulary import Vocabulary
from holdfast.engine.text.tokenizer import Tokenizer

__all__ = ["GrammarRefused", "Grammars", "begin_grammars", "read_grammars"]

log = logging.getLogger("holdfast.engine")

CODES = {
    Fault.INVALID: "invalid_grammar",
    Fault.UNSUPPORTED: "unsupported_grammar",
    Fault.TOO_LARGE: "grammar_too_large",
    Fault.TOO_SLOW: "grammar_too_slow",
    Fault.BUSY: "grammars_busy",
    Fault.UNAVAILABLE: "grammars_unavailable",
}
"""The codes of refusals; `grammars_busy` may be tried again."""


class GrammarRefused(Refused):
    """A turn's grammar cannot be used; `place` is where in the grammar the reason lies, if it is known."""

    param = "grammar"

    def __init__(self, error: GrammarError) -> None:
        super().__init__(f"{self.param}: {error}")
        self.code = CODES[error.fault]
        self.place = error.place


class Wakeup:
    """A descriptor that threads make readable. Threads may outlive it."""

    __slots__ = ("_lock", "_open", "descriptor")

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Called in a thread."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def take(self) -> int:
        """How often `wake` was called since the last time."""
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self.descriptor)
        return 0

    def wait(self, seconds: float) -> None:
        """Wait for a `wake`, or until time is up."""
        select.select([self.descriptor], [], [], seconds)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if self._open:
                os.close(self.descriptor)
            self._open = False


class Grammars:
    """Compiles grammars for one vocabulary; without a `builder` it refuses them, and `why`."""

    __slots__ = ("_compiler", "_unheard", "_wakeup", "_why")

    def __init__(self, builder: Builder | None, why: str = "", limits: CompilerLimits | None = None) -> None:
        self._wakeup = Wakeup()
        self._compiler = None if builder is None else Compiler(builder, limits, wake=self._wakeup.wake)
        self._why = why
        self._unheard = 0
        """Compilations of which no `wake` was taken yet."""

    @property
    def available(self) -> bool:
        """Whether turns may have grammars."""
        return self._compiler is not None

    @property
    def pending(self) -> bool:
        """Whether a compilation has not ended, or was not polled since."""
        return self._unheard > 0

    @property
    def descriptor(self) -> int:
        """Readable when a compilation has ended."""
        return self._wakeup.descriptor

    def request(self, grammar: Grammar) -> Compilation:
        """Have a grammar compiled; returns at once. Raises `GrammarError` where that is impossible."""
        if self._compiler is None:
            raise GrammarError(Fault.UNAVAILABLE, self._why)
        before = self._compiler.running
        found = self._compiler.request(grammar)
        self._unheard += self._compiler.running - before
        return found

    def poll(self) -> None:
        """Take over the finished compilations."""
        self._unheard -= self._wakeup.take()
        if self._compiler is not None:
            self._compiler.poll()

    def wait(self, seconds: float) -> None:
        """Wait until a compilation has ended, or time is up."""
        if self.pending:
            self._wakeup.wait(seconds)

    def close(self) -> None:
        """Start no more compilations. Closing again is no error."""
        if self._compiler is not None:
            self._compiler.close()
        self._compiler, self._why = None, "the engine is closed"
        self._wakeup.close()


def read_grammars(tokenizer: Tokenizer, size: int, end_tokens: Sequence[int]) -> Grammars:
    """The grammars of a model with `size` logits."""
    try:
        return Grammars(GuidanceBuilder(Vocabulary(tokenizer, size=size, end_tokens=end_tokens)))
    except (GrammarError, ValueError) as error:
        log.info("turns cannot have grammars: %s", error)
        return Grammars(None, str(error))


def begin_grammars(tokenizer: Tokenizer, size: int, end_tokens: Sequence[int]) -> Callable[[], Grammars]:
    """Begin to read the vocabulary in a thread; call the returned function to wait for it."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="holdfast-vocabulary")
    reading = threads.submit(read_grammars, tokenizer, size, end_tokens)
    threads.shutdown(wait=False)
    return reading.result
