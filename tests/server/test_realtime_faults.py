"""What a WebSocket client can do wrong, and connections that break at every phase; no engine notices."""

import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.frames import Opcode

from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.talking import LONG, Talk

DEEP = '{"type":"session.open","metadata":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}"

WRONG: list[tuple[str, str | None]] = [
    ("", None),
    ("{", None),
    ("[]", None),
    ('"text"', None),
    ("null", None),
    ("NaN", None),
    ("1" * 100_000, None),
    (DEEP, None),
    ('{"type": "input.append", "text": "\\ud800"}', None),
    ('{"type": "session.open"} {"type": "session.open"}', None),
    ("{}", "type"),
    ('{"type": 7}', "type"),
    ('{"type": null}', "type"),
    ('{"type": "response.started"}', "type"),
    ('{"type": "session.open", "more": 1}', "more"),
    ('{"type": "session.open", "id": 7}', "id"),
    ('{"type": "session.open", "id": "../x"}', "id"),
    ('{"type": "session.open", "id": "a\\u0000b"}', "id"),
    ('{"type": "session.open", "ttl": -1}', "ttl"),
    ('{"type": "session.open", "ttl": "1"}', "ttl"),
    ('{"type": "session.open", "metadata": []}', "metadata"),
    ('{"type": "session.open", "resume_after_seq": -1, "id": "a"}', "resume_after_seq"),
    ('{"type": "session.open", "resume_after_seq": 1.5, "id": "a"}', "resume_after_seq"),
    ('{"type": "session.open", "resume_after_seq": 99999999999999999999, "id": "a"}', "resume_after_seq"),
    ('{"type": "input.append", "text": "a"}', "type"),
    ('{"type": "session.close"}', "type"),
]
"""Messages to a connection without a session, and the field that is named."""

WRONG_INSIDE: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "session.open"}, "type"),
    ({"type": "input.append"}, "text"),
    ({"type": "input.append", "text": "a", "token_ids": [1]}, "text"),
    ({"type": "input.append", "text": 1}, "text"),
    ({"type": "input.append", "token_ids": [True]}, "token_ids[0]"),
    ({"type": "input.append", "token_ids": [1] * 10_000}, "token_ids"),
    ({"type": "input.append", "token_ids": [-1]}, "token_ids"),
    ({"type": "input.append", "token_ids": [1, 1 << 20]}, "token_ids"),
    ({"type": "input.commit"}, "input"),
    ({"type": "input.commit", "mode": "later"}, "mode"),
    ({"type": "input.commit", "turn_id": "a/b"}, "turn_id"),
    ({"type": "input.commit", "input": "a"}, "input"),
    ({"type": "input.commit", "on_abort": "stay"}, "on_abort"),
    ({"type": "input.commit", "sampling": {"n": 2}}, "sampling.n"),
    ({"type": "input.commit", "sampling": {"top_k": True}}, "sampling.top_k"),
    ({"type": "response.interrupt", "keep": "all"}, "turn_id"),
    ({"type": "response.interrupt", "turn_id": "one"}, "keep_tokens"),
    ({"type": "response.interrupt", "turn_id": "one", "keep_tokens": -1}, "keep_tokens"),
    ({"type": "response.interrupt", "turn_id": "one", "keep": "some"}, "keep"),
    ({"type": "response.interrupt", "turn_id": "one", "keep": "all", "keep_tokens": 1}, "keep_tokens"),
    ({"type": "session.rewind"}, "to_turn"),
    ({"type": "session.rewind", "to_turn": -1}, "to_turn"),
    ({"type": "session.rewind", "to_turn": 1 << 40}, "to_turn"),
    ({"type": "session.rewind", "to_turn": 1}, "to_turn"),
    ({"type": "session.fork", "id": "a b"}, "id"),
    ({"type": "session.fork", "at_turn": 1.5}, "at_turn"),
    ({"type": "session.close", "id": "x"}, "id"),
]

WRONG_COMMITS: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.1}}, "sampling.top_p"),
    ({"sampling": {"top_k": -2}}, "sampling.top_k"),
    ({"sampling": {"max_tokens": -1}}, "sampling.max_tokens"),
    ({"sampling": {"max_tokens": 100_000}}, "sampling.max_tokens"),
    ({"sampling": {"stop": ""}}, "sampling.stop"),
    ({"sampling": {"logit_bias": {"x": 1.0}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {"1000000": 1.0}}}, "sampling.logit_bias"),
    ({"sampling": {"stop_token_ids": [1 << 20]}}, "sampling.stop_token_ids"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": 1e9}, "timeout"),
]
"""Commits that no session could carry out."""


