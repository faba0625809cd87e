"""What evaluation harnesses and old clients ask for: echoes, log-probabilities of prompts, prompts alone.

A server of a small real model; its numbers are compared with those of an engine in this process.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import __version__
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from tests.models.small import MARKS, VOCABULARY
from tests.server.serving import Server

RECORDED = json.loads((Path(__file__).parent / "recorded" / "lm_eval.json").read_text())
ANSWER = f"{MARKS[1]}assistant\n"
USER = {"role": "user", "content": "bak bal"}
PROMPT = "bak bal dan grüß 🙂 fes"


@pytest.fixture(scope="module")
def shared(small_models: Callable[[str], Path]) -> Iterator[Server]:
    server = Server(
        small_models("llama"), "--served-model-name", "smollm2", "--kv-tokens", "16384", "--audit", "strict"
    )
    yield server
    assert server.stop() == 0
    assert server.complaints() == []


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    assert shared.post("/flush_cache").status_code == 200
    yield shared
    shared.check_clean()


@pytest.fixture(scope="module")
def engine(small_models: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(str(small_models("llama")), kv_tokens=4096) as engine:
        yield engine


def completed(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def refused(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"]


def expected(engine: Engine, tokens: list[int], top: int = 1) -> list[float]:
    """The log-probabilities of a prompt, from its second token on."""
    turn = engine.generate([tokens], Sampling(max_tokens=0, prompt_logprobs=top))[0]
    return [each.logprob for each in turn.prompt_logprobs]


def test_the_requests_of_lm_eval_get_the_log_likelihoods_of_the_engine(
    server: Server, engine: Engine
) -> None:
    shapes = {
        tuple(sorted(each["body"])) for each in RECORDED["requests"] if "prompt" in (each["body"] or {})
    }
    assert ("echo", "logprobs", "max_tokens", "model", "prompt", "seed", "temperature") in shapes
    for each in RECORDED["requests"]:
        body = each["body"]
        if each["path"] != "/v1/completions":
            answer = server.get(each["path"]) if body is None else server.post(each["path"], body)
            assert answer.status_code == 200, answer.text
            assert body is None or isinstance(answer.json()["tokens"], list)
            continue
        # The vocabulary of the small model is smaller than that of the recorded one.
        prompts = [[token % VOCABULARY for token in prompt] for prompt in body["prompt"]]
        shown = completed(server, **{**body, "prompt": prompts})
        for choice, prompt in zip(shown["choices"], prompts, strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(prompt) + 1
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected(engine, prompt), abs=1e-4)
            for logprob, top in zip(
                logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
            ):
                assert logprob in top.values() and len(top) <= 2


def test_an_echo_has_the_text_and_the_offsets_of_the_prompt(server: Server) -> None:
    shown = completed(server, prompt=PROMPT, echo=True, logprobs=2, max_tokens=3, n=2)
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert shown["usage"]["prompt_tokens"] == len(tokens) and shown["usage"]["completion_tokens"] == 6
    for choice in shown["choices"]:
        text, logprobs = choice["text"], choice["logprobs"]
        assert text.startswith(PROMPT) and len(text) > len(PROMPT)
        lengths = {len(listed) for listed in logprobs.values()}
        assert lengths == {len(tokens) + 3}
        for token, place in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            # A token that is part of a character is shown as a replacement.
            assert "\ufffd" in token or text[place:].startswith(token)
        assert logprobs["text_offset"][len(tokens)] == len(PROMPT)


def test_an_echo_without_log_probabilities(server: Server) -> None:
    plain = completed(server, prompt=[PROMPT, "dan"], max_tokens=2)["choices"]
    shown = completed(server, prompt=[PROMPT, "dan"], max_tokens=2, echo=True)["choices"]
    assert [each["text"] for each in shown] == [PROMPT + plain[0]["text"], "dan" + plain[1]["text"]]
    assert [each["logprobs"] for each in shown] == [None, None]
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "dan", "max_tokens": 2, "echo": True, "stream": True,
                                          "temperature": 0},
    ) as stream:  # fmt: skip
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == shown[1]["text"]


def test_a_prompt_alone_is_computed_and_echoed(server: Server, engine: Engine) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    shown = completed(server, prompt=tokens, max_tokens=0, echo=True, logprobs=0)
    (choice,) = shown["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected(engine, tokens), abs=1e-4)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(tokens) - 1)
    assert shown["usage"]["completion_tokens"] == 0
    silent = completed(server, prompt=tokens, max_tokens=0)
    assert silent["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_a_chat_prompt_alone_warms_the_prefix_cache(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "bak bal dan " * 40}], "temperature": 0}
    warmed = server.post("/v1/chat/completions", {**body, "max_tokens": 0}).json()
    assert warmed["choices"][0]["message"]["content"] == ""
    assert warmed["choices"][0]["finish_reason"] == "length"
    usage = server.post("/v1/chat/completions", {**body, "max_tokens": 2}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17


def test_a_turn_without_an_answer_stays_in_the_session(server: Server) -> None:
    name = server.open()
    path = f"/v1/sessions/{name}/turns"
    said = server.post(path, {"input": "bak bal", "sampling": {"max_tokens": 0}}).json()
    assert (said["text"], said["finish_reason"]) == ("", "length")
    assert server.state(name)["tokens"]["known"] == said["usage"]["prompt_tokens"]
    later = server.post(path, {"input": "dan", "sampling": {"max_tokens": 4, "temperature": 0}}).json()
    assert later["usage"]["cached_tokens"] == said["usage"]["prompt_tokens"]
    # The history has an empty answer between the two messages.
    whole = f"{MARKS[1]}user\nbak bal{MARKS[0]}\n{ANSWER}{MARKS[0]}\n{MARKS[1]}user\ndan{MARKS[0]}\n{ANSWER}"
    assert completed(server, prompt=whole, max_tokens=4)["choices"][0]["text"] == later["text"]


def test_prompt_logprobs_in_the_form_of_vllm(server: Server, engine: Engine) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    (choice,) = completed(server, prompt=PROMPT, max_tokens=1, prompt_logprobs=2)["choices"]
    assert choice["text"] and choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(tokens) - 1
    for token, logprob, entry in zip(tokens[1:], expected(engine, tokens, 2), others, strict=True):
        assert next(iter(entry)) == str(token) and 2 <= len(entry) <= 3
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    shown = server.post(
        "/v1/chat/completions", {"messages": [USER], "max_tokens": 1, "prompt_logprobs": 0}
    ).json()
    assert len(shown["prompt_logprobs"]) == shown["usage"]["prompt_tokens"]
    assert [len(entry) for entry in shown["prompt_logprobs"][1:]] == [1] * (len(shown["prompt_logprobs"]) - 1)


def test_a_final_message_is_continued(server: Server) -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": "dan fes "}],
        "max_tokens": 4,
        "temperature": 0,
    }
    continued = {**body, "continue_final_message": True, "add_generation_prompt": False}
    said = server.post("/v1/chat/completions", continued).json()["choices"][0]["message"]["content"]
    raw = f"{MARKS[1]}user\nbak bal{MARKS[0]}\n{ANSWER}dan fes "
    assert completed(server, prompt=raw, max_tokens=4)["choices"][0]["text"] == said
    left_out = server.post("/v1/chat/completions", {**body, "continue_final_message": True}).json()
    assert left_out["choices"][0]["message"]["content"] == said
    bare = server.post("/v1/chat/completions", {**body, "add_generation_prompt": False}).json()
    assert (
        completed(server, prompt=f"{raw}{MARKS[0]}\n", max_tokens=4)["usage"]["prompt_tokens"]
        == (bare["usage"]["prompt_tokens"])
    )


def test_what_does_not_go_together_is_refused_by_name(server: Server) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    answer = {"role": "assistant", "content": "dan"}
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(server, chat, {"messages": [USER, answer], **both})[0] == "continue_final_message"
    last = {"messages": [answer, USER], "continue_final_message": True}
    assert refused(server, chat, last)[0] == "continue_final_message"
    assert refused(server, text, {"prompt": "x", "suffix": "y"}) == ("suffix", "unsupported")
    assert refused(server, text, {"prompt": "", "echo": True}) == ("prompt", "empty_turn")
    assert refused(server, text, {"prompt": [VOCABULARY], "echo": True})[0] == "prompt"
    assert refused(server, text, {"prompt": [1] * 9000, "echo": True})[0] == "prompt"
    stream = {"prompt": "x", "stream": True}
    assert refused(server, text, {**stream, "echo": True, "logprobs": 1}) == ("echo", "unsupported")
    assert refused(server, text, {**stream, "prompt_logprobs": 1}) == ("prompt_logprobs", "unsupported")
    assert refused(server, text, {"prompt": "x", "prompt_logprobs": -1})[0] == "prompt_logprobs"
    assert refused(server, text, {"prompt": "x", "echo": True, "session_id": server.open()})[0] == "echo"
    empty = {"input": "", "sampling": {"max_tokens": 0}}
    assert refused(server, f"/v1/sessions/{server.open()}/turns", empty)[1] == "empty_turn"


def test_small_questions_of_old_clients(server: Server) -> None:
    assert server.get("/version").json() == {"version": __version__}
    assert (server.get("/ping").status_code, server.post("/ping").status_code) == (200, 200)
    shown = server.get("/tokenizer_info").json()
    assert (shown["eos_token"], shown["vocab_size"]) == (MARKS[0], VOCABULARY)
    assert "add_generation_prompt" in shown["chat_template"]
