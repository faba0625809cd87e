"""The masks of a step on the host: which sample has which, forced tokens, drafts, bans, growing buffers."""

from __future__ import annotations

import pytest
import torch

from holdfast.engine.constraints.guidance import ParallelMatchers
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.toy import ToyCompiled, ToyMatcher
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.step.masks import ROWS_FIRST, Ahead, StepMasks, Wanted
from holdfast.kernels import TokenMasks
from holdfast.kernels.torch.sampling import allowed_tokens

WIDTH, END = 75, 0


def matcher(seed: int) -> ToyMatcher:
    return ToyCompiled(WIDTH, END, seed).matcher()


def forcing(count: int = 0) -> ToyMatcher:
    """A matcher that forces a token after as many free ones."""
    for seed in range(10_000):
        found, taken = matcher(seed), []
        while len(taken) < count and not found.forced():
            taken.append(allowed_by(found)[1])
            found.accept(taken[-1:])
        if len(taken) == count and found.forced():
            found.rollback(count)
            return found
    raise AssertionError("no such seed")


def allowed_by(each: ToyMatcher) -> list[int]:
    rows = MaskRows.allocated(1, WIDTH)
    each.fill(rows, 0)
    return rows.allowed(0)


def allowed_in(masks: TokenMasks, sample: int) -> list[int]:
    rows = allowed_tokens(masks, WIDTH)
    return rows[sample].nonzero().squeeze(1).tolist()


@pytest.fixture
def masks() -> StepMasks:
    return StepMasks(WIDTH, torch.device("cpu"), ParallelMatchers(threads=1))


def fill(masks: StepMasks, wanted: list[Wanted], samples: int) -> set[int]:
    """Fill the masks of a step, all of them when it is sampled."""
    masks.open(samples, ((each.first, each.first + 1 + len(each.drafts)) for each in wanted))
    return masks.fill(wanted)


def test_samples_without_a_constraint_have_no_mask(masks: StepMasks) -> None:
    wanted = [
        Wanted(1, TurnConstraint(matcher(3))),
        Wanted(2, TurnConstraint(None)),
        Wanted(4, TurnConstraint(matcher(5))),
    ]
    assert fill(masks, wanted, 5) == {1, 4}
    sent = masks.send()
    assert sent.rows.tolist() == [-1, 0, -1, -1, 2]
    assert sent.words.shape == (3, 3)
    assert allowed_in(sent, 1) == allowed_by(matcher(3))
    assert allowed_in(sent, 4) == allowed_by(matcher(5))
    assert fill(masks, [Wanted(0, TurnConstraint(None))], 1) == set()


def test_forced_tokens_are_allowed_alone(masks: StepMasks) -> None:
    pending = TurnConstraint(None)
    pending.force([70, 71])
    by_grammar = forcing(1)
    by_grammar.accept(allowed_by(by_grammar)[1:2])
    failed = TurnConstraint(matcher(1))
    failed.accept([WIDTH])
    fill(masks, [Wanted(0, pending), Wanted(1, TurnConstraint(by_grammar)), Wanted(2, failed)], 3)
    sent = masks.send()
    assert allowed_in(sent, 0) == [70]
    assert allowed_in(sent, 1) == by_grammar.forced()
    assert allowed_in(sent, 2) == []


def test_drafts_have_a_mask_each_and_the_token_after_them_may_be_forced(masks: StepMasks) -> None:
    found = forcing(2)
    drafts: list[int] = []
    expected = []
    for _ in range(2):
        expected.append(allowed_by(found))
        drafts.append(expected[-1][1])
        found.accept(drafts[-1:])
    forced = found.forced()
    found.rollback(2)
    assert fill(masks, [Wanted(1, TurnConstraint(found), drafts)], 5) == {1, 2, 3}
    sent = masks.send()
    assert [allowed_in(sent, sample) for sample in (1, 2, 3)] == [*expected, forced[:1]]
    assert sent.rows.tolist() == [-1, 0, 1, 2, -1]
    assert allowed_by(found) == expected[0], "the matcher is where it was"


def test_banned_tokens_are_taken_from_a_mask_unless_nothing_is_left(masks: StepMasks) -> None:
    only = TurnConstraint(None)
    only.force([7])
    fill(masks, [Wanted(0, TurnConstraint(matcher(3))), Wanted(1, only)], 2)
    everything = allowed_by(matcher(3))
    masks.forbid(0, everything[:3])
    masks.forbid(1, [7, 8])
    sent = masks.send()
    assert allowed_in(sent, 0) == everything[3:]
    assert allowed_in(sent, 1) == [7]


def test_buffers_grow_and_are_used_again(masks: StepMasks) -> None:
    addresses = set()
    for rows in (1, 3, ROWS_FIRST, 4 * ROWS_FIRST, 2):
        wanted = [Wanted(row, TurnConstraint(matcher(row))) for row in range(rows)]
        assert len(fill(masks, wanted, rows)) == rows
        sent = masks.send()
        assert all(allowed_in(sent, row) == allowed_by(matcher(row)) for row in range(rows))
        addresses.add(sent.rows.data_ptr())
    assert len(addresses) <= 3


def test_a_mask_filled_ahead_is_used_while_the_constraint_stays_there(masks: StepMasks) -> None:
    stays, moves, forced = (TurnConstraint(matcher(seed)) for seed in (3, 5, 7))
    wanted = [Wanted(0, stays), Wanted(1, moves), Wanted(2, forced)]
    masks.open(3, [(0, 1), (1, 2), (2, 3)])
    masks.fill_ahead(masks.ahead(wanted))
    moves.accept(allowed_by(matcher(5))[1:2])
    forced.force([9])
    stays.matcher = None  # It is not asked again.
    assert masks.fill([Wanted(1, moves), Wanted(2, forced)]) == {1, 2}
    sent = masks.send()
    after = matcher(5)
    after.accept(allowed_by(after)[1:2])
    assert allowed_in(sent, 1) == allowed_by(after)
    assert allowed_in(sent, 2) == [9]


def test_masks_that_cannot_be_filled_ahead_are_left(masks: StepMasks) -> None:
    pending, failed = TurnConstraint(matcher(3)), TurnConstraint(matcher(1))
    pending.force([4, 5])
    failed.accept([WIDTH])
    plain = TurnConstraint(matcher(2))
    masks.open(4, [(0, 1), (1, 2), (2, 4)])
    wanted = [Wanted(0, pending), Wanted(1, failed), Wanted(2, plain, (1,)), Wanted(9, plain)]
    assert masks.ahead([*wanted, Wanted(0, TurnConstraint(None))]) == []
    assert masks.ahead([Wanted(0, plain)]) == [Ahead(0, plain, 0)]
