"""A Llama of random weights as a GGUF file, which Holdfast and llama.cpp both read.

    python -m holdfast.bench.cpu.write_gguf PATH [--shape llama-1024] [--dtype bfloat16]

Vocabulary and chat template are those of the embedded model. `llama-quantize PATH OTHER Q4_K_M` makes a file
in K-quants of it; SmolLM2 itself has rows that no super-block divides. Text that it generates means nothing,
time and memory are those of a real model of its size. It is plain ASCII, since llama-server breaks off an
answer that is not valid text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from holdfast.bench.cpu.formats import SHAPES, Shape
from holdfast.bench.models import find_model

CONTEXT = 8192
SPACE = "Ġ"
"""How vocabularies of bytes write a space; other bytes that are not printable are not ASCII either."""
KINDS = {
    "bfloat16": (torch.bfloat16, GGMLQuantizationType.BF16),
    "float16": (torch.float16, GGMLQuantizationType.F16),
    "float32": (torch.float32, GGMLQuantizationType.F32),
}


def copy_tokenizer(writer: gguf.GGUFWriter, path: Path) -> torch.Tensor:
    """Copy a file's tokenizer; returns for each token whether it is plain text."""
    plain: list[bool] = []
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        writer.add_key_value(name, value, kind, field.types[1] if kind is GGUFValueType.ARRAY else None)
        if name == "tokenizer.ggml.tokens":
            plain = [text.replace(SPACE, " ").isascii() and not text.startswith("<") for text in value]
    return torch.tensor(plain)


def matrices(shape: Shape, vocabulary: int) -> dict[str, tuple[int, int]]:
    """The sizes of all matrices by their names in the file; the embedding is tied."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"token_embd": (vocabulary, shape.width)}
    for layer in range(shape.layers):
        sizes |= {
            f"blk.{layer}.attn_q": (queries, shape.width),
            f"blk.{layer}.attn_k": (keys, shape.width),
            f"blk.{layer}.attn_v": (keys, shape.width),
            f"blk.{layer}.attn_output": (shape.width, queries),
            f"blk.{layer}.ffn_gate": (shape.inner, shape.width),
            f"blk.{layer}.ffn_up": (shape.inner, shape.width),
            f"blk.{layer}.ffn_down": (shape.width, shape.inner),
        }
    return sizes


def write(path: Path, shape: Shape, dtype: str) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, "llama")
    with find_model("smollm2") as embedded:
        plain = copy_tokenizer(writer, embedded.path)
    vocabulary = len(plain)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    stored, kind = KINDS[dtype]
    generator = torch.Generator().manual_seed(0)
    for name, size in matrices(shape, vocabulary).items():
        weight = torch.randn(size, generator=generator).mul_(size[1] ** -0.5).to(stored)
        if name == "token_embd":
            weight[~plain] = 0  # of all logits some are positive, so these tokens are never said
        numbers = (
            weight.view(torch.int16).numpy().view("uint8") if stored is torch.bfloat16 else weight.numpy()
        )
        writer.add_tensor(f"{name}.weight", numbers, raw_dtype=kind)
    ones = torch.ones(shape.width).numpy()
    norms = [f"blk.{layer}.{part}_norm" for layer in range(shape.layers) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the chosen model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1024")
    parser.add_argument("--dtype", choices=KINDS, default="bfloat16")
    chosen = parser.parse_args()
    write(chosen.path, SHAPES[chosen.shape], chosen.dtype)


if __name__ == "__main__":
    main()
