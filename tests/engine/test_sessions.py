"""Conversations: turns, barge-in, rewinding, forking, closing, and what memory looks like meanwhile."""

import pytest
from tokenizers import AddedToken

from holdfast.core import errors
from holdfast.engine.engine import Engine, Session
from tests.engine.conftest import Make
from tests.engine.tiny import END, WORDS, greedy, tokenizer, word

SAID = [word("the"), word("river"), word("runs")]


def history(engine: Engine, session: Session) -> list[int]:
    tokens = engine.loop.scheduler.registry.find(session.id).sequence.tokens
    return tokens.slice(0, len(tokens))


def until(session: Session, turn: object, count: int) -> None:
    """Drive until a turn has said a number of tokens."""
    while len(turn._stream.tokens) < count:  # type: ignore[attr-defined]
        session._engine.drive()


def test_words_go_through_the_chat_template(engine: Engine) -> None:
    tokens = tokenizer()
    with engine.session(system="You are terse.") as session:
        first = session.say("Name a river.", greedy(6))
        messages = [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Name a river."},
        ]
        expected = tokens.encode_chat(messages) + first.token_ids
        assert history(engine, session) == expected
        second = session.say("And one more?", greedy(6))
        more = tokens.encode_continuation(
            [{"role": "user", "content": "And one more?"}], last_token=expected[-1]
        )
        said = second.token_ids
        assert history(engine, session) == expected + more + said
        assert second.usage.prompt_tokens == len(expected) + len(more)
        assert second.usage.cached_tokens == len(expected)
        assert session.turns == 2


def test_pieces_are_the_text(engine: Engine) -> None:
    with engine.session() as session:
        turn = session.say("the river", greedy(12))
        pieces = list(turn)
        assert "".join(pieces) == turn.text == tokenizer().decode(turn.token_ids)
        assert turn.done
        assert list(turn) == [], "what was handed out does not come again"


