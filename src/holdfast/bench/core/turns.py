"""The memory work of one session turn, and of open, first turn and close.

Sessions with short, medium and long histories in one world take turns of 32 tokens in and 32 out,
interleaved, so that two adjacent samples differ in the history alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.bench.core import anchors
from holdfast.bench.core.report import Check, Figure, Parameter, Settings
from holdfast.bench.core.sessions import Session, World
from holdfast.bench.core.workloads import outputs, stream
from holdfast.bench.figures import Progress
from holdfast.bench.timing import clock, collector_off, median_us, paired_ratio
from holdfast.core.ledger import Kind

LAYOUTS = ("dense", "full+window+state")
# Tokens of history -> how many sessions have it.
HISTORIES = {1024: 20, 16384: 10, 102400: 6}
TURNS_EACH = 10
TURN_INPUT = 32
TURN_OUTPUT = 32
ROUNDS = TURNS_EACH * min(HISTORIES.values())

PROMPTS = (32, 1024)
OPENINGS = 200


def measure_turn(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """One turn of a session at rest, by page size, layout and history."""
    for layout in LAYOUTS:
        for page_size in settings.page_sizes:
            samples: dict[int, list[int]] = {history: [] for history in HISTORIES}
            for repeat in range(settings.repeats):
                progress(f"turn: {layout}, page size {page_size}, run {repeat + 1} of {settings.repeats}")
                _sample_turns(layout, page_size, samples)
            yield from _turn_figures(layout, page_size, samples)


def _turn_figures(layout: str, page_size: int, samples: dict[int, list[int]]) -> Iterator[Figure]:
    shortest, *_, longest = HISTORIES
    for history, sample in samples.items():
        value = median_us(sample)
        baseline = anchors.TURN_US.get((page_size, history))
        limit = anchors.TURN_US_MAX.get((layout, page_size))
        checks = [Check("turn", value, "us", baseline, at_most=limit)]
        observed: dict[str, Parameter] = {"samples": len(sample)}
        if history == longest:
            ratio = paired_ratio(sample, samples[shortest])
            observed["ratio_to_shortest"] = ratio
            checks.append(Check("ratio_to_shortest", ratio, "ratio", at_most=anchors.TURN_RATIO_MAX))
        parameters: dict[str, Parameter] = {"page_size": page_size, "history": history, "layout": layout}
        yield Figure("turn", value, "us", parameters, tuple(checks), observed=observed)
        theirs = anchors.baseline_turn(page_size, history)
        if theirs is not None and layout == "dense":
            yield theirs


def _sample_turns(layout: str, page_size: int, samples: dict[int, list[int]]) -> None:
    """One run in a fresh world: every round takes one turn in a session of each history."""
    world = World(layout, page_size)
    generated = outputs(TURN_OUTPUT)
    sessions = {
        history: [_with_history(world, history, number) for number in range(count)]
        for history, count in HISTORIES.items()
    }
    # All inputs are made before the first sample: making them would evict the processor's caches.
    inputs = {
        (number, turn): stream(5000 + 64 * number + turn, TURN_INPUT)
        for number in range(max(HISTORIES.values()))
        for turn in range(TURNS_EACH)
    }
    histories = list(HISTORIES)
    with collector_off():
        for turn in range(ROUNDS):
            # The first in a round has cold caches: each history is first in turn.
            for place in range(len(histories)):
                history = histories[(turn + place) % len(histories)]
                of_session, number = divmod(turn, HISTORIES[history])
                session, tokens = sessions[history][number], inputs[number, of_session]
                started = clock()
                session.turn(tokens, generated)
                samples[history].append(clock() - started)


def _with_history(world: World, history: int, number: int) -> Session:
    """An idle session whose first turn had `history` tokens."""
    session = Session(world, f"session {history}/{number}")
    # The sessions must not share a prefix, so the streams of different histories differ.
    session.first_turn(stream(1000 + number + (history << 8), history), outputs(TURN_OUTPUT))
    return session


def measure_open_close(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """Open, first turn (match, root lease, publish) and close, by page size, layout and prompt."""
    for layout in LAYOUTS:
        for page_size in settings.page_sizes:
            for prompt in PROMPTS:
                progress(f"open_close: {layout}, page size {page_size}, {prompt} tokens")
                samples: list[int] = []
                for _ in range(settings.repeats):
                    samples += _sample_openings(layout, page_size, prompt)
                yield from _open_close_figures(layout, page_size, prompt, samples)


def _open_close_figures(layout: str, page_size: int, prompt: int, samples: list[int]) -> Iterator[Figure]:
    value = median_us(samples)
    theirs = anchors.baseline_open_close(page_size, prompt)
    baseline = theirs.value if theirs is not None else None
    limit = baseline * anchors.OPEN_CLOSE_SHARE_MAX[layout] if baseline is not None else None
    parameters: dict[str, Parameter] = {"page_size": page_size, "prompt": prompt, "layout": layout}
    checks = (Check("open_close", value, "us", baseline, at_most=limit),)
    yield Figure("open_close", value, "us", parameters, checks, observed={"samples": len(samples)})
    if theirs is not None and layout == "dense":
        yield theirs


def _sample_openings(layout: str, page_size: int, prompt: int) -> list[int]:
    """One run in a fresh world; at its end only the tree holds memory."""
    world = World(layout, page_size)
    generated = outputs(TURN_OUTPUT)
    prompts = [stream(20_000 + number, prompt) for number in range(OPENINGS)]
    samples: list[int] = []
    with collector_off():
        for number, tokens in enumerate(prompts):
            started = clock()
            session = Session(world, f"session {number}")
            session.first_turn(tokens, generated)
            session.close()
            samples.append(clock() - started)
    for pool in world.ledger.pools.values():
        assert len(pool.free) + pool.by_kind[Kind.TREE] == pool.size, "a closed session leaked memory"
    return samples
