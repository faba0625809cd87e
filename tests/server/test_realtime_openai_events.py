"""OpenAI's realtime events: their sequences, the session behind them, and what is computed again."""

import json
from typing import Any

import pytest

from tests.server.openai_talking import Body, OpenAITalk, computed, message, text_of
from tests.server.serving import Server

LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "me"}}</tool_call>'
LONG = "x" * 4000
"""A text that takes long enough to repeat to be cut."""

OUTPUT = [
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
]
CALLED = [
    "response.output_item.added",
    "conversation.item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "conversation.item.done",
]
BEGUN = ["response.created", "rate_limits.updated"]


def cancelled(talk: OpenAITalk, text: str = LONG, pieces: int = 3) -> Body:
    """A response that is cancelled after some pieces, as it ended."""
    talk.send({"type": "conversation.item.create", "item": message(text)})
    talk.send({"type": "response.create"})
    for _ in range(pieces):
        talk.hear("response.output_text.delta", "response.text.delta")
    talk.send({"type": "response.cancel"})
    return talk.ended()


def sent(talk: OpenAITalk, response: Body) -> str:
    """The text of a response's deltas."""
    deltas = (event for event in talk.heard if event["type"] == "response.output_text.delta")
    return "".join(event["delta"] for event in deltas if event["response_id"] == response["id"])


# --- sequences ---------------------------------------------------------------------------------------