def test_an_end_token_is_not_said_twice(engine: Engine) -> None:
    """What the model ended with itself is not added by the template once more."""
    with engine.session() as session:
        session.say("hello", greedy(1, logit_bias={END: 100.0})).wait()
        before = history(engine, session)
        assert before[-1] == END
        session.say("again", greedy(1)).wait()
        assert END not in history(engine, session)[len(before) : len(before) + 1]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_interrupt_keeps_what_it_is_told_to(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    words = greedy(40, logit_bias={word(name): 50.0 for name in WORDS})
    plain = make().session().say(SAID, words).token_ids
    for keep, kept in ((4, 4), (0, 0), ("none", None)):
        session = engine.session()
        turn = session.say(SAID, words)
        until(session, turn, 9)
        session.interrupt(keep=keep)
        assert turn.finish_reason == "abort"
        if kept is None:
            assert history(engine, session) == []
            assert session.turns == 0
        else:
            assert turn.token_ids == plain[:kept]
            assert turn.text == tokenizer().decode(plain[:kept])
            assert history(engine, session) == SAID + plain[:kept]
    session = engine.session()
    turn = session.say(SAID, words)
    until(session, turn, 9)
    session.interrupt(keep="all")
    assert 9 <= len(turn.token_ids) <= 11
    assert history(engine, session) == SAID + turn.token_ids == SAID + plain[: len(turn.token_ids)]


def test_interrupt_reaches_back_to_the_last_finished_turn(engine: Engine) -> None:
    session = engine.session()
    turn = session.say(SAID, greedy(8))
    said = turn.token_ids
    session.interrupt(keep=3)
    assert history(engine, session) == SAID + said[:3]
    assert turn.token_ids == said[:3]
    with pytest.raises(errors.NothingToKeep):
        session.interrupt(keep=5)


@pytest.mark.parametrize("keep", ["some", -1, 1.5, True, None])
def test_what_an_interruption_cannot_keep_is_named(engine: Engine, keep: object) -> None:
    session = engine.session()
    said = session.say(SAID, greedy(8)).token_ids
    with pytest.raises(ValueError, match=f"^keep must be all, none or a number of tokens, not {keep!r}"):
        session.interrupt(keep=keep)  # type: ignore[arg-type]
    assert history(engine, session) == SAID + said, "nothing was cut"


@pytest.mark.parametrize("tier", ["moon", "device", "", 1])
def test_where_memory_cannot_be_moved_to_is_named(engine: Engine, tier: object) -> None:
    session = engine.session()
    session.say(SAID, greedy(3)).wait()
    with pytest.raises(ValueError, match=f"^tier must be one of host, disk, or None, not {tier!r}"):
        session.spill(tier)  # type: ignore[arg-type]


def test_tokens_shown_follow_what_was_handed_out(engine: Engine) -> None:
    session = engine.session()
    turn = session.say(SAID, greedy(20, logit_bias={word("deep"): 50.0}))
    shown = []
    for piece in turn:
        shown.append(piece)
        assert turn.tokens_shown == len(shown)
        if len(shown) == 5:
            break
    session.interrupt(keep=turn.tokens_shown)
    assert turn.text == "".join(shown) == " deep" * 5
    assert history(engine, session) == SAID + [word("deep")] * 5


def test_a_second_turn_is_refused_while_one_runs(engine: Engine) -> None:
    session = engine.session()
    turn = session.say(SAID, greedy(10))
    engine.drive()
    with pytest.raises(errors.SessionBusy):
        session.say(SAID, greedy(10))
    assert len(turn.token_ids) == 10


def test_rewind_and_fork(engine: Engine) -> None:
    session = engine.session()
    ends = [[]]
    for name in ("cold", "deep", "old"):
        turn = session.say([word(name)] * 3, greedy(4))
        ends.append(ends[-1] + [word(name)] * 3 + turn.token_ids)
    child, early = session.fork(), session.fork(1)
    assert history(engine, child) == ends[3]
    assert history(engine, early) == ends[1]
    session.rewind(2)
    assert (session.turns, child.turns, early.turns) == (2, 3, 1)
    assert history(engine, session) == ends[2]
    again = session.say([word("old")] * 3, greedy(4))
    assert ends[2] + [word("old")] * 3 + again.token_ids == ends[3]
    with pytest.raises(errors.UnknownBoundary):
        session.rewind(9)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_close_in_the_middle_of_a_turn(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    session = engine.session(id="mine")
    assert session.id == "mine"
    turn = session.say(SAID, greedy(50))
    until(session, turn, 3)
    session.close()
    assert turn.done
    assert turn.finish_reason == "abort"
    session.close()
    with pytest.raises(errors.UnknownSession):
        session.say(SAID, greedy(5))
    with engine.session(id="mine") as again:
        assert again.say(SAID, greedy(5)).finish_reason == "length"


def test_a_session_too_long_is_refused_and_goes_on(make: Make) -> None:
    engine = make(context_length=40)
    session = engine.session()
    session.say(SAID, greedy(10)).wait()
    with pytest.raises(errors.ContextExceeded):
        session.say(SAID * 8, greedy(10))
    assert len(session.say(SAID, greedy(10)).token_ids) == 10


def test_memory_names_every_holder(make: Make) -> None:
    engine = make()
    session = engine.session(id="talk")
    session.say(SAID * 20, greedy(9)).wait()
    running = engine.session(id="run")
    turn = running.say([word("cold")] * 50, greedy(30))
    until(running, turn, 5)
    report = engine.memory()
    assert set(report) == {"step", "pools", "top", "listening", "tenants", "audit", "findings"}
    assert report["findings"] == []
    pools = report["pools"]
    assert isinstance(pools, list)
    components = [pool.name.lower() for pool in engine.loop.setup.memory_plan.layout.components]
    assert [(pool["component"], pool["tier"]) for pool in pools] == [(name, "device") for name in components]
    for pool in pools:
        assert sum(pool["holders"].values()) == pool["units"]
        assert pool["bytes_per_unit"] > 0
        assert pool["unit"] == ("slot" if pool["component"] == "state" else "page")
    full = pools[0]
    assert full["page_size"] == 16
    held = {kind.lower(): count for kind, count in full["holders"].items()}
    assert held["session"] >= 1
    assert held["turn"] >= 1
    top = report["top"]
    assert isinstance(top, list)
    holders = [entry["holder"] for entry in top]
    assert "session talk" in holders
    assert any(holder.startswith("turn ") and holder.endswith(" of run") for holder in holders)
    tenants = report["tenants"]
    assert isinstance(tenants, list)
    (tenant,) = tenants
    assert [pool["limit"] for pool in tenant["pools"]] == [pool["units"] for pool in pools]
    assert [pool["units"] for pool in tenant["pools"]] == [
        pool["units"] - pool["holders"]["FREE"] - pool["holders"]["RETIRING"] for pool in pools
    ]
    audit = report["audit"]
    assert isinstance(audit, dict)
    assert audit["mode"] == "strict"


def test_many_sessions_speak_at_once(make: Make) -> None:
    """More than may run: the rest wait, and each says what it would have said alone."""
    engine = make(max_running=3, kv_tokens=1024)
    prompts = [[word("deep")] * (3 + number) for number in range(8)]
    turns = [engine.session().say(prompt, greedy(12)) for prompt in prompts]
    expected = [make().session().say(prompt, greedy(12)).token_ids for prompt in prompts]
    assert [turn.token_ids for turn in turns] == expected


@pytest.mark.parametrize("bad", [[-1], [5, 10**9], [2**70]])
def test_tokens_that_the_model_does_not_have_are_refused_and_cost_nobody_anything(
    engine: Engine, bad: list[int]
) -> None:
    with engine.session() as session:
        expected = session.say(SAID, greedy(4)).token_ids
        with pytest.raises(ValueError, match="said: token ids are whole numbers from 0 to"):
            session.say(bad, greedy(4))
        with pytest.raises(ValueError, match="prompts: token ids are whole numbers from 0 to"):
            engine.generate([SAID, bad], greedy(4))
        session.rewind(0)
        assert session.say(SAID, greedy(4)).token_ids == expected
    assert not engine.loop.busy


def test_a_mark_that_only_the_tokenizer_knows_is_refused_and_costs_nobody_anything(engine: Engine) -> None:
    """On a GPU its row of the token table would be the end of the engine, with all sessions."""
    mark = AddedToken("<|image|>", special=True)
    assert engine.loop.setup.tokenizer._encoder.add_special_tokens([mark]) == 1
    with engine.session() as session, engine.session() as other:
        expected = session.say("deep", greedy(4)).token_ids
        speaking = other.say("old", greedy(8))
        engine.drive()
        assert len(session.say("a picture: <|image|>", greedy(4)).token_ids) == 4  # In a message it is text.
        with pytest.raises(ValueError, match="prompts: token ids are whole numbers from 0 to"):
            engine.generate(["deep", "<|image|>"], greedy(4))
        assert len(speaking.token_ids) == 8
        session.rewind(0)
        assert session.say("deep", greedy(4)).token_ids == expected


def test_a_batch_with_an_empty_prompt_is_refused_as_a_whole(engine: Engine) -> None:
    with pytest.raises(errors.EmptyTurn):
        engine.generate([SAID, []], greedy(4))
    assert not engine.loop.scheduler.registry.queue


def test_verbs_that_follow_at_once_keep_the_memory(engine: Engine) -> None:
    session = engine.session()
    for _ in range(3):
        session.say(SAID * 12, greedy(5)).wait()
    other = session.fork().fork()
    known = engine.known_tokens(other.id)
    assert other.say(SAID, greedy(2)).usage.cached_tokens == known
