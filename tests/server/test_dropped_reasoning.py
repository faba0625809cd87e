"""`keep_reasoning` in the dialects that have sessions, and with templates that open the reasoning."""

from typing import Any

import pytest

from holdfast.server.link import wire
from tests.server.conftest import Serve
from tests.server.joined import ANN, Joined, joined
from tests.server.serving import Server
from tests.server.test_found_sessions import ECHOES

THOUGHT = "<think>up or down? or neither of them</think>\n\n"

OPENS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def thinking(serve: Serve) -> Server:
    return serve("echo", "--reasoning-parser", "think", "--audit", "strict")


def test_sessions_chats_and_responses_drop_reasoning(thinking: Server) -> None:
    name = thinking.open(keep_reasoning=False)
    first = thinking.say(name, f"{THOUGHT}Up.")
    assert (first["text"], first["reasoning"]) == ("Up.", "up or down? or neither of them")
    usage = first["usage"]
    assert usage["recomputed_tokens"] == 4, "three letters and the end of the answer"
    tokens = thinking.state(name)["tokens"]
    assert tokens["known"] == usage["prompt_tokens"] + 4
    second = thinking.say(name, "Down.")
    assert second["usage"]["cached_tokens"] == usage["prompt_tokens"]
    assert "recomputed_tokens" not in second["usage"], "nothing was thought"
    whole = thinking.say(name, f"{THOUGHT}Up.", keep_reasoning=True)
    assert "recomputed_tokens" not in whole["usage"]
    known = whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    assert thinking.state(name)["tokens"]["known"] == known

    plain = thinking.open()
    body = {"messages": [{"role": "user", "content": f"{THOUGHT}Up."}], "session_id": plain}
    chat = thinking.post("/v1/chat/completions", {**body, "keep_reasoning": False}).json()
    assert chat["choices"][0]["message"]["reasoning_content"] == "up or down? or neither of them"
    assert thinking.state(plain)["tokens"]["known"] == chat["usage"]["prompt_tokens"] + 4

    asked = thinking.post("/v1/responses", {"input": f"{THOUGHT}Up.", "keep_reasoning": False}).json()
    assert [item["type"] for item in asked["output"]] == ["reasoning", "message"]
    after = {"input": "Down.", "previous_response_id": asked["id"]}
    more = thinking.post("/v1/responses", after).json()
    details = more["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == asked["usage"]["input_tokens"]
    again = thinking.get(f"/v1/responses/{asked['id']}").json()
    assert again["output"] == asked["output"], "the response is shown as it was"


def test_a_repeated_turn_is_shown_as_it_ended(thinking: Server) -> None:
    name = thinking.open(keep_reasoning=False)
    first = thinking.say(name, f"{THOUGHT}Up.", turn_id="t1")
    again = thinking.say(name, f"{THOUGHT}Up.", turn_id="t1")
    assert (again["text"], again["reasoning"], again["token_ids"]) == (
        first["text"],
        first["reasoning"],
        first["token_ids"],
    )
    history = [
        {"role": "user", "content": f"{THOUGHT}Up."},
        {"role": "assistant", "content": "Up."},
        {"role": "user", "content": "Down."},
    ]
    told = thinking.post("/v1/chat/completions", {"messages": history, "session_id": name})
    assert told.status_code == 200, "what the client sends back is the session's history"
    assert told.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"]


@pytest.mark.parametrize("model", ECHOES)
def test_a_marker_that_the_prompt_opens_goes_too(model: str) -> None:
    """The echo model repeats the whole input here, since it does not end as its own template does."""

    async def story(world: Joined) -> None:
        record = await world.service.sessions.open(ANN, "s")
        said: list[dict[str, Any]] = [{"role": "user", "content": "neither of them</think>\n\nUp."}]
        end = await world.say(record, said, keep_reasoning=False)
        assert end.answer is not None and end.answer.reasoning.endswith("neither of them")
        (start,) = [each for each in world.sent if isinstance(each, wire.StartTurn)]
        known = world.loop.scheduler.registry.find("ann/s").sequence.tokens

        def spelled(tokens: list[int]) -> str:
            return world.loop.setup.tokenizer.decode(tokens, skip_special_tokens=False)

        assert spelled(start.tokens).endswith("assistant\n<think>\n")
        answer = spelled(end.tokens).partition("</think>\n\n")[2]
        assert answer.startswith("Up.")
        assert spelled(known.slice(0, len(known))) == (
            spelled(start.tokens).removesuffix("<think>\n") + answer
        )
        assert end.recomputed_tokens is not None and end.view is not None
        if model == "echo":
            assert end.recomputed_tokens == end.view.known - (len(start.tokens) - len("<think>\n"))
        computed = end.view.known - end.recomputed_tokens
        after = await world.say(record, [{"role": "user", "content": "and then"}])
        assert (after.cached_tokens, after.outcome) == (computed, "finished")

    joined(story, model, OPENS, reasoning_parser="think")
