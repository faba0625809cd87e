"""A small world around the memory core: chats that play turns against simulated memory.

Every method is one event of a scheduler's life, carried out on the real core and on the simulated device,
and leaves a healthy state behind: where memory is short it raises `OutOfUnits` and the chat is as it was.
The unit tests, the state machines, the failing allocations and the mutants all play in it.
"""

from holdfast.core import fallback
from holdfast.core.audit import Audit, Finding
from holdfast.core.layout import LAYOUT_NAMES, Component, MemoryLayout, Tier, named_layout
from holdfast.core.ledger import Grant, Kind, Ledger, OutOfUnits
from holdfast.core.plan import UnitCopy
from holdfast.core.prefix import PrefixTree
from holdfast.core.sequence import Sequence
from holdfast.core.sharing import fork, lean, leave_history, publish, reclaim, tail_sources
from tests.core.device import Device, Table, digests

PAGE_SIZES = (1, 3, 16, 64, 256)
LAYOUTS = LAYOUT_NAMES
STATEFUL = tuple(name for name in LAYOUTS if named_layout(name, 1).state)
WINDOWED = tuple(name for name in LAYOUTS if named_layout(name, 1).window)
PAGED = tuple(name for name in LAYOUTS if named_layout(name, 1).paged)


def make_ledger(layout: MemoryLayout, pages: int = 400, slots: int = 40) -> Ledger:
    """A ledger with device pools alone."""
    sizes = {Component.FULL: pages, Component.WINDOW: pages, Component.STATE: slots}
    return Ledger(layout, {(component, Tier.DEVICE): sizes[component] for component in layout.components})


