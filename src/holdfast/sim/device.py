"""A simulated device: pages and slots that remember their exact content.

It runs plans as a real executor would: table changes, copies, moves, then rows. Before it computes, every row
reads through its block tables and its state slot and compares the content with its expected history. A stale
table entry, a page used twice, a wrong rollback, a bleeding fork, a wrong state: all show
as wrong content, with the name of the row. It also checks fences: a unit named by a plan in flight must
not be allocated to another sequence. It feeds the sampled tokens to the matchers of constrained turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.plan import Row, RowResult, TierMove
from holdfast.core.registry import Plan
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.sim.constraint import Matcher, MatcherOf, unconstrained
from holdfast.sim.content import EMPTY, History, extend, next_token, stops

Pool = tuple[Component, Tier]
Table = list[int | None]
Tables = dict[int, tuple[Table, Table]]
Names = dict[Pool, dict[int, int]]
NOTHING = -1
PAGED = (Component.FULL, Component.WINDOW)


class WrongContent(Exception):
    """A row found wrong content in memory; `number` identifies the row."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


class SimDevice:
    """Memory with a perfect recollection. `log` gives the tokens of a sequence by its number, if it lives."""

    __slots__ = (
        "_blank",
        "_copied",
        "_flights",
        "_histories",
        "_matchers",
        "_planned",
        "_sampled",
        "_tables",
        "layout",
        "log",
        "matcher_of",
        "memory",
        "vocabulary",
    )

    def __init__(
        self,
        layout: MemoryLayout,
        vocabulary: int,
        log: Callable[[int], list[int] | None],
        matcher_of: MatcherOf = unconstrained,
    ) -> None:
        self.layout = layout
        self.vocabulary = vocabulary
        self.log = log
        self.matcher_of = matcher_of
        self._blank = {component: [NOTHING] * layout.page_size for component in layout.components}
        self._blank[Component.STATE] = [NOTHING]
        self.memory: dict[Pool, dict[int, list[int]]] = {
            (component, tier): {} for component in layout.components for tier in Tier
        }
        self._tables: Tables = {}
        self._planned: Tables = {}
        self._flights: dict[int, Names] = {}
        self._copied: dict[int, Names] = {}
        self._sampled: dict[int, int] = {}
        self._histories: dict[int, History] = {}
        self._matchers: dict[int, tuple[str, Matcher | None]] = {}

    # --- plans ------------------------------------------------------------------------------------

    def announce(self, plan: Plan, transits: Mapping[int, Session] | None = None) -> None:
        """Hear of a plan before it runs; raises `WrongContent` if it hands out a unit that is in flight.

        `transits` has the session of each tier move; a cancelled move is not watched.
        """
        named: Names = {pool: {} for pool in self.memory}
        fresh: list[tuple[Pool, int, int]] = []
        for row in plan.rows:
            self._change_tables(self._planned, row)
            self._name_row(row, named, fresh)
        # The source of a copy belongs to another sequence, which may go on writing past the copied part.
        copied: Names = {pool: {} for pool in self.memory}
        for copy, owner in zip(plan.copies, plan.copied, strict=True):
            copied[copy.component, Tier.DEVICE][copy.source] = owner.number
            fresh.append(((copy.component, Tier.DEVICE), copy.destination, owner.number))
        for move in plan.moves:
            session = transits.get(move.number) if transits is not None else None
            if session is not None:
                source, destination = (
                    (move.component, move.source_tier),
                    (move.component, move.destination_tier),
                )
                for unit in move.sources:
                    named[source].setdefault(unit, session.number)
                fresh.extend((destination, unit, session.number) for unit in move.destinations)
        for pool, unit, number in fresh:
            for step, flight in self._flights.items():
                if flight[pool].get(unit, number) != number:
                    what = (
                        f"{pool[0].name.lower()} unit {unit} is handed out while step {step} still names it"
                    )
                    raise WrongContent(number, what)
            named[pool][unit] = number
        self._flights[plan.step] = named
        self._copied[plan.step] = copied

    def _name_row(self, row: Row[Turn], named: Names, fresh: list[tuple[Pool, int, int]]) -> None:
        """Note the units that a row reads, and those that it writes."""
        number, page_size = row.number, self.layout.page_size
        first, end = row.start // page_size, self.layout.pages_for(row.start + row.count)
        for component, table in zip(PAGED, self._planned[number], strict=True):
            if component not in self._blank or not table:
                continue
            pool = (component, Tier.DEVICE)
            low = self.layout.window_first_page(row.start) if component is Component.WINDOW else 0
            units = [unit for unit in table[low:first] if unit is not None]
            named[pool].update(dict.fromkeys(units, number))
            fresh.extend((pool, unit, number) for unit in table[first:end] if unit is not None)
        if row.state is not None:
            pool = (Component.STATE, Tier.DEVICE)
            source, destination = row.state
            fresh.append((pool, destination, number))
            if source is not None:
                named[pool][source] = number

    def run(self, plan: Plan, late: Collection[int] = ()) -> tuple[list[RowResult], list[bool]]:
        """Carry out a plan; raises `WrongContent` if memory is not what it must be.

        What moves of the numbers in `late` bring is not there yet: `move` puts it there. What goes to a file
        is taken at once.
        """
        for copy in plan.copies:
            pool = (copy.component, Tier.DEVICE)
            self.write_unit(pool, copy.destination, self.read_unit(pool, copy.source))
        for move in plan.moves:
            if move.number not in late or move.destination_tier is Tier.DISK:
                self.move(move)
        return [self._run_row(row) for row in plan.rows], [True] * len(plan.moves)

    def spoil(self, plan: Plan) -> None:
        """Write nonsense wherever a plan would write: what a step that failed half-way leaves behind."""
        for copy in plan.copies:
            self.write_unit((copy.component, Tier.DEVICE), copy.destination, self._blank[copy.component])
        for move in plan.moves:
            for unit in move.destinations:
                self.write_unit((move.component, move.destination_tier), unit, self._blank[move.component])
        for row in plan.rows:
            self._change_tables(self._tables, row)
            self._write(row, [NOTHING] * row.count)

    def in_flight(self) -> Iterator[tuple[int, Pool, dict[int, int]]]:
        """The units that each plan in flight names, by pool, and the number of the sequence that it names."""
        for flights in (self._flights, self._copied):
            for step, named in flights.items():
                for pool, units in named.items():
                    yield step, pool, units

    def settled(self, plan: Plan) -> None:
        """A plan is over: it names nothing any more."""
        del self._flights[plan.step], self._copied[plan.step]
        for number in plan.forgotten:
            for table in (self._tables, self._planned, self._sampled, self._histories, self._matchers):
                table.pop(number, None)

    # --- memory -----------------------------------------------------------------------------------

    def read_unit(self, pool: Pool, unit: int) -> list[int]:
        """What one unit contains. Read only."""
        return self.memory[pool].get(unit, self._blank[pool[0]])

    def contents_of(self, number: int, tokens: list[int]) -> list[int]:
        """What memory must contain after each length of a sequence's tokens. Read only."""
        return self._histories.setdefault(number, History()).follow(tokens)

    def tables_of(self, number: int) -> tuple[tuple[Table, Table], tuple[Table, Table]]:
        """The tables of a sequence as rows that have run have left them, and as planned rows will."""
        nothing: tuple[Table, Table] = ([], [])
        return self._tables.get(number, nothing), self._planned.get(number, nothing)

    def write_unit(self, pool: Pool, unit: int, contents: list[int]) -> None:
        """Let a unit contain that."""
        self.memory[pool][unit] = list(contents)

    def move(self, move: TierMove) -> None:
        """Copy units from one tier to another."""
        for source, destination in zip(move.sources, move.destinations, strict=True):
            contents = self.read_unit((move.component, move.source_tier), source)
            self.write_unit((move.component, move.destination_tier), destination, contents)

    def _change_tables(self, tables: Tables, row: Row[Turn]) -> None:
        full, window = tables.setdefault(row.number, ([], []))
        change = row.table
        if change is not None:
            for table, first, units in (
                (full, change.first, change.full),
                (window, change.window_first, change.window),
            ):
                del table[change.first :]
                table.extend([None] * (first - len(table)))
                table.extend(units)

    # --- rows -------------------------------------------------------------------------------------

    def _run_row(self, row: Row[Turn]) -> RowResult:
        number, start = row.number, row.start
        self._change_tables(self._tables, row)
        tokens = self.log(number)
        if tokens is None:
            raise WrongContent(number, "a row is computed for a sequence that is gone")
        if len(tokens) < start:
            raise WrongContent(number, f"a row starts at {start}, but only {len(tokens)} tokens are known")
        contents = self.contents_of(number, tokens[:start])
        self._verify(row, contents)
        inputs = row.tokens
        if len(inputs) < row.count:
            if number not in self._sampled:
                raise WrongContent(number, "a row goes on from a token that was never sampled")
            inputs = [*inputs, self._sampled[number]]
        return self._compute(row, inputs, contents[-1], self._matcher(row, tokens))

    def _verify(self, row: Row[Turn], contents: list[int]) -> None:
        """Read everything that the row depends on."""
        full, window = self._tables[row.number]
        if self.layout.full:
            self._verify_pages(row, full, Component.FULL, 0, contents)
        if self.layout.window:
            self._verify_pages(
                row, window, Component.WINDOW, max(0, row.start - self.layout.window), contents
            )
        if row.state is not None:
            source = row.state[0]
            found = EMPTY if source is None else self.read_unit((Component.STATE, Tier.DEVICE), source)[0]
            if found != contents[-1]:
                raise WrongContent(row.number, f"state slot {source} is not the state at {row.start} tokens")

    def _verify_pages(
        self, row: Row[Turn], table: Table, component: Component, first: int, contents: list[int]
    ) -> None:
        start, page_size = row.start, self.layout.page_size
        pool = (component, Tier.DEVICE)
        low = first // page_size
        units = table[low : self.layout.pages_for(start)]
        found: list[int] = []
        for unit in units:
            found += self._blank[component] if unit is None else self.read_unit(pool, unit)
        shift = low * page_size
        if found[first - shift : start - shift] != contents[first + 1 : start + 1]:
            found += [NOTHING] * (start - shift - len(found))
            wrong = next(at for at in range(first, start) if found[at - shift] != contents[at + 1])
            page = wrong // page_size
            where = f"{component.name.lower()} unit {units[page - low] if page - low < len(units) else None}"
            raise WrongContent(row.number, f"{where} is not what was written at {wrong}")

    # --- constraints ------------------------------------------------------------------------------

    def lose_matchers(self, rows: Iterable[Row[Turn]]) -> None:
        """Forget the matchers of the turns of some rows: each is made again from what its turn has said."""
        for row in rows:
            self._matchers.pop(row.number, None)

    def _matcher(self, row: Row[Turn], tokens: list[int]) -> Matcher | None:
        """The matcher of a row that samples, if its turn is constrained; it has taken all that was said.

        A row behind one that went wrong is computed in vain: its sample reaches no matcher.
        """
        turn = row.turn
        if not row.sample or turn.over or (turn.ending is not None and not turn.ending.trusted):
            return None
        turn_id, matcher = self._matchers.get(row.number, ("", None))
        if turn_id != turn.request.turn_id:
            matcher = self.matcher_of(turn.request.turn_id)
            self._matchers[row.number] = turn.request.turn_id, matcher
            if matcher is not None:
                matcher.accept(tokens[turn.input_end :])
        if matcher is not None:
            at = row.start + row.count - row.drafts
            if at != len(tokens):
                raise WrongContent(row.number, f"a row samples token {at}, but {len(tokens)} are known")
            if matcher.accepted != len(tokens) - turn.input_end:
                said = f"{matcher.accepted} tokens, of {len(tokens) - turn.input_end} that were said"
                raise WrongContent(row.number, f"a matcher has taken {said}")
        return matcher

    def _force(self, row: Row[Turn], said: list[int], content: int, matcher: Matcher) -> RowResult:
        """Add the forced tokens that follow a sampled one, up to a stop or to all that the turn may say."""
        left = row.turn.request.max_tokens - row.turn.generated - len(said)
        forced = matcher.forced()[:left] if matcher.takes_runs else []
        finish = None
        for count, token in enumerate(forced, 1):
            content = extend(content, token)
            if stops(content):
                forced, finish = forced[:count], "stop"
                break
        matcher.accept(forced)
        return RowResult([*said, *forced], finish, forced=len(forced))

    # --- computing --------------------------------------------------------------------------------

    def _compute(self, row: Row[Turn], inputs: list[int], content: int, matcher: Matcher | None) -> RowResult:
        """Write what the row computes and say what the model says; drafts stand while the model agrees."""
        contents: list[int] = []
        for token in inputs:
            content = extend(content, token)
            contents.append(content)
        missing = self._write(row, contents)
        if missing is not None:
            raise WrongContent(row.number, f"{missing} is missing in its table, but is to be written")
        self._sampled.pop(row.number, None)
        said: list[int] = []
        at = row.count - row.drafts - 1
        while row.sample and at < row.count:
            token = next_token(contents[at], self.vocabulary)
            if matcher is not None:
                token = matcher.mask(token)
                matcher.accept([token])
            said.append(token)
            self._sampled[row.number] = token
            content = extend(contents[at], token)
            if stops(content):
                return RowResult(said, "stop")
            at += 1
            if at < row.count and inputs[at] != token:
                break
        return RowResult(said) if matcher is None else self._force(row, said, content, matcher)

    def _write(self, row: Row[Turn], contents: list[int]) -> str | None:
        """Fill the memory of a row; returns which page its table lacks, if any."""
        missing = None
        for table, component in zip(self._tables[row.number], PAGED, strict=True):
            if component in self._blank:
                page = self._write_pages(row, table, component, contents)
                if page is not None:
                    missing = f"{component.name.lower()} page {page}"
        if row.state is not None:
            self.write_unit((Component.STATE, Tier.DEVICE), row.state[1], contents[-1:])
        return missing

    def _write_pages(
        self, row: Row[Turn], table: Table, component: Component, contents: list[int]
    ) -> int | None:
        page_size = self.layout.page_size
        memory = self.memory[component, Tier.DEVICE]
        at, end = row.start, row.start + row.count
        missing = None
        while at < end:
            page, cell = divmod(at, page_size)
            count = min(end - at, page_size - cell)
            unit = table[page] if page < len(table) else None
            if unit is None:
                missing = page
            else:
                cells = memory.setdefault(unit, list(self._blank[component]))
                cells[cell : cell + count] = contents[at - row.start : at - row.start + count]
            at += count
        return missing
