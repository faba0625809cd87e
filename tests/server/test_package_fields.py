"""The fields of requests of the openai and anthropic packages, inside of objects too.

Each is read, refused, or without effect. One that a new release brings is in none of the lists, and fails
here: it must not be ignored unseen. Objects that the server refuses by their type (blocks, tools, items) are
left out. Whole bodies of OpenAI are in `test_dialects`, and their unbuilt fields in `test_unbuilt`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params, item_create_params
from openai.types.realtime import RealtimeClientEventParam
from openai.types.responses import ResponsesClientEventParam, response_create_params

from holdfast.server.dialects.refused import ANTHROPIC_FIELDS, FIELDS, MESSAGE_FIELDS
from holdfast.server.routes.conversations import ConversationBody, ConversationItemsBody
from holdfast.server.routes.messages_body import (
    COUNT_BODY,
    MESSAGES_BODY,
    MessageFormat,
    MessageOutput,
    MessageThinking,
    MessageTool,
    MessageToolChoice,
)
from holdfast.server.routes.messages_input import CacheControl, Message, MessageBlock
from holdfast.server.routes.openai import StreamOptions
from holdfast.server.routes.realtime_openai.client_events import (
    ItemCreate,
    ItemDelete,
    ItemFields,
    ItemRetrieve,
    ItemTruncate,
    PartFields,
    ReasoningFields,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionFields,
    SessionUpdate,
)
from tests.server.bad_values import SECRET
from tests.server.openai_talking import OpenAITalk
from tests.server.package_fields import shapes_of
from tests.server.serving import Server

RECORDED = Path(__file__).parent / "recorded" / "fields" / "anthropic.json"


class Sorted(NamedTuple):
    """The fields of one object: those that are read, those that are refused, those without effect."""

    read: tuple[str, ...]
    refused: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def read_by(*structs: Any) -> tuple[str, ...]:
    """The fields of structs, and the type, which chooses one of them."""
    return (*{name for struct in structs for name in struct.__struct_fields__}, "type")


ANTHROPIC_REFUSED = (*ANTHROPIC_FIELDS, *FIELDS)
BILLED = ("billing_policy", "user_profile_id", "workspace_id")
"""Who pays, and on whose behalf: the last two are headers."""

ANTHROPIC = {
    "MessageCreateParamsBase": Sorted(
        read_by(MESSAGES_BODY.described), ANTHROPIC_REFUSED, (*BILLED, "metadata", "service_tier")
    ),
    "MessageCountTokensParams": Sorted(read_by(COUNT_BODY.described), ANTHROPIC_REFUSED, BILLED),
    "UserMessageParam": Sorted(read_by(Message)),
    "AssistantMessageParam": Sorted(read_by(Message)),
    "SystemMessageParam": Sorted(read_by(Message)),
    "SystemMessageOutputConfigParam": Sorted((), ("effort",)),
    "TextBlockParam": Sorted(read_by(MessageBlock), (), ("citations",)),
    "ThinkingBlockParam": Sorted(read_by(MessageBlock)),
    "RedactedThinkingBlockParam": Sorted(read_by(MessageBlock)),
    "ToolUseBlockParam": Sorted(read_by(MessageBlock), (), ("caller", "toolset_name")),
    "ToolResultBlockParam": Sorted(read_by(MessageBlock), (), ("toolset_name",)),
    "CacheControlEphemeralParam": Sorted(read_by(CacheControl)),
    # Thinking of another conversation is taken as it is: there is no check for `block_binding` to forgive.
    "ThinkingConfigEnabledParam": Sorted(read_by(MessageThinking), (), ("block_binding",)),
    "ThinkingConfigAdaptiveParam": Sorted(read_by(MessageThinking), (), ("block_binding",)),
    "ThinkingConfigDisabledParam": Sorted(read_by(MessageThinking)),
    "ToolChoiceAutoParam": Sorted(read_by(MessageToolChoice)),
    "ToolChoiceAnyParam": Sorted(read_by(MessageToolChoice)),
    "ToolChoiceToolParam": Sorted(read_by(MessageToolChoice)),
    "ToolChoiceNoneParam": Sorted(read_by(MessageToolChoice)),
    "ToolParam": Sorted(read_by(MessageTool)),
    "OutputConfigParam": Sorted(read_by(MessageOutput)),
    "JSONOutputFormatParam": Sorted(read_by(MessageFormat)),
}

CACHED = ("prompt_cache_breakpoint",)
"""Every prompt is cached, with or without marks."""
MESSAGE = ("role", "content", "name")
CHAT = {
    "ChatCompletionDeveloperMessageParam": Sorted(MESSAGE),
    "ChatCompletionSystemMessageParam": Sorted(MESSAGE),
    "ChatCompletionUserMessageParam": Sorted(MESSAGE),
    "ChatCompletionAssistantMessageParam": Sorted((*MESSAGE, "tool_calls"), tuple(MESSAGE_FIELDS)),
    "ChatCompletionToolMessageParam": Sorted(("role", "content", "tool_call_id")),
    "ChatCompletionFunctionMessageParam": Sorted(MESSAGE),
    "ChatCompletionContentPartTextParam": Sorted(("type", "text"), (), CACHED),
    "ChatCompletionMessageFunctionToolCallParam": Sorted(("id", "type", "function")),
    "ChatCompletionFunctionToolParam": Sorted(("type", "function")),
    "FunctionDefinition": Sorted(("name", "description", "parameters", "strict")),
    "ChatCompletionNamedToolChoiceParam": Sorted(("type", "function")),
    "ChatCompletionAllowedToolChoiceParam": Sorted(("type", "allowed_tools")),
    "ChatCompletionAllowedToolsParam": Sorted(("mode", "tools")),
    "ChatCompletionStreamOptionsParam": Sorted(read_by(StreamOptions), (), ("include_obfuscation",)),
    "ResponseFormatText": Sorted(("type",)),
    "ResponseFormatJSONObject": Sorted(("type",)),
    "ResponseFormatJSONSchema": Sorted(("type", "json_schema")),
    # A schema is enforced whether it is strict or not.
    "JSONSchema": Sorted(("schema",), (), ("name", "description", "strict")),
}

CALLED = ("id", "type", "call_id", "name", "namespace", "arguments", "input", "action")
ANSWERED = ("id", "type", "call_id", "output")
TOOL = ("type", "name", "description", "parameters", "strict", "allowed_callers", "format")
UNBUILT_TOOL = ("async", "defer_loading")
SAID = ("id", "type", "role", "content")
WHO_CALLED = ("caller", "async")
RESPONSES = {
    "ResponseCreatePromptCacheOptions": Sorted(("prewarm",), ("comparison_response_id",), ("mode", "ttl")),
    "PromptCacheOptions": Sorted(("prewarm",), ("comparison_response_id",), ("mode", "ttl")),
    "Reasoning": Sorted(("effort",), ("mode", "context"), ("summary", "generate_summary")),
    "ResponseTextConfigParam": Sorted(("format",), (), ("verbosity",)),
    "ResponseFormatTextJSONSchemaConfigParam": Sorted(
        ("type", "schema"), (), ("name", "description", "strict")
    ),
    "ResponseConversationParamParam": Sorted(("id",)),
    "StreamOptions": Sorted((), (), ("include_obfuscation",)),
    "ResponseCreateStreamOptions": Sorted((), (), ("include_obfuscation",)),
    "ConversationCreateParams": Sorted(read_by(ConversationBody)),
    "ItemCreateParams": Sorted(read_by(ConversationItemsBody), (), ("include",)),
    "ResponseSteerEventParam": Sorted(("type", "input", "previous_response_id")),
    "EasyInputMessageParam": Sorted(SAID, (), ("phase",)),
    "Message": Sorted(SAID, (), ("status",)),
    "ResponseOutputMessageParam": Sorted(SAID, (), ("status", "phase")),
    "ResponseInputTextParam": Sorted(("type", "text"), (), CACHED),
    "ResponseInputTextContentParam": Sorted(("type", "text"), (), CACHED),
    "ResponseOutputTextParam": Sorted(("type", "text"), (), ("annotations", "logprobs")),
    "ResponseOutputRefusalParam": Sorted(("type", "refusal")),
    "ResponseFunctionToolCallParam": Sorted((*CALLED, "status"), (), WHO_CALLED),
    "ResponseCustomToolCallParam": Sorted(CALLED, (), WHO_CALLED),
    "LocalShellCall": Sorted(CALLED, (), ("status",)),
    "LocalShellCallAction": Sorted(
        ("type", "command", "timeout_ms", "user", "working_directory"), (), ("env",)
    ),
    "FunctionCallOutput": Sorted(ANSWERED, (), ("caller", "name", "namespace", "status")),
    "ResponseCustomToolCallOutputParam": Sorted(ANSWERED, (), ("caller",)),
    "LocalShellCallOutput": Sorted(ANSWERED, (), ("status",)),
    "ResponseReasoningItemParam": Sorted(
        ("id", "type", "content", "encrypted_content"), (), ("summary", "status")
    ),
    "ItemReference": Sorted(("id", "type")),
    # What a function returns is described to programs that call it, and models call it here.
    "FunctionToolParam": Sorted(TOOL, UNBUILT_TOOL, ("output_schema",)),
    "ToolFunction": Sorted(TOOL, UNBUILT_TOOL, ("output_schema",)),
    "CustomToolParam": Sorted(TOOL, UNBUILT_TOOL),
    "NamespaceToolParam": Sorted(("type", "name", "tools"), (), ("description",)),
    "LocalShell": Sorted(("type",)),
    "ToolChoiceFunctionParam": Sorted(("type", "name")),
    "ToolChoiceCustomParam": Sorted(("type", "name")),
    "ToolChoiceAllowedParam": Sorted(("type", "mode", "tools")),
}

SHOWN = ("tracing", "truncation", "include", "audio")
"""Settings that are shown again: the sessions' texts need none of them."""
ITEM = Sorted(read_by(ItemFields), (), ("object", "status"))
REALTIME = {
    "SessionUpdateEventParam": Sorted(read_by(SessionUpdate)),
    "ConversationItemCreateEventParam": Sorted(read_by(ItemCreate)),
    "ConversationItemRetrieveEventParam": Sorted(read_by(ItemRetrieve)),
    "ConversationItemDeleteEventParam": Sorted(read_by(ItemDelete)),
    "ConversationItemTruncateEventParam": Sorted(read_by(ItemTruncate)),
    "ResponseCreateEventParam": Sorted(read_by(ResponseCreate)),
    "ResponseCancelEventParam": Sorted(read_by(ResponseCancel)),
    "RealtimeSessionCreateRequestParam": Sorted(
        tuple({*read_by(SessionFields)} - {*SHOWN, "prompt"}), ("prompt",), (*SHOWN, "model")
    ),
    "RealtimeResponseCreateParamsParam": Sorted(
        tuple({*read_by(ResponseFields)} - {"prompt"}), ("prompt",), ("audio",)
    ),
    "RealtimeReasoningParam": Sorted(read_by(ReasoningFields)),
    "RealtimeFunctionToolParam": Sorted(("type", "name", "description", "parameters")),
    "ToolChoiceFunctionParam": Sorted(("type", "name")),
    "RealtimeConversationItemSystemMessageParam": ITEM,
    "RealtimeConversationItemUserMessageParam": ITEM,
    "RealtimeConversationItemAssistantMessageParam": ITEM,
    "RealtimeConversationItemFunctionCallParam": ITEM,
    "RealtimeConversationItemFunctionCallOutputParam": ITEM,
    # Parts of other types than text and spoken text are refused.
    "Content": Sorted(read_by(PartFields), (), ("audio", "image_url", "detail")),
}

