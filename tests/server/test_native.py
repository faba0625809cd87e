"""SGLang's own interface over real sockets: the answers of `/generate`, and what else its clients ask for."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.server.conftest import Serve
from tests.server.native_client import GREEDY, LONG, NativeClient
from tests.server.serving import ADMIN_KEY, Server
from tests.server.test_sessions import long_turn, wait_known, wait_state

END = 256
"""The token that ends what the echo model says."""


@pytest.fixture
def native(echo: Server) -> NativeClient:
    return NativeClient(echo)


def test_an_answer_has_the_fields_that_clients_read(native: NativeClient) -> None:
    answer = native.generate(text="hello", rid="mine", unknown_field={"x": 1})
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert set(meta) >= {
        "id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency",
    }  # fmt: skip
    assert (answer["text"], meta["id"]) == ("hello", "mine")
    assert meta["finish_reason"] == {"type": "stop", "matched": END}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 6, 0)
    assert answer["output_ids"][-1] == END and len(answer["output_ids"]) == 6
    assert "output_token_logprobs" not in meta


def test_text_and_its_tokens_are_answered_alike(native: NativeClient) -> None:
    tokens = native.server.post("/tokenize", {"prompt": "some words"}).json()["tokens"]
    assert native.generate(input_ids=tokens)["output_ids"] == native.generate(text="some words")["output_ids"]


def test_a_batch_is_answered_as_a_list_in_its_order(native: NativeClient) -> None:
    texts = [f"prompt {number}" for number in range(20)]
    answers = native.generate(text=texts, rid="batch")
    assert [answer["text"] for answer in answers] == texts
    assert [answer["meta_info"]["id"] for answer in answers] == [f"batch_{number}" for number in range(20)]
    assert [answer["text"] for answer in native.generate(text=["alone"])] == ["alone"]
    answers = native.generate(input_ids=[[70, 71], [72]], rid=["a", "b"])
    assert [answer["output_ids"] for answer in answers] == [[70, 71, END], [72, END]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


def test_a_batch_may_have_parameters_for_each(native: NativeClient) -> None:
    answers = native.generate(
        text=["abcdef", "ghijkl"],
        sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 4}],
        return_logprob=[False, True],
    )
    assert [answer["text"] for answer in answers] == ["ab", "ghij"]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [False, True]


def test_several_choices_are_a_list_grouped_by_prompt(native: NativeClient) -> None:
    answers = native.generate(text=["one", "two"], sampling_params={"n": 3}, rid="x")
    assert [answer["text"] for answer in answers] == ["one"] * 3 + ["two"] * 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6
    assert len(native.generate(text="one", sampling_params={"n": 2})) == 2


def test_a_stream_is_cumulative_and_ends_with_the_whole(native: NativeClient) -> None:
    chunks = native.stream(text="straße 東京 🙂", return_logprob=True)
    assert chunks[-1] == "[DONE]"
    shown = [chunk for chunk in chunks if chunk != "[DONE]"]
    for earlier, later in pairwise(shown):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    for chunk in shown:
        meta = chunk["meta_info"]
        assert "\ufffd" not in chunk["text"]
        assert meta["completion_tokens"] == len(chunk["output_ids"]) == len(meta["output_token_logprobs"])
        assert (meta["prompt_tokens"], meta["cached_tokens"]) == (19, 0)
    assert shown[-1]["text"] == "straße 東京 🙂"
    assert shown[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_streamed_batch_says_which_answer_a_chunk_is_of(native: NativeClient) -> None:
    chunks = native.stream(text=["first", "second"], sampling_params={"n": 2})
    assert chunks.count("[DONE]") == 1 and chunks[-1] == "[DONE]"
    last: dict[int, Any] = {chunk["index"]: chunk for chunk in chunks[:-1]}
    assert [last[index]["text"] for index in range(4)] == ["first", "first", "second", "second"]
    assert all(chunk["meta_info"]["finish_reason"] for chunk in last.values())


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({"stop": "wor"}, "hello ", {"type": "stop", "matched": "wor"}),
        ({"stop": ["xyz", "lo w"]}, "hel", {"type": "stop", "matched": "lo w"}),
        ({"stop": "wor", "no_stop_trim": True}, "hello wor", {"type": "stop", "matched": "wor"}),
        ({"stop_token_ids": [86]}, "hello ", {"type": "stop", "matched": 86}),
        ({"stop_token_ids": [86], "no_stop_trim": True}, "hello w", {"type": "stop", "matched": 86}),
        ({"skip_special_tokens": False}, "hello world", {"type": "stop", "matched": END}),
        ({"no_stop_trim": True}, "hello world", {"type": "stop", "matched": END}),
        (
            {"skip_special_tokens": False, "no_stop_trim": True},
            "hello world<|end|>",
            {"type": "stop", "matched": END},
        ),
        ({"max_new_tokens": 4}, "hell", {"type": "length", "length": 4}),
        ({"max_new_tokens": 0}, "", {"type": "length", "length": 0}),
        ({"max_new_tokens": 14, "ignore_eos": True}, "hello worldhe", {"type": "length", "length": 14}),
        ({"temperature": None, "top_p": None, "stop": None, "n": None}, "hello world", None),
    ],
    ids=str,
)
def test_where_an_answer_ends(
    native: NativeClient, sampling: dict[str, Any], text: str, reason: dict[str, Any] | None
) -> None:
    answer = native.generate(text="hello world", sampling_params=sampling)
    assert answer["text"] == text
    if reason is not None:
        assert answer["meta_info"]["finish_reason"] == reason
    streamed = native.stream(text="hello world", sampling_params=sampling)[-2]
    assert (streamed["text"], streamed["output_ids"]) == (text, answer["output_ids"])


def test_the_limit_is_cut_to_what_fits(native: NativeClient) -> None:
    long = {"max_new_tokens": 100_000, "ignore_eos": True}
    answer = native.generate(input_ids=[70] * 8000, sampling_params=long)
    assert answer["meta_info"]["completion_tokens"] == 192
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 192}
    answer = native.generate(input_ids=[70] * 8191, sampling_params=long)
    assert answer["meta_info"]["completion_tokens"] == 1


def test_log_probabilities_of_answers_and_prompts(serve: Serve, small_models: Any) -> None:
    server = serve(small_models("llama"), "--audit", "strict", "--kv-tokens", "4096")
    native = NativeClient(server)
    tokens = list(range(270, 300))
    wanted = {"input_ids": tokens, "sampling_params": {**GREEDY, "max_new_tokens": 5}, "return_logprob": True}
    plain = native.generate(**wanted)["meta_info"]
    assert plain["input_token_logprobs"] == []
    assert len(plain["output_token_logprobs"]) == plain["output_token_logprobs_length"] == 5
    whole = native.generate(**wanted, logprob_start_len=0, top_logprobs_num=3, return_text_in_logprobs=True)
    meta = whole["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == tokens
    assert entries[0][0] is None and meta["input_top_logprobs"][0] is None
    assert all(entry[0] < 0 for entry in entries[1:])
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [3] * 29
    assert [entry[1] for entry in meta["output_token_logprobs"]] == whole["output_ids"]
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0][1] == entry[1] and top[0][0] == pytest.approx(entry[0], abs=1e-5)
        assert isinstance(entry[2], str) and entry[2]
    for start in (1, 16, 17, 29):
        later = native.generate(**wanted, logprob_start_len=start)["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in later] == tokens[start:]
        assert later[0][0] is None
        assert [entry[0] for entry in later[1:]] == pytest.approx(
            [entry[0] for entry in entries[start + 1 :]], abs=1e-4
        )
    assert native.generate(**wanted, logprob_start_len=30)["meta_info"]["input_token_logprobs"] == []
    assert native.refused(**wanted, logprob_start_len=31) == (400, "logprob_start_len")
    server.check_clean()


def test_what_a_server_says_about_itself(native: NativeClient) -> None:
    model = native.server.get("/get_model_info").json()
    assert model == native.server.get("/model_info").json()
    assert (model["served_model_name"], model["is_generation"]) == ("echo", True)
    server = native.server.get("/get_server_info").json()
    assert server["max_req_input_len"] == 8191 and server["internal_states"]
    assert native.server.get("/server_info").json()["context_length"] == 8192
    assert native.server.get("/health_generate").status_code == 200
    for method in ("GET", "POST"):
        assert native.server.http.request(method, "/flush_cache").status_code == 200


def test_requests_are_stopped_by_name(native: NativeClient) -> None:
    assert native.abort(rid="nobody") == native.abort(rid="") == native.abort() == 200
    running = native.begin(text="words", rid="stop-me", sampling_params=LONG)
    other = native.begin(text=["a", "b"], rid="both", sampling_params=LONG)
    running.wait_for_tokens(3)
    other.wait_for_tokens(3)
    assert native.abort(rid="stop-me") == 200
    last = running.last()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["finish_reason"]["message"]
    assert last["output_ids"] and last["text"].startswith("wor")
    assert native.abort(rid="both") == 200
    assert other.last()["meta_info"]["finish_reason"]["type"] == "abort"
    native.server.settle()


def test_a_waiting_caller_gets_what_was_said_before_the_abort(native: NativeClient) -> None:
    waiting = native.begin(text="words", rid="whole", sampling_params=LONG, stream=False)
    native.until_running(1)
    assert native.abort(rid="", abort_all=True) == 200
    answer = waiting.last()
    assert waiting.status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


def test_a_client_that_goes_away_ends_its_request(native: NativeClient) -> None:
    for many in ("words", ["words", "more words"]):
        running = native.begin(text=many, rid="gone", sampling_params=LONG)
        running.wait_for_tokens(3)
        running.drop()
        native.server.settle()
    assert native.generate(text="hello", rid="gone")["text"] == "hello"


def test_a_name_can_be_used_once_at_a_time(native: NativeClient) -> None:
    running = native.begin(text="words", rid="taken", sampling_params=LONG)
    running.wait_for_tokens(1)
    assert native.refused(text="x", rid="taken")[0] == 409
    native.abort(rid="taken")
    assert running.last()["meta_info"]["finish_reason"]["type"] == "abort"
    assert native.generate(text="x", rid="taken")["text"] == "x"


def test_one_bad_prompt_refuses_the_whole_batch(native: NativeClient) -> None:
    status, param = native.refused(input_ids=[[70]] * 30 + [[999]], sampling_params=LONG)
    assert (status, param) == (400, "input_ids")
    native.server.settle()


def test_a_deadline_stops_a_request(native: NativeClient) -> None:
    answer = native.generate(text="x", sampling_params=LONG, timeout=0.05)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["completion_tokens"] < 8000


def test_keys_keep_tenants_and_the_admin_apart(serve: Serve) -> None:
    server = serve(
        "echo",
        *("--audit", "strict", "--kv-tokens", "65536", "--admin-key", ADMIN_KEY),
        environment={"HOLDFAST_API_KEYS": "anna:anna-key,bert:bert-key"},
    )
    anna, bert, admin = (NativeClient(server, key) for key in ("anna-key", "bert-key", ADMIN_KEY))
    assert server.post("/generate", {"text": "x"}).status_code == 401
    for path in ("/flush_cache", "/get_server_info"):
        assert anna.get(path).status_code == 403
        assert admin.get(path).status_code == 200
    for key, status in (("anna-key", 403), (ADMIN_KEY, 200)):
        reset = server.post("/reset_prefix_cache", headers={"Authorization": f"Bearer {key}"})
        assert reset.status_code == status
    for streaming in (False, True):
        name = anna.open(session_id=f"mine-{streaming}", streaming=streaming)
        assert bert.refused(text="x", session_params={"id": name})[0] == 404
        assert bert.close(name) == 404
        assert bert.open(session_id=name) == name
        assert bert.close(name) == anna.close(name) == 200
    running = anna.begin(text="words", rid="annas", sampling_params=LONG)
    running.wait_for_tokens(1)
    assert bert.abort(rid="annas") == 200
    assert bert.abort(abort_all=True) == 403
    seen = running.tokens
    running.wait_for_tokens(seen + 5)
    assert admin.abort(abort_all=True) == 200
    assert running.last()["meta_info"]["finish_reason"]["type"] == "abort"
    assert "model_path" in json.loads(anna.get("/get_model_info").text)


def test_abort_all_ends_each_turn_by_its_own_policy(echo: Server) -> None:
    calls: dict[str, Any] = {
        policy: long_turn(echo, echo.open(policy), "long", on_abort=policy) for policy in ("keep", "rollback")
    }
    wait_known(echo, "keep", 100)
    assert echo.post("/abort_request", {"abort_all": True}).status_code == 200
    stands = {}
    for policy, call in calls.items():
        call.join()
        turn = call.answer.json()
        assert turn["finish_reason"] == "abort"
        wait_state(echo, policy, "IDLE")
        stands[policy] = turn["usage"]["prompt_tokens"] + turn["usage"]["completion_tokens"]
    assert echo.state("keep")["tokens"]["known"] == stands["keep"] >= 100
    assert echo.state("rollback")["tokens"]["known"] == 0
