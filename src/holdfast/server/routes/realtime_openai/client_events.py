"""The events that OpenAI's clients send, in the current form and in that of the beta.

Unknown fields are ignored, as OpenAI's clients send more with every release; the fields that are read are
checked, and a wrong one is named.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.engine.portions import in_turns
from holdfast.server import limits
from holdfast.server.http.bodies import Reading, parse_large
from holdfast.server.http.problems import Problem
from holdfast.server.routes.realtime_openai.protocol import misunderstood

__all__ = [
    "AUDIO_EVENTS",
    "DECODED",
    "AudioEvent",
    "BufferClear",
    "ClientEvent",
    "ItemCreate",
    "ItemDelete",
    "ItemFields",
    "ItemRetrieve",
    "ItemTruncate",
    "PartFields",
    "ResponseCancel",
    "ResponseCreate",
    "ResponseFields",
    "SessionFields",
    "SessionUpdate",
    "read_event",
]


Shown = dict[str, Any] | list[Any] | str | float | bool | None | UnsetType
"""A setting that is shown again as it came."""


class ReasoningFields(msgspec.Struct):
    """How much the model reasons."""

    effort: str | None = None


class AnswerFields(msgspec.Struct, kw_only=True):
    """Settings of a session or of a single response."""

    instructions: str | None = None
    output_modalities: list[str] | None = None
    modalities: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    max_output_tokens: int | str | None = None
    max_response_output_tokens: int | str | None = None
    reasoning: ReasoningFields | None = None
    prompt: Any = None


class SessionFields(AnswerFields, kw_only=True):
    """A session's settings. Text needs none of those that are only shown again."""

    type: str | None = None
    audio: Shown = UNSET
    include: Shown = UNSET
    tracing: Shown = UNSET
    truncation: Shown = UNSET
    voice: Shown = UNSET
    speed: Shown = UNSET
    turn_detection: Shown = UNSET
    input_audio_format: Shown = UNSET
    output_audio_format: Shown = UNSET
    input_audio_transcription: Shown = UNSET
    input_audio_noise_reduction: Shown = UNSET


class PartFields(msgspec.Struct):
    """A part of a message."""

    type: str | None = None
    text: str | None = None
    transcript: str | None = None


class ItemFields(msgspec.Struct):
    """An item of a conversation, or with the type `item_reference` the id of one."""

    type: str
    id: str | None = None
    role: str | None = None
    content: list[PartFields] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ResponseFields(AnswerFields, kw_only=True):
    """A response to make: settings for it alone, and its context."""

    conversation: str | None = None
    input: list[ItemFields] | None = None
    metadata: dict[str, Any] | None = None


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """An event of a client; `event_id` comes back with an error about it."""

    event_id: str | None = None


class SessionUpdate(Event, tag="session.update"):
    """Change settings; fields that are left out or null stay as they are."""

    session: SessionFields


class ItemCreate(Event, tag="conversation.item.create"):
    """Put an item into the conversation: at its end, after an item, or first with "root"."""

    item: ItemFields
    previous_item_id: str | None = None


class ItemRetrieve(Event, tag="conversation.item.retrieve"):
    """Ask for an item."""

    item_id: str


class ItemDelete(Event, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: str


class ItemTruncate(Event, tag="conversation.item.truncate"):
    """Cut an answer to its heard part: its first `text_end` characters, or its first `tokens` tokens."""

    item_id: str
    content_index: int = 0
    audio_end_ms: int = 0
    text_end: int | None = None
    tokens: int | None = None


class ResponseCreate(Event, tag="response.create"):
    """Have the model answer."""

    response: ResponseFields | None = None


class ResponseCancel(Event, tag="response.cancel"):
    """Stop a response; the part already sent stays."""

    response_id: str | None = None


class BufferClear(Event, tag="input_audio_buffer.clear"):
    """Discard recorded audio, of which there is none."""


class AudioEvent(Event):
    """An event that needs a model with audio."""


class BufferAppend(AudioEvent, tag="input_audio_buffer.append"):
    """Recorded audio; it is not read."""


class BufferCommit(AudioEvent, tag="input_audio_buffer.commit"):
    """The end of recorded audio."""


class OutputClear(AudioEvent, tag="output_audio_buffer.clear"):
    """Discard audio that was not played yet."""


class TranscriptionUpdate(AudioEvent, tag="transcription_session.update"):
    """Change the settings of a transcription."""


AUDIO_EVENTS = {
    BufferAppend: "audio_not_supported",
    BufferCommit: "input_audio_buffer_commit_empty",
    OutputClear: "audio_not_supported",
    TranscriptionUpdate: "audio_not_supported",
}
"""The error code that answers each event about audio."""

ClientEvent = (
    SessionUpdate
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | BufferClear
    | BufferAppend
    | BufferCommit
    | OutputClear
    | TranscriptionUpdate
)

DECODED: Any = ClientEvent
"""The union that decodes events."""


async def read_event(text: str, reading: Reading) -> ClientEvent:
    """Decode an event; an invalid one is a problem with the field's name and the event's id."""
    try:
        content = text.encode("utf-8", "surrogatepass")
        event = cast(ClientEvent, await parse_large(content, DECODED, reading))
        await in_turns(limits.checking(event, reading.room))
    except Problem as problem:
        raise misunderstood(text, problem) from None
    return event
