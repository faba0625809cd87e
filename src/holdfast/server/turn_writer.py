"""Turns as the engine takes them: the tokens of the input, the grammar, and how the answer is read.

The input follows a session's history, or stands alone. Rendering, tokenising and checking grammars happen in
text processes (`server/prompts.py`); a turn that is tokens already and asks nothing of its answer needs none
of them. Used by `service`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.text.chat_template import prompt_end_of
from holdfast.engine.tools.formats import call_format
from holdfast.engine.tools.request import Tool, ToolsRefused, read_tools
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.link import wire
from holdfast.server.prompts import Prompts, begins_with_system
from holdfast.server.sessions import SessionRecord
from holdfast.server.text import jobs
from holdfast.server.turn_request import Input, TurnAsked

__all__ = ["TurnWriter", "WrittenTurn", "checked_tools", "require_template_kwargs", "tools_of"]

RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "documents", "self", "known", "prompt_end"}
)
"""Variables of chat templates that other fields of a request stand for."""


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A turn without its name: `tokens` follow the history."""

    tokens: list[int]
    grammar: wire.GrammarFields | None = None
    answer: wire.AnswerFields | None = None
    found: jobs.Found | None = None
    """With a conversation that was compared with trails: where it goes on."""


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools of a request; raises the problem with them."""
    try:
        return read_tools(list(tools)).offered
    except ToolsRefused as error:
        raise Problem(400, "invalid_value", str(error), error.param) from error


def require_template_kwargs(given: Mapping[str, Any] | None) -> None:
    """Raise for variables that the template does not get from a client."""
    for name in sorted(RESERVED_KWARGS & (given or {}).keys()):
        raise bad_field(f"chat_template_kwargs.{name}", "is reserved: other request fields set this variable")


def tools_of(asked: TurnAsked, record: SessionRecord | None) -> list[dict[str, Any]]:
    """The tools of a turn: its own, or its session's, whose history describes them once."""
    given = [dict(tool) for tool in asked.answer.tools or ()]
    if record is None:
        return given
    if not given:
        return record.tools
    if record.view.known and checked_tools(given) != checked_tools(record.tools):
        raise bad_field(
            "tools",
            "differ from those in the session's history; leave them out, or open another session",
            "tools_changed",
        )
    return given


