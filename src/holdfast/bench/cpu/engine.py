"""Decode and prefill of the embedded default on the CPU: the engine beside transformers, in one process.

    python -m benchmarks.cpu_engine [--threads 2] [--repeats 5] [--prefills 512 2048] [--batches 1 4 16]

Each round measures every case of both systems, so that a busy moment of the machine touches both; the figures
are medians over the rounds, with the smallest and the largest. The engine runs the quantised weights as
`holdfast chat` does, and the dequantised float32 ones; transformers runs float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from holdfast import Engine, Sampling
from holdfast.engine.pull import pull

DECODE_AFTER = 64
DECODED = 64

Case = Callable[[int], float]


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens that no round has seen before, so that nothing comes from a cache."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (length,), generator=generator).tolist()


def engine_prefill(engine: Engine, length: int, seed: int) -> float:
    """Tokens a second of a prompt."""
    began = time.perf_counter()
    engine.generate([prompt(length, seed)], Sampling(max_tokens=1, temperature=0.0))
    return length / (time.perf_counter() - began)


def engine_decode(engine: Engine, batch: int, seed: int) -> float:
    """Tokens a second of `batch` turns at once, after their first ones."""
    sampling = Sampling(max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True)
    turns = [engine.session().say(prompt(DECODE_AFTER, seed * 100 + row), sampling) for row in range(batch)]
    while any(not turn._bound()[1].tokens for turn in turns):
        engine.drive()
    said = sum(len(turn._bound()[1].tokens) for turn in turns)
    began = time.perf_counter()
    for turn in turns:
        turn.wait()
    rate = (batch * (DECODED + 1) - said) / (time.perf_counter() - began)
    engine.close()
    return rate


@torch.inference_mode()
def their_prefill(model: PreTrainedModel, length: int, seed: int) -> float:
    tokens = torch.tensor([prompt(length, seed)])
    began = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    return length / (time.perf_counter() - began)


@torch.inference_mode()
def their_decode(model: PreTrainedModel, batch: int, seed: int) -> float:
    rows = [prompt(DECODE_AFTER, seed * 100 + row) for row in range(batch)]
    answer = model(torch.tensor(rows), use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    for _ in range(DECODED):
        chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
        answer = model(chosen, past_key_values=answer.past_key_values, use_cache=True, logits_to_keep=1)
    return batch * DECODED / (time.perf_counter() - began)


def load_theirs(path: str) -> PreTrainedModel:
    """The same file as transformers reads it, dequantised."""
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"])).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefills", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    path = str(pull("smollm2"))
    options: dict[str, object] = {"kv_tokens": 8192, "context_length": 4096, "leave_history": False}
    engines = {
        "holdfast": Engine(path, **options),
        "holdfast float32": Engine(path, dtype="float32", **options),
    }
    theirs = load_theirs(path)
    cases: dict[tuple[str, str], Case] = {}
    for length in chosen.prefills:
        for name, engine in engines.items():
            cases[f"prefill {length}", name] = lambda seed, e=engine, n=length: engine_prefill(e, n, seed)
        cases[f"prefill {length}", "transformers float32"] = lambda seed, n=length: their_prefill(
            theirs, n, seed
        )
    for batch in chosen.batches:
        for name, engine in engines.items():
            cases[f"decode, {batch} at once", name] = lambda seed, e=engine, n=batch: engine_decode(
                e, n, seed
            )
        cases[f"decode, {batch} at once", "transformers float32"] = lambda seed, n=batch: their_decode(
            theirs, n, seed
        )
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    for seed in range(chosen.repeats + 1):
        for key, case in cases.items():
            rate = case(seed + 1)
            if seed:  # The first round warms up.
                rates[key].append(rate)
    names = [*engines, "transformers float32"]
    table = Table(title=f"SmolLM2-135M-Instruct, tokens/s, {chosen.threads} threads, median and range")
    for heading in ("case", *names):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case_name in dict.fromkeys(name for name, _ in cases):
        table.add_row(case_name, *(shown(rates[case_name, name]) for name in names))
    Console(width=120).print(table)


def shown(rates: list[float]) -> str:
    """A median with its range."""
    return f"{median(rates):.1f} [{min(rates):.0f}-{max(rates):.0f}]"


if __name__ == "__main__":
    main()
