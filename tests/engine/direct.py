"""Verbs as plain calls on a loop: a refusal is raised, and whoever asked may be told when it is durable."""

from collections.abc import Callable, Sequence

from holdfast.core.registry import Event
from holdfast.core.turn import Turn
from holdfast.engine.engine import Engine
from holdfast.engine.listeners import Refusal, TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.replies import Answer
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.turns.waiting import MemoryWait
from holdfast.engine.verbs import Verbs

__all__ = ["Heard", "direct", "settle", "submit"]


class Told(Answer):
    """Raises a refusal at once, and says when the verb is acknowledged."""

    def __init__(self, done: Callable[[], object] | None) -> None:
        super().__init__()
        self.tell = done

    def done(self, session_id: str | None, answer: object = None) -> None:
        super().done(session_id, answer)
        if self.tell is not None:
            self.tell()

    def refused(self, refusal: Refusal) -> None:
        raise refusal


def direct(
    engine: EngineLoop | Verbs,
    verb: str,
    *arguments: object,
    done: Callable[[], object] | None = None,
    **more: object,
) -> object:
    """Carry out a verb; its answer, if it is acknowledged already. On a loop it has nothing to wait for."""
    verbs, told = engine if isinstance(engine, Verbs) else Verbs(engine), Told(done)
    getattr(verbs, verb)(told, *arguments, **more)
    assert isinstance(engine, Verbs) or not verbs.waits, f"{verb} waits for its session"
    return told.value


class Heard(TurnListener):
    """Hears a turn; `events` are what was told of it."""

    turn: Turn | None = None

    def __init__(self, hear: Callable[[Event], object] | None = None) -> None:
        self.events: list[Event] = []
        self._hear = hear

    def begun(self, turn: Turn, stream: TurnStream) -> None:
        self.turn = turn

    def refused(self, refusal: Refusal) -> None:
        raise refusal

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if self._hear is not None:
            self._hear(event)


def submit(
    loop: EngineLoop,
    session_id: str | None,
    turn_id: str,
    tokens: Sequence[int],
    sampling: Sampling,
    hear: Callable[[Event], object] | None = None,
    **more: object,
) -> Heard:
    """Submit a turn that has nothing to wait for."""
    heard = Heard(hear)
    verbs = Verbs(loop)
    verbs.submit(heard, TurnSpec(turn_id, "local", tokens, sampling, session_id, **more))  # type: ignore[arg-type]
    assert not verbs.waits, f"turn {turn_id} waits for its session"
    return heard


def settle(engine: Engine, session_id: str) -> None:
    """Drive an engine until a session has nothing in flight."""
    wait = MemoryWait(engine.loop.scheduler, session_id)
    while not wait.over(engine.loop.now()):
        engine.drive()
