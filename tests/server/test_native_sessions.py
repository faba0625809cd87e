"""SGLang's sessions over real sockets: streaming ones that keep their memory, ordinary ones that branch.

The stories of aborted, refused and overlapping turns are told here as SGLang's clients meet them.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, processors

from tests.models.small import MARKS, write_small_model
from tests.server.apart import ENDLESS, until
from tests.server.conftest import Serve
from tests.server.native_client import GREEDY, LONG, NativeClient, total
from tests.server.serving import Server


@pytest.fixture
def native(echo: Server) -> NativeClient:
    return NativeClient(echo)


@pytest.fixture
def streaming(native: NativeClient) -> Iterator[str]:
    name = native.open(streaming=True)
    yield name
    assert native.close(name) == 200


# --- streaming sessions ---------------------------------------------------------------------------


def test_a_turn_finds_all_of_the_turn_before_it_in_memory(native: NativeClient, streaming: str) -> None:
    before = 0
    for number in range(6):
        answer = native.turn(streaming, f"turn {number}", session_params={"rid": None})
        meta = answer["meta_info"]
        assert answer["text"] == f"turn {number}"
        assert (meta["prompt_tokens"], meta["cached_tokens"]) == (before + 6, before)
        before = total(answer)


@pytest.mark.parametrize("model", [pytest.param("echo-window", marks=pytest.mark.soak), "echo-hybrid"])
def test_so_it_does_in_other_layouts(serve: Serve, model: str) -> None:
    sizes = ("--kv-tokens", "16384", "--window-tokens", "16384", "--state-slots", "64")
    server = serve(model, "--audit", "strict", *sizes)
    native = NativeClient(server)
    name = native.open(streaming=True)
    before = 0
    for number in range(20):
        answer = native.turn(name, f"turn {number} " + "words " * 9)
        assert answer["meta_info"]["cached_tokens"] == before
        before = total(answer)
    assert native.close(name) == 200
    server.check_clean()


@pytest.mark.parametrize(
    "params", [{"replace": True}, {"offset": 1}, {"offset": -1}, {"drop_previous_output": True}], ids=str
)
def test_what_would_rewrite_history_is_refused(
    native: NativeClient, streaming: str, params: dict[str, Any]
) -> None:
    first = native.turn(streaming, "one")
    status, param = native.refused(text="two", session_params={"id": streaming, **params})
    assert (status, param) == (400, f"session_params.{next(iter(params))}")
    assert native.turn(streaming, "two")["meta_info"]["cached_tokens"] == total(first)


def test_turns_may_have_one_name_one_after_another(serve: Serve, tmp_path: Path) -> None:
    server = serve("echo", "--audit", "strict", "--kv-tokens", "4096", "--journal", str(tmp_path / "journal"))
    native = NativeClient(server)
    name = native.open(streaming=True)
    before = 0
    for number in range(3):
        answer = native.turn(name, f"turn {number}", rid="same")
        assert (answer["text"], answer["meta_info"]["cached_tokens"]) == (f"turn {number}", before)
        before = total(answer)
    silent = native.turn(name, "listen", rid="same", sampling_params={"max_new_tokens": 0})
    assert native.turn(name, "speak", rid="same")["meta_info"]["prompt_tokens"] == total(silent) + 5
    assert native.close(name) == 200
    server.check_clean()


def test_parameters_that_change_nothing_are_taken(native: NativeClient, streaming: str) -> None:
    plain = {"rid": "whatever", "offset": 0, "replace": False, "drop_previous_output": False}
    assert native.turn(streaming, "one", session_params=plain)["text"] == "one"


def test_the_mark_of_a_beginning_is_dropped_from_later_turns(serve: Serve, tmp_path: Path) -> None:
    directory = write_small_model(tmp_path / "model")
    encoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    mark = encoder.token_to_id(MARKS[1])
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{MARKS[1]} $A", special_tokens=[(MARKS[1], mark)]
    )
    encoder.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": MARKS[1]}))
    server = serve(directory, "--audit", "strict", "--kv-tokens", "4096")
    native = NativeClient(server)
    sampling = {**GREEDY, "max_new_tokens": 4}
    for kind in (True, False):
        name = native.open(streaming=kind)
        rid = None
        before = 0
        for number, (said, new) in enumerate(
            [
                ({"input_ids": [mark, 300, 301]}, 3),
                ({"input_ids": [mark, 302, 303]}, 2),
                ({"input_ids": [304, 305]}, 2),
                ({"text": "abc"}, 3),
            ]
        ):
            answer = native.generate(
                **said, session_params={"id": name, "rid": rid}, sampling_params=sampling
            )
            assert answer["meta_info"]["prompt_tokens"] == before + new, number
            rid = answer["meta_info"]["id"]
            before = total(answer)
        assert native.close(name) == 200
    assert native.generate(text="abc", sampling_params=sampling)["meta_info"]["prompt_tokens"] == 4
    server.check_clean()


def test_a_silent_turn_leaves_its_prompt_alone(native: NativeClient, streaming: str) -> None:
    silent = native.turn(streaming, "listen", sampling_params={"max_new_tokens": 0})
    assert (silent["text"], silent["output_ids"], silent["meta_info"]["completion_tokens"]) == ("", [], 0)
    answer = native.turn(streaming, "speak")
    assert answer["meta_info"]["prompt_tokens"] == total(silent) + 5
    assert answer["text"] == "speak"


def test_log_probabilities_on_a_session_are_those_of_what_is_new(serve: Serve, small_models: Any) -> None:
    server = serve(small_models("llama"), "--audit", "strict", "--kv-tokens", "4096")
    native = NativeClient(server)
    name = native.open(streaming=True)
    wanted = {
        "sampling_params": {**GREEDY, "max_new_tokens": 5},
        "return_logprob": True,
        "logprob_start_len": 0,
        "session_params": {"id": name},
    }
    history: list[int] = []
    for number in range(3):
        tokens = list(range(270 + 10 * number, 279 + 10 * number))
        answer = native.generate(input_ids=tokens, **wanted)
        alone = native.generate(
            input_ids=history + tokens,
            **{**wanted, "session_params": None, "logprob_start_len": len(history)},
        )
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == tokens
        assert entries[0][0] is None
        assert answer["output_ids"] == alone["output_ids"]
        assert [entry[0] for entry in entries[1:]] == pytest.approx(
            [entry[0] for entry in alone["meta_info"]["input_token_logprobs"][1:]], abs=1e-4
        )
        history += tokens + answer["output_ids"]
    native.close(name)
    server.check_clean()


# --- stories: a refused turn changes nothing, an aborted one rolls back ---------------------------


def test_an_overlong_turn_is_refused_and_the_session_keeps_its_memory(
    native: NativeClient, streaming: str
) -> None:
    first = native.turn(streaming, "before")
    known = total(first)
    for tokens in (8192, 8192 - known, 9000):
        answer = native.post("/generate", {"input_ids": [70] * tokens, "session_params": {"id": streaming}})
        assert answer.status_code == 400
        assert "context length" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    most = native.generate(
        input_ids=[70] * (8190 - known), session_params={"id": streaming}, sampling_params=LONG
    )
    assert (most["meta_info"]["cached_tokens"], most["meta_info"]["completion_tokens"]) == (known, 2)
    assert native.refused(text="x", session_params={"id": streaming})[0] == 400


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("stop", ["abort", "abort all", "disconnect"])
def test_an_aborted_turn_rolls_back_and_nothing_is_computed_again(
    native: NativeClient, streaming: str, turns: int, stop: str
) -> None:
    before = 0
    for number in range(turns):
        before = total(native.turn(streaming, f"turn {number}"))
    held = native.server.held()
    for attempt in range(3):
        rid = f"cut-{stop.replace(' ', '-')}-{turns}-{attempt}"
        running = native.begin(
            text="words " * 20, session_params={"id": streaming}, rid=rid, sampling_params=LONG
        )
        running.wait_for_tokens(5)
        if stop == "disconnect":
            running.drop()
        else:
            assert native.abort(rid=rid, abort_all=stop == "abort all") == 200
            last = running.last()
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert running.status == 200
        native.server.settle(held)
        assert native.server.state(streaming)["tokens"]["known"] == before
    after = native.turn(streaming, "after")
    assert (after["text"], after["meta_info"]["cached_tokens"]) == ("after", before)
    assert after["meta_info"]["prompt_tokens"] == before + 5


def test_a_queued_turn_that_is_aborted_leaves_the_session_idle(serve: Serve) -> None:
    server = serve("echo", "--audit", "strict", "--max-running", "1", *ENDLESS)
    native = NativeClient(server)
    name = native.open(streaming=True)
    first = native.turn(name, "before")
    blocking = native.begin(text="words", rid="blocking", sampling_params=LONG)
    blocking.wait_for_tokens(3)
    for attempt in range(3):
        waiting = native.begin(
            text="waiting", rid=f"waiting-{attempt}", session_params={"id": name}, stream=False
        )
        until(lambda: server.state(name)["state"] == "QUEUED")  # after the turn before has been sealed
        assert native.abort(rid=f"waiting-{attempt}") == 200
        answer = waiting.last()
        assert (waiting.status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert (answer["text"], answer["meta_info"]["completion_tokens"]) == ("", 0)
        assert server.state(name)["state"] == "IDLE"
    native.abort(rid="blocking")
    blocking.last()
    assert native.turn(name, "after")["meta_info"]["cached_tokens"] == total(first)
    native.close(name)
    server.check_clean()


@pytest.mark.parametrize("turns", [0, 2])
def test_a_second_turn_is_refused_and_the_first_goes_on(
    native: NativeClient, streaming: str, turns: int
) -> None:
    before = 0
    for number in range(turns):
        before = total(native.turn(streaming, f"turn {number}"))
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    running = native.begin(text="live", session_params={"id": streaming}, sampling_params=sampling)
    running.wait_for_tokens(3)
    for _ in range(5):
        assert native.refused(text="overlapping", session_params={"id": streaming})[0] == 409
    last = running.last()
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2000}
    assert (last["meta_info"]["prompt_tokens"], last["meta_info"]["cached_tokens"]) == (before + 4, before)
    after = native.turn(streaming, "after")
    assert after["meta_info"]["cached_tokens"] == total(last)


@pytest.mark.parametrize("empty", [{"text": ""}, {"input_ids": []}], ids=str)
def test_an_empty_turn_is_refused(native: NativeClient, streaming: str, empty: dict[str, Any]) -> None:
    assert native.refused(**empty, session_params={"id": streaming}) == (400, next(iter(empty)))
    first = native.turn(streaming, "one")
    assert native.refused(**empty, session_params={"id": streaming})[0] == 400
    assert native.turn(streaming, "two")["meta_info"]["cached_tokens"] == total(first)


def test_flushing_the_cache_leaves_sessions_their_memory(native: NativeClient, streaming: str) -> None:
    before = total(native.turn(streaming, "words that are long enough for several pages of memory"))
    for number in range(3):
        assert native.server.http.request("GET" if number % 2 else "POST", "/flush_cache").status_code == 200
        answer = native.turn(streaming, f"turn {number}")
        assert answer["meta_info"]["cached_tokens"] == before
        before = total(answer)


def outlive(native: NativeClient, kind: bool, idle: float) -> tuple[str, Any, httpx.Response]:
    """A session, its turn that took longer than it may be idle, and the answer to the next one.

    On a slow machine it may expire before a turn comes: then the answer says so.
    """
    for length in (500, 1500, 4500):
        name = native.open(streaming=kind, timeout=idle)
        params: dict[str, Any] = {"id": name}
        sampling = {"max_new_tokens": length, "ignore_eos": True}
        body = {"text": "a", "session_params": params, "sampling_params": sampling}
        answer = native.post("/generate", body)
        if answer.status_code == 410:
            return name, None, answer
        long = answer.json()
        if long["meta_info"]["e2e_latency"] > idle:
            following = {"text": "b", "session_params": params | {"rid": long["meta_info"]["id"]}}
            return name, long, native.post("/generate", following)
        native.close(name)
    return outlive(native, kind, idle / 2)


@pytest.mark.parametrize("kind", [True, False])
def test_a_session_is_idle_from_the_end_of_its_turn_on(native: NativeClient, kind: bool) -> None:
    for idle in (1.0, 1.0, 2.0, 2.0, 4.0, 4.0):
        name, long, after = outlive(native, kind, idle)
        if after.status_code != 410:
            break
    assert after.json()["meta_info"]["prompt_tokens"] == total(long) + 1
    deadline = time.monotonic() + 30
    while native.post("/generate", {"text": "", "session_params": {"id": name}}).status_code == 400:
        assert time.monotonic() < deadline, "the session does not expire"
        time.sleep(0.1)
    rid = long["meta_info"]["id"]
    assert native.refused(text="x", session_params={"id": name, "rid": rid})[0] == 410


def test_closing_a_session_ends_its_turn(native: NativeClient) -> None:
    for kind in (True, False):
        name = native.open(streaming=kind)
        running = native.begin(text="words", session_params={"id": name}, sampling_params=LONG)
        running.wait_for_tokens(3)
        assert native.close(name) == 200
        assert running.last()["meta_info"]["finish_reason"]["type"] == "abort"
        native.server.settle()
        assert native.refused(text="x", session_params={"id": name})[0] == 404
        assert native.close(name) == 200


def test_names_of_sessions(native: NativeClient) -> None:
    for first in (True, False):
        name = native.open(session_id=f"chosen-{first}", streaming=first)
        assert name == f"chosen-{first}"
        for second in (True, False):
            answer = native.post("/open_session", {"session_id": name, "streaming": second})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "session_exists")
        assert native.close(name) == 200
        assert native.open(session_id=name, streaming=not first) == name
        assert native.close(name) == 200
    assert native.refused(text="x", session_params={"id": "never-opened"})[0] == 404
    assert native.close("never-opened") == 404
    assert native.generate(text="x", session_params={"id": None})["text"] == "x"


# --- ordinary sessions ----------------------------------------------------------------------------


def test_branches_grow_from_any_request(native: NativeClient) -> None:
    name = native.open()
    root = native.turn(name, "root ")
    length = total(root) - 1
    prompts = {}
    for branch in ("left", "right"):
        answer = native.turn(name, branch, session_params={"rid": root["meta_info"]["id"], "offset": -1})
        assert answer["text"] == "root root " + branch
        assert answer["meta_info"]["prompt_tokens"] == length + len(branch)
        prompts[branch] = answer
    again = native.turn(name, "!", session_params={"rid": prompts["left"]["meta_info"]["id"], "offset": -1})
    assert again["text"] == "root root left" * 2 + "!"
    assert native.close(name) == 200
    native.server.settle()


@pytest.mark.parametrize(
    ("params", "prompt"),
    [
        ({"offset": -1}, "abcdefabcdefX"),
        ({"offset": 0}, "abcdefabcdef"),
        ({"offset": 3}, "abcX"),
        ({"offset": -8}, "abcdeX"),
        ({"offset": 1000}, "abcdefabcdef"),
        ({"drop_previous_output": True}, "abcdefX"),
        ({"drop_previous_output": True, "offset": 2}, "abX"),
        ({"drop_previous_output": True, "offset": -2}, "abcdX"),
    ],
    ids=str,
)
def test_what_a_request_inherits(native: NativeClient, params: dict[str, Any], prompt: str) -> None:
    """The echo model says what precedes the last end mark, or all where there is none."""
    name = native.open()
    root = native.turn(name, "abcdef")
    for replace in (False, True):
        answer = native.turn(
            name, "X", session_params={"rid": root["meta_info"]["id"], "replace": replace, **params}
        )
        assert answer["text"] == prompt
    assert native.close(name) == 200


def test_replacing_forgets_what_grew_from_a_request(native: NativeClient) -> None:
    name = native.open()
    root = native.turn(name, "root")["meta_info"]["id"]
    child = native.turn(name, "child", session_params={"rid": root})["meta_info"]["id"]
    sibling = native.turn(name, "sibling", session_params={"rid": root})["meta_info"]["id"]
    assert native.refused(text="x", session_params={"id": name, "rid": root, "offset": -1000})[0] == 400
    fresh = native.turn(name, "fresh", session_params={"rid": root, "replace": True})["meta_info"]["id"]
    for gone in (child, sibling):
        status, param = native.refused(text="x", session_params={"id": name, "rid": gone})
        assert (status, param) == (400, "session_params.rid")
    assert native.turn(name, "more", session_params={"rid": fresh})
    native.turn(name, "anew", session_params={"replace": True})
    assert native.refused(text="x", session_params={"id": name, "rid": root})[0] == 400
    assert native.close(name) == 200


def test_a_running_request_can_be_replaced_but_not_followed(native: NativeClient) -> None:
    name = native.open()
    running = native.begin(text="abc", rid="first", session_params={"id": name}, sampling_params=LONG)
    running.wait_for_tokens(8)
    status, param = native.refused(text="x", session_params={"id": name, "rid": "first"})
    assert (status, param) == (400, "session_params.rid")
    seen = running.tokens
    running.wait_for_tokens(seen + 5)
    answer = native.turn(name, "X", session_params={"rid": "first", "replace": True, "offset": 3})
    assert answer["text"] == "abcX"
    assert running.last()["meta_info"]["finish_reason"]["type"] == "abort"
    again = native.turn(name, "Y", session_params={"rid": "first", "drop_previous_output": True})
    assert again["text"] == "abcY"
    assert native.close(name) == 200


def test_a_refused_request_leaves_the_tree_as_it_was(native: NativeClient) -> None:
    name = native.open()
    root = native.turn(name, "root")["meta_info"]["id"]
    child = native.turn(name, "child", session_params={"rid": root})["meta_info"]["id"]
    for bad in (
        {"input_ids": [70] * 9000},
        {"text": "x", "sampling_params": {"top_p": 0}},
        {"text": "x", "return_logprob": True, "logprob_start_len": 1000},
        {"text": "x", "rid": child},
        {"input_ids": [300]},
    ):
        assert native.refused(**bad, session_params={"id": name, "rid": root, "replace": True})[0] in (
            400,
            409,
        )
    assert native.turn(name, "more", session_params={"rid": child})
    assert native.close(name) == 200


def test_an_ordinary_session_says_what_its_tokens_say_alone(serve: Serve, small_models: Any) -> None:
    server = serve(small_models("llama"), "--audit", "strict", "--kv-tokens", "8192")
    native = NativeClient(server)
    name = native.open()
    sampling = {**GREEDY, "max_new_tokens": 7}
    rid = None
    history: list[int] = []
    for number in range(4):
        tokens = list(range(270 + 9 * number, 290 + 9 * number))
        params = {"id": name, "rid": rid, "offset": -1}
        answer = native.generate(input_ids=tokens, session_params=params, sampling_params=sampling)
        rid = answer["meta_info"]["id"]
        history = history[:-1] + tokens
        assert (
            answer["output_ids"] == native.generate(input_ids=history, sampling_params=sampling)["output_ids"]
        )
        history += answer["output_ids"]
    assert native.close(name) == 200
    server.check_clean()


def test_an_ordinary_session_outlives_the_engine(serve: Serve) -> None:
    server = serve("echo", "--audit", "strict", "--kv-tokens", "4096")
    native = NativeClient(server)
    ordinary, streaming = native.open(), native.open(streaming=True)
    first = native.turn(ordinary, "root ")
    native.turn(streaming, "words")
    running = native.begin(text="x", sampling_params=LONG, stream=False)
    native.until_running(1)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert running.last()["error"]["code"] == "engine_lost"
    assert running.status == 503
    server.wait_ready()
    assert native.refused(text="x", session_params={"id": streaming})[0] == 410
    again = native.turn(ordinary, "more", session_params={"rid": first["meta_info"]["id"], "offset": -1})
    assert again["text"] == "root root more"
    assert native.close(ordinary) == 200
    server.check_clean()


def test_several_answers_on_a_session_are_not_built(native: NativeClient, streaming: str) -> None:
    for name in (streaming, native.open()):
        for several in ({"text": ["a", "b"]}, {"text": "a", "sampling_params": {"n": 2}}):
            assert native.refused(**several, session_params={"id": name}) == (400, "session_params")
    native.close(name)


def test_sessions_are_counted_by_tenant(serve: Serve) -> None:
    server = serve("echo", "--max-sessions", "3", "--audit", "strict", "--kv-tokens", "4096")
    native = NativeClient(server)
    names = [native.open(streaming=True) for _ in range(3)]
    answer = native.post("/open_session", {"streaming": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    for name in names:
        native.close(name)
    server.check_clean()
