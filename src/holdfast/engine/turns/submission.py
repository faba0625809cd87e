"""A turn's way from its client to the core: it waits for its grammar, session and memory, then begins.

Four kinds of turns come this way: those of sessions, those that steer (`steering`), those of volatile
sessions, whose clients resend the history, and requests of their own. A turn that is refused has changed
nothing. Used by `verbs`, which shares its queues: a turn waits for verbs that came before it on its session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.core.errors import Refused
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.constraints.compiler import Compilation, State
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.grammars import GrammarRefused
from holdfast.engine.listeners import Refusing, TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.sampling import SamplingError
from holdfast.engine.turns.beginner import TurnBeginner
from holdfast.engine.turns.history import catch_up, require_same
from holdfast.engine.turns.listening import Ahead
from holdfast.engine.turns.spec import HistoryChanged, HistoryRepeated, TurnSpec
from holdfast.engine.turns.steering import Steering
from holdfast.engine.turns.waiting import MemoryWait, SessionQueues, TurnWait, kept_of_turn, turn_before

__all__ = ["Submission"]

log = logging.getLogger("holdfast.engine")


class Submission:
    """The turns of one engine that have not begun, and how each begins."""

    __slots__ = (
        "_ahead",
        "_dispatcher",
        "_grammars",
        "_loop",
        "_patient",
        "_queues",
        "_requests",
        "_scheduler",
        "_session_log",
        "_steering",
        "_turns",
        "_waiting",
    )

    def __init__(self, loop: EngineLoop, queues: SessionQueues, ahead: Ahead, patient: bool) -> None:
        """With `patient`, a turn on a busy session waits a step for the abort of the turn before it."""
        self._loop = loop
        self._scheduler = loop.scheduler
        self._session_log = loop.session_log
        self._dispatcher = loop.dispatcher
        self._grammars = loop.setup.grammars
        self._ahead = ahead
        self._turns = TurnBeginner(loop, ahead)
        self._steering = Steering(loop, self._turns)
        self._patient = patient
        self._queues = queues
        self._requests = SessionQueues(lambda _: False)
        """Requests of their own that wait for their grammar, by the ids of their turns."""
        self._waiting: set[TurnListener] = set()
        """Turns that wait for their session, or for their grammar."""

    @property
    def waits(self) -> bool:
        """Whether a request of its own waits for its grammar; other turns wait in the queues of sessions."""
        return bool(self._requests)

    @property
    def compiles(self) -> bool:
        """Whether a grammar is being compiled: its descriptor tells the end of that."""
        return self._grammars.pending

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait until a grammar is compiled."""
        self._grammars.wait(seconds)

    def retry(self, spent: Callable[[], bool]) -> None:
        """Try some of the requests that wait for their grammar, until `spent`."""
        if self._grammars.pending:
            self._grammars.poll()
        if self._requests:
            self._requests.retry(spent)
            self._dispatcher.tell()

    def submit(self, listener: TurnListener, spec: TurnSpec) -> None:
        """Queue a turn, when its grammar is compiled and its session is ready for it."""
        compilation: Compilation | None = None
        if spec.grammar is not None and not self._is_repeated(spec):
            try:
                compilation = self._grammars.request(spec.grammar)
            except GrammarError as error:
                listener.refused(GrammarRefused(error))
                return
        if spec.volatile and spec.session_id is not None:
            self._follow_later(listener, spec, spec.session_id, compilation)
        elif spec.session_id is not None:
            self._submit_later(listener, spec, spec.session_id, compilation)
        elif compilation is not None:
            self._request_later(listener, spec, compilation)
        else:
            with Refusing(listener):
                self._turns.begin(listener, spec, None, None)
        self._dispatcher.tell()

    def _when_turn_ready(
        self,
        listener: TurnListener,
        queue: tuple[SessionQueues, str],
        compilation: Compilation | None,
        is_ready: Callable[[], bool],
        act: Callable[[], None],
    ) -> None:
        """Begin a turn as soon as it is ready and its grammar is compiled, after others of its queue."""

        def attempt() -> bool:
            if listener not in self._waiting:
                return True  # It was aborted while it waited.
            if (compilation is not None and compilation.state is State.WAITING) or not is_ready():
                return False
            self._waiting.discard(listener)
            with Refusing(listener):
                act()
            return True

        self._waiting.add(listener)
        queues, name = queue
        queues.add_turn(name, attempt)

    def _submit_later(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Submit a turn as soon as its session is ready for it."""
        steers = spec.steers is not None and not self._is_repeated(spec)
        if steers:
            # The turn before stops at once; this one begins when it has ended.
            try:
                steers = not self._steering.stop(self._scheduler.registry.find(session_id), spec)
            except (Refused, SamplingError) as refusal:
                listener.refused(refusal)
                return
        wait = TurnWait(self._scheduler, session_id)
        memory = MemoryWait(self._scheduler, session_id, kept_of_turn(spec.steers, None))

        def is_ready() -> bool:
            if steers and not (self._ahead.stop(session_id) and memory.over(self._loop.now())):
                return False
            waits = self._patient or spec.steers is not None
            held = self._is_being_written(spec) or self._dispatcher.is_shedding(session_id)
            return not held and (not waits or wait.over())

        def act() -> None:
            require_same(self._loop, session_id, wait.session)
            if steers:
                self._steering.cut(self._scheduler.registry.find(session_id), spec)
            self._submit(listener, spec, session_id, compilation)

        self._when_turn_ready(listener, (self._queues, session_id), compilation, is_ready, act)

    def _follow_later(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Submit a volatile turn, as soon as the memory that it follows can be cut or shared.

        It does not wait for a turn before it: its client has tokens for a session of their own.
        """
        follows = spec.parent if spec.parent is not None else session_id
        is_cut = spec.parent is not None or spec.keep != spec.known
        wait = MemoryWait(self._scheduler, follows, lambda _: spec.keep or 0, spec.parent is not None)

        def is_ready() -> bool:
            return not is_cut or wait.over(self._loop.now())

        def act() -> None:
            require_same(self._loop, follows, wait.session)
            self._follow(listener, spec, session_id, compilation)

        self._when_turn_ready(listener, (self._queues, follows), compilation, is_ready, act)

    def _request_later(self, listener: TurnListener, spec: TurnSpec, compilation: Compilation) -> None:
        """Begin a request of its own as soon as its grammar is compiled."""

        def act() -> None:
            self._turns.begin(listener, spec, None, compilation)

        self._when_turn_ready(listener, (self._requests, spec.turn_id), compilation, lambda: True, act)

    def _follow(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Queue a volatile turn on its session; one that is made for it is closed again if it is refused."""
        now = catch_up(self._loop)
        scheduler = self._scheduler
        if spec.parent is not None:
            session, opened = scheduler.fork(spec.parent, session_id, now, known=spec.keep), True
        elif spec.known:
            session, opened = scheduler.registry.find(session_id), False
            if session.sequence.known != spec.known:
                raise HistoryChanged("the history has changed", session)
        else:
            session, opened = scheduler.open(session_id, spec.tenant, now, volatile=True), True
        try:
            self._turns.begin(listener, spec, session, compilation)
        except (Refused, SamplingError):
            if opened:
                scheduler.close(session_id, now)
            raise

    def abort(self, listener: TurnListener, keep: int | None, reason: str) -> None:
        """End the turn of a listener, which hears of the end; a turn that is over stays as it is.

        `keep` is how many generated tokens stay, at most all: None to roll the turn back.
        """
        turn = listener.turn
        if listener in self._waiting:
            self._waiting.discard(listener)
            listener.dropped(reason)
        elif turn is not None and not turn.over:
            kept = keep if keep is None or keep == KEEP_ALL else min(keep, turn.generated)
            now = self._loop.now()
            try:
                self._scheduler.abort(turn.session_id, turn.request.turn_id, now, kept, reason)
            except Refused as refusal:
                log.info("turn %s is ending already: %s", turn.request.turn_id, refusal)
        self._dispatcher.tell()

    def _is_repeated(self, spec: TurnSpec) -> bool:
        """Whether a turn has been carried out: its grammar is not needed again."""
        if spec.session_id is None or spec.fingerprint is None:
            return False
        return self._session_log.knows_turn(spec.session_id, spec.turn_id)

    def _is_being_written(self, spec: TurnSpec) -> bool:
        """Whether a turn that is repeated has ended, and will be durable in a moment."""
        if spec.session_id is None or spec.fingerprint is None:
            return False
        return self._session_log.is_being_written(spec.session_id, spec.turn_id)

    def _submit(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Queue a turn on a session, replay it if it has been carried out, or refuse it."""
        # A turn that is overdue ends now, and changes the history, rather than when this one is queued.
        self._scheduler.tick(self._loop.now())
        session = self._scheduler.registry.find(session_id)
        if spec.fingerprint is not None:
            finished = self._session_log.replay(session_id, spec.turn_id, spec.fingerprint)
            if finished is not None:
                listener.replayed(finished, session)
                return
        if spec.grammar is not None and compilation is None:
            raise HistoryChanged("the repeated turn was aborted meanwhile", session)
        known = session.history
        # A turn in flight changes the history too; that the session is busy is said by the core.
        is_busy = turn_before(self._scheduler, session_id) is not None
        if not is_busy and spec.opens and known:
            raise HistoryRepeated("the session has a history", session)
        if not is_busy and spec.known not in (None, known):
            raise HistoryChanged("the history has changed", session)
        if spec.steers is not None:
            spec = self._steering.fitted(session, spec)
        self._turns.begin(listener, spec, session, compilation)
