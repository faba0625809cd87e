"""Engines with a draft model: tiny models of the same vocabulary, and what is asked of their cache."""

from pathlib import Path

from holdfast.engine.draft.gain import Costs
from holdfast.engine.draft.proposer import DraftProposer
from holdfast.engine.engine import Engine
from tests.engine.tiny import tiny_engine, write_model

PROMPT = [20, 21, 22, 23, 24, 25, 26] * 6

FREE_OF_COST = Costs(0.01, 0.0)
"""Drafts that always pay, however seldom they are right: tiny models are all of about the same size."""


def write_draft(directory: Path, family: str = "llama", **fields: object) -> Path:
    """A draft model of one layer: of the weights of a model of two, it has those of the first."""
    if family in ("llama", "mistral"):
        fields = {"num_hidden_layers": 1, **fields}
    return write_model(directory / f"draft-{family}", family, **fields)


def drafting_engine(target: Path, draft: Path, *, costs: Costs = FREE_OF_COST, **options: object) -> Engine:
    """An engine with a draft model."""
    engine = tiny_engine(target, **{"draft": str(draft), "draft_tokens": 4096, **options})
    proposer_of(engine).costs = costs
    return engine


def proposer_of(engine: Engine) -> DraftProposer:
    """The draft model's proposer."""
    assert engine.loop.drafts is not None
    return engine.loop.drafts


def check_cache(engine: Engine) -> None:
    """Every page of the draft model has one holder, whose count is right, or is free."""
    cache = proposer_of(engine).cache
    for pool in cache.ledger.pools.values():
        held = [
            unit
            for entry in cache.entries.values()
            for hold in entry.holds
            if hold.pool is pool
            for unit in hold.units
        ]
        assert sorted([*held, *pool.free]) == list(range(pool.size))
        assert sum(entry.holder.held[pool.index] for entry in cache.entries.values()) == len(held)
    assert not cache.ledger.leaks and not cache.ledger.dropped
    sessions = engine.loop.scheduler.registry.sessions
    assert set(cache.entries) <= set(sessions) and set(proposer_of(engine).records) <= set(sessions)


def check_empty(engine: Engine) -> None:
    """Nothing is left of any session or turn."""
    proposer = proposer_of(engine)
    check_cache(engine)
    assert not proposer.cache.entries and not proposer.records and not proposer.passes.turns
    assert all(len(pool.free) == pool.size for pool in proposer.cache.ledger.pools.values())
