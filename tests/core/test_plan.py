"""Plans and results: plain values, complete from the start."""

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.plan import Row, RowResult, StepPlan, StepResult, TableChange, TierMove, UnitCopy


def test_a_plan_is_true_when_there_is_anything_to_do() -> None:
    assert not StepPlan(1)
    for name, part in (
        ("rows", Row("turn", 1, 0, 1, [5], True, None)),
        ("copies", UnitCopy(Component.FULL, 3, 4)),
        ("moves", TierMove(1, Component.STATE, Tier.DEVICE, [0], Tier.HOST, [2])),
        ("forgotten", 7),
    ):
        plan: StepPlan[str, str] = StepPlan(2)
        getattr(plan, name).append(part)
        assert plan
    assert not plan.void and plan.step == 2 and plan.copied == []


def test_a_copy_says_what_it_copies() -> None:
    assert repr(UnitCopy(Component.WINDOW, 3, 4)) == "window 3 -> 4"


def test_values_keep_what_they_are_given_and_nothing_else() -> None:
    change = TableChange(2, [7, 8], 3, [9])
    row = Row("turn", 1, 32, 2, [5, 6], True, change)
    assert (row.turn, row.number, row.start, row.count, row.tokens) == ("turn", 1, 32, 2, [5, 6])
    assert row.sample and row.table is change and row.drafts == 0 and row.state is None
    assert (change.first, change.full, change.window_first, change.window) == (2, [7, 8], 3, [9])
    move = TierMove(4, Component.FULL, Tier.DEVICE, [1, 2], Tier.DISK, [8, 9])
    assert (move.number, move.source_tier, move.sources) == (4, Tier.DEVICE, [1, 2])
    assert (move.destination_tier, move.destinations) == (Tier.DISK, [8, 9])
    for value in (change, row, move, RowResult([])):
        with pytest.raises(AttributeError):
            value.anything_else = 1


def test_results_name_what_went_wrong_or_nothing() -> None:
    assert (RowResult([3]).finish, RowResult([3]).error) == (None, None)
    assert RowResult([3], finish="stop").finish == "stop"
    assert (StepResult([]).moved, StepResult([]).error) == ([], None)
    assert StepResult([], [True, False]).moved == [True, False]