def test_a_wrong_message_is_an_error_that_names_the_field_and_the_connection_stays(echo: Server) -> None:
    with Talk(echo) as talk:
        for text, param in WRONG:
            talk.connection.send(text)
            error = talk.refused()
            assert (error["type"], error["param"]) in (
                ("invalid_request_error", param),
                ("conflict_error", param),
            ), text[:80]
            assert talk.heard[-1]["seq"] is None
        talk.connection.send(b"\x00\xff")
        assert talk.refused()["code"] == "invalid_message"
        assert talk.open()["turns"] == 0


def test_a_wrong_message_changes_nothing_in_the_session(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.say("input.append", text="kept")
        for message, param in WRONG_INSIDE:
            if message["type"] == "input.append" and "text" not in message and "token_ids" in message:
                continue  # Token ids after text are refused for that alone.
            if message == {"type": "input.commit"}:
                continue
            talk.connection.send(json.dumps(message))
            assert talk.refused()["param"] == param, message
        talk.say("input.commit")
        assert talk.hear("response.done")["text"] == "kept"
        for message, param in WRONG_INSIDE:
            if message["type"].startswith("input."):
                talk.connection.send(json.dumps(message))
                assert talk.refused()["param"] == param, message
        talk.say("input.append", text="")
        talk.say("input.commit", turn_id="empty")
        assert (talk.refused()["param"], talk.heard[-1]["turn_id"]) == ("input", "empty")
        talk.say("input.append", text="text")
        talk.say("input.append", token_ids=[1])
        assert talk.refused()["param"] == "token_ids"
    assert echo.state(name)["turns"] == 1


@pytest.mark.parametrize("mode", ["after", "interrupt"])
def test_a_commit_that_is_refused_changes_nothing(echo: Server, mode: str) -> None:
    """Neither the turn that speaks, nor one that waits, nor the input, which can be committed rightly."""
    with Talk(echo) as talk:
        talk.open()
        talk.commit("la ", turn_id="speaks", sampling=LONG)
        talk.hear("response.delta")
        talk.commit("next", turn_id="waits")
        talk.say("input.append", text="precious")
        for fields, _ in WRONG_COMMITS:
            talk.say("input.commit", turn_id="wrong", mode=mode, **fields)
        talk.say("input.commit", turn_id="speaks", mode=mode)
        talk.say("response.interrupt", turn_id="speaks", keep="all")
        for fields, param in WRONG_COMMITS:
            error = talk.hear("error", "response.done")
            assert (error["type"], error["turn_id"]) == ("error", "wrong"), (fields, error)
            assert error["error"]["param"] == param, (fields, error)
        conflict = talk.hear("error", "response.done")
        assert (conflict["turn_id"], conflict["error"]["code"]) == ("speaks", "turn_conflict")
        cut = talk.hear("error", "response.done")
        assert (cut["turn_id"], cut["finish_reason"]) == ("speaks", "abort")
        assert talk.hear("error", "response.done")["text"] == "next"
        talk.say("input.commit", turn_id="right", mode=mode)
        right = talk.hear("error", "response.done")
        assert (right["turn_id"], right["text"]) == ("right", "precious")


@pytest.mark.parametrize("said", [{"text": "second"}, {"token_ids": [70, 71]}])
@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"turn_id": "a/b"}])
def test_what_is_appended_after_a_refused_commit_is_a_new_input(
    echo: Server, said: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Whoever says each turn with its input never hears of an earlier one that was refused."""
    with Talk(echo) as talk:
        talk.open()
        talk.commit("first", **wrong)
        assert talk.refused()["param"] in wrong
        talk.say("input.append", text="both", token_ids=[1])
        assert talk.refused()["param"] == "text"
        talk.say("input.append", **said)
        if "text" in said:
            talk.say("input.append", text=" and more")
        talk.say("input.commit", sampling={"max_tokens": 30})
        done = talk.hear("error", "response.done")
        assert done["text"] == "second and more" or done["token_ids"][:2] == [70, 71]
        again = talk.turn("third")
        assert again["text"] == "third"


def test_a_commit_that_finds_no_place_leaves_turns_and_input_as_they_are(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.commit("la ", turn_id="speaks", sampling=LONG)
        talk.hear("response.started")
        for _ in range(64):
            talk.say("session.rewind", to_turn=0)
        talk.say("input.append", text="precious")
        talk.say("input.commit", turn_id="refused", mode="interrupt")
        talk.say("response.interrupt", turn_id="speaks", keep="none")
        refused = talk.hear("error", "response.done")
        assert (refused["turn_id"], refused["error"]["code"]) == ("refused", "too_many_messages")
        assert talk.hear("error", "response.done")["turn_id"] == "speaks"
        for _ in range(64):
            talk.hear("session.rewound")
        talk.say("input.commit", turn_id="refused", mode="interrupt")
        assert talk.hear("error", "response.done")["text"] == "precious"


def test_a_turn_that_is_committed_again_does_not_cut_itself(echo: Server) -> None:
    """A client that was cut off says its last commit again, word for word."""
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("la ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        talk.commit("lo ", turn_id="two", mode="interrupt", sampling=LONG)
        while talk.hear("response.delta")["turn_id"] != "two":
            pass
        talk.commit("lo ", turn_id="two", mode="interrupt", sampling=LONG)
        talk.say("input.commit")
        assert talk.refused()["code"] == "empty_turn", "what was committed again is not appended still"
        talk.say("response.interrupt", turn_id="two", keep_tokens=1)
        done = talk.hear("response.done")
        assert (done["turn_id"], len(done["token_ids"])) == ("two", 1)
        assert [message["turn_id"] for message in talk.heard if message["type"] == "response.done"] == [
            "one",
            "two",
        ]
    assert echo.state(name)["turns"] == 2


def test_an_input_past_the_context_is_refused_and_the_session_stays(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.commit("x" * 9000, turn_id="long")
        refused = talk.hear("error", "response.started")
        assert (refused["turn_id"], refused["error"]["code"]) == ("long", "context_length_exceeded")
        assert talk.turn("short")["text"] == "short"


def test_more_messages_than_can_wait_are_refused(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("la ", turn_id="one", sampling=LONG)
        talk.hear("response.started")
        for _ in range(70):
            talk.say("session.rewind", to_turn=0)
        codes = {talk.hear("error")["error"]["code"]}
        talk.say("response.interrupt", turn_id="one", keep="none")
        talk.hear("response.done")
        assert codes == {"too_many_messages"}
        for _ in range(64):
            assert talk.hear("session.rewound")["turns"] == 0
    assert echo.state(name)["turns"] == 0


# --- frames -----------------------------------------------------------------------------------------


def test_a_message_over_the_limit_is_closed_with_1009(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.say("input.append", text="x" * (4 << 20))
        assert talk.closed_with() == 1009


def test_invalid_utf_8_is_closed_with_1007(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.connection.socket.sendall(frame(Opcode.TEXT, b'{"type": "\xff\xfe"}'))
        assert talk.closed_with() == 1007


def test_a_broken_frame_is_closed_with_1002(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.connection.socket.sendall(b"\xf3\x80\x00\x00\x00\x00")
        assert talk.closed_with() == 1002


def frame(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    """A client's frame, masked with zeros."""
    head = bytes([(0x80 if final else 0) | opcode])
    size = len(payload)
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", size)
    return head + bytes(4) + payload


def noise(seed: int) -> Iterator[bytes]:
    """Frames that may or may not mean something."""
    chance = random.Random(seed)
    kinds = [
        "session.open", "input.append", "input.commit", "response.interrupt", "session.rewind",
        "session.fork", "session.close", "error", "",
    ]  # fmt: skip
    names = ["type", "id", "text", "token_ids", "turn_id", "sampling", "mode", "keep", "to_turn", "at_turn"]
    values = [
        "",
        "a",
        "x" * 200,
        0,
        1,
        -1,
        1 << 70,
        1.5,
        None,
        True,
        [],
        [1, 2],
        {},
        {"n": 1},
        "after",
        "all",
    ]
    for _ in range(60):
        body = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(4))}
        body["type"] = chance.choice(kinds)
        text = json.dumps(body).encode()
        match chance.randrange(12):
            case 0:
                yield frame(Opcode.BINARY, chance.randbytes(chance.randrange(300)))
            case 1:
                yield frame(Opcode.TEXT, text[: chance.randrange(len(text))])
            case 2:
                yield frame(Opcode.TEXT, text[:5], final=False) + frame(Opcode.CONT, text[5:])
            case 3:
                yield frame(Opcode.PING, chance.randbytes(chance.randrange(100)))
            case 4:
                yield frame(Opcode.PONG, b"")
            case 5 if chance.random() < 0.2:
                yield frame(chance.randrange(16), chance.randbytes(chance.randrange(200)))
            case 6 if chance.random() < 0.2:
                yield chance.randbytes(chance.randrange(16))
            case _:
                yield frame(Opcode.TEXT, text)


