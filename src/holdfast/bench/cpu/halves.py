"""A model whose weights are not quantised on a CPU: the C kernels beside float32 weights in torch.

    python -m holdfast.bench.cpu.halves [--dtype bfloat16] [--rows 1 4 16] [--prompt 512] [--rounds 8]

A Llama of random weights, larger than the caches, is written to a directory and opened twice: with `--dtype
auto` and with `--dtype float32`. Rounds take turns. Figures are from the round with the smallest processor
time, with one thread: other load on the machine can only make it larger.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from holdfast.bench.cpu.formats import SHAPES, Shape
from holdfast.bench.models import write_model
from holdfast.bench.prompts import prompt
from holdfast.bench.tables import make_table
from holdfast.bench.timing import in_turn
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling

VOCABULARY = 32_000
DECODED = 16
CONTEXT = 64

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

KINDS = {"float32 in torch": "float32", "as stored, in C": "auto"}
"""The option `--dtype` by what it does with the weights."""


def configuration(shape: Shape) -> dict[str, object]:
    """A Llama of a shape, with tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }


def write_weights(directory: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Random weights of a Llama that keep magnitudes."""
    width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"model.embed_tokens": (VOCABULARY, width)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        sizes |= {
            f"{at}.self_attn.q_proj": (queries, width),
            f"{at}.self_attn.k_proj": (keys, width),
            f"{at}.self_attn.v_proj": (keys, width),
            f"{at}.self_attn.o_proj": (width, queries),
            f"{at}.mlp.gate_proj": (shape.inner, width),
            f"{at}.mlp.up_proj": (shape.inner, width),
            f"{at}.mlp.down_proj": (width, shape.inner),
        }
    norms = [
        f"model.layers.{layer}.{name}"
        for layer in range(shape.layers)
        for name in ("input", "post_attention")
    ]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(size, generator=generator).mul_(size[1] ** -0.5).to(dtype)
        for name, size in sizes.items()
    }
    tensors |= {f"{name}_layernorm.weight": torch.ones(width, dtype=dtype) for name in norms}
    save_file(
        tensors | {"model.norm.weight": torch.ones(width, dtype=dtype)}, directory / "model.safetensors"
    )


def seconds_of_decode(engine: Engine, rows: int, seed: int) -> float:
    """Processor time of a step in which each of some turns gets a token."""
    sampling = Sampling(max_tokens=DECODED, temperature=0.0, ignore_eos=True)
    turns = [engine.session().say(prompt(CONTEXT, seed * 100 + row), sampling) for row in range(rows)]
    while any(not turn._stream.tokens for turn in turns):
        engine.drive()
    left = rows * DECODED - sum(len(turn._stream.tokens) for turn in turns)
    began = time.process_time()
    for turn in turns:
        turn.wait()
    taken = time.process_time() - began
    engine.close()
    return taken * rows / left


def seconds_of_prompt(engine: Engine, length: int, seed: int) -> float:
    """Processor time from a prompt to its first token."""
    began = time.process_time()
    engine.generate([prompt(length, seed)], Sampling(max_tokens=1, temperature=0.0))
    return time.process_time() - began


def measure(
    engines: dict[str, Engine], rows: Sequence[int], length: int, rounds: int
) -> dict[str, list[float]]:
    """For each engine the smallest seconds of a step with so many rows, then of the prompt."""
    least = {name: [float("inf")] * (len(rows) + 1) for name in engines}
    for number in range(rounds + 1):
        for name in in_turn(list(engines), number):
            engine, best = engines[name], least[name]
            found = [seconds_of_decode(engine, count, number + 1) for count in rows]
            found.append(seconds_of_prompt(engine, length, number + 1))
            best[:] = [min(pair) for pair in zip(best, found, strict=True)]
    return least


def main() -> None:
    """Measure both and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1024")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[chosen.shape]
    options = {"kv_tokens": 4096, "step_tokens": max(1024, chosen.prompt), "leave_history": False}
    with tempfile.TemporaryDirectory(prefix="halves-") as folder:
        path = write_model(Path(folder), configuration(shape))
        write_weights(path, shape, DTYPES[chosen.dtype])
        engines = {name: Engine(str(path), dtype=dtype, **options) for name, dtype in KINDS.items()}
        found = measure(engines, chosen.rows, chosen.prompt, chosen.rounds)
    headings = [*(f"{count} rows, tokens/s" for count in chosen.rows), f"prompt of {chosen.prompt}, tokens/s"]
    table = make_table(f"{chosen.shape} in {chosen.dtype}", "one thread", ("weights",), headings)
    tokens = [*chosen.rows, chosen.prompt]
    for name, seconds in found.items():
        table.add_row(name, *(f"{count / taken:,.1f}" for count, taken in zip(tokens, seconds, strict=True)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
