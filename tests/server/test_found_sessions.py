"""Chats that bring their history go on in the session that has it: counted in tokens and commands."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.durable.journal_reading import load
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.session_trail import STRETCHES_MAX
from holdfast.server.sessions import SessionRecord
from holdfast.server.text.trails import APART_CHARACTERS, PLACES_MAX
from tests.server.agents import BERN, OSLO, TOOLS, calling
from tests.server.joined import ANN, Joined, Message, joined

ECHOES = ("echo", "echo-window", "echo-hybrid")
FAMILIES = ("llama", "mistral", "bamba")
AGENT = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{{ opening }}{% endif %}"
)
OPENING_TOKENS = 1 + len("assistant\n")
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def answered(end: wire.End) -> Message:
    """An answer as a client sends it back."""
    message: Message = {"role": "assistant", "content": end.text}
    calls = [] if end.answer is None else end.answer.calls
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def results(end: wire.End, content: str) -> list[Message]:
    """The results of the calls of an answer."""
    calls = [] if end.answer is None else end.answer.calls
    return [{"role": "tool", "tool_call_id": call.id, "content": content} for call in calls]


ROUNDS = (calling("weather", OSLO), calling("sing", {"loud": True}), "Oslo has <|end|> rain.")
"""What the tools say after the first call: `echo` repeats it, so that the first two are calls again."""


# --- counts ---------------------------------------------------------------------------------------


class Pair:
    """The same conversation, sent whole and on a session, with the tokens that each computes."""

    def __init__(self, world: Joined, record: SessionRecord, history: list[Message]) -> None:
        self.world = world
        self.record = record
        self.history = history
        self.new = history
        self.counts: list[tuple[int, int]] = []
        self.said: wire.End

    async def turn(self, **fields: Any) -> wire.End:
        """One turn of both, which say the same."""
        world = self.world
        sent, before = len(world.sent), world.computed
        found = await world.chat(self.history, **fields)
        assert len(world.sent) == sent + 1, "one command a request"
        between = world.computed
        said = await world.say(self.record, self.new, **fields)
        self.counts.append((between - before, world.computed - between))
        assert (found.text, found.tokens, found.prompt_tokens) == (said.text, said.tokens, said.prompt_tokens)
        self.said = said
        return found

    def go_on(self, end: wire.End, said: str) -> None:
        """The client has the answer, and says something more, or gives it to the tools that were called."""
        self.new = results(self.said, said) or [user(said)]
        self.history = [*self.history, answered(end), *(results(end, said) or [user(said)])]


@pytest.mark.parametrize("model", ECHOES)
def test_an_agent_computes_what_it_would_on_a_session(model: str) -> None:
    async def story(world: Joined) -> None:
        record = await world.service.sessions.open(ANN, "s")
        pair = Pair(world, record, [system("Be brief."), user(calling("weather", BERN))])
        lengths: list[int] = []
        for said in (*ROUNDS, "Thanks.", "And tomorrow?", "Fine.", ""):
            end = await pair.turn(tools=TOOLS)
            lengths.append(len(pair.history))
            if said:
                pair.go_on(end, said)
        assert len(pair.counts) == 7 and all(found == on_session for found, on_session in pair.counts[1:])
        assert world.how() == {"new": 1, "found": 6}
        # The client edits what it said in its fifth turn, and goes on from there; then in its fourth.
        for name, turns in (("edit", 4), ("fork", 3)):
            forked = await world.service.sessions.fork(record, name, turns)
            branch = Pair(world, forked, [*pair.history[: lengths[turns - 1] + 1], user("No: sing.")])
            branch.new = branch.history[-1:]
            for said in ("Well.", "Bye."):
                branch.go_on(await branch.turn(tools=TOOLS), said)
            assert [found for found, _ in branch.counts] == [own for _, own in branch.counts]
        assert world.how() == {"new": 1, "found": 8, "forked": 2}
        # The first conversation is where it was.
        pair.go_on(end, "Still there?")
        await pair.turn(tools=TOOLS)
        assert len(set(pair.counts[-1])) == 1

    joined(story, model, AGENT, **PARSERS)


@pytest.mark.parametrize("opening", ["", "<think>"])
@pytest.mark.parametrize("model", ECHOES)
def test_a_template_that_drops_reasoning_computes_the_last_answer_again(model: str, opening: str) -> None:
    """Each turn computes the answer before it, without its thoughts, what is new, and its own answer.

    Where a state can only be resumed where it was kept, it computes the input before that answer as well.
    """

    async def story(world: Joined) -> None:
        spell = world.service.prompts.tokenizer.encode
        options = {"chat_template_kwargs": {"opening": opening}}
        history = [user(f"{'Hm.' if opening else '<think>Hm.'}</think>One.")]
        end = await world.chat(history, **options)
        assert (end.text, end.answer and end.answer.reasoning) == ("One.", "Hm.")
        before_that = spell(f"<|start|>user\n{history[0]['content']}<|end|><|start|>assistant\n{opening}")
        for said in ("Two.", "Three.", "Four."):
            said = said if opening else f"<think>So.</think>{said}"
            history = [*history, answered(end), user(said)]
            before = world.computed
            end = await world.chat(history, **options)
            answer, header = history[-2]["content"], "<|start|>assistant\n" if opening else ""
            new = spell(f"{header}{answer}<|end|><|start|>user\n{said}<|end|><|start|>assistant\n{opening}")
            least = len(new) + len(end.tokens)
            most = least + len(before_that) if model == "echo-hybrid" else least
            assert least <= world.computed - before <= most
            before_that = new
        assert world.how() == {"new": 1, "found": 3}

    joined(story, model, THINKING, **PARSERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_found_sessions_say_what_requests_of_their_own_say(
    family: str, small_models: Callable[[str], Path]
) -> None:
    """Greedy and seeded, with an edit and a repeated request, on all kinds of memory."""
    said: dict[int, list[tuple[list[int], int]]] = {}

    def tell(found_sessions: int) -> None:
        async def story(world: Joined) -> None:
            heard = said[found_sessions] = []

            async def ask(history: list[Message], **fields: Any) -> Message:
                end = await world.chat(history, max_tokens=12, **fields)
                heard.append((end.tokens, end.prompt_tokens))
                return answered(end)

            for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 4, "seed": 5}):
                history = [system("Say words."), user("Begin: dak fel")]
                for word in ("gor", "kas", "lin", "mor"):
                    history = [*history, await ask(history, **sampling), user(f"More {word}.")]
                await ask(history, **sampling)
                await ask(history, **sampling)
                await ask([*history[:4], {**history[4], "content": " bak"}, *history[5:]], **sampling)
                await ask([*history[:5], user("Other.")], **sampling)
            assert world.how() == ({"new": 1, "found": 10, "forked": 5} if found_sessions else {})

        joined(story, str(small_models(family)), found_sessions=found_sessions)

    tell(0)
    tell(8)
    assert said[0] == said[8]


def test_tokens_that_another_spelling_would_not_have_are_not_computed_again(
    small_models: Callable[[str], Path],
) -> None:
    async def story(world: Joined) -> None:
        spell = world.service.prompts.tokenizer.encode
        history, odd, known = [user("Spell.")], 0, 0
        for seed in range(6):
            end = await world.chat(history, max_tokens=20, temperature=1.5, seed=seed)
            assert end.cached_tokens == known
            known = end.prompt_tokens + len(end.tokens)
            odd += spell(end.text) != end.tokens
            history = [*history, answered(end), user("And?")]
        assert odd > 2

    joined(story, str(small_models("llama")))


# --- places to go on from -------------------------------------------------------------------------


def test_a_request_that_is_repeated_computes_one_token_of_its_prompt() -> None:
    async def story(world: Joined) -> None:
        history = [system("Be brief."), user("one"), *([answer("one"), user("two")])]
        first = await world.chat(history[:2])
        for _ in range(2):
            end = await world.chat(history)
        assert (end.text, end.cached_tokens) == ("two", end.prompt_tokens - 1)
        assert end.prompt_tokens > first.prompt_tokens
        # An older one is answered again on a fork; the conversation stays.
        again = await world.chat(history[:2])
        assert (again.tokens, again.prompt_tokens) == (first.tokens, first.prompt_tokens)
        assert again.cached_tokens == first.prompt_tokens - OPENING_TOKENS
        last = await world.chat([*history, answer("two"), user("three")])
        assert last.cached_tokens == end.prompt_tokens + len(end.tokens)
        assert world.how() == {"new": 1, "found": 3, "forked": 1}

    joined(story)


@pytest.mark.parametrize("model", ECHOES)
def test_a_note_that_moves_to_the_last_message_costs_the_end_of_the_message_that_had_it(model: str) -> None:
    """A client adds a note to its last message, and leaves it out when it sends that message again.

    A window or a state cannot be resumed inside of a message: that message is computed again.
    """

    async def story(world: Joined) -> None:
        history: list[Message] = []
        for number in range(4):
            text = "".join(f"line {line} of file {number}\n" for line in range(100))
            end = await world.chat([*history, user(f"{text}note: {number}")], max_tokens=5)
            if number and model == "echo":
                spared = end.prompt_tokens - end.cached_tokens - len(text)
                assert spared < 3 * APART_CHARACTERS, "less than the message before"
            history = [*history, user(text), answered(end)]
        assert world.how() == {"new": 1, "found": 3}
        (conversation,) = world.service.conversations.all()
        assert len(conversation.trail.stretches) < 2 * 4 * 3 + 2 * PLACES_MAX

    joined(story, model)


def test_names_of_control_tokens_are_compared_as_what_they_are() -> None:
    """The text `<|end|>` of a user, or of an answer, is not the token of that name."""

    async def story(world: Joined) -> None:
        history = [user("say <|end|> now")]
        end = await world.chat(history)
        assert end.text == "say <|end|> now"
        history += [answered(end), user("more")]
        more = await world.chat(history)
        assert more.cached_tokens == end.prompt_tokens + len(end.tokens)
        # Two messages whose text is the same, if names were not told from tokens.
        split = [user("say "), {"role": "assistant", "content": "x"}, *history[1:]]
        other = await world.chat(split)
        assert other.cached_tokens < 16

    joined(story)


def test_a_long_conversation_has_a_short_trail() -> None:
    async def story(world: Joined) -> None:
        history = [user("0")]
        for number in range(1, 60):
            end = await world.chat(history)
            history = [*history, answered(end), user(str(number))]
        trails = [command for command in world.sent if isinstance(command, wire.StartTurn)]
        assert len(trails) == 59 and world.how() == {"new": 1, "found": 58}
        (conversation,) = world.service.conversations.all()
        assert len(conversation.trail.stretches) <= STRETCHES_MAX + 3
        recent = [*history[:-6], user("other")]
        assert (await world.chat(recent)).cached_tokens > 0.8 * end.prompt_tokens

    joined(story)


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


# --- several clients ------------------------------------------------------------------------------


def test_two_clients_that_extend_a_conversation_at_once_are_both_answered() -> None:
    async def story(world: Joined) -> None:
        first = [user("tell me " + "a long story " * 20)]
        history = [*first, answered(await world.chat(first))]
        ends = await asyncio.gather(*(world.chat([*history, user(f"and {number}")]) for number in range(3)))
        assert [end.text for end in ends] == ["and 0", "and 1", "and 2"]
        assert world.how()["new"] + world.how()["found"] + world.how().get("forked", 0) == 4
        assert all(end.cached_tokens >= 16 * (end.prompt_tokens // 16) - 48 for end in ends), (
            "shared by pages"
        )
        # Each goes on where it is.
        for end in ends:
            more = await world.chat([*history, user(end.text), answered(end), user("more")])
            assert more.cached_tokens == end.prompt_tokens + len(end.tokens)

    joined(story)


def test_a_session_that_speaks_is_not_waited_for() -> None:
    async def story(world: Joined) -> None:
        history = [user("one"), answered(await world.chat([user("one")])), user("two")]
        talking = await world.start(history, ignore_eos=True, max_tokens=4000)
        other = await world.start([*history, answer("two"), user("three")])
        assert (await other.result()).text == "three"
        assert not talking.over
        world.service.leave(talking, keeps=False)
        assert (await talking.result()).outcome == "aborted"
        # What was left is taken up where its prompt ends.
        again = await world.chat(history)
        assert (again.text, again.cached_tokens) == ("two", again.prompt_tokens - 1)

    joined(story)


def test_a_client_that_leaves_and_tries_again_at_once_finds_its_prompt() -> None:
    async def story(world: Joined) -> None:
        history = [user("one " * 50)]
        for _ in range(3):
            feed = await world.start(history, ignore_eos=True, max_tokens=4000)
            while feed.take() is None:
                await asyncio.sleep(0)
            world.service.leave(feed, keeps=False)
        end = await world.chat(history)
        assert end.cached_tokens == end.prompt_tokens - 1
        assert world.how() == {"new": 1, "found": 3} and world.hidden() == 1

    joined(story)


def test_tenants_do_not_find_each_others_conversations() -> None:
    async def story(world: Joined) -> None:
        bob = Caller("bob", admin=False)
        history = [user("a secret " * 10)]
        end = await world.chat(history)
        history += [answered(end), user("and?")]
        assert (await world.chat(history, bob)).cached_tokens == 0
        assert (await world.chat(history)).cached_tokens == end.prompt_tokens + len(end.tokens)
        names = {each.tenant: each.name for each in world.service.conversations.all()}
        assert set(names) == {"ann", "bob"} and world.how() == {"new": 2, "found": 1}
        for name in names.values():
            with pytest.raises(Problem) as refused:
                world.service.table.find("ann", name)
            assert refused.value.code == "bad_name"

    joined(story)


# --- limits ---------------------------------------------------------------------------------------


def test_the_least_recently_used_conversation_of_the_largest_tenant_makes_room() -> None:
    async def story(world: Joined) -> None:
        bob, ends = Caller("bob", admin=False), {}
        for number in range(3):
            ends[number] = await world.chat([user(f"{number}")])
        ends[3] = await world.chat([user("3")], bob)
        assert world.hidden() == 4
        await world.chat([user("0"), answer("0"), user("again")])
        await world.chat([user("4")], bob)
        assert world.hidden() == len(world.service.conversations) == 4
        kept = [each.tenant for each in world.service.conversations.all()]
        assert sorted(kept) == ["ann", "ann", "bob", "bob"]
        before = world.how()["found"]
        await world.chat([user("0"), answer("0"), user("again"), answer("again"), user("more")])
        await world.chat([user("3"), answer("3"), user("more")], bob)
        assert world.how()["found"] == before + 2

    joined(story, found_sessions=4)


def test_where_all_sessions_speak_a_conversation_is_a_request_of_its_own() -> None:
    async def story(world: Joined) -> None:
        talking = await world.start([user("one")], ignore_eos=True, max_tokens=4000)
        end = await world.chat([user("two")])
        assert (end.text, end.view, world.hidden()) == ("two", None, 1)
        world.service.leave(talking, keeps=False)
        await talking.result()
        assert (await world.chat([user("two")])).view is not None

    joined(story, found_sessions=1)


@pytest.mark.parametrize("model", ECHOES)
def test_a_tiny_pool_serves_more_conversations_than_it_holds(model: str) -> None:
    """Sessions of users, requests and conversations all have their turns, whatever is evicted for them."""

    async def story(world: Joined) -> None:
        record = await world.service.sessions.open(ANN, "s")
        chats = [[user(f"{number} " * 30)] for number in range(8)]
        for turn in range(3):
            for number, history in enumerate(chats):
                end = await world.chat(history, max_tokens=20)
                chats[number] = [*history, answered(end), user(f"turn {turn}")]
            assert (await world.say(record, [user("hello " * 20)], max_tokens=20)).outcome == "finished"
        ends = await asyncio.gather(*(world.chat(history, max_tokens=20) for history in chats))
        assert {end.outcome for end in ends} == {"finished"}

    joined(story, model, kv_tokens=640, window_tokens=640, state_slots=6, context_length=512)


def test_limits_of_sessions_do_not_count_hidden_ones() -> None:
    async def story(world: Joined) -> None:
        for number in range(5):
            await world.chat([user(f"{number}")])
        for number in range(3):
            await world.service.sessions.open(ANN, f"s{number}")
        assert [record.name for record in world.service.table.of("ann")] == ["s0", "s1", "s2"]
        assert len(world.loop.session_log.sessions) == 3

    joined(story, max_sessions=3)


def test_what_is_refused_leaves_the_conversation_as_it_was() -> None:
    async def story(world: Joined) -> None:
        history = [user("one")]
        end = await world.chat(history)
        history += [answered(end), user("two")]
        for fields in ({"max_tokens": 100_000}, {"logit_bias": {100_000: 1.0}}):
            with pytest.raises(Problem) as refused:
                await world.chat(history, **fields)
            assert refused.value.status == 400
            assert "in the session" not in refused.value.message
        assert (await world.chat(history)).cached_tokens == end.prompt_tokens + len(end.tokens)
        assert world.how() == {"new": 1, "found": 1}

    joined(story)


def test_a_new_conversation_and_a_fork_that_are_refused_leave_no_session() -> None:
    async def story(world: Joined) -> None:
        bad = {"logit_bias": {100_000: 1.0}}
        with pytest.raises(Problem):
            await world.chat([user("one")], **bad)
        assert world.hidden() == len(world.service.conversations) == 0
        history = [user("one"), answered(await world.chat([user("one")])), user("two")]
        end = await world.chat(history)
        with pytest.raises(Problem):
            await world.chat([*history[:2], user("zwei")], **bad)
        await world.rest()
        assert world.hidden() == len(world.service.conversations) == 1
        last = await world.chat([*history, answered(end), user("three")])
        assert last.cached_tokens == end.prompt_tokens + len(end.tokens)
        assert world.how() == {"new": 1, "found": 2}

    joined(story)


# --- sessions that have names ---------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_named_session_keeps_the_reasoning_that_its_client_leaves_out(opening: str) -> None:
    async def story(world: Joined) -> None:
        options = {"chat_template_kwargs": {"opening": opening}}
        whole, plain = [await world.service.sessions.open(ANN, name) for name in ("whole", "plain")]
        said = f"{'Hm.' if opening else '<think>Hm.'}</think>One."
        history: list[Message] = []
        for _ in range(3):
            history = [*history, user(said)]
            end = await world.say(whole, history, **options)
            same = await world.say(plain, history[-1:], **options)
            assert (end.text, end.answer and end.answer.reasoning) == ("One.", "Hm.")
            assert (end.tokens, end.prompt_tokens) == (same.tokens, same.prompt_tokens)
            assert (end.cached_tokens > 16) == (len(history) > 1)
            history = [*history, answered(end)]
        history[3] = answer("Two.")
        with pytest.raises(Problem) as refused:
            await world.say(whole, [*history, user("And?")], **options)
        assert (refused.value.status, refused.value.param) == (409, "messages[3]")
        assert world.how() == {}

    joined(story, template=THINKING, **PARSERS)


# --- sessions that are gone -----------------------------------------------------------------------


def test_a_session_that_has_ended_on_the_engine_is_not_missed() -> None:
    async def story(world: Joined) -> None:
        history = [user("one")]
        end = await world.chat(history)
        history += [answered(end), user("two")]
        (conversation,) = world.service.conversations.all()
        # The engine closes it, and the API process has not heard of that yet.
        world.commands.receive(wire.CloseSession(0, conversation.name))
        end = await world.chat(history)
        assert (end.text, world.how()) == ("two", {"new": 2})
        world.service.link.lose()
        assert len(world.service.conversations) == 0
        for name in list(world.loop.scheduler.registry.sessions):
            world.loop.scheduler.close(name, world.loop.now())
        await world.rest()
        world.service.link.connect(world.take)
        assert (await world.chat(history)).text == "two"

    joined(story)


def test_hidden_sessions_are_in_no_journal(tmp_path: Path) -> None:
    async def story(world: Joined) -> None:
        record = await world.service.sessions.open(ANN, "s")
        history = [user("one")]
        history += [answered(await world.chat(history)), user("two")]
        assert (await world.chat(history)).cached_tokens
        await world.say(record, [user("one")])
        assert list(world.loop.session_log.sessions) == ["ann/s"]
        world.loop.session_log.sync()
        with closing(sqlite3.connect(f"file:{tmp_path / 'journal'}?mode=ro", uri=True)) as journal:
            assert [stored.id for stored in load(journal)] == ["ann/s"]

    joined(story, journal=str(tmp_path / "journal"), disk=str(tmp_path / "disk"))