@pytest.mark.parametrize("seed", range(24))
def test_noise_does_no_harm(echo: Server, seed: int) -> None:
    talk = Talk(echo)
    talk.open(f"noise-{seed}")
    wire = talk.connection.socket
    try:
        for sent in noise(seed):
            wire.sendall(sent)
    except OSError:
        pass  # The server has had enough.
    talk.drop()
    assert not [line for line in echo.lines if "failed" in line or "Exception in" in line], echo.lines
    with Talk(echo) as other:
        assert other.open()["turns"] == 0
        assert other.turn("unharmed")["text"] == "unharmed"


# --- disconnects ------------------------------------------------------------------------------------

PHASES = ["handshake", "opening", "appended", "committed", "started", "speaking", "interrupting", "queued",
          "done", "rewinding", "forking", "closing"]  # fmt: skip


@pytest.mark.parametrize("graceful", [False, True], ids=["abrupt", "graceful"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_connection_that_breaks_leaves_the_session_at_its_last_commit(
    echo: Server, phase: str, graceful: bool
) -> None:
    name = f"broken-{phase}-{graceful}"
    talk = Talk(echo)
    before = 0
    if phase != "handshake":
        talk.say("session.open", id=name)
    if phase not in ("handshake", "opening"):
        talk.hear("session.opened")
        talk.turn("before")
        before = 1
        talk.say("input.append", text="la ")
    if phase in ("committed", "started", "speaking", "interrupting", "queued", "closing"):
        talk.say("input.commit", turn_id="one", sampling=LONG)
    if phase in ("speaking", "interrupting", "closing"):
        talk.hear("response.delta")
    if phase == "started":
        talk.hear("response.started")
    if phase == "queued":
        talk.commit("behind", turn_id="two")
    if phase == "interrupting":
        talk.say("response.interrupt", turn_id="one", keep="none")
    if phase == "done":
        talk.say("input.commit", turn_id="one")
        talk.hear("response.done")
        before = 2
    if phase == "rewinding":
        talk.say("session.rewind", to_turn=1)
    if phase == "forking":
        talk.say("session.fork", id=f"{name}-fork")
    if phase == "closing":
        talk.say("session.close")
    if graceful:
        talk.connection.close()
    else:
        linger = struct.pack("ii", 1, 0)
        talk.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        talk.drop()
    if phase == "closing":
        return  # Whether the message was heard before the connection broke is a matter of chance.
    with Talk(echo) as again:
        again.open(name)
        done = again.turn("after", turn_id="after")
        while done["turn_id"] != "after":  # The end of the turn that the broken connection left.
            done = again.hear("response.done")
        assert done["text"] == "after"
        assert echo.state(name)["turns"] == before + 1


def test_a_disconnected_turn_stops_at_once(echo: Server) -> None:
    name = echo.open()
    talk = Talk(echo)
    talk.open(name)
    talk.commit("la ", turn_id="one", sampling={"max_tokens": 7000, "ignore_eos": True})
    talk.hear("response.delta")
    talk.drop()
    with Talk(echo) as again:
        again.open(name, resume_after_seq=0)
        assert again.hear("response.done")["abort_reason"] == "the client went away"
        spoken = sum(len(m["token_ids"]) for m in again.heard if m["type"] == "response.delta")
        assert spoken < 7000


def test_many_connections_come_and_go_while_one_speaks(serve: Serve) -> None:
    server = serve("echo-hybrid", "--audit", "strict", "--context-length", "8192", "--kv-tokens", "65536")
    with Talk(server) as steady:
        steady.open("steady")
        steady.commit("steady ", turn_id="one", sampling={"max_tokens": 2000, "ignore_eos": True})
        for number in range(16):
            talk = Talk(server)
            talk.open(f"guest-{number}")
            talk.commit("la ", sampling=LONG)
            if number % 2:
                talk.hear("response.delta")
            talk.drop()
        done = steady.hear("response.done")
        assert done["text"] == ("steady " * 600)[: len(done["text"])]
        assert done["usage"]["completion_tokens"] == 2000
    server.check_clean()
