"""Turns under JSON schemas on the CPU: tokens a second and first tokens beside the same turns without.

    python -m holdfast.bench.cpu.constrained [--rows 16] [--tokens 64] [--repeats 5] [--threads 2] [--json]
    python -m holdfast.bench.cpu.constrained --write-tokenizer tokenizer.json

SmolLM2 with different real schemas, both kinds of rows in turn in one engine; the figures are medians over
the rounds. `--write-tokenizer` writes SmolLM2's tokenizer for `holdfast.bench.gpu --tokenizer` and ends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from holdfast.bench.constrained import (
    Constraints,
    first_token_delay,
    measure,
    read_tokenizer,
    steps_of_fixed_keys,
)
from holdfast.bench.figures import OURS
from holdfast.bench.machine import ForeignLoad
from holdfast.engine.engine import Engine
from holdfast.engine.options import make_options
from holdfast.engine.start.startup import open_loop


def figures(rows: int, tokens: int, repeats: int) -> list[dict[str, object]]:
    """The ratio of the rates, and the steps per token of an object with six fixed keys."""
    load = ForeignLoad()
    options = make_options(kv_tokens=16_384, context_length=4096, leave_history=False, max_running=rows)
    loop = open_loop("smollm2", options)
    constraints = Constraints(read_tokenizer(None), loop.setup.model.config.vocabulary)
    rates = measure(loop, constraints, rows, tokens, repeats)
    said, steps = steps_of_fixed_keys(loop, constraints)
    first, added = first_token_delay(Engine(loop))
    common = {"system": OURS, "foreign_load": round(load.cores(), 2)}
    found = [
        _figure("constrained", rates.ratio, "ratio") | {"rows": rows, "rounds": repeats},
        _figure("constrained_rate", rates.constrained, "tokens/s") | {"rows": rows},
        _figure("free_rate", rates.free, "tokens/s") | {"rows": rows},
        _figure("steps_per_token_of_fixed_keys", steps / said, "ratio") | {"tokens": said, "steps": steps},
        _figure("first_token_without_a_new_schema", first, "ms") | {"turns": 100},
        _figure("first_token_added_by_a_new_schema", added, "ms") | {"schemas": 100},
    ]
    return [figure | common for figure in found]


def _figure(name: str, value: float, unit: str) -> dict[str, object]:
    shown = round(value, 3)
    return {"name": name, "value": shown, "unit": unit, "min": shown, "max": shown}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object a line")
    parser.add_argument("--write-tokenizer", type=Path, help="write SmolLM2's tokenizer.json and end")
    chosen = parser.parse_args()
    if chosen.write_tokenizer is not None:
        chosen.write_tokenizer.write_text(read_tokenizer(None).written(), encoding="utf-8")
        return
    torch.set_num_threads(chosen.threads)
    for figure in figures(chosen.rows, chosen.tokens, chosen.repeats):
        print(json.dumps(figure) if chosen.as_json else f"{figure['name']}: {figure['value']}", flush=True)


if __name__ == "__main__":
    main()
