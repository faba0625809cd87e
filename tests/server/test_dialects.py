"""Every declared field in every dialect: it is read from its row, or refused by name."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import inspect
from openai.types import completion_create_params as openai_text
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_responses

from holdfast.cli.options import SAMPLING_OPTIONS
from holdfast.client import BadRequest, Client
from holdfast.client import Sampling as ClientSampling
from holdfast.client.values import AnswerOptions as ClientAnswerOptions
from holdfast.client.values import TurnOptions as ClientTurnOptions
from holdfast.engine.constraints.grammar import Kind
from holdfast.engine.fields import Bound, Declared, declarations, declared
from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.constraints import Constraint
from holdfast.server.dialects.refused import FIELDS, HINTS
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.dialects.table import Absent, Elsewhere, FieldTable, Row, same
from holdfast.server.dialects.tables import (
    CHAT,
    COMPLETIONS,
    DIALECTS,
    GENERATE,
    MESSAGES,
    REALTIME,
    RESPONSES,
    SESSIONS,
    Dialect,
    Unknown,
)
from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.http.bodies import decode_json
from holdfast.server.http.problems import Problem
from holdfast.server.routes import (
    messages,
    messages_body,
    openai,
    realtime_messages,
    responses,
    responses_body,
    schema,
    sessions,
    sglang,
    sglang_body,
)
from tests.server.serving import Server

DECLARATIONS = (Sampling, TurnOptions, AnswerOptions)
DECLARED = [field for kind in DECLARATIONS for field in declarations(kind).values()]

TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object"}
TAG = {"format": {"type": "any_text"}}

OTHER: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125,
    "repetition_penalty": 1.5, "frequency_penalty": -1.0, "presence_penalty": 2.0, "logit_bias": {3: -4.0},
    "seed": 11, "stop": ["a", "b"], "stop_token_ids": [5, 6], "ignore_eos": True, "n": 3, "logprobs": 4,
    "prompt_logprobs": 0, "skip_special_tokens": False, "keep_stop": True, "on_abort": "keep",
    "timeout": 12.5, "append_history": True, "constraint": Constraint(Kind.REGEX, "[a-z]", "regex"),
    "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "thinking": False,
    "thinking_tokens": 9, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1},
    "separate_reasoning": False, "stream_reasoning": False, "keep_reasoning": False,
    "expect_return_seconds": 2.5,
    "continue_final_message": True, "add_generation_prompt": False,
}  # fmt: skip
"""For every declared field a value that is not its default."""

CONSTRAINTS: dict[str, tuple[Any, Kind, Any, str]] = {
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        Kind.JSON_SCHEMA,
        SCHEMA,
        "response_format.json_schema.schema",
    ),
    "structured_outputs": ({"choice": ["a"]}, Kind.CHOICE, ["a"], "structured_outputs.choice"),
    "guided_json": (SCHEMA, Kind.JSON_SCHEMA, SCHEMA, "guided_json"),
    "guided_json_object": (True, Kind.JSON_OBJECT, None, "guided_json_object"),
    "guided_regex": ("[a-z]", Kind.REGEX, "[a-z]", "guided_regex"),
    "guided_choice": (["a", "b"], Kind.CHOICE, ["a", "b"], "guided_choice"),
    "guided_grammar": ('root ::= "a"', Kind.GBNF, 'root ::= "a"', "guided_grammar"),
    "json_schema": ('{"type": "object"}', Kind.JSON_SCHEMA, '{"type": "object"}', "json_schema"),
    "regex": ("[a-z]", Kind.REGEX, "[a-z]", "regex"),
    "ebnf": ('root ::= "a"', Kind.GBNF, 'root ::= "a"', "ebnf"),
    "structural_tag": (json.dumps(TAG), Kind.STRUCTURAL_TAG, json.dumps(TAG), "structural_tag"),
    "grammar": ({"kind": "lark", "value": 'start: "a"'}, Kind.LARK, 'start: "a"', "grammar.value"),
}
"""For every field that constrains the answer: what a client writes, and the constraint that it asks for."""


def other(table: FieldTable[Any], row: Row) -> tuple[Any, Any]:
    """What a client writes for a row, and the value that is read of it."""
    if row.field != "constraint":
        return written(OTHER[row.field]), OTHER[row.field]
    given, kind, value, place = CONSTRAINTS[row.written]
    return given, Constraint(kind, value, table.prefix + place)


BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT.name: (openai.CHAT_BODY.read, {"messages": []}),
    COMPLETIONS.name: (openai.COMPLETION_BODY.read, {"prompt": "x"}),
    RESPONSES.name: (responses_body.RESPONSE_BODY.read, {"input": "x"}),
    MESSAGES.name: (messages_body.MESSAGES_BODY.read, {"messages": []}),
    GENERATE.name: (sglang_body.GENERATE_BODY.read, {"text": "x"}),
    SESSIONS.name: (sessions.TURN.read, {"input": "x"}),
    REALTIME.name: (realtime_messages.COMMIT.read, {"type": "input.commit"}),
}
"""What decodes a request of each dialect, and a request that is complete."""

CASES = [(dialect, field) for dialect in DIALECTS for field in DECLARED]


def names(case: Any) -> str:
    return str(case.name)


def table_of(dialect: Dialect, field: Declared) -> FieldTable[Any]:
    return next(table for table in dialect.tables if field.name in table.declared)


def place(prefix: str, name: str, value: Any) -> dict[str, Any]:
    return {name: value} if not prefix else {prefix.rstrip("."): {name: value}}


def written(value: Any) -> Any:
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else value


def decoded(dialect: Dialect, given: dict[str, Any], prefix: str) -> Any:
    """The struct that a table is read from, of a request with some fields."""
    kind, complete = BODIES[dialect.name]
    body = decode_json(json.dumps({**complete, **given}).encode(), kind, None)
    return getattr(body, prefix.rstrip(".")) if prefix else body


def same_value(read: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return read is not None and dict(read) == value
    return bool((list(read) if isinstance(read, tuple) else read) == value)


def test_every_declared_field_has_another_value_and_a_meaning() -> None:
    assert OTHER.keys() == {field.name for field in DECLARED} and len(OTHER) == len(DECLARED)
    for field in DECLARED:
        assert not same_value(field.default, OTHER[field.name])
        assert field.meaning.endswith(".")
        unbounded = field.kind is bool or get_origin(field.kind) is Literal
        assert unbounded or field.bound is not None, field.name
    for kind in DECLARATIONS:
        kind(**{name: OTHER[name] for name in declarations(kind)})
    constraints = {row.written for each in DIALECTS for row in each.answer.rows if row.field == "constraint"}
    assert constraints == CONSTRAINTS.keys()


@pytest.mark.parametrize(("dialect", "field"), CASES, ids=names)
def test_a_declared_field_is_read_or_refused(dialect: Dialect, field: Declared) -> None:
    table = table_of(dialect, field)
    entries = [entry for entry in table.entries if entry.field == field.name]
    assert entries
    for entry in entries:
        if isinstance(entry, Row):
            assert_read(dialect, table, entry)
        elif isinstance(entry, Absent):
            assert entry.reason
            assert_refused(dialect, table, entry)
        else:
            assert_told(dialect, table, entry)


def assert_read(dialect: Dialect, table: FieldTable[Any], row: Row) -> None:
    sent, value = other(table, row)
    given = {row.written: sent} | ({row.switch: True} if row.switch else {})
    body = {table.prefix.rstrip("."): given} if table.prefix else given
    read = table.read(decoded(dialect, body, table.prefix))
    assert same_value(getattr(read, row.field), value)
    assert table.names(decoded(dialect, body, table.prefix))[row.field] == table.prefix + row.written
    empty = decoded(dialect, {table.prefix.rstrip("."): {}} if table.prefix else {}, table.prefix)
    default = table.declared[row.field].default if row.default in (None, DEFAULT) else row.default
    if row.switch:
        default = None
    assert same_value(getattr(table.read(empty), row.field), default if default != () else [])


DEFAULT = Row("n").default


def assert_refused(dialect: Dialect, table: FieldTable[Any], absent: Absent) -> None:
    for name in (absent.field, *absent.names):
        asking = place(table.prefix, name, written(OTHER[absent.field]))
        with pytest.raises(Problem) as caught:
            refuse_unbuilt(decoded(dialect, asking, table.prefix), table.prefix)
        assert (caught.value.status, caught.value.param) == (400, table.prefix + name)
        assert name != absent.field or caught.value.message == f"{table.prefix}{name}: {absent.reason}"
    assert set(absent.names) <= set(FIELDS)


def test_two_constraints_are_refused_with_both_names() -> None:
    for dialect in DIALECTS:
        table = dialect.answer
        rows = [row for row in table.rows if row.field == "constraint"]
        for first, second in itertools.combinations(rows, 2):
            given = {row.written: other(table, row)[0] for row in (first, second)}
            body = {table.prefix.rstrip("."): given} if table.prefix else given
            with pytest.raises(Problem) as caught:
                table.read(decoded(dialect, body, table.prefix))
            assert caught.value.param == table.prefix + second.written
            assert table.prefix + first.written in caught.value.message


NO_FORMAT = {"response_format": {"type": "text"}, "regex": "", "guided_json_object": False}


def test_a_constraint_that_asks_for_nothing_does_not_count() -> None:
    body = {**NO_FORMAT, "structured_outputs": {"disable_fallback": True}, "ebnf": 'root ::= "a"'}
    assert CHAT.answer.read(decoded(CHAT, body, "")).constraint == Constraint(
        Kind.GBNF, 'root ::= "a"', "ebnf"
    )
    assert CHAT.answer.read(decoded(CHAT, NO_FORMAT, "")).constraint is None


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schemas": 1}},
            "response_format.json_schema",
        ),
        ("structured_outputs", {"json": SCHEMA, "regex": "a"}, "structured_outputs.regex"),
        (
            "structured_outputs",
            {"json": SCHEMA, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
        ("structured_outputs", {"yaml": "a"}, "structured_outputs"),
        ("guided_choice", "a", "guided_choice"),
        ("regex", 7, "regex"),
        ("thinking", {"type": "enabled"}, "thinking"),
        ("reasoning_effort", "enormous", "reasoning_effort"),
        ("tools", {}, "tools"),
    ],
    ids=str,
)
def test_a_malformed_answer_option_is_refused_with_its_place(field: str, value: Any, param: str) -> None:
    with pytest.raises(Problem) as caught:
        CHAT.answer.read(decoded(CHAT, {field: value}, ""))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "given", [{}, {"kind": "yaml", "value": "a"}, {"kind": "regex"}, {"kind": "lark", "x": 1}]
)
def test_a_native_grammar_has_a_kind_and_a_value(given: dict[str, Any]) -> None:
    with pytest.raises(Problem) as caught:
        SESSIONS.answer.read(decoded(SESSIONS, {"grammar": given}, ""))
    assert (caught.value.param or "").startswith("grammar")


@pytest.mark.parametrize(
    ("dialect", "params"),
    [
        (CHAT, openai_chat.CompletionCreateParamsBase),
        (COMPLETIONS, openai_text.CompletionCreateParamsBase),
        (RESPONSES, openai_responses.ResponseCreateParamsBase),
    ],
    ids=["chat", "completions", "responses"],
)
def test_every_field_of_the_openai_package_is_built_refused_or_a_hint(dialect: Dialect, params: Any) -> None:
    kind, _ = BODIES[dialect.name]
    refused = {each.name for each in unbuilt(kind)}
    built = set(kind.__struct_fields__) - refused
    for name in get_type_hints(params):
        places = [name in built, name in refused, name in HINTS and name not in built]
        assert sum(places) == 1, f"{name}: built, refused, a hint: {places}"


def assert_told(dialect: Dialect, table: FieldTable[Any], entry: Elsewhere) -> None:
    kind, _ = BODIES[dialect.name]
    assert entry.name.partition(".")[0] in kind.__struct_fields__
    if table.declaration is not Sampling:
        return  # Only sampling is checked by its declaration.
    empty = decoded(dialect, {table.prefix.rstrip("."): {}}, table.prefix)
    assert table.names(empty)[entry.field] == entry.name
    if table.declaration is not Sampling:
        return  # Only sampling checks its values when it is made.
    with pytest.raises(Problem) as caught:
        table.read(empty, **{entry.field: -1})
    assert (caught.value.param, caught.value.message.split()[0]) == (entry.name, entry.name)


@pytest.mark.parametrize("dialect", DIALECTS, ids=names)
def test_unknown_fields_are_ignored_or_refused_as_the_dialect_says(dialect: Dialect) -> None:
    for table in dialect.tables:
        unknown = place(table.prefix, "no_such_field", [1])
        if dialect.unknown is Unknown.IGNORED:
            decoded(dialect, unknown, table.prefix)
        else:
            with pytest.raises(Problem) as caught:
                decoded(dialect, unknown, table.prefix)
            assert caught.value.param == f"{table.prefix}no_such_field"


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if each.unknown is Unknown.REFUSED], ids=names)
def test_a_sampling_field_beside_the_others_is_refused_with_its_place(dialect: Dialect) -> None:
    for row in dialect.sampling.rows:
        with pytest.raises(Problem) as caught:
            decoded(dialect, {row.written: 1}, "")
        said = f"{row.written}: there is no such field here: turns take it as sampling.{row.written}"
        assert (caught.value.param, caught.value.message) == (row.written, said)


def test_null_is_as_good_as_left_out_where_the_dialect_says_so() -> None:
    for dialect in DIALECTS:
        for table in dialect.tables:
            rows = [row for row in table.rows if table.nullable or not table.declared[row.field].optional]
            nulls = {row.written: None for row in rows}
            body = {table.prefix.rstrip("."): nulls} if table.prefix else nulls
            if table.nullable:
                table.read(decoded(dialect, body, table.prefix))
            elif rows:
                with pytest.raises(Problem):
                    decoded(dialect, body, table.prefix)


# --- the OpenAPI document -------------------------------------------------------------------------


def properties(component: str) -> dict[str, Any]:
    assert sglang.router.routes and messages.router.routes and responses.router.routes, (
        "routes describe their bodies when they are imported"
    )
    found: dict[str, Any] = schema.components()[component]["properties"]
    return found


@pytest.mark.parametrize("dialect", DIALECTS, ids=names)
def test_the_schema_describes_every_field_with_its_bound(dialect: Dialect) -> None:
    for table in dialect.tables:
        if table.struct == "CommitMessage":
            continue  # Messages are not in the document.
        shown = properties(table.struct)
        for row in table.rows:
            field, bound = table.declared[row.field], table.bound_of(row)
            (described,) = [each for each in described_parts(shown[row.written]) if "description" in each]
            assert described["description"] == field.meaning
            if field.kind in (int, float) and bound is not None:
                lowest = "exclusiveMinimum" if bound.above else "minimum"
                assert (described[lowest], described["maximum"]) == (bound.low, bound.high)
        assert not {entry.field for entry in table.absent} & shown.keys()


def described_parts(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield shown
    for part in shown.get("anyOf", ()):
        yield from described_parts(part)


# --- the documentation ----------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "request-fields.md"
BEGIN, END = "<!-- fields:begin -->", "<!-- fields:end -->"
SHOWN = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE, SESSIONS, REALTIME)


def entry_shown(table: FieldTable[Any], field: Declared) -> str:
    """A field in one dialect: its name there, and the default where it is the dialect's own."""
    parts = []
    for entry in table.entries:
        if entry.field == field.name and isinstance(entry, Row):
            switch = f" with `{entry.switch}`" if entry.switch else ""
            default = "" if entry.default is DEFAULT else f" ({entry.default})"
            parts.append(f"`{table.prefix}{entry.written}`{switch}{default}")
        elif entry.field == field.name and isinstance(entry, Elsewhere):
            parts.append(f"`{entry.name}`")
    return ", ".join(parts) or "-"


