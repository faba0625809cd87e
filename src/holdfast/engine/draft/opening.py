"""Opening a draft model or a draft head: it is checked before the target's weights are loaded.

Every error names the option: `draft` for a model or a head that cannot be found or read, one with another
vocabulary, or a model with recurrent layers, whose state cannot be cut where a draft is refused; `speculate`
for a multi-token-prediction head that the model's checkpoint does not have. Used by `startup`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import DraftCache
from holdfast.engine.draft.gain import Costs
from holdfast.engine.draft.head_passes import HeadPasses
from holdfast.engine.draft.head_proposer import HeadProposer
from holdfast.engine.draft.hidden import HeadCache
from holdfast.engine.draft.passes import DraftPasses
from holdfast.engine.draft.proposer import DraftLimits, DraftProposer
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.start import tuning
from holdfast.engine.start.memory_plan import MemoryPlan, free_bytes, memory_types, plan_memory, unit_bytes
from holdfast.engine.start.pull import ECHO_MODELS, PullError, resolve_model
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.models.checkpoint import Checkpoint, choose_placement, load_model, open_checkpoint
from holdfast.models.eagle3 import Eagle3Description, load_eagle3, open_eagle3
from holdfast.models.fields import ConfigurationError
from holdfast.models.heads import DraftHead, load_mtp
from holdfast.models.layout import memory_shape
from holdfast.models.model import Model, ModelDescription, StepModel

__all__ = ["Draft", "Head", "LoadedDraft", "find_draft", "with_memory"]

ROWS_MAX = 64
"""Turns that draft at a time. With more, a step has so many tokens that drafts cost what they bring."""

MEMORY_SHARE = 1 / 16
"""The part of the free memory that the draft model's cache takes by default."""

SESSIONS_MAX = 32
"""Sessions of the expected length that the cache has room for by default, at most."""

STEPS_KEPT, KEPT_TOKENS = 2, {"cpu": tuning.CPU_STEP_TOKENS, "cuda": tuning.GPU_STEP_TOKENS}
"""Steps whose hidden states wait for a head at a time, and the tokens of the largest by default."""


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

    @property
    def promised(self) -> int:
        """Bytes of the device that are free now and will be taken beside the target's pools."""
        own = self.bytes if self.passes.model.device.type == "cpu" else 0
        if isinstance(self.passes, HeadPasses):
            head = self.passes.head
            tokens = max(KEPT_TOKENS[head.device.type], self.memory.tuning.step_tokens)
            own += STEPS_KEPT * tokens * head.feature_width * head.dtype.itemsize
        return own

    def proposer(
        self,
        target: ModelDescription,
        catch_up: int,
        stream_of: Callable[[Turn], TurnStream],
        ngrams: Speculator | None,
    ) -> DraftProposer:
        """The proposer of drafts for a model; `catch_up` bounds the tokens computed before drafts.

        A head computes what the target has computed, and no more.
        """
        if isinstance(self.passes, HeadPasses):
            return self._head_proposer(self.passes, target, stream_of, ngrams)
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

    def _head_proposer(
        self,
        passes: HeadPasses,
        target: ModelDescription,
        stream_of: Callable[[Turn], TurnStream],
        ngrams: Speculator | None,
    ) -> HeadProposer:
        head, cache = passes.head, self.cache
        assert isinstance(cache, HeadCache), "a head has a cache of its own kind"
        vocabulary = target.config.vocabulary
        limits = DraftLimits(
            rows=ROWS_MAX,
            catch_up=1 << 30,
            context=min(head.context_length, self.memory.tokens_max),
            draft_vocabulary=vocabulary,
            target_vocabulary=vocabulary,
        )
        costs = Costs.of(replace(head.config, vocabulary=head.outputs), target.config, target.device)
        return HeadProposer(passes, cache, limits, costs, stream_of, ngrams, self.page_bytes)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model whose description was checked."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer

    def load(self, options: EngineOptions, target: Model) -> LoadedDraft:
        """Load the weights and allocate the memory; graphs are captured on a GPU."""
        device = target.device
        length = min(self.checkpoint.config.context_length, target.context_length)
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


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head whose description was checked: that in the target's checkpoint, or an EAGLE-3 head."""

    target: Checkpoint
    described: Eagle3Description | None
    tokenizer: Tokenizer

    def load(self, options: EngineOptions, target: Model) -> LoadedDraft:
        """Load the weights and allocate the memory; graphs are captured on a GPU."""
        placement = choose_placement(self.target, target.device, options.dtype)
        dummy = options.load_format == "dummy"
        head: DraftHead
        try:
            if self.described is None:
                head = load_mtp(self.target, target, placement, dummy=dummy)
            else:
                head = load_eagle3(self.described, target, placement, dummy=dummy)
        except ConfigurationError as error:
            if self.described is not None:
                raise _unusable(options, error) from error
            raise OptionError("speculate", f"mtp cannot be used: {error}") from error
        return with_memory(head, options, self.tokenizer)


def with_memory(head: DraftHead, options: EngineOptions, tokenizer: Tokenizer) -> LoadedDraft:
    """Allocate the memory of a head; graphs are captured on a GPU."""
    memory = plan_draft(head, options)
    cache = HeadCache(memory.layout, max(memory.device.full, memory.device.window))
    passes = HeadPasses(head, memory, cache, ROWS_MAX, tokenizer)
    if head.device.type == "cuda" and not options.fast_start:
        passes.executor.capture()
    return LoadedDraft(passes, cache, memory)


def find_draft(options: EngineOptions, tokenizer: Tokenizer, target: Checkpoint) -> Draft | Head | None:
    """What the options say that drafts, checked against the target as far as that needs no weights.

    None if they name nothing. Raises `OptionError`.
    """
    if options.speculate == "mtp":
        return _find_mtp(options, tokenizer, target)
    name = options.draft
    if name is None:
        return None
    if name in ECHO_MODELS:
        raise OptionError("draft", f"{name} cannot be used: it has no weights")
    try:
        path: Path = resolve_model(name, None, options.cache)
        described = open_eagle3(path)
        if described is not None:
            described.check(target.config)
            return Head(target, described, tokenizer)
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


def _find_mtp(options: EngineOptions, tokenizer: Tokenizer, target: Checkpoint) -> Head:
    """The multi-token-prediction head in the target's checkpoint."""
    prefix = target.family.mtp
    if prefix is None or target.metadata is not None:
        what = "GGUF files" if target.metadata is not None else target.config.architecture
        raise OptionError("speculate", f"mtp cannot be used: {what} has no such head that can be read")
    if options.load_format != "dummy" and not any(
        name.startswith(prefix) for name in target.source().names()
    ):
        raise OptionError("speculate", f"mtp cannot be used: {target.path} has no weights named {prefix}*")
    return Head(target, None, tokenizer)


def plan_draft(model: StepModel, options: EngineOptions) -> MemoryPlan:
    """The memory of a draft model: as many tokens as stated, or a part of what is free."""
    shape, on_gpu = model.memory_shape, model.device.type == "cuda"
    own = replace(
        options, kv_dtype="auto", state_dtype="auto", speculate="none", draft=None, draft_tokens=None
    )
    window = shape.window_tokens if shape.window is not None else 0
    page_size = options.page_size or tuning.choose_page_size(on_gpu, window).value
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
