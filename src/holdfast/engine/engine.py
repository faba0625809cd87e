"""The engine in one's own process: sessions, turns and batches without a server.

    with Engine("smollm2") as engine:
        with engine.session(system="You are terse.") as session:
            for piece in session.say("Name three rivers."):
                print(piece, end="")

Whoever iterates over a turn drives the engine; other turns in flight get on as well. A turn that is left
before its end goes on when the engine is driven again, or is cut with `interrupt`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from types import TracebackType

import torch

from holdfast.core.audit import Finding
from holdfast.core.errors import EmptyTurn, SessionExpired
from holdfast.core.layout import Tier
from holdfast.core.registry import Event
from holdfast.core.session import Place
from holdfast.core.turn import KEEP_ALL, TurnRequest
from holdfast.core.turn import Turn as CoreTurn
from holdfast.engine.echo import open_echo
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import EngineOptions, OptionError, check_context, make_options
from holdfast.engine.pull import ECHO_MODELS, cache_directory, resolve_model
from holdfast.engine.report import memory_report
from holdfast.engine.sampling import Sampling
from holdfast.engine.step.executor import Executor
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.engine.tiers.files import weights_identity
from holdfast.engine.waiting import Length, Wait, end_of_turn, kept_of_turn, no_memory
from holdfast.kernels import KernelSettings
from holdfast.kernels import configure as configure_kernels
from holdfast.kernels.cpu.library import match_threads
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint

TENANT = "local"
RESTING = {"host": Tier.HOST, "disk": Tier.DISK}
"""Where the memory of a session may be moved to."""

Progress = Callable[[str, int, int], None]


class TurnFailed(RuntimeError):
    """A turn could not be carried out; the session is as it was before it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a turn cost, in tokens: `prompt` counts the history, `cached` of it was in memory already.

    `computed` is all that the model computed for the turn, generated tokens and what had to be computed again
    included; over HTTP it is of the prompt alone.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int


class Turn:
    """A turn as its caller sees it: an iterator of text, and the result once it is done."""

    __slots__ = ("_engine", "_outcome", "_said", "_stream", "_turn")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn: CoreTurn | None = None
        self._stream: TurnStream | None = None
        self._outcome: tuple[str, str] | None = None
        self._said = 0

    def attach(self, attended: tuple[CoreTurn, TurnStream]) -> Turn:
        """Bind the handle to what the loop made of it."""
        self._turn, self._stream = attended
        return self

    def hear(self, event: Event) -> None:
        """The loop tells what happens to the turn."""
        if event.kind != "tokens":
            self._outcome = (event.kind, event.reason)
            self._bound()[1].end()

    def _bound(self) -> tuple[CoreTurn, TurnStream]:
        assert self._turn is not None and self._stream is not None, "the turn was never submitted"
        return self._turn, self._stream

    @property
    def id(self) -> str:
        """The turn's name."""
        return self._bound()[0].request.turn_id

    @property
    def done(self) -> bool:
        """Whether the turn has had its end."""
        return self._outcome is not None

    def __iter__(self) -> Iterator[str]:
        while True:
            if text := self.take():
                yield text
            if self.done:
                break
            self._engine.drive()
        self._raise_failure()

    def take(self) -> str:
        """What was said since this was last asked, for callers who drive the engine themselves."""
        pieces = self._bound()[1].pieces
        text = "".join(pieces[self._said :])
        self._said = len(pieces)
        return text

    def wait(self) -> Turn:
        """Drive the engine until the turn is done."""
        while not self.done:
            self._engine.drive()
        self._raise_failure()
        return self

    def _raise_failure(self) -> None:
        if self._outcome is not None and self._outcome[0] == "failed":
            raise TurnFailed(f"turn {self.id} failed: {self._outcome[1]}")

    @property
    def text(self) -> str:
        """Everything the turn says, of one that was cut short what stands; waits for its end."""
        turn, stream = self.wait()._bound()
        return stream.text_of(turn.generated)

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens lie wholly inside the text that was handed out so far."""
        stream = self._bound()[1]
        return stream.tokens_of(sum(map(len, stream.pieces[: self._said])))

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens that stand; waits for the end."""
        turn, stream = self.wait()._bound()
        return stream.tokens[: turn.generated]

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, or `abort`; waits for the end."""
        self.wait()
        assert self._outcome is not None
        return "abort" if self._outcome[0] == "aborted" else self._outcome[1]

    @property
    def usage(self) -> Usage:
        """What the turn cost; waits for the end."""
        turn, _ = self.wait()._bound()
        return Usage(turn.input_end, turn.cached, turn.computed, turn.generated)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the generated tokens that stand, where they were asked for."""
        turn, stream = self.wait()._bound()
        return stream.logprobs[: turn.generated]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the turn's input from its second token on, where they were asked for."""
        return self.wait()._bound()[1].prompt_logprobs


