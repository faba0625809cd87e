"""Which cases of a parametrised test `make test` runs: a cover of models, other parameters and overlap.

Two rules, in this order. Where each model runs with each value of the other parameters, models take turns:
each model and each value is seen, not each pair of them. Of two cases that differ in overlap alone, one runs,
so that models and values see both ways where they are seen twice. `make soak` runs the others. Used by
`conftest`.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.engine.tiny import CONFIGURATIONS, WINDOWED

OVERLAP = "overlap"
MODELS = frozenset({*CONFIGURATIONS, *WINDOWED})

Values = tuple[str, ...]


def left_out(name: str, cases: Sequence[Mapping[str, object]]) -> set[int]:
    """The numbers of the cases of a test that are left out; a case is the value of each parameter.

    Which turn is first differs from test to test.
    """
    first = zlib.crc32(name.encode())
    columns = [column for column in cases[0] if column != OVERLAP]
    places: dict[Values, list[int]] = {}
    for number, case in enumerate(cases):
        places.setdefault(tuple(f"{case[column]}" for column in columns), []).append(number)
    kept = _models_in_turn(first, list(places))
    omitted = {number for place in places.keys() - set(kept) for number in places[place]}
    if OVERLAP in cases[0] and len(places) > 1:
        twins = {place: places[place] for place in kept if len(places[place]) == 2}
        omitted.update(_overlap_in_turn(first, twins))
    return omitted


def _models_in_turn(first: int, places: Sequence[Values]) -> list[Values]:
    """The places that are kept where models take turns; all where they cannot."""
    columns = list(zip(*places, strict=True))
    found = [number for number, seen in enumerate(columns) if set(seen) <= MODELS]
    if len(found) != 1:
        return list(places)
    models = _ranks(columns.pop(found[0]))
    rows = _ranks(list(zip(*columns, strict=True)) or ((),) * len(places))
    if len(places) != len(set(models)) * len(set(rows)):
        return list(places)
    # Columns that say the same count once. Their sum shows a model with each value of each, where it can.
    different = {_ranks(column) for column in columns}
    sums = [sum(ranks) for ranks in zip(*different, strict=True)] or list(rows)
    turns = min(len(set(models)), max(map(len, map(set, different)), default=1))
    for others in (sums, rows):
        pairs = enumerate(zip(models, others, strict=True))
        kept = [number for number, (model, other) in pairs if (model + other + first) % turns == 0]
        if {models[number] for number in kept} == set(models):
            return [places[number] for number in kept]
    return list(places)


def _ranks(values: Sequence[object]) -> tuple[int, ...]:
    """The place of each value among those that are different."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def _overlap_in_turn(first: int, twins: Mapping[Values, Sequence[int]]) -> Iterator[int]:
    """Of each two cases that differ in overlap alone, the one whose values have run more often that way."""
    seen: Counter[tuple[int, str, int]] = Counter()
    for turn, (place, both) in enumerate(twins.items(), first):
        runs = [sum(seen[column, value, way] for column, value in enumerate(place)) for way in (0, 1)]
        way = turn % 2 if runs[0] == runs[1] else runs.index(min(runs))
        seen.update((column, value, way) for column, value in enumerate(place))
        yield both[1 - way]