class TurnWriter:
    """Writes turns for one model."""

    def __init__(self, prompts: Prompts, facts: wire.ModelFacts) -> None:
        self._prompts = prompts
        self._facts = facts
        self._reads_all = facts.reasoning is not None or (
            facts.calls is not None and call_format(facts.calls).reasons
        )
        """Whether answers are read even if their turns offer no tools."""

    async def write(self, asked: TurnAsked, record: SessionRecord | None, tenant: str) -> WrittenTurn:
        """A tenant's turn, to follow a session's history."""
        asks = self._asks(asked, record)
        steers = asked.steers is not None
        return self._checked(asked, await self._written(asked.input, asks, record, tenant, steers))

    async def write_after(self, asked: TurnAsked, record: SessionRecord, history: bytes) -> WrittenTurn:
        """The new part of a whole conversation; raises the problem if its session's history differs."""
        messages = asked.input.messages or []
        system = None if begins_with_system(messages) else record.system
        job = jobs.Chat(
            messages,
            None,
            True,
            system,
            [],
            self._asks(asked, record),
            history=history,
            prompt_end=asked.input.prompt_end,
        )
        return self._checked(asked, _turn(await self._prompts.chat(job, record.tenant)))

    async def write_whole(self, asked: TurnAsked, tenant: str, trails: list[jobs.TrailFields]) -> WrittenTurn:
        """A whole conversation, to follow the longest beginning of it that a session has."""
        messages = asked.input.messages or []
        job = jobs.Chat(
            messages,
            None,
            True,
            asks=self._asks(asked, None),
            one_shot=True,
            trails=trails,
            prompt_end=asked.input.prompt_end,
        )
        return self._checked(asked, _turn(await self._prompts.chat(job, tenant)))

    def asks(self, asked: TurnAsked) -> jobs.Asks:
        """The answer's requirements of a request without a session."""
        return self._asks(asked, None)

    def _checked(self, asked: TurnAsked, written: WrittenTurn) -> WrittenTurn:
        """A turn that the model can take."""
        if written.tokens and max(written.tokens) >= self._facts.vocabulary:
            # Tokenizers may have special tokens without a row in the embedding table.
            raise bad_field("input", "has a special token that the model does not have")
        if written.grammar is not None and not self._facts.constrains:
            raise bad_field(
                grammar_field(asked.answer), "this server cannot constrain answers", "unsupported"
            )
        return written

    async def _written(
        self, said: Input, asks: jobs.Asks, record: SessionRecord | None, tenant: str, steers: bool
    ) -> WrittenTurn:
        messages = said.messages
        if messages is None and said.text is not None and said.templated and self._prompts.chats:
            messages = [{"role": "user", "content": said.text}]
        # What a turn that steers follows is known to the engine alone: an answer that was cut.
        first = not steers and (record is None or record.view.known == 0)
        if messages is None:
            tokens = await self._plain_tokens(said, first, tenant)
            return await self._answer_to(tokens, asks, tenant)
        job = jobs.Chat(
            messages,
            None if record is None or steers else record.view.last_token,
            first,
            record.system if record is not None and first else None,
            [] if record is None else record.view.calls,
            asks,
            one_shot=record is None,
            prompt_end=said.prompt_end,
        )
        return _turn(await self._prompts.chat(job, tenant))

    async def replacement(self, said: Input, record: SessionRecord, first: bool) -> list[int]:
        """The tokens of a turn without an answer, to stand anywhere in a session's history."""
        messages = said.messages
        if messages is None and self._prompts.chats:
            messages = [{"role": "user", "content": said.text}]
        if messages is None:
            return await self._plain_tokens(said, first, record.tenant)
        if not self._prompts.chats:
            raise bad_field("messages", "this model has no chat template; give text")
        job = jobs.Chat(
            messages,
            None,
            first,
            record.system if first else None,
            asks=jobs.Asks(tools=record.tools),
            prompt_end=prompt_end_of(messages),
        )
        return (await self._prompts.chat(job, record.tenant)).tokens

    async def _plain_tokens(self, said: Input, first: bool, tenant: str) -> list[int]:
        """The tokens of text outside of a chat template, or those given."""
        if said.tokens is None:
            return await self._prompts.text(said.text, first=first, tenant=tenant) if said.text else []
        self._prompts.require_tokens(said.tokens, self._facts.vocabulary)
        return said.tokens

    async def _answer_to(self, tokens: list[int], asks: jobs.Asks, tenant: str) -> WrittenTurn:
        """A turn of tokens; most ask nothing of their answer."""
        if asks.constraint is None and not (asks.reads and (asks.tools or self._reads_all)):
            return WrittenTurn(tokens)
        made = await self._prompts.answer_to(tokens, asks, tenant)
        return WrittenTurn(tokens, made.grammar, made.answer)

    def _asks(self, asked: TurnAsked, record: SessionRecord | None) -> jobs.Asks:
        """A turn's requirements of its answer, in the form of a text process."""
        options = asked.answer
        require_template_kwargs(options.chat_template_kwargs)
        tools = tools_of(asked, record) if asked.reads else []
        if tools and not self._prompts.chats:
            raise bad_field("tools", "this model has no chat template")
        if options.thinking_tokens is not None and not options.separate_reasoning:
            raise bad_field("thinking_tokens", "needs separate_reasoning")
        choice = options.tool_choice
        if not tools and choice in ("auto", "none", ""):
            choice = None  # It asks for nothing.
        constraint = options.constraint
        return jobs.Asks(
            tools=tools,
            tool_choice=dict(choice) if isinstance(choice, Mapping) else choice,
            parallel_tool_calls=options.parallel_tool_calls,
            template_kwargs=options.template_kwargs,
            constraint=None
            if constraint is None
            else jobs.ConstraintFields(constraint.kind.value, constraint.value, constraint.field),
            separate_reasoning=options.separate_reasoning,
            thinking_tokens=options.thinking_tokens,
            reads=asked.reads,
        )


def _turn(made: jobs.Written) -> WrittenTurn:
    return WrittenTurn(made.tokens, made.grammar, made.answer, made.found)


def grammar_field(options: AnswerOptions) -> str:
    """The field that asks for a turn's grammar."""
    if options.constraint is not None:
        return options.constraint.field
    return "tools" if options.tool_choice in (None, "auto") else "tool_choice"
