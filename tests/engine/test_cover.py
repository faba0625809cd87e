"""What `make test` leaves out of a matrix: never a model, never a value, never a way to overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from tests.engine.cover import left_out

MODELS = ("bamba", "llama", "olmo3")


def matrix(**columns: Sequence[object]) -> list[dict[str, object]]:
    return [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]


def kept(name: str, cases: list[dict[str, object]]) -> list[tuple[object, ...]]:
    omitted = left_out(name, cases)
    return [tuple(case.values()) for number, case in enumerate(cases) if number not in omitted]


@pytest.mark.parametrize("name", ["one", "two", "three", "four"])
def test_each_model_and_each_value_runs(name: str) -> None:
    for models, values, more in product((2, 3), (2, 3, 4, 5), (1, 2, 3)):
        cases = matrix(model=MODELS[:models], value=range(values), more=range(more), overlap=[False, True])
        run = kept(name, cases)
        assert {case[0] for case in run} == set(MODELS[:models])
        assert {case[1:3] for case in run} == set(product(range(values), range(more)))
        assert {case[3] for case in run} == {False, True}
        assert len(run) <= max(models * more, models * values, len(cases) // (2 * min(models, values)))


def test_models_that_run_twice_see_both_ways_to_overlap() -> None:
    run = kept("any", matrix(model=MODELS[:2], value=range(4), overlap=[False, True]))
    assert len(run) == 4
    assert {(case[0], case[2]) for case in run} == {(m, way) for m in MODELS[:2] for way in (False, True)}


def test_a_third_parameter_pairs_models_with_values() -> None:
    run = kept("any", matrix(model=MODELS[:2], part=range(3), damage="abcd"))
    assert len(run) == 12
    assert {(case[0], case[2]) for case in run} == set(product(MODELS[:2], "abcd"))


def test_values_that_come_together_hide_no_model() -> None:
    rows = [{"given": each, "expected": f"{each}!"} for each in range(4)]
    cases = [{"make": model, **row} for model in MODELS[:2] for row in rows]
    run = kept("any", cases)
    assert len(run) == 4
    assert {case[0] for case in run} == set(MODELS[:2])
    assert {case[1] for case in run} == set(range(4))


@pytest.mark.parametrize(
    "cases",
    [
        matrix(model=MODELS),  # Nothing else to take turns over.
        matrix(overlap=[False, True]),
        matrix(model=MODELS[:2], draft=MODELS[:2]),  # Two models in one test.
        matrix(model=MODELS[:2], value=range(3))[1:],  # Not a whole matrix.
    ],
)
def test_where_nothing_can_take_turns_all_cases_run(cases: list[dict[str, object]]) -> None:
    assert left_out("any", cases) == set()
