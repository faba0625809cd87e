"""Starting an engine: find a model, fetch it, load its weights and put the engine together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from holdfast.engine.draft.opening import find_draft
from holdfast.engine.durable.membership import Identity, Membership
from holdfast.engine.echo import open_echo
from holdfast.engine.grammars import begin_grammars
from holdfast.engine.listeners import SessionObserver
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import EngineOptions, OptionError, check_context
from holdfast.engine.ranks.starting import start_ranks
from holdfast.engine.start.assembly import build_loop
from holdfast.engine.start.loading import configure_kernels, load_weights
from holdfast.engine.start.pull import ECHO_MODELS, resolve_model
from holdfast.engine.start.setup import AnswerSetup, formats_of
from holdfast.engine.step.executor import Executor
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.engine.tiers.files import weights_identity
from holdfast.engine.tools.choose import Chosen
from holdfast.kernels.cpu.library import match_threads
from holdfast.models.checkpoint import Checkpoint, open_checkpoint
from holdfast.models.fields import Fields

__all__ = ["Progress", "open_loop"]

Progress = Callable[[str, int, int], None]
"""A stage, how much of it is done, and of how much."""


def open_loop(
    name: str,
    options: EngineOptions,
    progress: Progress | None = None,
    observer: SessionObserver | None = None,
    *,
    serve_early: bool = False,
    member: Membership | None = None,
) -> EngineLoop:
    """Find a model, download it if necessary, load it and set up its memory.

    With `serve_early` only the CUDA graphs that are needed first are captured here; the others are left to
    `EngineLoop.capturing`. A `member` of a cluster shares its journal with other engines.
    """
    if name in ECHO_MODELS:
        if options.tensor_parallel > 1:
            raise OptionError("tensor_parallel", f"must be 1: {name} has no weights to divide")
        if options.draft is not None:
            raise OptionError("draft", f"cannot be used: {name} has no weights to draft for")
        if options.speculate == "mtp":
            raise OptionError("speculate", f"mtp cannot be used: {name} has no weights")
        return open_echo(name, options, observer, member=member)
    device = _device(options.device)
    if device.index is not None:
        # Kernels are launched, and events recorded, on the current device of the engine's thread.
        torch.cuda.set_device(device)
    configure_kernels(options)
    path = resolve_model(name, _stage(progress, "fetch"), options.cache)
    checkpoint = open_checkpoint(path)
    check_context(options, checkpoint.config.context_length, checkpoint.config.context_reach)
    tokenizer = open_tokenizer(checkpoint)  # Fails before the weights are loaded, which takes long.
    draft = find_draft(options, tokenizer, checkpoint)
    formats = _formats(checkpoint, tokenizer, options)
    tokenizer = tokenizer.writing_calls(formats.calls)
    ends = checkpoint.generation.eos_tokens or tokenizer.eos_tokens
    grammars = begin_grammars(tokenizer, checkpoint.config.vocabulary, ends)
    identity = weights_identity(path) if options.disk is not None else ""
    crew = start_ranks(str(path), checkpoint, options, device)
    try:
        with _one_thread(), _room_for(device, "the weights", "a smaller model, or weights in fewer bits,"):
            group = None if crew is None else crew.group
            loaded = load_weights(checkpoint, options, device, _stage(progress, "load"), group)
        if crew is not None:
            crew.loaded()
        if device.type == "cpu":
            match_threads()
        with _one_thread(), _room_for(device, "the draft model", "a smaller one, or a smaller draft_tokens,"):
            loaded_draft = None if draft is None else draft.load(options, loaded)
        smaller = "smaller pools, or a smaller max_running or context_length,"
        with _room_for(device, "pools and steps", smaller):
            loop = build_loop(
                loaded,
                tokenizer,
                checkpoint.generation,
                options,
                runner=crew if loaded_draft is None else loaded_draft,
                identity=Identity(identity, member),
                answers=AnswerSetup(formats, grammars()),
                observer=observer,
            )
            executor = loop.executor
            if loaded.device.type == "cuda" and not options.fast_start and isinstance(executor, Executor):
                executor.capture(progress, first_only=serve_early)
    except BaseException:
        if crew is not None:
            crew.kill()
        raise
    return loop


def _formats(checkpoint: Checkpoint, tokenizer: Tokenizer, options: EngineOptions) -> Chosen:
    """How the model writes tool calls, and marks its reasoning."""
    if checkpoint.metadata is not None:
        model_type = checkpoint.metadata.get("general.architecture")
    else:
        model_type = Fields.read(checkpoint.path / "config.json").raw("model_type")
    return formats_of(options, tokenizer, {"model_type": model_type})


@contextmanager
def _room_for(device: torch.device, what: str, smaller: str) -> Iterator[None]:
    """Turn an out-of-memory error into an `OptionError` that names what needs less memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch reports it only in the message.
        missing = isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)
        if not missing:
            raise
        text = f"{device} has too little free memory for {what}: {smaller} would take less"
        raise OptionError("device", f"{text} ({error})") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Load weights with one thread: they are many small copies, which threads make slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise OptionError(
            "device", f"{name} cannot be used: torch finds {found} GPUs here; choose cpu or auto"
        )
    return device


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)
