"""The engine in the caller's process: sessions, turns and batches without a server.

    with Engine("smollm2") as engine:
        with engine.session(system="You are terse.") as session:
            for piece in session.say("Name three rivers."):
                print(piece, end="")

Iterating over a turn drives the engine, and so all turns in flight. A turn that is not read to its end goes
on when the engine is driven again, or is ended with `interrupt`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import index
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

from holdfast.core.audit import Finding
from holdfast.core.errors import EmptyTurn, SessionBusy, SessionExpired
from holdfast.core.layout import Tier
from holdfast.core.session import Place
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.answer_builder import AnswerBuilder, Asked
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.listeners import Reply
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import EngineOptions, make_options
from holdfast.engine.replies import Answer
from holdfast.engine.reports.report import memory_report
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.startup import Progress, open_loop
from holdfast.engine.text.chat_roles import Message
from holdfast.engine.text.chat_template import prompt_end_of
from holdfast.engine.tools.events import Call
from holdfast.engine.tools.request import read_tools
from holdfast.engine.turns.listening import ahead_of
from holdfast.engine.turns.local_turn import Turn, TurnFailed, Usage
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.verbs import Verbs

__all__ = ["Engine", "Session", "Turn", "TurnFailed", "Usage"]

Arguments = ParamSpec("Arguments")

TENANT = "local"
WAITING_SECONDS = 0.005
"""How long a step without work waits for a grammar."""
RESTING = {"host": Tier.HOST, "disk": Tier.DISK}
"""The tiers that the memory of a session may be moved to."""


def as_grammar(asked: Grammar | Mapping[str, Any] | None) -> Grammar | None:
    """A grammar, or that of a JSON schema; raises `GrammarError` for a schema that is none."""
    if asked is None or isinstance(asked, Grammar):
        return asked
    return Grammar.of(Kind.JSON_SCHEMA, dict(asked))


class Session:
    """A conversation whose memory stays between turns."""

    __slots__ = ("_current", "_engine", "id", "pending", "system")

    def __init__(self, engine: Engine, name: str, system: str | None) -> None:
        self._engine = engine
        self.id = name
        self.system = system
        self.pending = ""
        """The beginning of the next user message, computed ahead while the engine is driven."""
        self._current: Turn | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, text: str) -> None:
        """Say more of the next user message: it is computed ahead, as far as its tokens are final."""
        self.replace(len(self.pending), text)

    def replace(self, start: int, text: str) -> None:
        """Revise the next user message from character `start` on; `replace(0, "")` discards it."""
        if not 0 <= start <= len(self.pending):
            raise ValueError(f"start must be from 0 to {len(self.pending)}, not {start}")
        self.pending = self.pending[:start] + text
        tokens = ahead_of(lambda part: self._tokens_of(part, None), self.pending)
        with suppress(SessionBusy):  # A turn that runs is not disturbed.
            self._engine.carry_out(self._engine.verbs.hear, self.id, self._engine.checked("text", tokens))

    def say(
        self,
        said: str | Sequence[int] | Sequence[Message],
        sampling: Sampling | None = None,
        *,
        grammar: Grammar | Mapping[str, Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        thinking_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        steer: int | str | None = None,
        keep_reasoning: bool | None = None,
    ) -> Turn:
        """Start a turn: iterate over it for text as it comes, or read its `text`.

        `said` is a user message, messages (results of tools have the role `tool`), or tokens. The text of the
        answer matches the `grammar`, which may be a JSON schema. `tool_choice` is OpenAI's; reasoning ends
        after `thinking_tokens`; `template_kwargs` are variables of the chat template. A text follows what was
        appended before. With `steer` the turn before it, running or finished, is cut after that many tokens
        ("all": those it has), and this one goes on from there. `keep_reasoning`: whether the history keeps
        it, instead of what the session says.
        """
        engine = self._engine
        if isinstance(said, str):
            said, self.pending = self.pending + said, ""
        tokens = engine.checked("said", self._tokens_of(said, template_kwargs, steers=steer is not None))
        chosen = sampling if sampling is not None else Sampling()
        known = engine.known_tokens(self.id)
        turn_id = f"t-{secrets.token_hex(4)}"
        tools = read_tools(self.tools, tool_choice)
        asked = Asked(tools, as_grammar(grammar), thinking_tokens=thinking_tokens, seed=turn_id)
        built = engine.answers.build(tokens, asked)
        spec = TurnSpec(
            turn_id,
            TENANT,
            tokens,
            chosen,
            self.id,
            computes_from=None if chosen.prompt_logprobs is None else known,
            grammar=built.grammar,
            answer=built.answer,
            steers=None if steer is None else _kept(steer, "all"),
            keep_reasoning=keep_reasoning,
        )
        self._current = Turn(engine, spec)
        return self._current

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The session's tools, in OpenAI's form."""
        return self._engine.loop.session_log.sessions[self.id].tools

    @property
    def calls(self) -> list[Call]:
        """The complete tool calls of the last turn, whose results the next turn may bring."""
        return [call.call for call in self._engine.loop.session_log.calls_of(self.id, self.turns)]

    def _tokens_of(
        self,
        said: str | Sequence[int] | Sequence[Message],
        template_kwargs: Mapping[str, Any] | None,
        steers: bool = False,
    ) -> Sequence[int]:
        """The tokens of a message or messages, in the chat template if the model has one."""
        tokenizer = self._engine.loop.setup.tokenizer
        known = self._engine.known_tokens(self.id)
        if isinstance(said, str):
            if tokenizer.template is None:
                return tokenizer.encode(said, add_special_tokens=known == 0)
            said = [{"role": "user", "content": said}]
        messages = [each for each in said if isinstance(each, Mapping)]
        if not messages:
            return [each for each in said if not isinstance(each, Mapping)]
        tools = read_tools(self.tools).offered
        if known == 0:
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            return tokenizer.encode_chat([*system, *messages], tools=tools, template_kwargs=template_kwargs)
        last = None if steers else self._engine.last_token(self.id)
        return tokenizer.encode_continuation(
            messages, last_token=last, calls=self.calls, tools=tools, template_kwargs=template_kwargs
        )

    def interrupt(self, keep: int | str = "all") -> None:
        """End the turn: `keep` is how many generated tokens stay, "all", or "none" to roll the turn back."""
        verbs = self._engine.verbs
        self._engine.carry_out(verbs.interrupt, self.id, _kept(keep))
        if self._current is not None:
            self._current.wait()

    def rewind(self, turns: int) -> None:
        """Go back so that only the first `turns` turns remain."""
        self._engine.carry_out(self._engine.verbs.rewind, self.id, turns)

    def compact(self, from_turn: int, to_turn: int, said: str | Sequence[Message]) -> int:
        """Replace turns, counted from 1, by a user message or messages; the turns after them stay.

        Returns how many tokens the next turn computes again.
        """
        engine, tokenizer = self._engine, self._engine.loop.setup.tokenizer
        first = from_turn == 1
        if tokenizer.template is None:
            if not isinstance(said, str):
                raise ValueError("this model has no chat template: give text")
            tokens = tokenizer.encode(said, add_special_tokens=first)
        else:
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
            end = prompt_end_of(messages)
            tools = read_tools(self.tools).offered
            if first:
                system = [{"role": "system", "content": self.system}] if self.system is not None else []
                tokens = tokenizer.encode_chat([*system, *messages], tools=tools, prompt_end=end)
            else:
                tokens = tokenizer.encode_continuation(messages, last_token=None, tools=tools, prompt_end=end)
        turns = (from_turn, to_turn)
        name = f"c-{secrets.token_hex(4)}"
        left = engine.carry_out(engine.verbs.compact, self.id, turns, engine.checked("said", tokens), name)
        assert isinstance(left, int), "a compaction answers with a count"
        return left

    def update(self, **settings: object) -> None:
        """Change settings of the session; omitted ones stay. Forks inherit them.

        `ttl`: seconds of idleness after which it is closed, None for the engine's. `pin`: whether its memory
        stays on the device while that of other idle sessions can leave. `priority`, from -4 to 4: the lowest
        leaves first, and of turns that wait the highest goes first. `keep_reasoning`: whether its turns keep
        what the model thought.
        """
        self._engine.carry_out(self._engine.verbs.update, self.id, None, settings)

    def fork(self, at_turn: int | None = None) -> Session:
        """Open a session that continues from here, or from the end of an earlier turn; memory is shared."""
        child = f"s-{secrets.token_hex(4)}"
        self._engine.carry_out(self._engine.verbs.fork, self.id, child, at_turn)
        return Session(self._engine, child, self.system)

    def spill(self, tier: str | None = None) -> bool:
        """Move the memory to "host" or "disk", or to the nearest with room; whether it is there."""
        if tier is not None and tier not in RESTING:
            raise ValueError(f"tier must be one of {', '.join(RESTING)}, or None, not {tier!r}")
        self._engine.carry_out(self._engine.verbs.spill, self.id, None if tier is None else RESTING[tier])
        return self._wait_for_move(Place.AWAY)

    def restore(self) -> bool:
        """Move the memory back to the device; whether it is there. The next turn does so by itself."""
        self._engine.carry_out(self._engine.verbs.restore, self.id)
        return self._wait_for_move(Place.HOME)

    def _wait_for_move(self, place: Place) -> bool:
        session = self._engine.loop.scheduler.registry.find(self.id)
        while session.place in (Place.LEAVING, Place.RETURNING):
            self._engine.drive()
        return session.place is place

    @property
    def turns(self) -> int:
        """How many turns the session has."""
        return len(self._engine.loop.scheduler.registry.find(self.id).boundaries)

    def close(self) -> None:
        """Close the session and free its memory. Closing it again is no error."""
        if self.id in self._engine.loop.scheduler.registry.sessions:
            with suppress(SessionExpired):
                self._engine.carry_out(self._engine.verbs.close, self.id)


