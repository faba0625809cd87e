"""What a draft head and the verification of its drafts cost on a CPU, at a planted acceptance.

    python -m holdfast.bench.cpu.heads [--layers 16] [--width 512] [--tokens 64] [--repeats 3] [--json]

A Llama of random weights, alone, with drafts that cost nothing, and with an EAGLE-3 head of random weights.
Figures are ratios of tokens a second, and of the time of a step, to the model alone, measured side by side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from holdfast.bench.drafts import DraftCase, measure_drafts
from holdfast.bench.loops import open_model
from holdfast.bench.machine import ForeignLoad
from holdfast.bench.models import write_model
from holdfast.bench.tables import make_table

__all__ = ["main"]

AGREEMENTS = (0.6, 0.8)
ROWS = (1, 4)


def shape(layers: int, width: int) -> dict[str, object]:
    """A Llama's configuration."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 256),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
    }


def main() -> None:
    """Measure and print a table, or one JSON object a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object a line")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    options = {"kv_tokens": 8192, "leave_history": False}
    load = ForeignLoad()
    cases = [
        DraftCase(rows, agreement, chosen.tokens, chosen.repeats) for agreement in AGREEMENTS for rows in ROWS
    ]
    found = []
    with tempfile.TemporaryDirectory(prefix="shape-") as folder:
        path = write_model(Path(folder), shape(chosen.layers, chosen.width))
        for figure in measure_drafts(
            lambda: open_model(path, "cpu", "float32", dummy=True), False, options, cases
        ):
            found.append({**figure, "foreign_load": round(load.cores(), 2)})
            if chosen.as_json:
                print(json.dumps(found[-1]), flush=True)
    if not chosen.as_json:
        keys = [key for key in found[0] if key != "name"]
        table = make_table(found[0]["name"], None, (), tuple(keys))
        for figure in found:
            table.add_row(*(str(figure[key]) for key in keys))
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
