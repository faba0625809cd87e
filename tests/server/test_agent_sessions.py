"""Agents in sessions: calls wait for results through interrupts, forks, restarts, and over WebSockets."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx

from holdfast.client import Client, TurnEventKind
from tests.server.agents import BERN, TOOLS, calling, session_calls
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.talking import Talk
from tests.server.test_sessions import events_of

Body = dict[str, Any]


def tool_result(call: Body, content: str) -> list[Body]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": content}]


def test_a_session_waits_for_its_tools(caller: Server) -> None:
    name = caller.open(tools=TOOLS)
    first = caller.say(name, f"<think>Look.</think>Wait. {calling('weather', BERN)}", turn_id="t1")
    assert first["finish_reason"] == "tool_calls" and first["text"].strip() == "Wait."
    assert first["reasoning"] == "Look." and first["usage"]["reasoning_tokens"] >= 5
    assert session_calls(first["tool_calls"]) == [("weather", BERN)]
    shown = caller.get(f"/v1/sessions/{name}").json()
    assert shown["tool_calls"] == first["tool_calls"]
    listed = caller.get("/v1/sessions").json()["sessions"]
    assert [one["tool_calls"] for one in listed if one["id"] == name] == [first["tool_calls"]]
    second = caller.say(name, tool_result(first["tool_calls"][0], "21 degrees"))
    assert "21 degrees" in second["text"], "the model repeats the result in its wrapping"
    assert (second["finish_reason"], second["tool_calls"]) == ("stop", [])
    assert caller.get(f"/v1/sessions/{name}").json()["tool_calls"] == []
    again = caller.say(name, f"<think>Look.</think>Wait. {calling('weather', BERN)}", turn_id="t1")
    for field in ("text", "reasoning", "tool_calls", "finish_reason", "token_ids"):
        assert again[field] == first[field], field


def test_a_stream_of_a_turn_with_calls(caller: Server) -> None:
    name = caller.open(tools=TOOLS)
    body = {"input": f"<think>Hm.</think>Wait. {calling('weather', BERN)}", "turn_id": "t1", "stream": True}
    for _ in range(2):  # The second is replayed.
        told = events_of(caller.post(f"/v1/sessions/{name}/turns", body))
        result = told[-1][1]
        assert told[-1][0] == "done" and result["finish_reason"] == "tool_calls"
        text = {kind: "".join(body.get("text", "") for event, body in told[:-1] if event == kind)
                for kind in ("delta", "reasoning.delta")}  # fmt: skip
        assert text == {"delta": result["text"], "reasoning.delta": "Hm."}
        (begun,) = [body for event, body in told if event == "tool_call"]
        (done,) = [body for event, body in told if event == "tool_call.done"]
        assert (begun["name"], begun["id"]) == ("weather", result["tool_calls"][0]["id"])
        assert json.loads(done["arguments"]) == BERN and done["outcome"] == "complete"
        pieces = [body["arguments"] for event, body in told if event == "tool_call.delta"]
        assert "".join(pieces) == done["arguments"]
        tokens = [token for event, body in told[:-1] for token in body["token_ids"]]
        assert tokens == result["token_ids"]


def test_a_call_that_its_limit_cuts(caller: Server) -> None:
    name = caller.open(tools=TOOLS)
    text = calling("weather", BERN)
    body = {"input": text, "stream": True, "sampling": {"max_tokens": text.index("Bern")}}
    told = events_of(caller.post(f"/v1/sessions/{name}/turns", body))
    (kind, ended), (_, result) = told[-2:]
    assert (kind, ended["outcome"]) == ("tool_call.done", "cut")
    assert (result["finish_reason"], result["tool_calls"]) == ("length", [])
    (cut,) = result["incomplete_tool_calls"]
    assert cut["outcome"] == "cut" and cut["function"]["arguments"] == ended["arguments"]
    assert caller.get(f"/v1/sessions/{name}").json()["tool_calls"] == []


LONG_CALL = calling("weather", {"city": "Bern" * 1200})


def test_an_interrupt_keeps_no_half_a_call(caller: Server) -> None:
    name = caller.open(tools=TOOLS)
    body = {"input": f"Wait. {LONG_CALL}", "turn_id": "t1", "stream": True, "sampling": {"max_tokens": 6000}}
    with caller.http.stream("POST", f"/v1/sessions/{name}/turns", json=body) as stream:
        seen, chunks = "", stream.iter_text()
        for chunk in chunks:
            seen += chunk
            if "event: tool_call.delta" in seen:
                break
        answer = caller.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "t1", "keep": "all"})
        assert answer.status_code == 200, answer.text
        seen += "".join(chunks)
    result = events_of(httpx.Response(200, text=seen))[-1][1]
    assert result["finish_reason"] == "abort" and result["tool_calls"] == []
    assert result["text"].strip() == "Wait." and len(result["token_ids"]) <= len("Wait. <")
    assert answer.json()["tool_calls"] == []
    known = answer.json()["tokens"]["known"]
    assert known == result["usage"]["prompt_tokens"] + len(result["token_ids"])
    assert caller.say(name, "Go on.")["text"] == "Go on."


def test_a_fork_waits_for_the_same_tools(caller: Server) -> None:
    name = caller.open(tools=TOOLS)
    first = caller.say(name, calling("weather", BERN))
    child = caller.post(f"/v1/sessions/{name}/fork", {}).json()
    assert child["tool_calls"] == first["tool_calls"]
    for each, said in ((name, "sun"), (child["id"], calling("sing", {"loud": True}))):
        caller.say(each, tool_result(first["tool_calls"][0], said))
    assert caller.get(f"/v1/sessions/{name}").json()["tool_calls"] == []
    waiting = caller.get(f"/v1/sessions/{child['id']}").json()["tool_calls"]
    assert session_calls(waiting) == [("sing", {"loud": True})]
    back = caller.post(f"/v1/sessions/{child['id']}/rewind", {"to_turn": 1}).json()
    assert back["tool_calls"] == first["tool_calls"], "the call of the turn that it inherited waits again"


def test_a_server_that_is_killed_between_call_and_result(serve: Serve, tmp_path: Path) -> None:
    arguments = ("--tool-parser", "hermes", "--journal", str(tmp_path / "journal"), "--kv-tokens", "8192")
    server = serve("echo", *arguments)
    name = server.open("agent", tools=TOOLS)
    first = server.say(name, calling("weather", BERN), turn_id="t1")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    server = serve("echo", *arguments)
    assert server.get(f"/v1/sessions/{name}").json()["tool_calls"] == first["tool_calls"]
    again = server.say(name, calling("weather", BERN), turn_id="t1")
    assert again["tool_calls"] == first["tool_calls"] and again["finish_reason"] == "tool_calls"
    last = server.say(name, tool_result(first["tool_calls"][0], calling("sing", {"loud": True})))
    assert session_calls(last["tool_calls"]) == [("sing", {"loud": True})], "its tools are there as well"


def test_the_client_library(caller: Server) -> None:
    with Client(caller.url) as client, client.session(tools=TOOLS) as session:
        turn = session.say(f"<think>Hm.</think>Wait. {calling('weather', BERN)}")
        kinds = [event.kind for event in turn.events()]
        assert kinds.index(TurnEventKind.REASONING) < kinds.index(TurnEventKind.TEXT)
        assert kinds[-1] is TurnEventKind.CALL_DONE
        assert (turn.text.strip(), turn.reasoning, turn.finish_reason) == ("Wait.", "Hm.", "tool_calls")
        (call,) = turn.tool_calls
        assert (call.name, call.parsed()) == ("weather", BERN)
        assert session.view().tool_calls == (call,)
        assert turn.usage.reasoning_tokens > 0
        assert '{"degrees": 21}' in session.tool_results({call.id: {"degrees": 21}}).text


# --- realtime -------------------------------------------------------------------------------------


def test_calls_over_a_connection(caller: Server) -> None:
    with Talk(caller) as talk:
        talk.open("rt", tools=TOOLS)
        done = talk.turn(f"<think>Hm.</think>Wait. {calling('weather', BERN)}", turn_id="t1")
        assert done["finish_reason"] == "tool_calls" and done["reasoning"] == "Hm."
        assert session_calls(done["tool_calls"]) == [("weather", BERN)]
        kinds = [message["type"] for message in talk.heard]
        for kind in ("reasoning.delta", "delta", "tool_call", "tool_call.delta", "tool_call.done"):
            assert f"response.{kind}" in kinds
        talk.say("input.append", messages=tool_result(done["tool_calls"][0], "21 degrees"))
        talk.say("input.commit", turn_id="t2")
        assert "21 degrees" in talk.hear("response.done")["text"]
        talk.say("session.close")
        talk.hear("session.closed")


def test_a_barge_in_keeps_what_was_said_and_no_half_a_call(caller: Server) -> None:
    with Talk(caller) as talk:
        talk.open("rt", tools=TOOLS)
        talk.commit(f"Wait. {LONG_CALL}", turn_id="t1", sampling={"max_tokens": 6000})
        talk.hear("response.tool_call.delta")
        talk.commit("Stop.", turn_id="t2", mode="interrupt")
        done = talk.hear("response.done")
        assert (done["turn_id"], done["finish_reason"], done["tool_calls"]) == ("t1", "abort", [])
        assert done["text"].strip() == "Wait." and len(done["token_ids"]) <= len("Wait. <")
        assert talk.hear("response.done")["text"] == "Stop."
        talk.say("session.close")
        talk.hear("session.closed")


def test_the_client_hears_no_half_a_call(caller: Server) -> None:
    with Client(caller.url) as client, client.session(tools=TOOLS) as session:
        turn = session.say(f"Wait. {LONG_CALL}", max_tokens=6000)
        for event in turn.events():
            if event.kind is TurnEventKind.ARGUMENTS:
                break
        session.interrupt()
        assert turn.text.strip() == "Wait." and turn.tool_calls == ()
        assert session.say("Go on.").text == "Go on."
