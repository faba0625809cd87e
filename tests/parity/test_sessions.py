"""Sessions through the whole engine: whatever happens to a turn, the next one says what a fresh model would.

Each story talks to a session, does something to it, goes on, and compares every turn with transformers given
the whole transcript as one prompt. Counts say what was computed: a turn computes what is new, no more.
"""

from holdfast.core.ledger import OutOfUnits
from tests.parity.families import kept, overlapped, without_overlap
from tests.parity.subject import Subject, Watched, greedy, prompt

INPUTS = (41, 3, 17, 1, 26, 9, 2, 31, 5, 12)
SAID = 7


@overlapped(1)
def test_ten_turns_equal_one_long_prompt(subject: Subject, overlap: bool) -> None:
    """Seventy tokens in ten turns; each turn computes its input and what it says, and nothing twice."""
    with Watched(subject, overlap=overlap) as watched, watched.engine.session() as session:
        transcript: list[int] = []
        for number, length in enumerate(INPUTS):
            known = len(transcript)
            transcript += prompt(length, number)
            turn = session.say(prompt(length, number), greedy(SAID))
            transcript = watched.check(turn, transcript)
            usage = turn.usage
            assert (usage.prompt_tokens, usage.cached_tokens) == (len(transcript) - SAID, known)
            # The last token of a turn is computed after it, or with the next one.
            assert length + SAID - 1 <= usage.computed_tokens <= length + SAID
        assert watched.history(session) == transcript
        watched.rest()
        assert watched.computed == len(transcript)


@overlapped(2)
def test_retract_in_the_middle(subject: Subject, overlap: bool) -> None:
    """Three turns of which memory holds no two at their ends: some are taken back, and all say the same."""
    sizes = {"kv_tokens": 192, "window_tokens": 128, "state_slots": 8, "page_size": 8, "checkpoints": 0}
    with Watched(subject, overlap=overlap, **sizes) as watched:
        sessions = [watched.engine.session() for _ in range(3)]
        inputs = [prompt(30, number) for number in range(3)]
        turns = [session.say(said, greedy(64)) for session, said in zip(sessions, inputs, strict=True)]
        if subject.ours.memory_shape.full is None:
            for _ in range(20):
                watched.loop.step()
            retract(watched)
        transcripts = [watched.check(turn, said) for turn, said in zip(turns, inputs, strict=True)]
        assert watched.retracts >= 1
        for number, session in enumerate(sessions):
            said = prompt(4, 10 + number)
            watched.check(session.say(said, greedy(SAID)), transcripts[number] + said)


def retract(watched: Watched) -> None:
    """Take a turn back where memory alone would not: windows and states take the same room at any length."""
    scheduler = watched.loop.scheduler
    state = next(iter(scheduler.registry.ledger.pools.values()))
    running = scheduler.registry.running
    shortfall = OutOfUnits(state, state.size, len(state.free))
    scheduler.pressure.make_room(shortfall, running[0], may_retract=True)


@overlapped(3)
def test_abort_and_rollback_then_another_turn(subject: Subject, overlap: bool) -> None:
    with Watched(subject, overlap=overlap) as watched, watched.engine.session() as session:
        transcript = watched.check(session.say(prompt(37, 1), greedy(20)), prompt(37, 1))
        lost = session.say(prompt(19, 2), greedy(50))
        while len(lost._stream.tokens) < 9:
            watched.loop.step()
        session.interrupt(keep="none")
        assert lost.finish_reason == "abort"
        assert watched.history(session) == transcript
        turn = session.say(prompt(11, 3), greedy(64))
        watched.check(turn, transcript + prompt(11, 3))
        watched.check_count(turn, new=11)


