"""Cutting into real models over a real WebSocket: what stays, what the next turn computes, and what it says.

Every conversation takes place twice: over `/v1/realtime`, and over HTTP with the same cut. Both have the same
tokens afterwards, which the journal tells, and go on in the same way; and so does a session that is given all
of these tokens as one prompt and computes them from nothing.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.durable.records import StoredTurn
from holdfast.engine.start.pull import PullError, pull
from tests.server.serving import Server
from tests.server.talking import Body, Talk

HEARD = 8
"""Tokens of a turn that are waited for before it is cut."""
FIRST, AFTER = 12, 10
"""Tokens of the answer before a turn that is cut, and of the one after it."""
KEEPS: dict[str, Body] = {
    "five": {"keep_tokens": 5},
    "zero": {"keep_tokens": 0},
    "all": {"keep": "all"},
    "none": {"keep": "none"},
}
SMALL_MODELS = ("bamba", "mistral")
TRIMMED = "llama"
"""Small too, with full attention alone."""
OPTIONS = ("--dtype", "float32", "--device", "cpu", "--audit", "strict", "--max-running", "4")
SMALL = ("--kv-tokens", "16384", "--window-tokens", "16384", "--state-slots", "32")


def greedy(count: int) -> Body:
    return {"max_tokens": count, "ignore_eos": True, "temperature": 0}


def runs(names: Iterable[str], soon: str) -> pytest.MarkDecorator:
    """All of `names` on the small models; those that are `soon` on the one whose memory can be cut anywhere.

    The long runs have all of them on a large model of that kind.
    """
    listed = [pytest.param(model, name, id=f"{model}-{name}") for model in SMALL_MODELS for name in names]
    listed += [pytest.param(TRIMMED, name, id=f"{TRIMMED}-{name}") for name in soon.split()]
    for name in names:
        listed.append(pytest.param("smollm2", name, id=f"smollm2-{name}", marks=pytest.mark.soak))
    return pytest.mark.parametrize(("subject", "way"), listed, indirect=["subject"])


@dataclass(frozen=True, slots=True)
class Subject:
    """A server of a model, and what is said to it."""

    server: Server
    journal: Path
    trims: bool
    """Whether memory can be cut at any token; otherwise the kept tokens of a turn that is cut are computed
    again, with the turn's input."""
    opening: str
    asked: str
    after: str
    long: int

    def turns(self, name: str) -> list[StoredTurn]:
        """What is written of a session."""
        (found,) = [each for each in read_sessions(self.journal) if each.id.endswith(f"/{name}")]
        return found.turns


WORDS = "bak del fin gor kus lan mer pol ras til"


@pytest.fixture(scope="module")
def subjects(
    small_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Subject]]:
    """Servers by model, each started when it is first asked for."""
    started: dict[str, Subject] = {}

    def get(model: str) -> Subject:
        if model not in started:
            journal = tmp_path_factory.mktemp("interrupts") / "sessions.journal"
            started[model] = make_subject(model, small_models, journal)
        return started[model]

    yield get
    for each in started.values():
        assert each.server.stop() == 0
        assert each.server.complaints() == []


def make_subject(model: str, small_models: Callable[[str], Path], journal: Path) -> Subject:
    if model == "smollm2":
        try:
            file, sizes = pull("smollm2"), ("--context-length", "1024", "--kv-tokens", "8192")
        except PullError as error:
            pytest.skip(str(error))
        said = (
            "Name ten rivers, and the countries that they flow through.",
            "Tell me a story.",
            "Go on.",
            300,
        )
    else:
        file, sizes = small_models(model), SMALL
        said = (f"{WORDS} {WORDS} {WORDS}", "gor kus", "lan til", 3000)
    server = Server(file, *OPTIONS, *sizes, "--journal", str(journal))
    return Subject(server, journal, model in (TRIMMED, "smollm2"), *said)


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Iterator[Subject]:
    """The server of a model; nothing is left by one test for the next."""
    found = subjects(request.param)
    yield found
    found.server.check_clean()


def hear_tokens(talk: Talk, count: int) -> list[int]:
    """The tokens of the turn that speaks, until there are so many."""
    heard: list[int] = []
    while len(heard) < count:
        heard += talk.hear("response.delta")["token_ids"]
    return heard


def resting(server: Server, name: str) -> Body:
    """A session, once no turn of it is in flight."""
    deadline = time.monotonic() + 120
    while (state := server.state(name))["state"] != "IDLE":
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
    return state


