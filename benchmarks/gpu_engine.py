"""The engine on a GPU: the same tokens as on the CPU, then what a step costs without graphs.

    PYTHONPATH=src python3 benchmarks/gpu_engine.py [--checks | --timings]

Needs torch, triton, transformers, safetensors and numpy. The checks load small random models of each layout
on both devices and compare greedy tokens of sessions that are interrupted, rewound and forked, with the
strict audit on. The timings run Qwen3-8B's shapes with dummy weights: decode steps by batch size, and the
first token of a session's turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from holdfast.core.turn import KEEP_ALL, TurnRequest
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


class PlainTokens:
    """Stands in for a tokenizer: tokens have no text here."""

    eos_tokens: tuple[int, ...] = ()
    template = None

    def detokenizer(self, **_: bool) -> PlainTokens:
        return self

    def add(self, _: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def open_loop(path: Path, device: str, **options: object) -> EngineLoop:
    chosen = make_options(device=device, **options)
    checkpoint = open_checkpoint(path)
    placement = choose_placement(checkpoint, torch.device(device), chosen.dtype)
    model = load_model(
        checkpoint, placement, load_format=chosen.load_format, context_length=chosen.context_length
    )
    return EngineLoop(model, PlainTokens(), checkpoint.generation, chosen)  # type: ignore[arg-type]


class Talk:
    """One session driven to its end, turn by turn."""

    def __init__(self, loop: EngineLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.turns = 0
        self.said: list[int] = []
        self.first: float | None = None
        self.over = False
        loop.scheduler.open(name, "bench", loop.now())

    def begin(self, tokens: list[int], count: int) -> None:
        self.turns += 1
        self.said, self.first, self.over = [], None, False
        request = TurnRequest(f"{self.name}.{self.turns}", tuple(tokens), count)
        sampling = Sampling(temperature=0, ignore_eos=True).with_defaults(self.loop.defaults)
        self.loop.submit(self.name, request, sampling, self.hear)

    def hear(self, event: object) -> None:
        kind, tokens = event.kind, event.tokens  # type: ignore[attr-defined]
        if kind == "tokens":
            self.said += tokens
            self.first = self.first if self.first is not None else time.perf_counter()
        else:
            self.over = True

    def finish(self) -> list[int]:
        while not self.over:
            self.loop.step()
        return self.said


def conversation(loop: EngineLoop, vocabulary: int) -> list[int]:
    """Turns, a barge-in, a rewind and a fork; returns everything that was said."""
    said: list[int] = []
    talk = Talk(loop, "one")
    for turn in range(3):
        talk.begin([(7 * turn + 3 * i) % vocabulary for i in range(41)], 24)
        said += talk.finish()
    talk.begin([5, 6, 7], 40)
    while len(talk.said) < 9:
        loop.step()
    loop.scheduler.interrupt("one", loop.now(), KEEP_ALL if len(talk.said) < 6 else 6)
    talk.finish()
    talk.begin([11, 12, 13], 16)
    said += talk.finish()
    while loop.scheduler.registry.seals or loop.scheduler.registry.flights:
        loop.step()
    loop.scheduler.fork("one", "two", loop.now(), 2)
    loop.scheduler.rewind("one", 1, loop.now())
    talk.begin([21, 22], 16)
    said += talk.finish()
    findings = loop.scheduler.audit.census()
    assert not findings, [str(finding) for finding in findings]
    return said


def small_models() -> dict[str, transformers.PretrainedConfig]:
    shared = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    return {
        "dense": transformers.LlamaConfig(**shared),
        "window": transformers.MistralConfig(**shared, sliding_window=24),
        "hybrid": transformers.BambaConfig(
            **shared,
            attn_layer_indices=[1, 3],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_expand=2,
        ),
    }


def check() -> bool:
    good = True
    for name, config in small_models().items():
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder:
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            for overlap in (False, True):
                for page_size in (1, 16, 64):
                    options = {
                        "dtype": "float32",
                        "page_size": page_size,
                        "kv_tokens": 2048,
                        "window_tokens": 2048,
                        "state_slots": 24,
                        "audit": "strict",
                        "overlap": overlap,
                        "chunk_tokens": 16,
                    }
                    here = conversation(open_loop(Path(folder), "cpu", **options), 128)
                    there = conversation(open_loop(Path(folder), "cuda", **options), 128)
                    same = here == there
                    good = good and same
                    answer = "same" if same else "DIFFERENT"
                    print(f"{name} page {page_size} overlap {overlap}: {answer} ({len(here)} tokens)")
    return good


def timings() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_8B))
        for overlap in (False, True):
            loop = open_loop(
                Path(folder),
                "cuda",
                load_format="dummy",
                page_size=64,
                kv_tokens=400_000,
                overlap=overlap,
                max_running=256,
            )
            for batch in (1, 16, 64, 256):
                talks = [Talk(loop, f"b{batch}.{i}") for i in range(batch)]
                for number, talk in enumerate(talks):
                    talk.begin([(number + 13 * i) % 50_000 for i in range(128)], 64)
                while not all(talk.first for talk in talks):
                    loop.step()
                steps = []
                while not any(talk.over for talk in talks):
                    begun = time.perf_counter()
                    loop.step()
                    steps.append(time.perf_counter() - begun)
                for talk in talks:
                    talk.finish()
                print(
                    f"overlap {overlap}: decode batch {batch}: {statistics.median(steps) * 1e3:.2f} ms a step"
                )
                for talk in talks:
                    loop.scheduler.close(talk.name, loop.now())
            for history in (1024, 8192, 32768):
                talk = Talk(loop, f"h{history}")
                talk.begin([(17 * i) % 50_000 for i in range(history)], 32)
                talk.finish()
                firsts = []
                for turn in range(5):
                    begun = time.perf_counter()
                    talk.begin([(turn + 29 * i) % 50_000 for i in range(32)], 32)
                    talk.finish()
                    assert talk.first is not None
                    firsts.append(talk.first - begun)
                loop.scheduler.close(talk.name, loop.now())
                print(
                    f"overlap {overlap}: first token at {history}: {statistics.median(firsts) * 1e3:.2f} ms"
                )
            del loop
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--timings", action="store_true")
    chosen = parser.parse_args()
    if not chosen.timings and not check():
        raise SystemExit(1)
    if not chosen.checks:
        timings()
