"""What a rank does in its own time, in the order that rank 0 tells."""

from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Component, Tier
from holdfast.core.plan import TierMove
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.follower import Follower
from holdfast.engine.ranks.group import RankGroup, join_gloo
from holdfast.engine.ranks.messages import Frame, Kind
from holdfast.engine.ranks.units import GatheredUnits
from holdfast.engine.step.executor import Executor
from holdfast.models.ranks import Ranks
from tests.engine.slow_copies import Queued
from tests.engine.tiny import tiny_engine, write_model

FOREVER = 1 << 30


@pytest.mark.parametrize("on_host", [False, True])
def test_memory_on_the_host_is_sent_when_its_copy_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    """Rank 0 tells that a move has ended when its own copy has: that of this rank may go on."""
    executor = tiny_engine(write_model(tmp_path / "llama"), host_memory=8 << 20).loop.executor
    assert isinstance(executor, Executor) and executor.host is not None
    executor.host_tier.copier = copier = Queued(FOREVER)
    group = join_gloo(tmp_path / "meeting", Ranks(0, 1), 5.0)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(RankGroup, "send", lambda _, tensor, rank: sent.append(tensor.clone()))
    follower = Follower(executor, group)
    storage = executor.memory.storage("full")[0]
    storage[3] = 5.0
    move = TierMove(1, Component.FULL, Tier.DEVICE, [3], Tier.HOST, [2])
    units = [GatheredUnits("full", on_host, [], [2 if on_host else 3])]
    for frame in (
        Frame(Kind.MOVE, messages.write_moves([move])),
        Frame(Kind.FENCE, [1]),
        Frame(Kind.GATHER, messages.write_units(units)),
    ):
        follower._acts[frame.kind](frame)
    assert (sent[0].view(storage.dtype) == 5.0).all()
    assert copier.copies[0].over is on_host, "nothing waits for it where it is not read"