class Session:
    """A conversation whose memory stays between turns."""

    __slots__ = ("_current", "_engine", "id", "system")

    def __init__(self, engine: Engine, name: str, system: str | None) -> None:
        self._engine = engine
        self.id = name
        self.system = system
        self._current: Turn | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, said: str | Sequence[int], sampling: Sampling | None = None) -> Turn:
        """Say something and get a turn: iterate over it for text as it comes, or ask for its `text`."""
        engine = self._engine
        tokens = engine.checked("said", self._encode(said) if isinstance(said, str) else said)
        known = engine.known_tokens(self.id)
        chosen, limit = engine.settle_sampling(sampling, known + len(tokens))
        turn = Turn(engine)
        first = None if chosen.prompt_logprobs is None else known
        request = TurnRequest(f"t-{secrets.token_hex(4)}", tuple(tokens), limit, computes_from=first)
        self._current = turn.attach(engine.loop.submit(self.id, request, chosen, turn.hear))
        return turn

    def _encode(self, text: str) -> list[int]:
        """The tokens of a user's words: with the chat template where the model has one."""
        tokenizer = self._engine.loop.tokenizer
        known = self._engine.known_tokens(self.id)
        if tokenizer.template is None:
            return tokenizer.encode(text, add_special_tokens=known == 0)
        message = {"role": "user", "content": text}
        if known == 0:
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            return tokenizer.encode_chat([*system, message])
        return tokenizer.encode_continuation([message], last_token=self._engine.last_token(self.id))

    def interrupt(self, keep: int | str = "all") -> None:
        """Cut in: `keep` is how many generated tokens stay, or "all" or "none" (then the turn never was)."""
        kept = _kept(keep)
        self._engine.settle(self.id, kept_of_turn(kept, None))
        self._engine.until_done(lambda done: self._engine.loop.interrupt(self.id, kept, done=done))
        if self._current is not None:
            self._current.wait()

    def rewind(self, turns: int) -> None:
        """Go back so that only the first `turns` turns remain."""
        self._engine.settle(self.id, end_of_turn(turns))
        self._engine.until_done(lambda done: self._engine.loop.rewind(self.id, turns, done=done))

    def fork(self, at_turn: int | None = None) -> Session:
        """A second session that goes on from here, or from the end of an earlier turn; memory is shared."""
        self._engine.settle(self.id, end_of_turn(at_turn), forks=True)
        child = f"s-{secrets.token_hex(4)}"
        self._engine.until_done(lambda done: self._engine.loop.fork(self.id, child, at_turn, done=done))
        return Session(self._engine, child, self.system)

    def spill(self, tier: str | None = None) -> bool:
        """Move the memory to "host" or "disk", or to the nearest with room; whether it is there."""
        if tier is not None and tier not in RESTING:
            raise ValueError(f"tier must be one of {', '.join(RESTING)}, or None, not {tier!r}")
        self._engine.settle(self.id)
        self._engine.loop.spill(self.id, None if tier is None else RESTING[tier])
        return self._wait_for_move(Place.AWAY)

    def restore(self) -> bool:
        """Bring the memory back to the device; whether it is there. The next turn does so by itself."""
        self._engine.settle(self.id)
        self._engine.loop.restore(self.id)
        return self._wait_for_move(Place.HOME)

    def _wait_for_move(self, place: Place) -> bool:
        session = self._engine.loop.scheduler.registry.find(self.id)
        while session.place in (Place.LEAVING, Place.RETURNING):
            self._engine.drive()
        return session.place is place

    @property
    def turns(self) -> int:
        """How many turns the conversation has."""
        return len(self._engine.loop.scheduler.registry.find(self.id).boundaries)

    def close(self) -> None:
        """End the conversation and give its memory back. Closing one that is over is no error."""
        loop = self._engine.loop
        if self.id in loop.scheduler.registry.sessions:
            with suppress(SessionExpired):
                self._engine.until_done(lambda done: loop.close_session(self.id, done))


