"""Turns of the local chat: what a server's text process writes, written in this process.

Renders messages with tools, and adds the grammar and the answer specification that the options ask for.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.cli.answer_options import AnswerAsked
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.engine import TENANT, Engine, Session, Turn
from holdfast.engine.sampling import Sampling
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.tools.events import Call
from holdfast.engine.turn_spec import TurnSpec
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.constraints import response_format
from holdfast.server.text import jobs
from holdfast.server.text.answer_writer import AnswerWriter, read_asked_tools

__all__ = ["LocalTurns"]


class LocalTurns:
    """Begins turns of one engine, as the options of the chat ask for."""

    def __init__(self, engine: Engine, sampling: Sampling, asked: AnswerAsked) -> None:
        setup = engine.loop.setup
        self._engine = engine
        self._sampling = sampling
        self._asked = asked
        self._tokenizer = setup.tokenizer
        self._answers = AnswerWriter(setup.tokenizer, setup.formats.calls, setup.formats.reasoning)
        asks = bool(asked.tools or asked.said or setup.formats.reasoning)
        self._plain = setup.tokenizer.template is None or not asks
        """Whether turns ask nothing of their answers."""

    def say(self, session: Session, words: str, calls: Sequence[Call]) -> Turn:
        """Begin a turn with the user's words, after an answer with these calls."""
        if self._plain:
            return session.say(words, self._sampling)
        return self._begin(session, [{"role": "user", "content": words}], calls, self._asked.said)

    def tool_results(self, session: Session, results: Mapping[str, str], calls: Sequence[Call]) -> Turn:
        """Begin a turn with the results of these calls."""
        messages = [
            {"role": "tool", "tool_call_id": name, "content": result} for name, result in results.items()
        ]
        return self._begin(session, messages, calls, self._asked.results)

    def _begin(
        self,
        session: Session,
        messages: list[dict[str, Any]],
        calls: Sequence[Call],
        fields: Mapping[str, Any],
    ) -> Turn:
        asks = self._asks(fields)
        tools = read_asked_tools(asks)
        if self._engine.known_tokens(session.id) == 0:
            system = [] if session.system is None else [{"role": "system", "content": session.system}]
            tokens = self._tokenizer.encode_chat(
                [*system, *messages], tools=tools.offered, template_kwargs=asks.template_kwargs
            )
        else:
            tokens = self._tokenizer.encode_continuation(
                messages,
                last_token=self._engine.last_token(session.id),
                calls=calls,
                tools=tools.offered,
                template_kwargs=asks.template_kwargs,
            )
        name = f"t-{secrets.token_hex(4)}"
        written = self._answers.written(tokens, asks, tools)
        grammar = None if written.grammar is None else msgspec.structs.asdict(written.grammar)
        answer = None if written.answer is None else msgspec.structs.asdict(written.answer)
        spec = TurnSpec(
            name,
            TENANT,
            tokens,
            self._sampling,
            session.id,
            grammar=None if grammar is None else Grammar.from_values(grammar),
            answer=None if answer is None else AnswerSpec(**{**answer, "seed": name}),
        )
        return Turn(self._engine, spec)

    def _asks(self, fields: Mapping[str, Any]) -> jobs.Asks:
        """The fields of a turn, as a text process takes them."""
        constraint = response_format(fields["response_format"]) if "response_format" in fields else None
        options = AnswerOptions(thinking=fields.get("thinking"))
        return jobs.Asks(
            tools=self._asked.tools,
            tool_choice=fields.get("tool_choice"),
            template_kwargs=options.template_kwargs,
            constraint=None
            if constraint is None
            else jobs.ConstraintFields(constraint.kind.value, constraint.value, constraint.field),
            thinking_tokens=fields.get("thinking_tokens"),
        )
