"""Every planted bug is reached and reported as a finding, of the right kind and about the right one."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from holdfast.sim.chat_mutants import CHAT_MUTANTS
from holdfast.sim.copy_mutants import COPY_MUTANTS
from holdfast.sim.explore import explore
from holdfast.sim.mutants import MUTANTS, planted
from holdfast.sim.prefetch_mutants import PREFETCH_MUTANTS
from holdfast.sim.runner import Options, simulate
from holdfast.sim.tier_mutants import TIER_MUTANTS
from tests.sim import command

# The worlds in which bugs are looked for are the first ones of the run that the command's figures speak of.
OPTIONS = Options(7, 60_000)
# Bugs of these need their own workload: others seldom do what they are about.
OF_CHATS = Options(7, 8_000, workloads=("chats",))
OF_TIERS = Options(7, 8_000, workloads=("tiers",))


def among(seed: int, layout: str, page_size: int, workload: str) -> Options:
    """Worlds of one kind."""
    return Options(seed, OPTIONS.steps, (layout,), (page_size,), (workload,))


# Where bugs are found soon that take long in worlds of all kinds. `make soak` finds them in those.
SOONER = {
    "file-is-taken-for-longer-than-it-is": among(8, "hybrid", 16, "agents"),
    "last-token-of-an-input-waits-for-ever": among(11, "window+state", 3, "crowd"),
    "copies-of-a-failed-step-are-trusted": among(3, "dense", 16, "adversary"),
    "lost-table-changes-are-not-resent": among(3, "window", 1, "mix"),
    "moves-of-a-failed-step-are-trusted": among(15, "window+state", 16, "agents"),
    "aborted-restore-keeps-its-parcel": among(2, "state", 64, "agents"),
    "double-close-frees-twice": among(3, "full+window+state", 1, "mix"),
    "a-spill-takes-what-others-lease": among(1, "state", 16, "agents"),
    "freed-while-in-transit": among(2, "window", 3, "voice"),
    "stale-event-is-accepted": among(1, "state", 64, "adversary"),
    "withdrawn-sample-is-awaited": among(1, "dense", 1, "agents"),
    "duplicate-insert-leaks": among(1, "dense", 1, "agents"),
    "forced-position-is-sampled-again": among(1, "dense", 1, "agents"),
    "duplicate-insert-frees-the-trees-page": among(1, "dense", 1, "agents"),
    "idle-clock-runs-during-a-turn": among(3, "window-only", 3, "mix"),
    "state-is-left-at-the-wrong-length": among(1, "state", 16, "mix"),
    "drafts-keep-their-spare-slot": among(2, "full+window+state", 16, "adversary"),
    "quota-is-ignored": among(1, "dense", 1, "agents"),
    "a-fork-is-kept-by-default": among(2, "hybrid", 3, "agents"),
    "fork-at-a-token-has-all-memory": among(1, "dense", 1, "chats"),
    "history-is-not-shared-during-a-turn": among(1, "dense", 1, "chats"),
    "volatile-turn-waits-for-a-journal": among(3, "full+window+state", 1, "chats"),
    "abandoned-input-is-kept": among(1, "dense", 1, "listening"),
    "listener-that-ended-stays-listed": among(1, "dense", 1, "listening"),
    "listening-takes-the-budget-first": among(1, "dense", 1, "listening"),
    "open-turn-samples": among(1, "dense", 1, "listening"),
    "revision-does-not-wait-for-rows": among(1, "dense", 1, "listening"),
    "revision-keeps-what-was-computed": among(1, "dense", 1, "listening"),
    "point-ahead-is-left-too-far": among(3, "full+window+state", 1, "listening"),
    "close-forgets-state-slot": among(3, "full+window+state", 1, "mix"),
    "close-frees-a-placeholder": among(3, "full+window+state", 1, "mix"),
    "cut-ignores-the-state": among(3, "full+window+state", 1, "mix"),
    "failed-admission-keeps-the-slot": among(3, "full+window+state", 1, "mix"),
    "failed-extend-keeps-its-pages": among(3, "full+window+state", 1, "mix"),
    "first-turn-abort-keeps-the-slot": among(3, "full+window+state", 1, "mix"),
    "release-keeps-window-locks": among(3, "full+window+state", 1, "mix"),
    "rollback-keeps-the-turns-slot": among(3, "full+window+state", 1, "mix"),
    "rollback-keeps-the-turns-state": among(3, "full+window+state", 1, "mix"),
    "turn-and-session-both-hold": among(3, "full+window+state", 1, "mix"),
    "window-of-the-mark-is-freed": among(3, "full+window+state", 1, "mix"),
    "retract-moves-the-mark": among(13, "hybrid", 16, "mix"),
    "failed-sink-loses-the-parcel": among(3, "full+window+state", 1, "tiers"),
    "sunk-parcel-is-read-from-the-host": among(1, "state", 16, "tiers"),
    "sunk-parcel-keeps-its-host-memory": among(1, "state", 16, "tiers"),
    "failed-adoption-keeps-its-pages": among(1, "hybrid", 3, "tiers"),
    "cut-keeps-the-stale-copy": among(3, "dense", 3, "tiers"),
    "new-pages-precede-the-copy": among(2, "dense", 1, "tiers"),
    "partial-page-of-the-copy-counts-as-whole": among(3, "dense", 3, "tiers"),
    "close-forgets-checkpoints": among(1, "window+state", 16, "agents"),
    "computed-input-does-not-end-its-turn": among(2, "window", 3, "voice"),
    "pins-are-forgotten": among(2, "window", 3, "voice"),
    "state-of-the-copy-outlives-a-turn": among(5, "state", 1, "tiers"),
    "failed-adoption-keeps-its-lease": among(1, "dense", 16, "tiers"),
    "compaction-leaves-later-boundaries": among(1, "state", 3, "chats"),
    "cancelled-prefetch-frees-its-pages-at-once": among(3, "hybrid", 1, "tiers"),
}

SESSION = r"SESSION (s|rt)\d+"
CHECKPOINT = r"CHECKPOINT (s|rt)\d+"
TURN = r"TURN (t|rt)\d+ of (s|rt)\d+"
TREE = r"TREE (red|blue)"
NAME = r"(s|rt)\d+"
ROW = r"(t|rt)\d+ of (s|rt)\d+"
TENANT = r"tenant (red|blue)"
PARCEL = r"parcel of s\d+"
COPY = r"(copy of|COPY) s\d+"
FREE = (
    rf"the free list(, last given to by ({SESSION}|{TURN}|{CHECKPOINT}|TRANSIT {NAME}|COPY {NAME}|{TREE}))?"
)


class Report(NamedTuple):
    """What a bug may be reported as, and about whom: any of these kinds, any of these holders."""

    kinds: set[str]
    holders: tuple[str, ...]


def report(kinds: str, *holders: str) -> Report:
    return Report(set(kinds.split(", ")), holders)


LEAK = "unclaimed, dropped hold"
LOCK = "lock without a lessee"
TWICE = "claimed twice, claimed while free"

EXPECTED: dict[str, Report] = {
    # Memory: the slot, the page or the lock, and who had it.
    "close-forgets-state-slot": report(LEAK, SESSION),
    "close-forgets-checkpoints": report(LEAK, CHECKPOINT),
    "close-keeps-its-lease": report(LOCK, NAME),
    "close-frees-a-placeholder": report("foreign unit", FREE, TURN),
    "release-frees-twice": report(TWICE, FREE, SESSION, TURN, CHECKPOINT, TREE),
    "move-leaves-the-old-hold-alive": report(LEAK + ", assertion", SESSION, TURN, CHECKPOINT, TREE),
    "fences-are-ignored": report("fence", ROW, NAME),
    "counter-is-not-lowered": report("counter", "ledger"),
    "turn-and-session-both-hold": report("claimed twice, assertion", TURN, SESSION),
    "failed-extend-keeps-its-pages": report("books", SESSION, TURN),
    "drafts-keep-their-spare-slot": report(LEAK, TURN),
    "drafts-are-not-trimmed": report("books, content", SESSION, TURN, TREE),
    "trim-rounds-down": report("books, assertion", SESSION, TURN),
    "window-of-the-mark-is-freed": report("books, content, assertion", SESSION, TURN, ROW),
    "rollback-keeps-the-turns-slot": report(LEAK, TURN),
    "rollback-keeps-the-turns-state": report("content", SESSION, TURN, ROW, PARCEL, TREE),
    "cut-ignores-the-state": report("content, books", SESSION, TURN, ROW, PARCEL, TREE),
    "retract-moves-the-mark": report("books, content", SESSION, TURN, ROW),
    "duplicate-insert-leaks": report(LEAK, TURN, SESSION),
    "duplicate-insert-frees-the-trees-page": report(TWICE, TREE, SESSION, TURN),
    "publish-leaves-stale-tables": report("content, fence", ROW),
    "leased-leaf-is-evicted": report("claimed while free, assertion, not queued, " + LOCK, NAME, TREE),
    "lease-forgets-its-lock": report(LOCK, NAME, TREE),
    "release-keeps-the-lock": report(LOCK, TREE, NAME),
    "release-keeps-window-locks": report(LOCK, TREE, NAME),
    "a-spill-takes-what-others-lease": report("claimed while free", NAME),
    "match-crosses-tenants": report("tenant, quota", NAME, TENANT),
    "state-is-left-at-the-wrong-length": report("content", TREE, ROW),
    # Admission and turns: the turn, or the session whose turn it was.
    "failed-admission-keeps-the-slot": report(LEAK + ", assertion", TURN, ROW),
    "failed-admission-keeps-the-lock": report(LOCK, NAME),
    "failed-admission-keeps-the-row": report("registry, assertion", ROW),
    "admitted-is-freed-as-if-it-had-failed": report(TWICE, TURN),
    "retried-chunk-takes-twice": report("books", TURN, SESSION),
    "second-turn-clears-the-firsts-flight": report("registry, refusal, assertion", ROW, NAME),
    "refused-turn-overwrites-the-mark": report("refusal, transcript, books", NAME, TURN),
    "refused-turn-drops-the-memory": report("refusal", NAME),
    "stale-event-is-accepted": report("refusal", NAME),
    "queued-abort-leaves-the-session-busy": report("registry, assertion", NAME),
    "abort-advances-the-history": report("transcript", NAME),
    "abort-shrinks-the-history": report("transcript, content", NAME, TREE),
    "abort-wipes-the-memory": report("recomputation", ROW),
    "first-turn-abort-keeps-the-slot": report(LEAK, TURN),
    "first-turn-abort-keeps-the-lock": report(LOCK, NAME),
    "keep-counts-one-too-many": report("transcript", NAME),
    "retract-clears-the-flight": report("registry", ROW),
    "finished-turn-is-freed-again-by-retract": report(TWICE, SESSION, TURN, FREE),
    "rewind-keeps-what-lies-past-the-cut": report("content, books, assertion", SESSION, TURN, ROW, PARCEL),
    "sealed-token-is-counted-twice": report("books, content, assertion", SESSION, TURN, ROW, NAME),
    # Closing, failed steps, copies, tiers: the session whose memory it is.
    "close-in-flight-frees-at-once": report("content, assertion, " + LEAK, ROW, SESSION, TURN),
    "deferred-close-is-forgotten": report("late, left over", NAME),
    "double-close-frees-twice": report(TWICE, SESSION, TURN, FREE, TREE),
    "idle-clock-runs-during-a-turn": report("transcript", NAME),
    "lost-table-changes-are-not-resent": report("content", ROW),
    "copies-of-a-failed-step-are-trusted": report("content, assertion", SESSION, TURN, ROW, PARCEL, NAME),
    "moves-of-a-failed-step-are-trusted": report("content", SESSION, TURN, ROW, PARCEL),
    "fork-forgets-its-copies": report("content", SESSION, TURN, ROW, PARCEL, TREE),
    "freed-while-in-transit": report(TWICE, SESSION, TURN, FREE),
    "aborted-restore-keeps-its-parcel": report(LEAK, SESSION),
    "seal-in-flight-counts-as-rest": report("content, books, assertion", SESSION, ROW),
    # Tenants: whose quota it is.
    "account-is-not-lowered": report("counter", TENANT),
    "quota-is-ignored": report("quota", TENANT),
    # Forced tokens: the turn whose row samples, or what it has said; the session whose seal is incomplete.
    "forced-position-is-sampled-again": report("content", ROW),
    "withdrawn-sample-is-awaited": report("registry", ROW),
    "forced-token-is-lost": report("content, transcript", ROW, NAME),
    "forced-tokens-are-not-counted": report("transcript, content", NAME, ROW),
    "first-sealing-row-is-the-last": report("recomputation", NAME),
    "matcher-takes-a-withdrawn-sample": report("content", ROW),
    # Turns that sample nothing: the turn that ends early, never or with a token.
    "first-chunk-of-an-input-ends-its-turn": report("event, assertion", ROW, NAME),
    "computed-input-does-not-end-its-turn": report("stall, assertion", ROW, NAME),
    "computed-input-is-sampled-after": report("transcript, assertion", ROW, NAME),
    "last-token-of-an-input-waits-for-ever": report("stall, assertion, delay", ROW, NAME),
    # The size of steps: the turn whose next token is late.
    "answers-wait-for-large-steps": report("pause", ROW),
    # Open turns: the turn that says what was not asked, or keeps what was not said; the turn that waits.
    "open-turn-samples": report("transcript, registry, content, assertion", ROW, NAME),
    "revision-keeps-what-was-computed": report("content, books, assertion", SESSION, TURN, ROW, NAME),
    "revision-does-not-wait-for-rows": report("content, books, assertion", SESSION, TURN, ROW, NAME),
    "abandoned-input-is-kept": report("transcript", NAME),
    "listening-takes-the-budget-first": report("delay", ROW),
    "point-ahead-is-left-too-far": report("content, books, assertion", SESSION, TURN, ROW, NAME),
    "listener-that-ended-stays-listed": report("registry, assertion", ROW, NAME),
    # Retention: the session that left too early, or that is not kept as its client said.
    "pins-are-forgotten": report("retention", NAME),
    "the-highest-priority-leaves-first": report("retention", NAME),
    "a-fork-is-kept-by-default": report("retention", NAME),
    # Coming back after a death: the session that is not as its client knows it.
    "revival-forgets-the-last-turn": report("transcript, assertion", SESSION, NAME),
    "file-is-taken-for-longer-than-it-is": report("content, books, assertion", SESSION, TURN, ROW, PARCEL),
    # Volatile sessions, cuts and forks at a token, compaction: the session whose history or memory it is.
    "volatile-session-gets-a-file": report("registry", NAME, ROW),
    "volatile-session-is-refused-at-the-limit": report("refusal", NAME),
    "volatile-sessions-use-up-the-limit": report("refusal", NAME, "nobody"),
    "volatile-turn-waits-for-a-journal": report("registry", NAME, ROW),
    "history-is-not-shared-during-a-turn": report("recomputation", NAME),
    "submit-with-a-cut-keeps-old-boundaries": report("transcript", NAME),
    "refused-turn-has-cut-the-history": report("refusal", NAME),
    "cut-turn-can-be-cut-again": report("transcript", NAME),
    "fork-at-a-token-keeps-later-turns": report("transcript", NAME),
    "fork-at-a-token-has-all-memory": report("books, content, assertion", SESSION, TURN, ROW, NAME),
    "compaction-keeps-stale-memory": report("recomputation, content, books", NAME, SESSION, TURN, PARCEL),
    "compaction-leaves-later-boundaries": report("transcript", NAME),
    "compacted-turn-can-be-cut": report("transcript", NAME),
    # Files and full disks: the session whose memory it is.
    "failed-adoption-keeps-its-lease": report(LOCK, NAME),
    "failed-adoption-keeps-its-pages": report(LEAK, SESSION),
    "adopted-session-does-not-rest": report("registry", NAME),
    "sunk-parcel-keeps-its-host-memory": report(LEAK, SESSION),
    "sunk-parcel-is-read-from-the-host": report("content, fence", PARCEL, ROW, SESSION, TURN, NAME),
    "failed-sink-loses-the-parcel": report("content, books", PARCEL, SESSION, TURN),
    # Checkpoints of spilled sessions: the session whose they are.
    "spilled-checkpoints-stay-pinned": report("registry", NAME),
    "spilled-checkpoints-are-forgotten": report(LEAK, CHECKPOINT),
    "spilled-session-is-not-listed-for-its-checkpoints": report("registry", NAME),
    "checkpoint-that-is-given-up-keeps-its-slot": report(LEAK, CHECKPOINT),
    # Copies on the host: the session that the copy is of, or who got its unit next.
    "cut-keeps-the-stale-copy": report("content, assertion", COPY, PARCEL, SESSION, TURN, ROW),
    "partial-page-of-the-copy-counts-as-whole": report(
        "content, assertion", COPY, PARCEL, SESSION, TURN, ROW
    ),
    "state-of-the-copy-outlives-a-turn": report("content, assertion", COPY, PARCEL, SESSION, TURN, ROW),
    "copy-is-freed-twice": report(TWICE, COPY, SESSION, FREE, f"TRANSIT {NAME}"),
    "close-forgets-the-copy": report(LEAK, COPY),
    "new-pages-precede-the-copy": report("content", PARCEL, SESSION, TURN, ROW),
    # Prefetches: the session whose memory comes back, the step that still writes it, the turn that waits.
    "cancelled-prefetch-keeps-its-pages": report(LEAK, f"TRANSIT {NAME}"),
    "cancelled-prefetch-frees-its-pages-at-once": report(
        "fence, content, retention", ROW, NAME, SESSION, TURN
    ),
    "prefetch-begins-while-a-turn-waits": report("delay", ROW),
    "turn-leaves-its-session-expected": report("registry", ROW, NAME),
}

OWN_WORKLOAD: dict[str, Options] = {mutant.name: OF_CHATS for mutant in CHAT_MUTANTS} | {
    mutant.name: OF_TIERS for mutant in (*TIER_MUTANTS, *COPY_MUTANTS, *PREFETCH_MUTANTS)
}

# What a handful of events already shows, and what takes thousands of states.
EXPLORED = (
    "failed-admission-keeps-the-lock",
    "abort-advances-the-history",
    "retract-clears-the-flight",
    "close-in-flight-frees-at-once",
    "drafts-are-not-trimmed",
    pytest.param("close-forgets-state-slot", marks=pytest.mark.soak),
    pytest.param("first-turn-abort-keeps-the-slot", marks=pytest.mark.soak),
    pytest.param("freed-while-in-transit", marks=pytest.mark.soak),
)


def agrees(holder: str, patterns: tuple[str, ...]) -> bool:
    """Whether all that a report names are such as it may name."""
    either = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.fullmatch(f"(?:{either})(?:, (?:{either}))*", holder) is not None


def test_there_are_enough_of_them_and_each_has_an_expectation() -> None:
    assert len(MUTANTS) >= 30
    assert sum(mutant.changes_one_statement for mutant in MUTANTS.values()) >= 20
    assert set(EXPECTED) == set(MUTANTS)
    assert all(mutant.what.endswith(".") for mutant in MUTANTS.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_finding_about_the_right_one(name: str) -> None:
    with planted(name) as patcher:
        finding = simulate({**OWN_WORKLOAD, **SOONER}.get(name, OPTIONS)).finding
    assert patcher.reached >= 1
    assert finding is not None, "not caught"
    expected = EXPECTED[name]
    assert finding.kind in expected.kinds, (finding.kind, finding.holder, finding.detail)
    assert agrees(finding.holder, expected.holders), (finding.kind, finding.holder, finding.detail)


@pytest.mark.parametrize("part", [0.25, pytest.param(2.0, marks=pytest.mark.soak)])
def test_the_same_worlds_find_nothing_without_a_mutant(part: float) -> None:
    assert simulate(Options(OPTIONS.seed, int(3000 * part))).finding is None
    for options in {replace(options, steps=int(700 * part)) for options in SOONER.values()}:
        assert simulate(options).finding is None


@pytest.mark.parametrize("options", [OF_CHATS, OF_TIERS], ids=["chats", "tiers"])
def test_the_worlds_of_one_workload_find_nothing_without_a_mutant(options: Options) -> None:
    assert simulate(replace(options, steps=2_000)).finding is None


@pytest.mark.parametrize("name", EXPLORED)
def test_an_exploration_finds_it_too(name: str) -> None:
    with planted(name) as patcher:
        done = explore(6000)
    assert patcher.reached >= 1
    assert done.finding is not None, "not caught"


@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_the_command_exits_with_a_finding(name: str) -> None:
    status, summary = command.run(
        "--seed", "7", "--steps", "200000", "--layout", "all", "--faults", "0.05", "--mutant", name
    )
    assert (status, summary["findings"]) == (1, 1), summary
    assert summary["mutant_reached"] >= 1
    assert summary["kind"] in EXPECTED[name].kinds
    assert agrees(summary["holder"], EXPECTED[name].holders), summary["holder"]