def test_a_response_has_all_events_in_order(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.kinds()
        response = talk.ask("hello", metadata={"topic": "greeting"}, max_output_tokens=100)
        assert talk.kinds() == [
            "conversation.item.added",
            "conversation.item.done",
            *BEGUN,
            *OUTPUT,
            "response.done",
        ]
        assert text_of(response) == "hello"
        assert (response["status"], response["status_details"]) == ("completed", None)
        assert (response["metadata"], response["max_output_tokens"]) == ({"topic": "greeting"}, 100)
        usage = response["usage"]
        assert usage["output_tokens"] == len("hello") + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        # One session of the caller stands behind the connection, and ends with it.
        assert caller.state(talk.session["id"])["turns"] == 1
    caller.settle()
    assert caller.get(f"/v1/sessions/{talk.session['id']}").status_code == 404


def test_clients_of_the_beta_get_its_names(caller: Server) -> None:
    with OpenAITalk(caller, additional_headers={"OpenAI-Beta": "realtime=v1"}) as talk:
        assert talk.hear("conversation.created")["conversation"]["object"] == "realtime.conversation"
        fields = {"modalities": ["text"], "temperature": 0.7, "max_response_output_tokens": 50}
        shown = talk.update(**fields, voice="alloy", turn_detection={"type": "server_vad"})
        assert {name: shown[name] for name in fields} == fields
        assert shown["voice"] == "alloy" and shown["turn_detection"] == {"type": "server_vad"}
        talk.kinds()
        response = talk.ask("hello")
        assert talk.kinds() == [
            "conversation.item.created",
            *BEGUN,
            "response.output_item.added",
            "conversation.item.created",
            "response.content_part.added",
            "response.text.delta",
            "response.text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        assert response["output"][0]["content"] == [{"type": "text", "text": "hello"}]


def test_a_tool_round(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.update(tools=[LOOK], instructions="Look first.")
        talk.kinds()
        response = talk.ask("Wait. " + CALL)
        assert talk.kinds() == [
            "conversation.item.added",
            "conversation.item.done",
            *BEGUN,
            *OUTPUT,
            *CALLED,
            "response.done",
        ]
        text, call = response["output"]
        assert text["content"][0]["text"].strip() == "Wait."
        assert (call["type"], call["name"], call["status"]) == ("function_call", "look", "completed")
        assert json.loads(call["arguments"]) == {"at": "me"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        assert talk.create(result)["previous_item_id"] == call["id"]
        before = response["usage"]["total_tokens"]
        response = talk.respond()
        assert "seen" in text_of(response)
        assert response["usage"]["input_token_details"]["cached_tokens"] == before
        # The instructions and the tools went in once, before the first turn.
        state = caller.state(talk.session["id"])
        assert state["turns"] == 2 and state["tokens"]["known"] == response["usage"]["total_tokens"]


def test_a_response_that_reaches_its_limit_is_incomplete(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.update(max_output_tokens=3)
        response = talk.ask("hello")
        assert (response["status"], text_of(response)) == ("incomplete", "hel")
        assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert text_of(talk.ask("hello", max_output_tokens="inf")) == "hello"
        # A limit beyond the context is shortened to what fits.
        assert text_of(talk.ask("hello", max_output_tokens=1_000_000)) == "hello"


# --- settings ----------------------------------------------------------------------------------------


def test_settings_of_audio_are_shown_again(caller: Server) -> None:
    audio = {
        "input": {
            "format": {"type": "audio/pcmu"},
            "turn_detection": {"type": "semantic_vad", "create_response": True},
            "transcription": {"model": "whisper-1"},
            "noise_reduction": {"type": "near_field"},
        },
        "output": {"voice": "marin", "speed": 1.1},
    }
    with OpenAITalk(caller) as talk:
        assert talk.session["output_modalities"] == ["text"]
        shown = talk.update(type="realtime", audio=audio, tracing="auto", truncation="disabled")
        assert shown["audio"]["input"] == audio["input"]
        assert shown["audio"]["output"]["voice"] == "marin" and "format" in shown["audio"]["output"]
        assert (shown["tracing"], shown["truncation"]) == ("auto", "disabled")
        shown = talk.update(audio={"input": {"turn_detection": None}}, instructions=None)
        assert shown["audio"]["input"]["turn_detection"] is None
        assert shown["audio"]["input"]["transcription"] == {"model": "whisper-1"}
        shown = talk.update(tools=[LOOK], tool_choice={"type": "function", "name": "look"})
        assert shown["tools"] == [LOOK] and shown["tool_choice"] == {"type": "function", "name": "look"}


@pytest.mark.parametrize("field", ["output_modalities", "modalities"])
@pytest.mark.parametrize("asked", [["audio"], ["text", "audio"]])
def test_audio_output_is_refused_and_the_session_goes_on(
    caller: Server, field: str, asked: list[str]
) -> None:
    with OpenAITalk(caller) as talk:
        error = talk.refused({"type": "session.update", "session": {field: asked, "instructions": "x"}})
        assert (error["code"], error["param"]) == ("audio_not_supported", f"session.{field}")
        error = talk.refused({"type": "response.create", "response": {field: asked}})
        assert (error["code"], error["param"]) == ("audio_not_supported", f"response.{field}")
        assert talk.update()["instructions"] == "", "a refused update changes nothing"
        assert text_of(talk.ask("hello")) == "hello"


def test_a_microphone_is_told_once_that_there_is_no_audio(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        error = talk.refused({"type": "input_audio_buffer.append", "audio": "AAAA"})
        assert error["code"] == "audio_not_supported"
        for _ in range(50):
            talk.send({"type": "input_audio_buffer.append", "audio": "AAAA"})
        assert (
            talk.refused({"type": "input_audio_buffer.commit"})["code"] == "input_audio_buffer_commit_empty"
        )
        assert talk.refused({"type": "output_audio_buffer.clear"})["code"] == "audio_not_supported"
        assert talk.refused({"type": "transcription_session.update"})["code"] == "audio_not_supported"
        # The buffer is empty: clearing it asks for nothing.
        talk.told({"type": "input_audio_buffer.clear"}, "input_audio_buffer.cleared")
        assert sum(event["type"] == "error" for event in talk.heard) == 4
        assert text_of(talk.ask("hello")) == "hello"


def test_instructions_come_first_and_later_ones_are_appended(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.update(instructions="one")
        first = talk.ask("hello")
        talk.update(instructions="two")
        second = talk.ask("hello")
        appended = len("<|start|>system\ntwo<|end|>") - len("<|start|>") - len("<|end|>") + 2
        alone = computed(talk.ask("hello"))
        # The history stays computed; the new instructions cost their own tokens, once.
        assert second["usage"]["input_token_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        assert computed(second) == alone + appended
        # Instructions of one response come last; those that repeat the session's add only the rest.
        assert text_of(talk.ask("hello", instructions="sing")) == "sing"
        assert text_of(talk.ask("hello", instructions="two\nsing")) == "sing"
        assert text_of(talk.ask("hello", instructions="two")) == "hello"
        assert computed(talk.ask("hello")) == alone


def test_a_response_needs_no_message(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        assert text_of(talk.respond(instructions="greet")) == "greet"
        response = talk.respond()
        assert response["status"] == "completed" and caller.state(talk.session["id"])["turns"] == 2


def test_other_tools_begin_the_session_again(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.update(tools=[LOOK])
        first = talk.ask("hello")
        assert text_of(talk.ask("again")) == "again"
        talk.update(tools=[LOOK, {**LOOK, "name": "listen"}])
        third = talk.ask("third")
        assert caller.state(talk.session["id"])["turns"] == 1
        assert third["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        # Without tools for one response nothing is computed again, and nothing can be called.
        response = talk.ask(CALL, tools=[])
        assert [item["type"] for item in response["output"]] == ["message"]
        assert response["usage"]["input_token_details"]["cached_tokens"] == third["usage"]["total_tokens"]


# --- cuts --------------------------------------------------------------------------------------------


def test_cancel_keeps_what_was_sent_and_nothing_is_computed_again(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        response = cancelled(talk)
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        text = text_of(response)
        assert text == sent(talk, response) and 3 <= len(text) < len(LONG)
        assert response["output"][0]["status"] == "incomplete"
        assert response["usage"]["output_tokens"] == len(text)
        after = talk.ask("hello")
        assert after["usage"]["input_token_details"]["cached_tokens"] == response["usage"]["total_tokens"]
        # The end of the cut answer, then the message and the beginning of the next answer.
        assert computed(after) == len("user\nhello" + "assistant\n") + 4
        assert caller.state(talk.session["id"])["turns"] == 2


def test_the_next_response_may_be_asked_for_right_after_a_cancel(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.send({"type": "conversation.item.create", "item": message(LONG)})
        talk.send({"type": "response.create"})
        name = talk.hear("response.created")["response"]["id"]
        error = talk.refused({"type": "response.create"})
        assert error["code"] == "conversation_already_has_active_response" and name in error["message"]
        talk.hear("response.output_text.delta")
        talk.send({"type": "response.cancel", "response_id": name})
        talk.send({"type": "conversation.item.create", "item": message("stop")})
        talk.send({"type": "response.create"})
        talk.send({"type": "conversation.item.create", "item": message("too late for it")})
        first, second = talk.ended(), talk.ended()
        assert (first["id"], first["status"]) == (name, "cancelled")
        assert text_of(second) == "stop"
        assert second["usage"]["input_token_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        # The answer stands before the message that came after it.
        added = [event for event in talk.heard if event["type"] == "conversation.item.added"]
        assert added[-1]["item"]["id"] == second["output"][0]["id"]
        assert added[-1]["previous_item_id"] == added[-3]["item"]["id"]
        assert text_of(talk.respond()) == "too late for it"


def test_a_response_that_is_cancelled_before_it_says_anything_takes_its_input_back(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.send({"type": "conversation.item.create", "item": message(LONG)})
        talk.send({"type": "response.create"})
        talk.send({"type": "response.cancel"})
        response = talk.ended()
        assert response["status"] in ("cancelled", "completed")
        assert talk.refused({"type": "response.cancel"})["code"] == "response_cancel_not_active"
        assert text_of(talk.ask("hello")) == "hello"
        assert caller.state(talk.session["id"])["turns"] == (1 if not response["output"] else 2)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"text_end": 3}, "abc"),
        ({"tokens": 2}, "ab"),
        ({"audio_end_ms": 0}, ""),
        ({"text_end": 99}, "abcdef"),
    ],
    ids=["text", "tokens", "nothing heard", "all"],
)
def test_truncate_cuts_the_last_answer(caller: Server, cut: dict[str, int], kept: str) -> None:
    with OpenAITalk(caller) as talk:
        response = talk.ask("abcdef")
        item = response["output"][0]["id"]
        event = {"type": "conversation.item.truncate", "item_id": item, "content_index": 0, "audio_end_ms": 0}
        shown = talk.told({**event, **cut}, "conversation.item.truncated")
        assert (shown["item_id"], shown["text_end"]) == (item, len(kept))
        held = caller.state(talk.session["id"])["tokens"]["known"]
        lost = 0 if kept == "abcdef" else len("abcdef") + 1 - len(kept)
        assert held == response["usage"]["total_tokens"] - lost
        shown = talk.told(
            {"type": "conversation.item.retrieve", "item_id": item}, "conversation.item.retrieved"
        )
        assert shown["item"]["content"] == [{"type": "output_text", "text": kept}]
        after = talk.ask("hello")
        assert after["usage"]["input_token_details"]["cached_tokens"] == held


def test_truncate_stops_a_response_that_still_runs(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.send({"type": "conversation.item.create", "item": message(LONG)})
        talk.send({"type": "response.create"})
        item = talk.hear("response.output_item.added")["item"]["id"]
        for _ in range(5):
            talk.hear("response.output_text.delta")
        talk.send({"type": "conversation.item.truncate", "item_id": item, "text_end": 2})
        assert talk.ended()["status"] == "cancelled"
        assert talk.hear("conversation.item.truncated")["text_end"] <= 2
        assert text_of(talk.ask("hello")) == "hello"


def test_an_answer_that_is_replaced_by_its_beginning_is_cut(caller: Server) -> None:
    """As livekit does it in text mode."""
    with OpenAITalk(caller) as talk:
        response = talk.ask("abcdef")
        asked, answer = (
            event["item"]["id"] for event in talk.heard if event["type"] == "conversation.item.done"
        )
        talk.told({"type": "conversation.item.delete", "item_id": answer}, "conversation.item.deleted")
        talk.create(message("abc", "assistant", id=answer), previous_item_id=asked)
        after = talk.ask("hello")
        kept = response["usage"]["total_tokens"] - len("def") - 1
        assert after["usage"]["input_token_details"]["cached_tokens"] == kept


# --- items -------------------------------------------------------------------------------------------


def test_items_may_be_placed_and_deleted_anywhere(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        second = talk.create(message("second"))["item"]["id"]
        assert talk.create(message("first", "system", id="mine"), previous_item_id="root") is not None
        third = talk.create(message("third", "assistant"), previous_item_id=second)
        assert third["previous_item_id"] == second
        one = talk.ask("one")
        two = talk.ask("two")
        assert two["usage"]["input_token_details"]["cached_tokens"] == one["usage"]["total_tokens"]
        # The last exchange is taken back: nothing before it is computed again.
        for item in [event["item"] for event in talk.heard if event["type"] == "conversation.item.done"][-2:]:
            talk.told(
                {"type": "conversation.item.delete", "item_id": item["id"]}, "conversation.item.deleted"
            )
        again = talk.ask("two")
        assert again["usage"]["input_token_details"]["cached_tokens"] == one["usage"]["total_tokens"]
        assert again["usage"]["input_tokens"] == two["usage"]["input_tokens"]
        # An edit at the beginning is computed from there.
        talk.told({"type": "conversation.item.delete", "item_id": "mine"}, "conversation.item.deleted")
        last = talk.ask("three")
        assert caller.state(talk.session["id"])["turns"] == 1
        lost = len("system\nfirst") + 2
        assert last["usage"]["input_tokens"] == again["usage"]["total_tokens"] - lost + computed(again) + 2


def test_a_history_can_be_given_with_its_calls(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.update(tools=[LOOK])
        talk.create(message("look at me"))
        call = {"type": "function_call", "name": "look", "call_id": "c1", "arguments": "{}"}
        assert talk.create(call)["item"]["call_id"] == "c1"
        talk.create({"type": "function_call_output", "call_id": "c1", "output": "seen"})
        talk.create(message("I have seen you.", "assistant"))
        assert text_of(talk.ask("hello")) == "hello"


def test_a_spoken_message_with_its_transcript_is_text(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        part = {"type": "input_audio", "audio": "AAAA", "transcript": "hello"}
        shown = talk.create({"type": "message", "role": "user", "content": [part]})
        assert shown["item"]["content"] == [{"type": "input_text", "text": "hello"}]
        assert text_of(talk.respond()) == "hello"


def test_a_response_outside_of_the_conversation(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        first = talk.ask("hello")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        talk.kinds()
        response = talk.respond(conversation="none", input=[reference, message("aside")], metadata={"n": "1"})
        assert (text_of(response), response["conversation_id"]) == ("aside", None)
        assert not any(kind.startswith("conversation.") for kind in talk.kinds())
        assert text_of(talk.respond(conversation="none", instructions="sing", input=[])) == "sing"
        # It runs beside one that belongs to the conversation.
        talk.send({"type": "conversation.item.create", "item": message(LONG)})
        talk.send({"type": "response.create"})
        name = talk.hear("response.created")["response"]["id"]
        beside = talk.respond(conversation="none", input=[message("beside")])
        assert text_of(beside) == "beside" and beside["id"] != name
        talk.send({"type": "response.cancel"})
        assert talk.ended()["id"] == name
        assert caller.state(talk.session["id"])["turns"] == 2
        # With a context of its own, the answer is still part of the conversation.
        own = talk.respond(input=[message("own")])
        assert text_of(own) == "own" and own["conversation_id"] is not None
        item: dict[str, Any] = {"type": "conversation.item.retrieve", "item_id": own["output"][0]["id"]}
        assert talk.told(item, "conversation.item.retrieved")["item"]["status"] == "completed"
        assert text_of(talk.ask("last")) == "last"


# --- sessions of a name ------------------------------------------------------------------------------


def test_a_named_session_stays_and_goes_on(caller: Server) -> None:
    query = "?model=any&session_id=kept"
    with OpenAITalk(caller, query) as talk:
        assert talk.session["id"] == "kept"
        first = talk.ask("hello")
    caller.say("kept", "between")
    known = caller.state("kept")["tokens"]["known"]
    with OpenAITalk(caller, query) as talk:
        after = talk.ask("hello")
        assert (
            after["usage"]["input_token_details"]["cached_tokens"] == known > first["usage"]["total_tokens"]
        )
        assert caller.state("kept")["turns"] == 3
        caller.say("kept", "meanwhile")
        error = talk.refused({"type": "response.create"})
        assert error["code"] == "history_changed"


def test_a_history_that_is_sent_again_to_a_named_session_is_appended_as_the_difference(
    caller: Server,
) -> None:
    """livekit sends its items again on a new connection; the session has them."""
    query, brief = "?model=any&session_id=resent", {"type": "realtime", "instructions": "Be brief."}
    with OpenAITalk(caller, query) as talk:
        talk.told({"type": "session.update", "session": brief}, "session.updated")
        first = talk.ask("hello")
    with OpenAITalk(caller, query) as talk:
        talk.told({"type": "session.update", "session": brief}, "session.updated")
        talk.create(message("hello"))
        talk.create(message("hello", "assistant"))
        second = talk.ask("again")
        assert text_of(second) == "again"
        known = first["usage"]["total_tokens"]
        assert second["usage"]["input_token_details"]["cached_tokens"] == known
        third = talk.ask("more")
        assert third["usage"]["input_token_details"]["cached_tokens"] == second["usage"]["total_tokens"]
        # "again" has one letter more than "more", and nothing else was read before it.
        added = third["usage"]["input_tokens"] - second["usage"]["total_tokens"]
        assert second["usage"]["input_tokens"] == known + added + 1
    with OpenAITalk(caller, query) as talk:
        talk.told({"type": "session.update", "session": brief}, "session.updated")
        talk.create(message("hello"))
        talk.create(message("goodbye", "assistant"))
        talk.create(message("again"))
        error = talk.refused({"type": "response.create"})
        assert error["code"] == "history_differs" and error["param"].startswith("conversation[")
    assert caller.state("resent")["turns"] == 3


def test_a_client_may_append_its_query_to_an_address_that_has_one(caller: Server) -> None:
    """pipecat writes `?model=` after the address that it was given, whatever that ends with."""
    for turns in (1, 2):
        with OpenAITalk(caller, "?session_id=appended?model=any") as talk:
            assert talk.session["id"] == "appended"
            assert text_of(talk.ask("hello")) == "hello"
        assert caller.state("appended")["turns"] == turns


def test_a_session_that_was_closed_elsewhere_is_sent_again(caller: Server) -> None:
    with OpenAITalk(caller) as talk:
        talk.ask("hello")
        assert caller.http.delete(f"/v1/sessions/{talk.session['id']}").status_code == 200
        after = talk.ask("again")
        assert text_of(after) == "again"
        assert (
            after["usage"]["input_tokens"] > len("helloagain")
            and caller.state(talk.session["id"])["turns"] == 1
        )
