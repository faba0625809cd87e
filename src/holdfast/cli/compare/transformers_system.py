"""transformers in this process: float32, eager, greedy, prompts of one length in one batch.

It has no server and no scheduler to pay for, and its batches are perfectly even: its figures are what the
library can do at best. The weights of a GGUF file are dequantised as its own reader does it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from holdfast.cli.compare.systems import Conversation
from holdfast.cli.compare.wire import Timing

__all__ = ["Transformers"]


class Transformers:
    """The library's own forward pass in a loop."""

    name = "transformers"

    def __init__(self, model: Path, threads: int) -> None:
        self._path = model
        self._threads = threads
        self._model: Any = None

    async def start(self) -> None:
        torch.set_num_threads(self._threads)
        self._model = await asyncio.to_thread(load, self._path)

    async def stop(self) -> None:
        self._model = None

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        timing, _ = await asyncio.to_thread(generate, self._model, prompts, count, None)
        return [timing] * len(prompts)

    async def conversation(self) -> Conversation:
        return _Cached(self._model)


class _Cached:
    """The cache of all turns before; a turn that its caller leaves is cut off it again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._last: list[int] = []

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        asked = count if leave_after is None else leave_after
        before = 0 if self._cache is None else self._cache.get_seq_length()
        timing, (cache, last) = await asyncio.to_thread(
            generate, self._model, [[*self._last, *tokens]], asked, self._cache
        )
        if leave_after is None:
            self._cache, self._last = cache, [last]
        elif self._cache is not None:
            cache.crop(before - cache.get_seq_length())
        return timing

    async def close(self) -> None:
        self._cache = None


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], count: int, cache: Any
) -> tuple[Timing, tuple[Any, int]]:
    """Greedy tokens; how long they took, the cache after them, and the last one, which is not in it."""
    began = time.perf_counter()
    answer = model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1)
    chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
    first = time.perf_counter() - began
    for _ in range(count - 1):
        answer = model(chosen, past_key_values=answer.past_key_values, use_cache=True, logits_to_keep=1)
        chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
    return Timing(first, time.perf_counter() - began), (answer.past_key_values, int(chosen[0, 0]))


def load(path: Path) -> Any:
    """A model directory, or a GGUF file of the Llama family, in float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model: Any = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"])).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model