PACKAGES: dict[str, tuple[dict[str, list[str]], dict[str, Sorted]]] = {
    "anthropic": (json.loads(RECORDED.read_text()), ANTHROPIC),
    "chat": (shapes_of(chat_params.CompletionCreateParamsBase), CHAT),
    "responses": (
        shapes_of(
            response_create_params.ResponseCreateParamsBase,
            ResponsesClientEventParam,
            conversation_create_params.ConversationCreateParams,
            item_create_params.ItemCreateParams,
        ),
        RESPONSES,
    ),
    "realtime": (shapes_of(RealtimeClientEventParam), REALTIME),
}


@pytest.mark.parametrize(
    ("package", "shape"), [(package, shape) for package, (_, table) in PACKAGES.items() for shape in table]
)
def test_every_field_is_read_refused_or_without_effect(package: str, shape: str) -> None:
    shapes, table = PACKAGES[package]
    known = table[shape]
    for field in shapes[shape]:
        places = [field in known.read, field in known.refused, field in known.unused]
        places[1] = places[1] and not places[0]
        assert sum(places) == 1, f"{field}: read, refused, without effect: {places}"
    assert set(known.unused) <= set(shapes[shape]), "listed, and no longer in the package"


# --- refused inside of objects --------------------------------------------------------------------