def same_over_http(subject: Subject, name: str, cut: Body) -> Body:
    """The conversation once more, with a turn that is cut over HTTP; returns the turn after it."""
    server = subject.server
    server.open(name)
    server.say(name, subject.opening, sampling=greedy(FIRST))
    body = {"input": subject.asked, "turn_id": "cut", "sampling": greedy(subject.long), "stream": True}
    enough = max(HEARD, cut.get("keep_tokens", 0))
    with server.http.stream("POST", f"/v1/sessions/{name}/turns", json=body) as answer:
        heard, kind = 0, ""
        for line in answer.iter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if kind == "delta" and line.startswith("data: ") and heard < enough:
                heard += len(json.loads(line.removeprefix("data: "))["token_ids"])
                if heard >= enough:
                    stands = server.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "cut", **cut})
                    assert stands.status_code == 200, stands.text
    return server.say(name, subject.after, sampling=greedy(AFTER))


def from_nothing(subject: Subject, turns: list[StoredTurn]) -> list[int]:
    """What the last of these turns should have said, with everything before it as one prompt."""
    server = subject.server
    *before, last = turns
    prompt = [token for turn in before for token in (*turn.input, *turn.output)] + last.input
    server.close_all()
    assert server.post("/flush_cache").status_code == 200
    turn = server.say(server.open(), prompt, sampling=greedy(len(last.output)))
    assert turn["usage"]["cached_tokens"] == 0
    tokens: list[int] = turn["token_ids"]
    return tokens


def costs_only_itself(subject: Subject, history: int, cut_input: int, kept: int, turn: Body) -> None:
    """The turn after a cut computed its own tokens, and those of the turn that was cut where it had to."""
    usage = turn["usage"]
    known = history + cut_input + kept
    assert usage["computed_tokens"] == usage["prompt_tokens"] - usage["cached_tokens"]
    if subject.trims:
        assert usage["cached_tokens"] == known
    else:
        # The last token before a turn that begins at once may be computed with it.
        assert history - 1 <= usage["cached_tokens"] <= known, "the history is never computed again"


def begin(subject: Subject, talk: Talk, name: str, **fields: Any) -> int:
    """A first turn, and a second one that speaks; returns the length of the history before it."""
    talk.open(name)
    first = talk.turn(subject.opening, sampling=greedy(FIRST))["usage"]
    talk.commit(subject.asked, turn_id="cut", sampling=greedy(subject.long), **fields)
    return int(first["prompt_tokens"] + first["completion_tokens"])


@runs(KEEPS, soon="five all")
def test_a_turn_that_speaks_is_cut(subject: Subject, way: str) -> None:
    keep = KEEPS[way]
    with Talk(subject.server) as talk:
        history = begin(subject, talk, "live")
        heard = hear_tokens(talk, HEARD)
        talk.say("response.interrupt", turn_id="cut", **keep)
        done = talk.hear("response.done")
        assert (done["turn_id"], done["finish_reason"]) == ("cut", "abort")
        kept = done["usage"]["completion_tokens"]
        assert kept == len(done["token_ids"])
        if keep.get("keep") == "none":
            assert (kept, done["text"], done["turns"]) == (0, "", 1)
            known, cut_input = history, 0
        else:
            assert kept == keep.get("keep_tokens", kept)
            assert HEARD <= kept < subject.long or "keep_tokens" in keep
            assert done["token_ids"][:HEARD] == heard[: min(kept, HEARD)]
            assert done["turns"] == 2
            known = done["usage"]["prompt_tokens"] + kept
            cut_input = done["usage"]["prompt_tokens"] - history
        assert resting(subject.server, "live")["tokens"]["known"] == known
        after = talk.turn(subject.after, turn_id="after", sampling=greedy(AFTER))
    assert (after["finish_reason"], after["turns"]) == ("length", 2 if keep.get("keep") == "none" else 3)
    if keep.get("keep") in ("all", "none"):
        assert after["usage"]["cached_tokens"] == known, "nothing but its own tokens"
    costs_only_itself(subject, history, cut_input, kept, after)

    cut = keep if keep.get("keep") == "none" else {"keep_tokens": kept}
    again = same_over_http(subject, "http", cut)
    assert (again["text"], again["token_ids"]) == (after["text"], after["token_ids"])
    live, http = subject.turns("live"), subject.turns("http")
    assert [(turn.input, turn.output) for turn in live] == [(turn.input, turn.output) for turn in http]
    if keep.get("keep") != "none":
        assert live[1].output == done["token_ids"]
    assert live[-1].output == after["token_ids"] == from_nothing(subject, live)