def _kept(keep: int | str) -> int | None:
    """How many generated tokens an interruption keeps, as the core counts them."""
    words = {"all": KEEP_ALL, "none": None}
    if isinstance(keep, str) and keep in words:
        return words[keep]
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be {', '.join(words)} or a number of tokens, not {keep!r}")
    return keep


class Engine:
    """A model, its memory and its sessions, in this process."""

    def __init__(
        self, model: str | EngineLoop = "smollm2", *, progress: Progress | None = None, **options: object
    ) -> None:
        """Load a model: a directory, a .gguf file, or the name of a packaged one. See `EngineOptions`.

        A loop that is ready, with options of its own, is taken as it is.
        """
        if isinstance(model, EngineLoop):
            assert not options, "a loop has its options already"
            self.loop = model
        else:
            self.loop = open_loop(model, make_options(**options), progress)

    @property
    def options(self) -> EngineOptions:
        """What the engine was set up with."""
        return self.loop.options

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every session. With a journal they stay in it, and are here again with the next engine."""
        self.loop.shut_down()
        for name in list(self.loop.scheduler.registry.sessions):
            Session(self, name, None).close()

    def session(self, system: str | None = None, id: str | None = None) -> Session:  # noqa: A002
        """Open a conversation."""
        name = id if id is not None else f"s-{secrets.token_hex(4)}"
        self.until_done(lambda done: self.loop.open_session(name, TENANT, system=system, done=done))
        return Session(self, name, system)

    def sessions(self) -> list[str]:
        """The names of all conversations that are open, those of the journal included."""
        return list(self.loop.book.sessions)

    def resume(self, id: str) -> Session:  # noqa: A002
        """A conversation that is open, by its name: one that came back from the journal, for example."""
        self.loop.scheduler.registry.find(id)
        return Session(self, id, self.loop.book.sessions[id].system)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        progress: Progress | None = None,
    ) -> list[Turn]:
        """Complete a batch of prompts, texts or lists of token ids; answers in the order of the prompts.

        With `sampling.n` above one, a prompt's choices follow one another.
        """
        tokenizer = self.loop.tokenizer
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        written = [
            self.checked("prompts", tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for prompt in listed
        ]
        if not all(written):
            raise EmptyTurn("every prompt needs tokens: one of them has none")
        pending: list[Turn] = []
        for encoded in written:
            chosen, limit = self.settle_sampling(sampling, len(encoded))
            for choice in range(chosen.n):
                turn = Turn(self)
                first = None if chosen.prompt_logprobs is None else 0
                request = TurnRequest(f"r-{secrets.token_hex(6)}", tuple(encoded), limit, computes_from=first)
                pending.append(
                    turn.attach(self.loop.request(TENANT, request, chosen.choice(choice), turn.hear))
                )
        for done, turn in enumerate(pending):
            turn.wait()
            if progress is not None:
                progress("generate", done + 1, len(pending))
        return pending

    def checked(self, name: str, tokens: Sequence[int]) -> list[int]:
        """Token ids that a caller brings; one that the model does not have is refused.

        Texts can have such, too: tokenizers may know marks that the model's table has no rows for. To a GPU
        they would be the end of everything that it holds.
        """
        vocabulary = self.loop.model.config.vocabulary
        numbers = [index(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < vocabulary:
            raise ValueError(f"{name}: token ids are whole numbers from 0 to {vocabulary - 1}")
        return numbers

    def settle_sampling(self, sampling: Sampling | None, prompt: int) -> tuple[Sampling, int]:
        """Fill in what was left open, and how many tokens may be generated after `prompt` tokens."""
        chosen = (sampling or Sampling()).with_defaults(self.loop.defaults)
        room = self.loop.tokens_max(TENANT) - prompt
        return chosen, chosen.max_tokens if chosen.max_tokens is not None else max(1, room)

    def drive(self) -> None:
        """Make one step for all turns in flight."""
        self.loop.step()

    def until_done(self, act: Callable[[Callable[[], None]], object]) -> None:
        """Carry out a verb, and drive the engine until it is acknowledged."""
        acknowledged: list[bool] = []
        act(lambda: acknowledged.append(True))
        while not acknowledged:
            self.loop.step()

    def known_tokens(self, session_id: str) -> int:
        """How many tokens a session's history has."""
        return self.loop.scheduler.registry.find(session_id).sequence.known

    def last_token(self, session_id: str) -> int | None:
        """The last token of a session's history."""
        tokens = self.loop.scheduler.registry.find(session_id).sequence.tokens
        return tokens[len(tokens) - 1] if len(tokens) else None

    def settle(self, session_id: str, length: Length = no_memory, forks: bool = False) -> None:
        """Drive the engine until a verb on a session gives up no memory that it could keep."""
        wait = Wait(self.loop.scheduler, session_id, length, forks)
        while not wait.over(self.loop.now()):
            self.loop.step()

    def memory(self) -> dict[str, object]:
        """The ledger: units by holder, component and tier, the largest holders, findings."""
        return memory_report(self.loop)

    def audit(self) -> list[Finding]:
        """Recount everything now; what must not be is healed and returned."""
        return self.loop.scheduler.recount()


