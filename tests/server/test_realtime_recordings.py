"""What clients of OpenAI's realtime protocol say, recorded from their current releases, said again.

The recordings are written by the tests of those clients (`tests/clients`, with `--record DIRECTORY`). Each
holds two turns, a tool round, an interruption and one more turn: events that the client sent, and types and
ids of those that it waited for.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai_talking import OpenAITalk
from tests.server.serving import Server

RECORDINGS = sorted((Path(__file__).parent / "realtime_recordings").glob("*.json"))
LONG, LONG_MARK = "x" * 4000, "(long)"
TOO_LATE = "response_cancel_not_active"
"""The code of a cancellation whose response has ended: of the second of two, unless it comes at once."""


class Replay:
    """One recording, said again: each event once the client has got what it had got before."""

    def __init__(self, talk: OpenAITalk) -> None:
        self.talk = talk
        self.expected: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._recorded: list[dict[str, str]] = []
        self._cancelled = 0

    def catch_up(self) -> None:
        """Wait for all types of events that were heard until here, as often."""
        while self.expected - Counter(event["type"] for event in self.talk.heard):
            event = self.talk.hear(*self.expected, "error")
            if event["type"] == "error":
                assert event["error"]["code"] == TOO_LATE and self._cancelled > 1, event
                self.talk.heard.pop()
        added = [event["item"] for event in self.talk.heard if event["type"] == "response.output_item.added"]
        for recorded, item in zip(self._recorded, added, strict=False):
            self._names |= {recorded[name]: item[name] for name in ("id", "call_id") if name in recorded}

    def say(self, event: dict[str, Any]) -> None:
        self.catch_up()
        self._cancelled += event["type"] == "response.cancel"
        text = json.dumps(event).replace(LONG_MARK, LONG)
        for recorded, name in self._names.items():
            text = text.replace(recorded, name)
        self.talk.connection.send(text)

    def hear(self, entry: dict[str, str]) -> None:
        self.expected[entry["heard"]] += 1
        if entry["heard"] == "response.output_item.added":
            self._recorded.append(entry)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recorded_client_gets_what_it_waits_for(caller: Server, path: Path) -> None:
    recording = json.loads(path.read_text())
    query = "?" + recording["path"].partition("?")[2]
    with OpenAITalk(caller, query, additional_headers=recording["headers"]) as talk:
        replay = Replay(talk)
        for entry in recording["events"]:
            if "sent" in entry:
                replay.say(entry["sent"])
            else:
                replay.hear(entry)
        replay.catch_up()
        heard = Counter(event["type"] for event in talk.heard)
        assert {kind: count for kind, count in heard.items() if not kind.endswith("delta")} == {
            kind: count for kind, count in replay.expected.items() if not kind.endswith("delta")
        }
        responses = [event["response"] for event in talk.heard if event["type"] == "response.done"]
        assert [each["status"] for each in responses] == [*["completed"] * 3, "cancelled", "completed"]
        usages = [response["usage"] for response in responses]
        for before, after in pairwise(usages):
            assert after["input_token_details"]["cached_tokens"] == before["total_tokens"]


def test_all_clients_are_recorded() -> None:
    assert [path.stem for path in RECORDINGS] == ["agents", "livekit", "openai", "openai_beta", "pipecat"]
