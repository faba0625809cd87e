"""The constraint of a turn: forced tokens are found once, and taken at once or one by one."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.constraints.toy import ToyMatcher
from holdfast.engine.constraints.turn import TurnConstraint

WIDTH, END = 50, 0


class Runs(ToyMatcher):
    """Forces the tokens of a script wherever it stands, and counts how often it is asked."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(WIDTH, END)
        self.script = list(script)
        self.asked = 0
        self.taken: list[int] = []

    def accept(self, tokens: Sequence[int]) -> bool:
        self.taken += tokens
        return True

    def forced(self) -> list[int]:
        self.asked += 1
        return self.script[len(self.taken) :]


def test_a_run_is_found_once_whoever_asks_and_however_it_is_taken() -> None:
    script = [3, 1, 4, 1, 5]
    at_once = TurnConstraint(Runs(script))
    assert list(at_once.forced()) == list(at_once.forced()) == script
    at_once.accept(script)
    assert list(at_once.forced()) == []
    one_by_one = TurnConstraint(Runs(script), takes_runs=False)
    for place, token in enumerate(script):
        assert list(one_by_one.forced()) == script[place:]
        one_by_one.accept([token])
    assert list(one_by_one.forced()) == []
    for constraint in (at_once, one_by_one):
        assert isinstance(constraint.matcher, Runs)
        assert constraint.matcher.taken == script
        assert constraint.matcher.asked == 2, "once for the run, once for what follows it"


def test_a_token_that_leaves_the_run_makes_it_unknown() -> None:
    constraint = TurnConstraint(Runs([7, 8, 9]))
    assert list(constraint.forced()) == [7, 8, 9]
    constraint.accept([6])
    assert list(constraint.forced()) == [8, 9], "as the matcher says, not what is left of the old run"


def test_tokens_from_outside_come_first_and_need_no_matcher() -> None:
    constraint = TurnConstraint(None)
    assert constraint.free and list(constraint.forced()) == [] and constraint.cut([1, 2]) == [1, 2]
    constraint.force([5, 6])
    assert not constraint.free and list(constraint.forced()) == [5, 6] and constraint.cut([5]) == []
    constraint.accept([5])
    assert list(constraint.forced()) == [6]
    constraint.accept([6])
    assert constraint.free and not constraint.failed and constraint.why == ""
    grammar = TurnConstraint(Runs([1]))
    grammar.force([2])
    assert list(grammar.forced()) == [2]


def test_nothing_is_forced_after_a_failure() -> None:
    constraint = TurnConstraint(ToyMatcher(WIDTH, END))
    constraint.accept([WIDTH])
    assert (
        constraint.failed and constraint.why and list(constraint.forced()) == [] and constraint.cut([1]) == []
    )


def test_a_choice_is_known_until_a_token_is_taken() -> None:
    constraint = TurnConstraint(Runs([]))
    assert not constraint.chooses, "nobody has asked"
    assert list(constraint.forced()) == [] and constraint.chooses
    constraint.accept([1])
    assert not constraint.chooses
    forcing = TurnConstraint(Runs([4]))
    assert list(forcing.forced()) == [4] and not forcing.chooses