def _kept(keep: int | str, *words: str) -> int | None:
    """How many generated tokens an interruption keeps, as the core counts them; it may be one of `words`."""
    words = words or ("all", "none")
    if isinstance(keep, str) and keep in words:
        return KEEP_ALL if keep == "all" else None
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be {', '.join(words)} or a number of tokens, not {keep!r}")
    return keep


class Engine:
    """A model, its memory and its sessions, in this process."""

    def __init__(
        self, model: str | EngineLoop = "smollm2", *, progress: Progress | None = None, **options: object
    ) -> None:
        """Load a model: a directory, a .gguf file, or the name of a packaged one. See `EngineOptions`.

        A loop that is ready is used as it is, with its own options.
        """
        if isinstance(model, EngineLoop):
            assert not options, "a loop has its options already"
            self.loop = model
        else:
            self.loop = open_loop(model, make_options(**options), progress)
        self.verbs = Verbs(self.loop)
        self.answers = AnswerBuilder(self.loop.setup.tokenizer, self.loop.setup.formats)

    @property
    def options(self) -> EngineOptions:
        """The options of the engine."""
        return self.loop.setup.options

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and its sessions. Sessions in a journal come back with the next engine."""
        self.loop.shut_down()
        for name in list(self.loop.scheduler.registry.sessions):
            Session(self, name, None).close()
        self.loop.end_ranks()

    def session(
        self,
        system: str | None = None,
        id: str | None = None,  # noqa: A002
        tools: Sequence[Mapping[str, Any]] = (),
        ttl: float | None = None,
        **settings: object,
    ) -> Session:
        """Open a session, with `tools` in OpenAI's form that its turns may call.

        `ttl` is its time to live in seconds of idleness; for `settings` see `Session.update`.
        """
        name = id if id is not None else f"s-{secrets.token_hex(4)}"
        read_tools(tools)
        listed = [dict(tool) for tool in tools]
        self.carry_out(self.verbs.open, name, TENANT, ttl, None, system, listed, settings)
        return Session(self, name, system)

    def sessions(self) -> list[str]:
        """The ids of all open sessions, those from the journal included."""
        return list(self.loop.session_log.sessions)

    def resume(self, id: str) -> Session:  # noqa: A002
        """An open session by its id: one from the journal, for example."""
        self.loop.scheduler.registry.find(id)
        return Session(self, id, self.loop.session_log.sessions[id].system)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        *,
        grammar: Grammar | Mapping[str, Any] | None = None,
    ) -> list[Turn]:
        """Complete a batch of prompts, texts or lists of token ids; answers in the order of the prompts.

        With `sampling.n` above one, a prompt's choices follow one another. The text of every answer matches
        the `grammar`, which may be a JSON schema.
        """
        constraint = as_grammar(grammar)
        tokenizer = self.loop.setup.tokenizer
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        encoded = [
            self.checked("prompts", tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for prompt in listed
        ]
        if not all(encoded):
            raise EmptyTurn("a prompt has no tokens: every prompt needs at least one")
        chosen = sampling if sampling is not None else Sampling()
        first = None if chosen.prompt_logprobs is None else 0
        pending = [
            Turn(
                self,
                TurnSpec(
                    f"r-{secrets.token_hex(6)}",
                    TENANT,
                    tokens,
                    chosen,
                    choice=choice,
                    computes_from=first,
                    grammar=constraint,
                ),
            )
            for tokens in encoded
            for choice in range(chosen.n)
        ]
        for done, turn in enumerate(pending):
            turn.wait()
            if progress is not None:
                progress("generate", done + 1, len(pending))
        return pending

    def checked(self, name: str, tokens: Sequence[int]) -> list[int]:
        """Token ids from a caller; raises if one is out of range, which would kill the CUDA context.

        Texts are checked, too: a tokenizer may have special tokens that the model's embedding has no row for.
        """
        vocabulary = self.loop.setup.model.config.vocabulary
        numbers = [index(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < vocabulary:
            raise ValueError(f"{name}: token ids are whole numbers from 0 to {vocabulary - 1}")
        return numbers

    def drive(self) -> None:
        """Make one step for all turns in flight, and try verbs that wait for their session."""
        self.loop.step()
        self.verbs.rest(WAITING_SECONDS)
        self.verbs.retry()

    def carry_out(
        self,
        verb: Callable[Concatenate[Reply, Arguments], None],
        *arguments: Arguments.args,
        **more: Arguments.kwargs,
    ) -> object:
        """Carry out a verb, and drive the engine until it is acknowledged; raises if it is refused."""
        answer = Answer()
        verb(answer, *arguments, **more)
        while not answer.over:
            self.drive()
        answer.raise_refusal()
        return answer.value

    def known_tokens(self, session_id: str) -> int:
        """How many tokens a session's history has."""
        return self.loop.scheduler.registry.find(session_id).history

    def last_token(self, session_id: str) -> int | None:
        """The last token of a session's history."""
        session = self.loop.scheduler.registry.find(session_id)
        return session.sequence.tokens[session.history - 1] if session.history else None

    def memory(self) -> dict[str, object]:
        """The ledger: units by holder, component and tier, the largest holders, findings."""
        return memory_report(self.loop)

    def audit(self) -> list[Finding]:
        """Run the audit now: what it finds is repaired and returned."""
        return self.loop.scheduler.recount()