ASKED = {"role": "user", "content": "x"}
MESSAGES = {"messages": [ASKED], "max_tokens": 1}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ("/v1/responses", {"reasoning": {"mode": [SECRET]}}, "reasoning.mode"),
    ("/v1/responses", {"reasoning": {"context": "current_turn"}}, "reasoning.context"),
    (
        "/v1/responses",
        {"prompt_cache_options": {"comparison_response_id": SECRET}},
        "prompt_cache_options.comparison_response_id",
    ),
    ("/v1/responses", {"tools": [{**FLAT, "async": True}]}, "tools[0].async"),
    (
        "/v1/responses",
        {"tools": [FLAT, {**FLAT, "name": "g", "defer_loading": True}]},
        "tools[1].defer_loading",
    ),
    ("/v1/responses", {"tools": [{**FLAT, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ("/v1/responses", {"tools": [{**FLAT, "allowed_callers": SECRET}]}, "tools[0].allowed_callers"),
    (
        "/v1/responses",
        {"tools": [{"type": "namespace", "name": "n", "tools": [{**FLAT, "async": SECRET}]}]},
        "tools[0].tools[0].async",
    ),
    (
        "/v1/messages",
        {"messages": [ASKED, {"role": "system", "content": "s", "output_config": {"effort": SECRET}}]},
        "messages[1].output_config.effort",
    ),
    (
        "/v1/messages",
        {"messages": [ASKED, {"role": "system", "content": "s", "clear_at": SECRET}]},
        "messages[1].clear_at",
    ),
    (
        "/v1/messages",
        {"tools": [{"name": "f", "input_schema": {"type": "object"}, "input_examples": SECRET}]},
        "tools[0].input_examples",
    ),
]
ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"reasoning": {"mode": "standard", "context": "all_turns", "summary": "auto"}}),
    (
        "/v1/responses",
        {"reasoning": {"mode": None, "context": "auto"}, "prompt_cache_options": {"ttl": "1h"}},
    ),
    (
        "/v1/responses",
        {"tools": [{**FLAT, "async": False, "defer_loading": None, "allowed_callers": ["direct"]}]},
    ),
    (
        "/v1/messages",
        {"messages": [ASKED, {"role": "system", "content": "s", "clear_at": "never", "output_config": {}}]},
    ),
    ("/v1/messages", {"billing_policy": {"type": "billing_policy", "bill_to": "self"}}),
]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": MESSAGES,
}


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_not_built_is_refused_with_its_place(
    caller: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = caller.post(path, {**LEAST[path], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and SECRET not in answer.text


@pytest.mark.parametrize(("path", "fields"), ALLOWED, ids=lambda value: str(value)[:60])
def test_values_that_ask_for_nothing_more_are_allowed(
    caller: Server, path: str, fields: dict[str, Any]
) -> None:
    answer = caller.post(path, {**LEAST[path], **fields})
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        assert caller.http.delete(f"{path}/{answer.json()['id']}").status_code == 200


def test_a_prompt_template_is_refused_in_realtime(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        for event, param in (
            ({"type": "session.update", "session": {"prompt": {"id": SECRET}}}, "session.prompt"),
            ({"type": "response.create", "response": {"prompt": {"id": SECRET}}}, "response.prompt"),
        ):
            error = talk.told(event, "error")["error"]
            assert (error["code"], error["param"]) == ("unsupported", param)
            assert SECRET not in json.dumps(error)
        talk.told({"type": "session.update", "session": {"prompt": None}}, "session.updated")
