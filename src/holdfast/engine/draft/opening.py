"""Opening a draft model: it is checked before the target's weights are loaded, and its memory is planned.

Every error names the option `draft`: a model that cannot be found or read, one with another vocabulary, or
one with recurrent layers, whose state cannot be cut where a draft is refused. Used by `startup`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import DraftCache
from holdfast.engine.draft.gain import Costs
from holdfast.engine.draft.passes import DraftPasses
from holdfast.engine.draft.proposer import DraftLimits, DraftProposer
from holdfast.engine.memory_plan import MemoryPlan, free_bytes, memory_types, plan_memory, unit_bytes
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.pull import ECHO_MODELS, PullError, resolve_model
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.engine.tuning import choose_page_size
from holdfast.models.checkpoint import Checkpoint, choose_placement, load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.layout import memory_shape
from holdfast.models.model import Model, ModelDescription

__all__ = ["Draft", "LoadedDraft", "find_draft"]

ROWS_MAX = 64
"""Turns that draft at a time. With more, a step has so many tokens that drafts cost what they bring."""

MEMORY_SHARE = 1 / 16
"""The part of the free memory that the draft model's cache takes by default."""

SESSIONS_MAX = 32
"""Sessions of the expected length that the cache has room for by default, at most."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights, and its memory: allocated, so that the target's pools fit beside it."""

    passes: DraftPasses
    cache: DraftCache
    memory: MemoryPlan

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of every component."""
        return sum(self.memory.unit_bytes.values())

    @property
    def bytes(self) -> int:
        """Bytes of the cache."""
        return max(self.memory.device.full, self.memory.device.window) * self.page_bytes

    def proposer(
        self,
        target: ModelDescription,
        catch_up: int,
        stream_of: Callable[[Turn], TurnStream],
        ngrams: Speculator | None,
    ) -> DraftProposer:
        """The proposer of drafts for a model; `catch_up` bounds the tokens computed before drafts."""
        model = self.passes.model
        limits = DraftLimits(
            rows=ROWS_MAX,
            catch_up=catch_up,
            context=min(model.context_length, self.memory.tokens_max),
            draft_vocabulary=model.config.vocabulary,
            target_vocabulary=target.config.vocabulary,
        )
        costs = Costs.of(model.config, target.config, target.device)
        return DraftProposer(self.passes, self.cache, limits, costs, stream_of, ngrams, self.page_bytes)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model whose description was checked."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer

    def load(self, options: EngineOptions, device: torch.device, context_length: int) -> LoadedDraft:
        """Load the weights and allocate the memory; graphs are captured on a GPU."""
        length = min(self.checkpoint.config.context_length, context_length)
        try:
            model = load_model(
                self.checkpoint,
                choose_placement(self.checkpoint, device, options.dtype),
                load_format=options.load_format,
                context_length=length,
                pack_weights=False,
            )
        except ConfigurationError as error:
            raise _unusable(options, error) from error
        memory = plan_draft(model, options)
        pages = max(memory.device.full, memory.device.window)
        cache = DraftCache(memory.layout, pages)
        passes = DraftPasses(model, memory, cache, ROWS_MAX, self.tokenizer)
        if device.type == "cuda" and not options.fast_start:
            passes.executor.capture()
        return LoadedDraft(passes, cache, memory)


def find_draft(options: EngineOptions, tokenizer: Tokenizer) -> Draft | None:
    """The draft model that the options name, checked against the target's tokenizer; None if they name none.

    Raises `OptionError`.
    """
    name = options.draft
    if name is None:
        return None
    if name in ECHO_MODELS:
        raise OptionError("draft", f"{name} cannot be used: it has no weights")
    try:
        path: Path = resolve_model(name, None, options.cache)
        checkpoint = open_checkpoint(path)
        own = open_tokenizer(checkpoint)
        shape = memory_shape(checkpoint.config)
    except (PullError, ConfigurationError) as error:
        raise _unusable(options, error) from error
    if shape.state is not None:
        raise OptionError("draft", f"{name} cannot be used: it has recurrent layers, use one with attention")
    if difference := _difference(tokenizer, own):
        raise OptionError("draft", f"{name} cannot be used: its vocabulary differs, {difference}")
    return Draft(checkpoint, own)


def plan_draft(model: Model, options: EngineOptions) -> MemoryPlan:
    """The memory of a draft model: as many tokens as stated, or a part of what is free."""
    shape, on_gpu = model.memory_shape, model.device.type == "cuda"
    own = replace(options, kv_dtype="auto", state_dtype="auto", draft=None, draft_tokens=None)
    window = shape.window_tokens if shape.window is not None else 0
    page_size = options.page_size or choose_page_size(on_gpu, window).value
    each = sum(unit_bytes(shape, page_size, memory_types(model, own)).values())
    free = free_bytes(model.device)
    session = min(options.session_tokens, model.context_length)
    tokens = options.draft_tokens
    if tokens is None:
        tokens = int(free * MEMORY_SHARE) // each * page_size
        tokens = max(session, min(tokens, SESSIONS_MAX * session))
    pages = max(2, -(-tokens // page_size))
    if pages * each > free:
        most = free // each * page_size
        raise OptionError("draft_tokens", f"is too large: {tokens:,} tokens do not fit, {most:,} would")
    sized = replace(
        own,
        page_size=page_size,
        kv_tokens=pages * page_size,
        window_tokens=pages * page_size,
        state_slots=None,
        host_memory=0,
        disk=None,
        max_running=ROWS_MAX,
        step_tokens=options.step_tokens or 1,
        checkpoints=0,
    )
    return plan_memory(model, sized)


def _difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """What differs between two vocabularies, in words; None if every token has the same number in both."""
    one, other = target.vocabulary, draft.vocabulary
    if one == other:
        return None
    if len(one) != len(other):
        return f"{len(other)} tokens instead of {len(one)}"
    text = next(text for text, number in one.items() if other.get(text) != number)
    return f"token {one[text]} is {text!r} in the model only"


def _unusable(options: EngineOptions, error: Exception) -> OptionError:
    return OptionError("draft", f"{options.draft} cannot be used: {error}")