def open_loop(name: str, options: EngineOptions, progress: Progress | None = None) -> EngineLoop:
    """Find a model, fetch it where it has to be, load it and set up its memory."""
    if name in ECHO_MODELS:
        return open_echo(name, options)
    device = _device(options.device)
    if device.index is not None:
        # Kernels are launched, and events recorded, on the current device: of the thread that has the engine.
        torch.cuda.set_device(device)
    cache = cache_directory(options.cache)
    configure_kernels(KernelSettings(options.cpu_kernels, options.cuda_kernels, options.c_compiler, cache))
    path = resolve_model(name, _stage(progress, "fetch"), options.cache)
    checkpoint = open_checkpoint(path)
    check_context(options, checkpoint.config.context_length, checkpoint.config.context_reach)
    tokenizer = open_tokenizer(
        checkpoint
    )  # What cannot be read is said before weights are, which takes long.
    placement = choose_placement(checkpoint, device, options.dtype)
    with _one_thread(), _room_for(device, "the weights", "a smaller model, or weights in fewer bits,"):
        loaded = load_model(
            checkpoint,
            placement,
            load_format=options.load_format,
            context_length=options.context_length,
            pack_weights=False
            if options.fast_start and options.pack_weights is None
            else options.pack_weights,
            progress=_stage(progress, "load"),
        )
    if device.type == "cpu":
        match_threads()
    identity = weights_identity(path) if options.disk is not None else ""
    with _room_for(device, "pools and steps", "smaller pools, or a smaller max_running or context_length,"):
        loop = EngineLoop(loaded, tokenizer, checkpoint.generation, options, identity=identity)
        if loaded.device.type == "cuda" and not options.fast_start and isinstance(loop.executor, Executor):
            loop.executor.capture(progress)
    return loop


@contextmanager
def _room_for(device: torch.device, what: str, smaller: str) -> Iterator[None]:
    """Memory that a device does not have becomes one line that says for what, and what would take less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Of a CPU's memory torch says only in words that there is not enough.
        missing = isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)
        if not missing:
            raise
        text = f"{device} has too little free memory for {what}: {smaller} would take less"
        raise OptionError("device", f"{text} ({error})") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Weights are many small copies: threads that wait for one another only make them slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise OptionError(
            "device", f"{name} cannot be used: torch finds {found} GPUs here; choose cpu or auto"
        )
    return device


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)