@kept(7)
def test_keep_then_another_turn(subject: Subject, keep: int, overlap: bool) -> None:
    """Barge-in: what was heard stays, what was not is gone, in the middle of a turn and after its end.

    A model with a state has none in the middle of a turn: what stays of that turn is computed again.
    """
    with Watched(subject, overlap=overlap) as watched, watched.engine.session() as session:
        transcript = watched.check(session.say(prompt(21, 1), greedy(10)), prompt(21, 1))
        cut = session.say(prompt(14, 2), greedy(50))
        while len(cut._stream.tokens) < 9:
            watched.loop.step()
        session.interrupt(keep=keep)
        assert len(cut.token_ids) == keep
        transcript += prompt(14, 2)
        if keep:
            transcript = watched.check(cut, transcript)
        assert watched.history(session) == transcript
        done = session.say(prompt(8, 3), greedy(12))
        transcript += prompt(8, 3)
        watched.check(done, transcript)
        watched.check_count(done, new=8, again=14 + keep)
        session.interrupt(keep=keep)
        transcript += done.token_ids
        assert len(done.token_ids) == keep
        assert watched.history(session) == transcript
        turn = session.say(prompt(5, 4), greedy(64))
        watched.check(turn, transcript + prompt(5, 4))
        watched.check_count(turn, new=5, again=8 + keep)


@overlapped(4)
def test_fork_and_rewind(subject: Subject, overlap: bool) -> None:
    """Two children and their parent go different ways; a rewound session goes a fourth."""
    with Watched(subject, overlap=overlap) as watched:
        parent = watched.engine.session()
        ends: list[list[int]] = [[]]
        for number in range(4):
            said = prompt(23, number)
            ends.append(watched.check(parent.say(said, greedy(SAID)), ends[-1] + said))
        child, early = parent.fork(), parent.fork(2)
        assert watched.history(child) == ends[4]
        assert watched.history(early) == ends[2]
        turns = []
        for number, (session, before) in enumerate([(parent, ends[4]), (child, ends[4]), (early, ends[2])]):
            said = prompt(9, 20 + number)
            turns.append((session.say(said, greedy(24)), before + said))
        for turn, before in turns:
            watched.check(turn, before)
            watched.check_count(turn, new=9)
        parent.rewind(1)
        assert parent.turns == 1
        assert watched.history(parent) == ends[1]
        turn = parent.say(prompt(6, 30), greedy(24))
        watched.check(turn, ends[1] + prompt(6, 30))
        watched.check_count(turn, new=6)


@overlapped(5)
def test_spill_to_the_host_and_restore(subject: Subject, overlap: bool) -> None:
    """A session's memory leaves and comes back; nothing of it is computed again."""
    sizes = {"host_memory": 8 << 20, "session_tokens": 512}
    with Watched(subject, overlap=overlap, **sizes) as watched:
        scheduler, now = watched.loop.scheduler, watched.loop.now
        session = watched.engine.session()
        transcript = watched.check(session.say(prompt(45, 1), greedy(21)), prompt(45, 1))
        for number in range(2):
            watched.rest()
            assert scheduler.spill(session.id, now())
            watched.rest()
            assert scheduler.registry.find(session.id).state == "SPILLED"
            overwrite_free_units(watched)
            said = prompt(13, 5 + number)
            before = watched.computed
            turn = session.say(said, greedy(32))
            known, transcript = len(transcript), watched.check(turn, transcript + said)
            assert turn.usage.cached_tokens == known
            watched.rest()
            assert watched.computed - before == len(transcript) - known


def overwrite_free_units(watched: Watched) -> None:
    """What is free on the device may be anything."""
    for (component, tier), pool in watched.loop.scheduler.registry.ledger.pools.items():
        if tier == 0 and pool.free:
            for storage in watched.loop.executor.memory.storage(component.name.lower()):
                storage[list(pool.free)] = float("nan")


@without_overlap(6)
def test_memory_pressure_spills_resting_sessions(subject: Subject) -> None:
    """Six sessions where two fit take turns, spilled in between; none computes its history again."""
    # Where there are no pages, only slots can be scarce.
    slots = 7 if subject.ours.memory_shape.full or subject.ours.memory_shape.window else 4
    sizes = {"kv_tokens": 320, "window_tokens": 192, "state_slots": slots, "checkpoints": 0}
    with Watched(subject, host_memory=16 << 20, session_tokens=512, leave_history=False, **sizes) as watched:
        sessions = [watched.engine.session() for _ in range(6)]
        transcripts: list[list[int]] = [[] for _ in sessions]
        for turn_number in range(3):
            for number, session in enumerate(sessions):
                said = prompt(29, 100 * number + turn_number)
                turn = session.say(said, greedy(12))
                transcripts[number] = watched.check(turn, transcripts[number] + said)
        assert watched.loop.scheduler.registry.counters.spills >= 4
        assert watched.loop.scheduler.registry.counters.dropped == 0