class Chat:
    """A session: one sequence, the holders it goes through, and what a scheduler would note of it."""

    def __init__(self, ledger: Ledger, name: str, tenant: str) -> None:
        self.name = name
        self.tenant = tenant
        self.session = ledger.holder(Kind.SESSION, name)
        self.turn = ledger.holder(Kind.TURN, f"turn of {name}")
        self.checkpoints = ledger.holder(Kind.CHECKPOINT, name)
        self.sequence = Sequence(ledger, self.session)
        self.table = Table()
        self.rows: list[int] = []
        self.ends: list[int] = []
        self.input_end = 0

    @property
    def running(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self.sequence.mark is not None

    def forget_ends(self) -> None:
        """Drop turn ends that lie past what is known."""
        self.ends = [end for end in self.ends if end <= self.sequence.known]


class World:
    """Chats, a tree, an audit over both, and the device they run on."""

    def __init__(
        self, layout: MemoryLayout, pages: int = 400, slots: int = 40, state_budget: int = 1 << 30
    ) -> None:
        self.layout = layout
        self.ledger = make_ledger(layout, pages, slots)
        self.tree = PrefixTree(self.ledger, state_budget)
        self.device = Device(layout)
        self.chats: list[Chat] = []
        self.audit = Audit(self.ledger, self.tree, lambda: [chat.sequence for chat in self.chats])
        self.opened = 0
        self.tokens_computed = 0

    # --- the audit --------------------------------------------------------------------------------

    def census(self) -> list[Finding]:
        """The whole census, now."""
        return self.audit.census()

    def check(self) -> None:
        """A healthy state has no finding."""
        found = self.census()
        assert not found, [str(finding) for finding in found]

    def held(self) -> dict[str, dict[str, int]]:
        """Units by kind, for each pool: what "nothing changed" is compared by."""
        return {pool.name: pool.counts() for pool in self.ledger.pools.values()}

    def claims(self) -> dict[str, tuple]:
        """Who claims how much: all Holds of every chat and of the tree by size and holder, all locks."""
        kept: dict[str, tuple] = {}
        for chat in self.chats:
            grants = []
            chat.sequence.claim(grants)
            kept[chat.name] = tuple(sorted((g.pool.index, tuple(g.units), repr(g.holder)) for g in grants))
        grants = []
        self.tree.forest.claim(grants)
        units = [(g.pool.index, unit, repr(g.holder)) for g in grants for unit in g.units]
        kept["tree"] = tuple(sorted(units))
        kept["leases"] = tuple(
            sorted((r.name, r.length, r.window_first) for r in self.tree.leases.records.values())
        )
        return kept

    # --- steps ------------------------------------------------------------------------------------

    def plan(self) -> None:
        """A new step is planned."""
        self.ledger.step += 1

    def settle(self, lag: int = 0) -> None:
        """All but the newest `lag` steps have run."""
        step = max(self.ledger.settled, self.ledger.step - lag)
        self.ledger.settle(step)
        self.device.settle(step)

    def plan_row(self, chat: Chat, count: int, drafts: bool = False) -> None:
        """Plan a row of `count` known tokens and let the device compute it."""
        sequence = chat.sequence
        start, source = sequence.planned, sequence.state_source()
        (sequence.extend_drafts if drafts else sequence.extend)(count)
        self.plan()
        step, holder = self.ledger.step, repr(sequence.holder)
        expected = digests(chat.tenant, sequence.tokens.slice(0, start + count))
        chat.table.read(sequence)
        self.device.read(holder, chat.table, expected, start)
        self.device.write(step, chat, holder, chat.table, (start, expected))
        if self.layout.state:
            written = sequence.spare if drafts else sequence.state
            assert written is not None
            self.device.consume(step, chat, holder, (source, written.units[0]), (start, expected))
        sequence.fence = step
        self.tokens_computed += count
        if sequence.next_cut() == sequence.planned:
            sequence.pass_cut()
        if not drafts:
            chat.rows.append(count)

    def settle_row(self, chat: Chat) -> None:
        """The oldest row of a chat has run."""
        chat.sequence.advance(chat.rows.pop(0))

    def settle_rows(self, chat: Chat) -> None:
        """All rows of a chat have run."""
        while chat.rows:
            self.settle_row(chat)

    def lose_rows(self, chat: Chat) -> int:
        """The rows in flight of a chat never ran to their end: what they wrote is anybody's guess."""
        sequence = chat.sequence
        for row_start in range(sequence.computed, sequence.planned):
            page, offset = divmod(row_start, self.layout.page_size)
            for component, pages in chat.table.pages.items():
                if page in pages:
                    self.device.cells[component, pages[page]][offset] = -1
        for slot in (sequence.state, sequence.spare):
            if slot is not None:
                self.device.slots[slot.units[0]] = -1
        chat.rows.clear()
        return fallback.forget_rows(sequence)

    def row_limit(self, chat: Chat) -> int:
        """How many tokens the next row may have: a chunk ends at a cut."""
        cut = chat.sequence.next_cut()
        stop = chat.sequence.known if cut is None else min(cut, chat.sequence.known)
        return stop - chat.sequence.planned

    def compute(self, chat: Chat, count: int | None = None) -> None:
        """Compute `count` more known tokens, or all, in as many rows as the cuts ask for."""
        sequence = chat.sequence
        target = sequence.known if count is None else sequence.planned + count
        while sequence.planned < target:
            self.plan_row(chat, min(self.row_limit(chat), target - sequence.planned))
            self.settle_rows(chat)

    def copy(self, copies: list[UnitCopy], *chats: Chat) -> None:
        """Carry out copies in a step of their own."""
        if copies:
            self.plan()
            self.device.copy(self.ledger.step, chats[0], copies)
            for chat in chats:
                chat.sequence.fence = self.ledger.step

    # --- a chat's life ----------------------------------------------------------------------------

    def open(self, name: str = "", tenant: str = "tenant") -> Chat:
        """A new, empty chat."""
        self.opened += 1
        chat = Chat(self.ledger, name or f"chat {self.opened}", tenant)
        self.chats.append(chat)
        return chat

    def attach(self, chat: Chat, limit: int) -> int:
        """Lean on the longest prefix in the tree; returns how far full KV matched."""
        sequence = chat.sequence
        match = self.tree.match(chat.tenant, sequence.tokens.packed(0, sequence.known), limit)
        lease = self.tree.lease(match, chat.name)
        try:
            copies = lean(sequence, lease, match.length, tail_sources(lease) if match.tail else {})
        except OutOfUnits:
            lease.release()
            raise
        self.copy(copies, chat)
        lease.unlock_tail(self.ledger.step)
        return match.branch

    def begin(self, chat: Chat, tokens: list[int], checkpoint: bool = False, cut: int = 0) -> None:
        """A turn begins: new input, the prefix of a chat without memory, the mark, and the cuts.

        Points are left at the input's end with `checkpoint`, and `cut` tokens into the input.
        """
        sequence = chat.sequence
        known = sequence.known
        sequence.tokens.extend(tokens)
        branch = 0
        if sequence.lease is None:
            try:
                branch = self.attach(chat, known or max(0, sequence.known - 1))
            except OutOfUnits:
                sequence.tokens.cut(known)
                raise
        sequence.begin(chat.turn, known)
        chat.input_end = sequence.known
        if checkpoint:
            sequence.cut_chunk_at(sequence.known)
        if 0 < cut < len(tokens):
            sequence.cut_chunk_at(known + cut)
        if self.layout.state and not known:
            page_size = self.layout.page_size
            sequence.cut_chunk_at((sequence.known - 1) // page_size * page_size)
            if branch > sequence.computed:
                sequence.cut_chunk_at(branch // page_size * page_size)

    def say(self, chat: Chat, token: int) -> None:
        """A token was sampled."""
        chat.sequence.tokens.append(token)

    def draft(self, chat: Chat, tokens: list[int], accepted: int) -> None:
        """A row of drafts, of which the first `accepted` stand."""
        sequence = chat.sequence
        known = sequence.known
        sequence.tokens.extend(tokens)
        try:
            self.plan_row(chat, len(tokens), drafts=True)
        except OutOfUnits:
            sequence.tokens.cut(known)
            raise
        sequence.settle_drafts(len(tokens), accepted)
        sequence.tokens.cut(known + accepted)

    def commit(self, chat: Chat) -> None:
        """The turn ends well."""
        chat.sequence.commit(chat.session, chat.checkpoints)
        chat.ends.append(chat.sequence.known)

    def keep(self, chat: Chat, known: int) -> None:
        """The turn is cut short: its first tokens stay."""
        self.copy(fallback.keep(chat.sequence, known, chat.session, chat.checkpoints), chat)
        chat.ends.append(known)

    def rollback(self, chat: Chat, certain: int | None = None) -> None:
        """The turn never was."""
        fallback.rollback(chat.sequence, chat.session, chat.checkpoints, certain)

    def retract(self, chat: Chat, certain: int | None = None) -> None:
        """The turn gives its memory back and is queued again."""
        sequence = chat.sequence
        assert sequence.mark is not None
        known = sequence.mark.known
        fallback.retract(sequence, chat.session, chat.checkpoints, certain)
        sequence.begin(chat.turn, known)

    def rewind(self, chat: Chat, known: int) -> None:
        """A chat at rest goes back to an earlier length."""
        self.copy(fallback.fall_back(chat.sequence, known), chat)
        chat.sequence.tokens.cut(known)
        chat.forget_ends()

    def fork(self, parent: Chat, known: int, name: str = "") -> Chat:
        """A second chat goes on from an earlier length of the first."""
        child = self.open(name, parent.tenant)
        try:
            copies = fork(self.tree, parent.sequence, child.sequence, known)
        except OutOfUnits:
            child.sequence.close()
            self.chats.remove(child)
            raise
        self.device.hand_over(parent, child, units_of(child.sequence))
        self.copy(copies, child, parent)
        child.sequence.tokens.extend(parent.sequence.tokens.slice(0, known))
        child.ends = [end for end in parent.ends if end <= known]
        return child

    def publish(self, chat: Chat, length: int) -> None:
        """Whole pages below `length` go to the tree."""
        publish(self.tree, chat.sequence, length)

    def reclaim(self, chat: Chat) -> None:
        """What the tree keeps for this chat alone is its own again."""
        before = chat.sequence.lease.length
        alone_from = self.tree.alone_from(chat.sequence.lease)
        reclaim(self.tree, chat.sequence)
        assert chat.sequence.lease.length == alone_from <= before
        assert self.tree.alone_from(chat.sequence.lease) == alone_from, "others need what is left"

    def close(self, chat: Chat, leave: bool = False) -> None:
        """The chat ends, leaving its history to the tree or not."""
        if leave and chat.sequence.lease is not None:
            leave_history(self.tree, chat.sequence)
        chat.sequence.close()
        self.chats.remove(chat)

    def turn(self, chat: Chat, tokens: list[int], answer: list[int], checkpoint: bool = False) -> None:
        """A whole turn: input, computed; answer, token by token; commit."""
        self.begin(chat, tokens, checkpoint)
        self.compute(chat)
        for token in answer:
            self.say(chat, token)
            self.compute(chat)
        self.commit(chat)

    def finish(self) -> None:
        """Close everything: every unit is free, no lock and no root is left, and no finding."""
        for chat in list(self.chats):
            self.settle_rows(chat)
            if chat.running:
                self.rollback(chat)
            self.close(chat)
        self.tree.flush()
        self.plan()
        self.settle()
        self.check()
        for pool in self.ledger.pools.values():
            assert sorted(pool.free) == list(range(pool.size)), pool.counts()
        assert not self.ledger.live
        assert not self.tree.leases.records
        assert not self.tree.roots
        assert self.tree.forest.states == 0


def units_of(sequence: Sequence) -> list[tuple[Component, int]]:
    """All units that a sequence holds."""
    grants: list[Grant] = []
    sequence.claim(grants)
    return [(grant.pool.component, unit) for grant in grants for unit in grant.units]