@runs(KEEPS, soon="")
def test_a_turn_that_has_ended_is_cut(subject: Subject, way: str) -> None:
    server, keep = subject.server, KEEPS[way]
    with Talk(server) as talk:
        talk.open("live")
        first = talk.turn(subject.opening, sampling=greedy(FIRST))["usage"]
        done = talk.turn(subject.asked, turn_id="cut", sampling=greedy(20))
        talk.say("response.interrupt", turn_id="cut", **keep)
        stands = talk.hear("session.rewound", "error")
        assert stands["type"] == "session.rewound", stands
        after = talk.turn(subject.after, turn_id="after", sampling=greedy(AFTER))
    history = first["prompt_tokens"] + first["completion_tokens"]
    rolled_back = keep.get("keep") == "none"
    kept = 0 if rolled_back else keep.get("keep_tokens", 20)
    cut_input = 0 if rolled_back else done["usage"]["prompt_tokens"] - history
    assert stands["tokens"]["known"] == history + cut_input + kept
    costs_only_itself(subject, history, cut_input, kept, after)
    if "keep" in keep:
        assert after["usage"]["cached_tokens"] == stands["tokens"]["known"]

    server.open("http")
    server.say("http", subject.opening, sampling=greedy(FIRST))
    server.say("http", subject.asked, turn_id="cut", sampling=greedy(20))
    assert server.post("/v1/sessions/http/interrupt", {"turn_id": "cut", **keep}).status_code == 200
    assert server.say("http", subject.after, sampling=greedy(AFTER))["text"] == after["text"]
    live, http = subject.turns("live"), subject.turns("http")
    assert [(turn.input, turn.output) for turn in live] == [(turn.input, turn.output) for turn in http]
    assert live[-1].output == after["token_ids"] == from_nothing(subject, live)


@runs(("rollback", "keep"), soon="keep")
def test_a_connection_breaks_in_the_middle_of_a_turn(subject: Subject, way: str) -> None:
    server = subject.server
    talk = Talk(server)
    history = begin(subject, talk, "live", on_abort=way)
    heard = hear_tokens(talk, HEARD)
    last = talk.last_seq()
    talk.drop()
    known = resting(server, "live")["tokens"]["known"]
    with Talk(server) as back:
        back.open("live", resume_after_seq=last)
        done = back.hear("response.done")
        assert (done["turn_id"], done["abort_reason"]) == ("cut", "the client went away")
        after = back.turn(subject.after, turn_id="after", sampling=greedy(AFTER))
    kept = done["usage"]["completion_tokens"]
    if way == "keep":
        assert HEARD <= kept < subject.long
        assert done["token_ids"][: len(heard)] == heard
        assert known == done["usage"]["prompt_tokens"] + kept
    else:
        assert (known, done["turns"], done["text"]) == (history, 1, "")
    assert after["usage"]["cached_tokens"] == known, "nothing but its own tokens"

    again = same_over_http(subject, "http", {"keep_tokens": kept} if way == "keep" else {"keep": "none"})
    assert again["text"] == after["text"]
    live, http = subject.turns("live"), subject.turns("http")
    assert [(turn.input, turn.output) for turn in live] == [(turn.input, turn.output) for turn in http]
    assert live[-1].output == after["token_ids"] == from_nothing(subject, live)


@runs(("ten",), soon="")
def test_cutting_in_again_and_again_computes_no_history(subject: Subject, way: str) -> None:
    """Each commit cuts the turn before it: exactly what was sent of that stays."""
    with Talk(subject.server) as talk:
        talk.open("live")
        ends = [talk.turn(subject.opening, sampling=greedy(FIRST))]
        for number in range(10):
            talk.commit(subject.asked, turn_id=f"t{number}", mode="interrupt", sampling=greedy(subject.long))
            if number:
                ends.append(talk.hear("response.done"))
            hear_tokens(talk, 3)
        talk.commit(subject.after, turn_id="after", mode="interrupt", sampling=greedy(AFTER))
        ends += [talk.hear("response.done"), talk.hear("response.done")]
    for number, done in enumerate(ends[1:-1]):
        sent = [
            token
            for message in talk.heard
            if message["type"] == "response.delta" and message["turn_id"] == f"t{number}"
            for token in message["token_ids"]
        ]
        assert (done["turn_id"], done["token_ids"]) == (f"t{number}", sent)
    live = subject.turns("live")
    assert [turn.output for turn in live] == [done["token_ids"] for done in ends]
    starts = [0, len(live[0].input) + len(live[0].output)]
    for turn, done in zip(live[1:], ends[1:], strict=True):
        # Who cuts in at once may do so before the very last token is computed.
        cached, least = done["usage"]["cached_tokens"], starts[-1 if subject.trims else -2] - 1
        assert least <= cached <= starts[-1], "nothing before the turn that was cut is computed again"
        starts.append(starts[-1] + len(turn.input) + len(turn.output))
    assert len(starts) == 13
    assert live[-1].output == from_nothing(subject, live)
