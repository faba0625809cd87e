"""The cost of the audit: a whole census, its longest slice, and its overhead in a running turn.

The crowd: 1,000 sessions with all three components, 256 of them in their second turn. Every session has
published its first input, so the tree is as full as in a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from holdfast.bench.core import anchors
from holdfast.bench.core.report import Check, Figure, Parameter, Settings
from holdfast.bench.core.sessions import POOL_TOKENS, Session, World
from holdfast.bench.core.workloads import outputs, stream
from holdfast.bench.figures import Progress
from holdfast.bench.timing import clock, collector_off, median_us
from holdfast.core.audit import ROWS_PER_SLICE, ROWS_PER_UNIT, Audit
from holdfast.core.ledger import Grant, Hold, Kind, Ledger

LAYOUT = "full+window+state"
SESSIONS = 1_000
RUNNING = 256
TURN_INPUT = 32
TURN_OUTPUT = 32
DECODED = 8
STATES = 4_096
# Tokens of each session -> tokens in the pool of full pages. Windows need no more than the second number.
CROWDS = {288: (POOL_TOKENS, POOL_TOKENS), 8192: (1 << 24, 1 << 21)}
SLICE_BUDGET = 2_048
CENSUSES = 5
ROUNDS = 5

TURN_PAIRS = 40
LOOPS = 10_000


def crowd(page_size: int, tokens: int, sessions: int = SESSIONS, running: int = RUNNING) -> World:
    """`sessions` sessions with `tokens` tokens each, and the last `running` of them in their second turn."""
    pool_tokens, window_tokens = CROWDS[tokens]
    world = World(LAYOUT, page_size, pool_tokens, window_tokens, STATES)
    generated = outputs(TURN_OUTPUT)
    for number in range(sessions):
        session = Session(world, f"session {number}")
        session.first_turn(stream(40_000 + number, tokens - TURN_OUTPUT), generated)
        world.sessions.append(session)
    for number, session in enumerate(world.sessions[sessions - running :]):
        session.start_turn(stream(60_000 + number, TURN_INPUT), generated[:DECODED])
    return world


# --- the census ---------------------------------------------------------------------------------------


def measure_census(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """The whole census and the longest slice, by page size and length of the sessions."""
    for page_size in settings.page_sizes:
        for tokens in CROWDS:
            if tokens > 288 and page_size == 1:
                continue  # Ten million units in one census; the server uses slices.
            progress(f"census: page size {page_size}, {tokens} tokens a session")
            world = crowd(page_size, tokens)
            yield _census_figure(world, page_size, tokens, settings)
            theirs = anchors.baseline_census(page_size)
            if theirs is not None and tokens == 288:
                yield theirs


def _census_figure(world: World, page_size: int, tokens: int, settings: Settings) -> Figure:
    audit = Audit(world.ledger, world.tree, world.owners)
    with collector_off():
        samples = [_sample_census(audit) for _ in range(CENSUSES * settings.repeats)]
        slices = _sample_slices(audit, ROUNDS * settings.repeats)
    value, longest = median_us(samples) / 1000, max(slices) / 1e6
    parameters: dict[str, Parameter] = {
        "page_size": page_size,
        "sessions": SESSIONS,
        "running": RUNNING,
        "tokens_per_session": tokens,
        "layout": LAYOUT,
        "pool_tokens": CROWDS[tokens][0],
    }
    observed: dict[str, Parameter] = {
        "holds": len(world.ledger.live),
        "units": sum(pool.size for pool in world.ledger.pools.values()),
        "slices": len(slices),
        "slice_budget": SLICE_BUDGET,
        "slice_ms_max": longest,
    }
    baseline = anchors.PAGE_CHECK_MS.get(page_size) if tokens == 288 else None
    limit = anchors.CENSUS_MS_MAX.get((page_size, tokens))
    checks = (
        Check("census", value, "ms", baseline, at_most=limit),
        Check("slice_ms_max", longest, "ms", at_most=anchors.SLICE_MS_MAX.get(page_size)),
    )
    return Figure("census", value, "ms", parameters, checks, observed=observed)


def _sample_census(audit: Audit) -> int:
    started = clock()
    findings = audit.census()
    taken = clock() - started
    assert not findings, f"a healthy world has a finding: {findings[0]}"
    return taken


def _sample_slices(audit: Audit, rounds: int) -> list[int]:
    """The time of each slice of a census: the median over the rounds, whose slices do the same work."""
    by_slice: list[list[int]] = []
    for _ in range(rounds):
        index, done = 0, False
        while not done:
            started = clock()
            findings = audit.slice(SLICE_BUDGET)
            taken = clock() - started
            assert not findings, f"a healthy world has a finding: {findings[0]}"
            if index == len(by_slice):
                by_slice.append([])
            by_slice[index].append(taken)
            index, done = index + 1, audit.between_rounds
    return [int(median(samples)) for samples in by_slice]


# --- the overhead in running turns --------------------------------------------------------------------


def measure_audit_overhead(settings: Settings, progress: Progress) -> Iterator[Figure]:
    """A turn with the audit, the flight recorder and the finalisers, against one without, by page size.

    Slices are switched on and off. The recorder and the finalisers cannot be: the cost of one entry and of
    one finaliser is measured separately and multiplied by the transitions of a turn.
    """
    for page_size in settings.page_sizes:
        pairs: list[tuple[int, int]] = []
        built_in: list[float] = []
        for repeat in range(settings.repeats):
            progress(f"audit_overhead: page size {page_size}, run {repeat + 1} of {settings.repeats}")
            world = crowd(page_size, 288)
            with collector_off():
                pairs += _sample_pairs(world)
                built_in.append(_built_in_us(world.sessions[0]))
        sliced_us = median_us([audited - bare for audited, bare in pairs])
        added = sliced_us + median(built_in)
        without = median_us([bare for _, bare in pairs]) - median(built_in)
        yield _overhead_figure(page_size, without, added, sliced_us)


def _overhead_figure(page_size: int, without: float, added: float, sliced_us: float) -> Figure:
    parameters: dict[str, Parameter] = {
        "page_size": page_size,
        "sessions": SESSIONS,
        "running": RUNNING,
        "layout": LAYOUT,
    }
    observed: dict[str, Parameter] = {
        "added_us": added,
        "slices_us": sliced_us,
        "turn_us": without + added,
        "rows_per_slice": ROWS_PER_SLICE,
        "slice_budget": ROWS_PER_SLICE // ROWS_PER_UNIT,
    }
    ratio = (without + added) / without
    checks = (
        Check("audit_overhead", ratio, "ratio"),
        Check("added_us", added, "us", at_most=anchors.AUDIT_US_MAX.get(page_size)),
    )
    return Figure("audit_overhead", ratio, "ratio", parameters, checks, observed=observed)


def _sample_pairs(world: World) -> list[tuple[int, int]]:
    """The time of a turn with slices and without, in pairs whose order alternates.

    A slice runs once every few turns; a sample is as many turns.
    """
    audit = Audit(world.ledger, world.tree, world.owners)
    session = world.sessions[0]
    inputs, generated = stream(80_000, TURN_INPUT), outputs(TURN_OUTPUT)
    pairs: list[tuple[int, int]] = []
    turns = -(-ROWS_PER_SLICE // (1 + TURN_OUTPUT))
    for pair in range(TURN_PAIRS):
        taken = {True: 0, False: 0}
        for with_slices in (True, False) if pair % 2 else (False, True):
            session.audit = audit if with_slices else None
            started = clock()
            for _ in range(turns):
                session.turn(inputs, generated)
            taken[with_slices] = (clock() - started) // turns
        pairs.append((taken[True], taken[False]))
    session.audit = None
    return pairs


def _built_in_us(session: Session) -> float:
    """The cost of the flight recorder and of the finalisers of Holds in one turn."""
    ledger = session.world.ledger
    ledger.recorder.clear()
    session.turn(stream(80_000, TURN_INPUT), outputs(TURN_OUTPUT))
    entries = [what for _, what, *_ in ledger.recorder]
    finalised = sum(what in {"move", "join", "release"} for what in entries)
    return len(entries) * _entry_us(ledger) + finalised * _finaliser_us(ledger)


def _entry_us(ledger: Ledger) -> float:
    """The cost of one entry of the flight recorder, without the loop around it."""
    pool = next(iter(ledger.pools.values()))
    grant = next(iter(ledger.live.values()))
    started = clock()
    for _ in range(LOOPS):
        ledger.recorder.append((ledger.step, "grow", grant.serial, pool.index, LOOPS, grant.holder))
    middle = clock()
    for _ in range(LOOPS):
        continue
    return (2 * middle - started - clock()) / LOOPS / 1000


class _Unwatched:
    """A Hold without a finaliser."""

    __slots__ = ("grant",)

    def __init__(self, grant: Grant) -> None:
        self.grant = grant


def _finaliser_us(ledger: Ledger) -> float:
    """The cost of the finaliser of a dead Hold."""
    dead = ledger.take(next(iter(ledger.pools.values())), 0, ledger.holder(Kind.TURN, "benchmark"))
    dead.release()
    nothing = dead.grant
    started = clock()
    for _ in range(LOOPS):
        Hold(nothing)
    middle = clock()
    for _ in range(LOOPS):
        _Unwatched(nothing)
    return (2 * middle - started - clock()) / LOOPS / 1000
