"""A process that talks to an engine with a journal until somebody kills it.

Every act is announced before it is begun and confirmed when it is acknowledged, one line of JSON each, so
that whoever finds the body knows what was promised. Several sessions have turns in flight at once; each has
one act at a time. With a point named, it kills itself there.

    python -m tests.engine.victim DIRECTORY PATH JOURNAL SEED POINT COUNT < turns to be asked for again
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.core.errors import Refused
from holdfast.core.layout import Tier
from holdfast.core.registry import Event
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.engine import Engine
from holdfast.engine.turns.spec import TurnSpec
from tests.engine.direct import Heard, direct
from tests.engine.tiny import WORDS, greedy, tiny_engine, word

SESSIONS = 6
FINGERPRINT = "body of {}"


def say(**line: object) -> None:
    """One line, in one piece."""
    os.write(1, (json.dumps(line) + "\n").encode())


class Victim:
    """Clients of one engine."""

    def __init__(self, engine: Engine, seed: int, at: Callable[[str], None]) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.verbs = engine.verbs
        self.random = random.Random(seed)
        self.seed = seed
        self.serial = 0
        self.busy: set[str] = set()
        self.trying = ""
        """The session of the last act that was begun: not busy if the act is refused."""
        self.at = at

    def picture(self, name: str) -> dict[str, object]:
        session = self.loop.scheduler.registry.sessions.get(name)
        if session is None:
            return {"gone": True}
        tokens = session.sequence.tokens
        return {"tokens": tokens.digest(len(tokens)), "turns": len(session.boundaries)}

    def confirm(self, name: str, act: str, **more: object) -> None:
        self.busy.discard(name)
        say(ack=act, session=name, **self.picture(name), **more)
        self.at("after the answer")

    def begin(self, name: str) -> None:
        """A session has an act from now on, until that is acknowledged or refused."""
        self.trying = name
        self.busy.add(name)

    def next_name(self, kind: str) -> str:
        self.serial += 1
        return f"{kind}-{self.seed}-{self.serial}"

    def turn(self, name: str, turn_id: str, tokens: list[int], limit: int) -> None:
        fingerprint = FINGERPRINT.format(turn_id)
        say(ask="turn", session=name, turn_id=turn_id, tokens=tokens, limit=limit)
        replayed = self.loop.session_log.replay(name, turn_id, fingerprint)
        if replayed is not None:
            self.confirm(name, "turn", turn_id=turn_id, output=replayed.tokens, replayed=True)
            return
        self.begin(name)

        def hear(event: Event) -> None:
            if event.kind in ("finished", "aborted"):
                assert event.turn is not None
                end = event.turn.input_end
                log = self.loop.scheduler.registry.sessions[name].sequence.tokens
                stands = event.kind == "finished" or len(log) > event.turn.known_before
                output = log.slice(end, end + event.turn.generated) if stands else None
                self.confirm(name, "turn", turn_id=turn_id, output=output)

        spec = TurnSpec(turn_id, "local", tokens, greedy(limit), name, fingerprint=fingerprint)
        self.verbs.submit(Heard(hear), spec)

    def act(self) -> None:
        """Begin something on a session that has nothing to do."""
        names = [name for name in self.loop.session_log.sessions if name not in self.busy]
        dice = self.random.random()
        if len(self.loop.session_log.sessions) < SESSIONS and (not names or dice < 0.3):
            name = self.next_name("s")
            say(ask="open", session=name)
            self.begin(name)
            direct(self.verbs, "open", name, "local", done=lambda: self.confirm(name, "open"))
            return
        if not names:
            return
        name = self.random.choice(names)
        session = self.loop.scheduler.registry.sessions[name]
        if session.turn is not None or session.unsettled:
            return
        turns = len(session.boundaries)
        if dice < 0.75 or not turns:
            tokens = [word(self.random.choice(WORDS)) for _ in range(self.random.randint(1, 24))]
            if session.sequence.known < 1500:
                self.turn(name, self.next_name("t"), tokens, self.random.randint(1, 16))
            return
        self.begin(name)
        if dice < 0.80:
            keep = self.random.choice([0, KEEP_ALL, None])
            say(ask="cut", session=name)
            direct(self.verbs, "interrupt", name, keep, done=lambda: self.confirm(name, "cut"))
        elif dice < 0.83:
            last = self.random.randint(1, turns)
            say(ask="compact", session=name)
            direct(
                self.verbs,
                "compact",
                name,
                (self.random.randint(1, last), last),
                [word(self.random.choice(WORDS))],
                self.next_name("c"),
                done=lambda: self.confirm(name, "compact"),
            )
        elif dice < 0.86:
            say(ask="rewind", session=name)
            direct(
                self.verbs,
                "rewind",
                name,
                self.random.randint(0, turns),
                done=lambda: self.confirm(name, "rewind"),
            )
        elif dice < 0.91 and len(self.loop.session_log.sessions) < SESSIONS:
            child = self.next_name("f")
            say(ask="fork", session=child)
            self.busy.discard(name)
            self.begin(child)
            direct(
                self.verbs,
                "fork",
                name,
                child,
                self.random.randint(0, turns),
                done=lambda: self.confirm(child, "fork"),
            )
        elif dice < 0.95:
            self.busy.discard(name)
            direct(self.verbs, "spill", name, self.random.choice([Tier.DISK, None]))
        else:
            say(ask="close", session=name)
            direct(self.verbs, "close", name, done=lambda: self.confirm(name, "close"))

    def barge_in(self) -> None:
        """Sometimes a turn in flight is interrupted; what it says of itself at its end is what counts."""
        running = [session for session in self.loop.scheduler.registry.running if session.turn is not None]
        if running and self.random.random() < 0.1:
            session = self.random.choice(running)
            assert session.turn is not None
            keep = self.random.choice([None, KEEP_ALL, self.random.randint(0, session.turn.generated)])
            direct(self.verbs, "interrupt", session.id, keep)

    def live(self) -> None:
        """Until death."""
        while True:
            for act in (self.act, self.act, self.barge_in):
                self.trying = ""
                try:
                    act()
                except Refused as refusal:
                    say(refused=refusal.code)
                    self.busy.discard(self.trying)
            self.loop.step()
            self.verbs.retry()


def main() -> None:
    """Come to life, ask again for what was never answered, and go on."""
    directory, path, place, seed, point, count = sys.argv[1:]
    torch.set_num_threads(1)
    left = int(count)

    def at(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    engine = tiny_engine(
        Path(directory),
        journal=place,
        disk=f"{path}/disk",
        disk_limit=8 << 20,
        snapshot_seconds=0.05,
        kv_tokens=2048,
        audit="on",
    )
    victim = Victim(engine, int(seed), at)
    journal = engine.loop.session_log.journal
    assert journal is not None
    journal._probe = at
    say(alive={name: victim.picture(name) for name in engine.loop.session_log.sessions})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["session"] in engine.loop.session_log.sessions:
            victim.turn(asked["session"], asked["turn_id"], asked["tokens"], asked["limit"])
    victim.live()


if __name__ == "__main__":
    main()