def drawn() -> str:
    """The table of fields and dialects."""
    head = ["field", *(dialect.name for dialect in SHOWN), "meaning"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for field in DECLARED:
        cells = [entry_shown(table_of(dialect, field), field) for dialect in SHOWN]
        lines.append(f"| {' | '.join([f'`{field.name}`', *cells, field.meaning])} |")
    return "\n".join(lines)


def test_the_documentation_shows_every_field_in_every_dialect() -> None:
    shown = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == drawn(), "paste this between the marks:\n" + drawn()


# --- a field that is added ------------------------------------------------------------------------


def test_a_table_without_an_entry_for_a_field_is_refused_when_it_is_made() -> None:
    with pytest.raises(AssertionError, match="append_history"):
        FieldTable(TurnOptions, "Body", same("on_abort", "timeout"), nullable=True)
    with pytest.raises(AssertionError, match="speed"):
        FieldTable(TurnOptions, "Body", same("on_abort", "timeout", "append_history", "speed"), nullable=True)


def test_an_object_field_is_a_declaration_and_a_row() -> None:
    """What structured output needs: two fields of a dialect, one of them an object, fill one declared one."""

    @dataclasses.dataclass(frozen=True)
    class Grammar:
        kind: str
        source: str

    class Schema(msgspec.Struct):
        name: str
        schema: dict[str, Any]

    class ResponseFormat(msgspec.Struct):
        type: Literal["text", "json_schema"]
        json_schema: Schema | None = None

    def grammar_of(given: ResponseFormat) -> Grammar | None:
        if given.json_schema is None:
            return None
        return Grammar("json_schema", json.dumps(given.json_schema.schema))

    Options = dataclasses.make_dataclass(
        "Options", [("grammar", Any, declared(None, Bound(size=1 << 16, depth=64), "Constrains the output."))]
    )
    table = FieldTable(
        Options,
        "Body",
        (
            Row("grammar", "response_format", kind=ResponseFormat, value=grammar_of),
            Row("grammar", "regex", kind=str, value=lambda given: Grammar("regex", given)),
        ),
        nullable=True,
    )

    class Body(msgspec.Struct):
        model: str | None = None

    body = make_body(Body, table)

    def read(**given: Any) -> Any:
        return table.read(msgspec.json.decode(json.dumps(given), type=body.read)).grammar

    assert read() is None and read(response_format=None) is None
    assert read(response_format={"type": "text"}) is None
    assert read(regex="[a-z]+") == Grammar("regex", "[a-z]+")
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert read(response_format=nested) == Grammar("json_schema", '{"type": "object"}')
    with pytest.raises(msgspec.ValidationError, match=r"\$\.response_format\.json_schema"):
        read(response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert "response_format" not in {each.name for each in unbuilt(body.read)}
    assert "ebnf" in {each.name for each in unbuilt(body.read)}


def unbuilt(kind: type[msgspec.Struct]) -> list[inspect.Field]:
    """The fields of a body that are there to be refused."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return [field for field in found.fields if isinstance(field.type, inspect.AnyType)]


# --- the client and the command -------------------------------------------------------------------

UNTYPED = {"n", "logprobs", "prompt_logprobs", "skip_special_tokens", "keep_stop"}
"""Declared fields that the client has no name for: what it is given is sent, and the server answers."""


def test_the_client_names_declared_fields_with_their_types() -> None:
    hints = get_type_hints(ClientSampling)
    kinds = declarations(Sampling)
    assert hints.keys() == kinds.keys() - UNTYPED
    for name, hint in hints.items():
        assert hint == kinds[name].kind
    options = declarations(TurnOptions)
    assert get_type_hints(ClientTurnOptions) == {
        name: each.kind | None if each.optional else each.kind
        for name, each in options.items()
        if name in {row.field for row in SESSIONS.turn.rows}
    }
    assert get_type_hints(ClientAnswerOptions).keys() == {row.written for row in SESSIONS.answer.rows}


def test_what_the_client_has_no_name_for_is_refused_by_the_server(echo: Server) -> None:
    with Client(echo.url) as client, client.session() as session:
        for name in sorted(UNTYPED - {row.field for row in SESSIONS.sampling.rows}):
            with pytest.raises(BadRequest) as caught:
                session.say("x", **{name: OTHER[name]})  # type: ignore[misc]
            assert caught.value.param == f"sampling.{name}"


def test_the_command_has_options_for_declared_fields() -> None:
    kinds = declarations(Sampling)
    for option in SAMPLING_OPTIONS:
        assert option.kind == kinds[option.name].kind
        assert option.help
    assert get_args(kinds["temperature"].kind) == ()
