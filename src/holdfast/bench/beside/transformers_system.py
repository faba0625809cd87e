"""transformers in this process: float32, greedy, prompts of one length in one batch.

`Transformers` is the library's forward pass in a loop, without a server or a scheduler and with even batches:
its figures are an upper bound of the library. `ContinuousBatching` is the library's manager behind
`generate_batch`, for requests that arrive at any time. GGUF weights are dequantised by the library's reader.

The work runs in threads, which cannot be cancelled: an event tells them to stop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers.generation.continuous_batching.cache as their_cache
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from holdfast.bench.beside.http import BenchError, Timing
from holdfast.bench.beside.systems import Conversation

__all__ = ["ContinuousBatching", "Transformers"]

BLOCKS = 64
STEP_TOKENS_MAX = 1024
POLL_SECONDS = 0.25
STOP_SECONDS_MAX = 30.0

Answer = TypeVar("Answer")


async def in_a_thread(leaving: threading.Event, work: Callable[[], Answer]) -> Answer:
    """Run `work` in a thread; `leaving` is set when the caller is cancelled, and tells `work` to stop."""
    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        leaving.set()
        raise


class Transformers:
    """The library's forward pass in a loop."""

    name = "transformers"

    def __init__(self, model: Path, threads: int) -> None:
        self._path = model
        self._threads = threads
        self._model: Any = None
        self._leaving = threading.Event()

    async def start(self) -> None:
        torch.set_num_threads(self._threads)
        self._model = await asyncio.to_thread(load, self._path)

    async def stop(self) -> None:
        self._model = None

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        timing, _ = await in_a_thread(
            self._leaving, lambda: generate(self._model, prompts, count, None, self._leaving)
        )
        return [timing] * len(prompts)

    async def conversation(self) -> Conversation:
        return _Cached(self._model, self._leaving)


class _Cached:
    """A conversation with its KV cache; an aborted turn is cropped from the cache."""

    def __init__(self, model: Any, leaving: threading.Event) -> None:
        self._model = model
        self._leaving = leaving
        self._cache: Any = None
        self._last: list[int] = []

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        asked = count if leave_after is None else leave_after
        before = 0 if self._cache is None else self._cache.get_seq_length()
        prompt = [*self._last, *tokens]
        answer: tuple[Timing, tuple[Any, int]] = await in_a_thread(
            self._leaving, lambda: generate(self._model, [prompt], asked, self._cache, self._leaving)
        )
        timing, (cache, last) = answer
        if leave_after is None:
            self._cache, self._last = cache, [last]
        elif self._cache is not None:
            cache.crop(before - cache.get_seq_length())
        return timing

    async def close(self) -> None:
        self._cache = None


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], count: int, cache: Any, leaving: threading.Event
) -> tuple[Timing, tuple[Any, int]]:
    """Decode greedily; returns the times, the KV cache, and the last token, which is not in the cache."""
    began = time.perf_counter()
    answer = model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1)
    chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
    first = time.perf_counter() - began
    for _ in range(count - 1):
        if leaving.is_set():
            break
        answer = model(chosen, past_key_values=answer.past_key_values, use_cache=True, logits_to_keep=1)
        chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
    return Timing(first, time.perf_counter() - began), (answer.past_key_values, int(chosen[0, 0]))


class ContinuousBatching:
    """The manager behind `generate_batch`; it has no conversations."""

    name = "generate_batch"

    def __init__(self, model: Path, threads: int) -> None:
        self._path = model
        self._threads = threads
        self._manager: Any = None
        self._leaving = threading.Event()

    async def start(self) -> None:
        torch.set_num_threads(self._threads)
        self._manager = await asyncio.to_thread(start_manager, self._path)

    async def stop(self) -> None:
        """Stop the manager's thread and drop its requests."""
        if self._manager is not None:
            await asyncio.to_thread(
                lambda: self._manager.stop(block=True, timeout=STOP_SECONDS_MAX, hard_stop=True)
            )
            self._manager = None

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        return await in_a_thread(self._leaving, lambda: self._batch(prompts, count))

    def _batch(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        began = time.perf_counter()
        names = self._manager.add_requests(
            [list(prompt) for prompt in prompts], max_new_tokens=count, record_timestamps=True
        )
        found: dict[str, Timing] = {}
        while len(found) < len(names) and not self._leaving.is_set():
            result = self._manager.get_result(timeout=POLL_SECONDS)
            if result is None:
                if not self._manager.is_running():
                    raise BenchError("transformers' continuous batching stopped unexpectedly")
            elif result.is_finished():
                if result.error is not None or len(result.generated_tokens) != count:
                    raise BenchError(f"transformers' continuous batching failed: {result.error}")
                found[result.request_id] = Timing(result.timestamps[0] - began, result.timestamps[-1] - began)
        if self._leaving.is_set():
            for name in names:
                self._manager.cancel_request(name)
        return list(found.values())

    async def conversation(self) -> Conversation:
        raise BenchError("transformers' continuous batching keeps no conversations")


def start_manager(path: Path) -> Any:
    """A running manager with its own copy of the model.

    The library reads the free memory through a package that may be missing; the total of the system is used.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where: Any = their_cache
    where.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), total, 0, 0)
    model = load(path)
    model.set_attn_implementation("paged|sdpa")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=BLOCKS, max_batch_tokens=STEP_TOKENS_MAX
        ),
    )
    manager.start()
    return manager


def load(path: Path) -> Any:
    """A model directory, or a GGUF file of the Llama family, in float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model: Any = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"])).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model
