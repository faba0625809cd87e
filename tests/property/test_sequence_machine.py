"""Sequences, sharing and the audit under random turns, against a model of what memory must contain.

The model is naive: every row reads back, through the block tables and state slots that the core names, all
that it depends on, and compares it with the tokens themselves (tests/core/device.py). After every rule the
census finds nothing, and at the end every unit is free.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.audit import Audit
from holdfast.core.layout import named_layout
from holdfast.core.ledger import Kind, OutOfUnits
from tests.core.world import LAYOUTS, Chat, World

CHATS_MAX = 5
PICK = st.integers(0, CHATS_MAX - 1)
PROMPT = st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 5, 7, 17, 41]))


def choose(options: list, pick: int):
    """One of the options, by number."""
    return options[pick % len(options)]


def prompt_tokens(prompt: tuple[int, int]) -> list[int]:
    """A prompt of one of three families; prompts of a family share their beginnings."""
    base, count = prompt
    return [base * 1000 + position for position in range(count)]


class SequenceMachine(RuleBasedStateMachine):
    """Up to five chats of one tenant in small pools; subclasses say which layout."""

    layout_name = "dense"

    @initialize(
        page_size=st.sampled_from([1, 3, 16]),
        window=st.sampled_from([1, 4, 7, 33]),
        tokens=st.sampled_from([90, 200, 600]),
        slots=st.sampled_from([6, 12, 30]),
        state_budget=st.sampled_from([2, 5, 100]),
    )
    def build(self, page_size: int, window: int, tokens: int, slots: int, state_budget: int) -> None:
        layout = named_layout(self.layout_name, page_size, window)
        self.world = World(layout, tokens // page_size + 3, slots, state_budget)
        self.slicer = Audit(self.world.ledger, self.world.tree, self.world.audit.owners)
        self.world.turn(self.world.open(), prompt_tokens((0, 17)), [5000], checkpoint=True)

    def resting(self) -> list[Chat]:
        return [chat for chat in self.world.chats if not chat.running and not chat.rows]

    def leaning(self) -> list[Chat]:
        return [chat for chat in self.resting() if chat.ends and chat.sequence.lease is not None]

    def active(self) -> list[Chat]:
        return [chat for chat in self.world.chats if chat.running and not chat.rows]

    def behind(self) -> list[Chat]:
        """Chats in a turn that can plan a row: there is something to compute, and at most one in flight."""
        chats = [chat for chat in self.world.chats if chat.running and len(chat.rows) < 2]
        return [chat for chat in chats if self.world.row_limit(chat) > 0]

    def caught_up(self) -> list[Chat]:
        chats = [chat for chat in self.world.chats if chat.running and len(chat.rows) < 2]
        return [chat for chat in chats if chat.sequence.planned == chat.sequence.known]

    def drafting(self) -> list[Chat]:
        return [chat for chat in self.caught_up() if not chat.rows]

    def ending(self) -> list[Chat]:
        """Chats whose turn may end: the last token is computed, in flight as a seal, or not yet planned."""
        chats = [chat for chat in self.world.chats if chat.running and sum(chat.rows) <= 1]
        return [chat for chat in chats if chat.sequence.known - chat.sequence.planned <= 1]

    def attempt(self, action, *arguments) -> bool:
        """Do it; where memory is short, nothing has changed, and the tree gives something up."""
        held, claims = self.world.held(), self.world.claims()
        try:
            action(*arguments)
        except OutOfUnits as short:
            assert self.world.held() == held
            assert self.world.claims() == claims
            self.world.tree.evict(short.pool.component, short.asked)
            return False
        return True

    @precondition(lambda self: len(self.world.chats) < CHATS_MAX)
    @rule(prompt=PROMPT, checkpoint=st.booleans(), cut=st.integers(0, 20))
    def open(self, prompt: tuple[int, int], checkpoint: bool, cut: int) -> None:
        self.attempt(self.world.begin, self.world.open(), prompt_tokens(prompt), checkpoint, cut)

    @precondition(lambda self: self.resting())
    @rule(pick=PICK, prompt=PROMPT, checkpoint=st.booleans(), cut=st.integers(0, 20))
    def begin(self, pick: int, prompt: tuple[int, int], checkpoint: bool, cut: int) -> None:
        self.attempt(self.world.begin, choose(self.resting(), pick), prompt_tokens(prompt), checkpoint, cut)

    @precondition(lambda self: self.behind())
    @rule(pick=PICK, count=st.integers(1, 40), settle=st.booleans())
    def compute(self, pick: int, count: int, settle: bool) -> None:
        chat = choose(self.behind(), pick)
        self.attempt(self.world.plan_row, chat, min(self.world.row_limit(chat), count))
        if settle:
            self.world.settle_rows(chat)

    @precondition(lambda self: self.behind())
    @rule(pick=PICK)
    def catch_up(self, pick: int) -> None:
        chat = choose(self.behind(), pick)
        while self.world.row_limit(chat) > 0:
            if not self.attempt(self.world.plan_row, chat, self.world.row_limit(chat)):
                break
            self.world.settle_rows(chat)

    @precondition(lambda self: any(chat.rows for chat in self.world.chats))
    @rule(pick=PICK)
    def advance(self, pick: int) -> None:
        self.world.settle_row(choose([chat for chat in self.world.chats if chat.rows], pick))

    @precondition(lambda self: self.caught_up())
    @rule(pick=PICK, token=st.integers(5000, 5002), count=st.integers(1, 20))
    def say(self, pick: int, token: int, count: int) -> None:
        """Decode, with the row before still in flight; the last token is left to be computed."""
        chat = choose(self.caught_up(), pick)
        for _ in range(count):
            self.world.say(chat, token)
            if not self.attempt(self.world.plan_row, chat, 1):
                return
            if len(chat.rows) > 1:
                self.world.settle_row(chat)
        self.world.say(chat, token)

    @precondition(lambda self: self.drafting())
    @rule(pick=PICK, count=st.integers(1, 4), accepted=st.integers(1, 4))
    def draft(self, pick: int, count: int, accepted: int) -> None:
        tokens = list(range(7000, 7000 + count))
        self.attempt(self.world.draft, choose(self.drafting(), pick), tokens, min(accepted, count))

    @precondition(lambda self: self.ending())
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        self.world.commit(choose(self.ending(), pick))

    @precondition(lambda self: self.active())
    @rule(pick=PICK, dropped=st.integers(0, 9))
    def keep(self, pick: int, dropped: int) -> None:
        chat = choose(self.active(), pick)
        self.attempt(self.world.keep, chat, max(chat.input_end, chat.sequence.known - dropped))

    @precondition(lambda self: self.active())
    @rule(pick=PICK)
    def rollback(self, pick: int) -> None:
        chat = choose(self.active(), pick)
        known = chat.sequence.mark.known
        with NoAllocation(self.world):
            self.world.rollback(chat)
        assert chat.sequence.known == known

    @precondition(lambda self: self.active())
    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        chat = choose(self.active(), pick)
        known, mark_known = chat.sequence.known, chat.sequence.mark.known
        with NoAllocation(self.world):
            self.world.retract(chat)
        assert chat.sequence.known == known
        assert chat.sequence.mark.known == mark_known

    @precondition(lambda self: any(chat.running and chat.rows for chat in self.world.chats))
    @rule(pick=PICK, again=st.booleans())
    def lose(self, pick: int, again: bool) -> None:
        """A step fails: its rows are lost, and the turn starts again from its mark, or never was."""
        chat = choose([chat for chat in self.world.chats if chat.running and chat.rows], pick)
        with NoAllocation(self.world):
            certain = self.world.lose_rows(chat)
            (self.world.retract if again else self.world.rollback)(chat, certain)

    @precondition(lambda self: self.active())
    @rule(pick=PICK)
    def drop_spare_points(self, pick: int) -> None:
        choose(self.active(), pick).sequence.drop_spare_points()

    @precondition(lambda self: any(chat.ends for chat in self.resting()))
    @rule(pick=PICK, end=st.integers(0, 5))
    def rewind(self, pick: int, end: int) -> None:
        chat = choose([chat for chat in self.resting() if chat.ends], pick)
        self.attempt(self.world.rewind, chat, choose(chat.ends, end))

    @precondition(lambda self: self.leaning() and len(self.world.chats) < CHATS_MAX)
    @rule(pick=PICK, end=st.integers(0, 5))
    def fork(self, pick: int, end: int) -> None:
        """A fork that fails may have published: nobody holds more than before."""
        chat = choose(self.leaning(), pick)
        free = [len(pool.free) + pool.by_kind[Kind.RETIRING] for pool in self.world.ledger.pools.values()]
        try:
            self.world.fork(chat, choose(chat.ends, end))
        except OutOfUnits as short:
            for pool, before in zip(self.world.ledger.pools.values(), free, strict=True):
                assert len(pool.free) + pool.by_kind[Kind.RETIRING] >= before
            self.world.tree.evict(short.pool.component, short.asked)

    @precondition(lambda self: any(chat.sequence.mark.known == 0 for chat in self.active()))
    @rule(pick=PICK, share=st.integers(0, 4))
    def publish(self, pick: int, share: int) -> None:
        """The first turn publishes its prompt."""
        chat = choose([chat for chat in self.active() if chat.sequence.mark.known == 0], pick)
        self.world.publish(chat, min(chat.sequence.computed, chat.input_end) * share // 4)

    @precondition(lambda self: self.leaning())
    @rule(pick=PICK)
    def reclaim(self, pick: int) -> None:
        with NoAllocation(self.world):
            self.world.reclaim(choose(self.leaning(), pick))

    @precondition(lambda self: self.resting())
    @rule(pick=PICK, budget=st.integers(0, 3))
    def thin(self, pick: int, budget: int) -> None:
        chat = choose(self.resting(), pick)
        chat.sequence.thin_points(budget)
        pinned = sum(point.pinned for point in chat.sequence.points)
        assert len(chat.sequence.points) <= max(budget, pinned)

    @precondition(lambda self: self.resting())
    @rule(pick=PICK)
    def drop_memory(self, pick: int) -> None:
        choose(self.resting(), pick).sequence.drop_memory()

    @precondition(lambda self: self.resting())
    @rule(pick=PICK, leave=st.booleans())
    def close(self, pick: int, leave: bool) -> None:
        self.world.close(choose(self.resting(), pick), leave)

    @rule(index=st.integers(0, 2), count=st.integers(1, 6))
    def evict(self, index: int, count: int) -> None:
        components = self.world.layout.components
        self.world.tree.evict(components[index % len(components)], count)

    @rule(lag=st.integers(0, 1))
    def settle(self, lag: int) -> None:
        self.world.settle(lag)

    @invariant()
    def nothing_is_found(self) -> None:
        self.world.check()
        assert not self.slicer.slice(40)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


class NoAllocation:
    """Every allocation fails inside."""

    def __init__(self, world: World) -> None:
        self.pools = list(world.ledger.pools.values())

    def __enter__(self) -> None:
        for pool in self.pools:
            pool.guard(lambda pool, count: False)

    def __exit__(self, *problem: object) -> None:
        for pool in self.pools:
            pool.guard(None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_turns_read_what_they_wrote_and_leave_nothing_behind(name: str) -> None:
    machine = type("Machine", (SequenceMachine,), {"layout_name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=50)
    case().runTest()
