"""All orders of events in tiny worlds, breadth first, on the real code.

From every state that was not seen before, every event that can happen does, and everything is looked at
afterwards. A state is reached again by letting its events happen once more from the start: paths are short,
and the core is deterministic. States that differ in names alone count as one (fingerprint.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.sim.content import extend
from holdfast.sim.fingerprint import Fingerprint
from holdfast.sim.found import Crashed, Found
from holdfast.sim.tiny import Setting, TinyWorld

STEP = ("plan", "settle")
ONE_RESTS = ("turn a", *STEP, *STEP, *STEP)
BOTH_RUN = ("turn a", *STEP, "turn b", *STEP)
ONE_RESTS_ONE_RUNS = (*ONE_RESTS, "turn b", *STEP)
SETTINGS = (
    Setting("dense", 2, 5),
    Setting("dense", 3, 4, overlap=True, leave_history=True),
    Setting("dense", 2, 6, host=4, overlap=True),
    Setting("hybrid", 2, 6, slots=3),
    Setting("hybrid", 3, 4, slots=4, overlap=True, leave_history=True),
    Setting("hybrid", 3, 5, slots=4, host=3),
    Setting("window", 2, 7, overlap=True),
    Setting("window", 3, 7, host=4, leave_history=True),
    Setting("dense", 2, 7, host=4, overlap=True, prologue=ONE_RESTS),
    Setting("dense", 3, 5, leave_history=True, prologue=ONE_RESTS_ONE_RUNS),
    Setting("hybrid", 2, 6, slots=4, host=4, overlap=True, leave_history=True, prologue=ONE_RESTS),
    Setting("hybrid", 3, 5, slots=5, overlap=True, prologue=BOTH_RUN),
    Setting("window", 2, 7, host=4, prologue=ONE_RESTS_ONE_RUNS),
    Setting("window", 3, 7, overlap=True, leave_history=True, prologue=BOTH_RUN),
    Setting("dense", 2, 7, host=4, overlap=True, share=0.75, prologue=ONE_RESTS_ONE_RUNS),
    Setting("hybrid", 3, 6, slots=5, share=0.7, leave_history=True, prologue=BOTH_RUN),
    Setting("dense", 2, 6, overlap=True, constrained=True, prologue=("turn a", *STEP)),
    Setting("hybrid", 3, 5, slots=4, overlap=True, constrained=True, prologue=ONE_RESTS_ONE_RUNS),
    Setting("window", 2, 7, constrained=True, prologue=ONE_RESTS),
    Setting("dense", 2, 6, overlap=True, mute=True),
    Setting("hybrid", 3, 5, slots=4, host=3, overlap=True, mute=True),
    Setting("window", 2, 7, leave_history=True, mute=True, prologue=("turn a", *STEP)),
)
STATES_PER_PROGRESS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, its holder, and the events that lead to it."""

    kind: str
    detail: str
    holder: str
    setting: Setting
    path: tuple[str, ...]


@dataclass(slots=True)
class Exploration:
    """The result of an exploration. In `exhausted` settings every state was visited."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    exhausted: int = 0
    hash: int = 0
    finding: Finding | None = None

    @property
    def state_hash(self) -> str:
        """A number that stands for all states visited, in order."""
        return f"{self.hash:016x}"

    def as_json(self) -> dict[str, object]:
        """The last line of an exploration with `--json`."""
        line: dict[str, object] = {
            "name": "summary",
            "states": self.states,
            "transitions": self.transitions,
            "depth": self.depth,
            "exhausted": self.exhausted,
            "findings": int(self.finding is not None),
            "state_hash": self.state_hash,
        }
        if self.finding is not None:
            line |= {"kind": self.finding.kind, "holder": self.finding.holder, "detail": self.finding.detail}
            line |= {"setting": str(self.finding.setting), "path": list(self.finding.path)}
        return line


def explore(
    states: int,
    progress: Callable[[Exploration], None] | None = None,
    settings: tuple[Setting, ...] = SETTINGS,
) -> Exploration:
    """Visit so many states in all, as evenly over the settings as they have states; stops at a finding."""
    done = Exploration()
    for index, setting in enumerate(settings):
        share = -(-(states - done.states) // (len(settings) - index))
        _explore_one(setting, share, done, progress)
        if done.finding is not None:
            break
    return done


def _explore_one(
    setting: Setting, states: int, done: Exploration, progress: Callable[[Exploration], None] | None
) -> None:
    seen: set[bytes] = set()
    pending: deque[tuple[str, ...]] = deque([()])
    while pending:
        path = pending.popleft()
        for event in _after(setting, path, None)[0].enabled():
            if len(seen) >= states:
                return
            try:
                world, happened = _after(setting, path, event)
            except Found as found:
                done.finding = Finding(found.kind, found.detail, found.holder, setting, (*path, event))
                return
            done.transitions += 1
            digest = Fingerprint(world.scheduler, world.device, world.audience).digest() if happened else b""
            if happened and digest not in seen:
                seen.add(digest)
                pending.append((*path, event))
                done.states += 1
                done.depth = max(done.depth, len(path) + 1)
                done.hash = extend(done.hash, int.from_bytes(digest[:8]))
                if progress is not None and done.states % STATES_PER_PROGRESS == 0:
                    progress(done)
    done.exhausted += 1


def _after(setting: Setting, path: tuple[str, ...], event: str | None) -> tuple[TinyWorld, bool]:
    """A tiny world in which the events of a path have happened, and one more that is looked at if it does."""
    try:
        world = TinyWorld(setting)
        for past in path:
            world.apply(past, watched=False)
        return world, event is not None and world.apply(event, watched=True)
    except Found:
        raise
    except Exception as error:
        raise Crashed(f"{setting}; then {', '.join(path)}, {event}", "") from error
