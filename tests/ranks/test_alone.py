"""A group of one rank, which has every sum already."""

from typing import Any

import pytest
import torch

from holdfast.engine.ranks.group import RankGroup
from holdfast.models.ranks import Ranks


class Asked(Exception):
    """The others were asked."""


class Others:
    """A backend whose every call is an error."""

    def __getattr__(self, name: str) -> Any:
        raise Asked(name)


def test_a_rank_alone_asks_nobody() -> None:
    x = torch.arange(6.0).view(2, 3)
    alone = RankGroup(Ranks(0, 1), Others())
    assert alone.sum(x) is x
    assert torch.equal(alone.gather(x), x[None])
    alone.broadcast(x)
    assert torch.equal(x, torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(("ranks", "alone_too"), [(Ranks(0, 2), False), (Ranks(0, 1), True)])
def test_others_are_asked_where_there_are_any(ranks: Ranks, alone_too: bool) -> None:
    group, x = RankGroup(ranks, Others(), alone_too=alone_too), torch.ones(3)
    for call in (group.sum, group.gather, group.broadcast):
        with pytest.raises(Asked):
            call(x)
