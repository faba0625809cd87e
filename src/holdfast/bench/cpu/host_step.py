"""What the host does for a decode step, the model's forward pass left out.

    python -m benchmarks.host_step [--rows 1 16 64 256]

A few small layers decode on the CPU, greedily, without stop strings. The processor time of the forward pass
is taken out of each step's; what is left is planning, inputs, sampling of tiny logits, texts, settling and
telling. On a GPU all of it runs beside the device's own work: a step cannot be shorter than this.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_models import small_models
from benchmarks.gpu_sessions import Talk, open_loop, open_model
from holdfast.engine.loop import EngineLoop
from holdfast.models.model import Model

STEPS = 100
INPUT = 16
VOCABULARY = 120


class Watch:
    """How long the forward passes of a model have taken."""

    def __init__(self, model: Model) -> None:
        self.spent = 0.0
        self._forward = model.forward
        vars(model)["forward"] = self._timed

    def _timed(self, *arguments: object, **named: object) -> object:
        begun = time.thread_time()
        result = self._forward(*arguments, **named)  # type: ignore[arg-type]
        self.spent += time.thread_time() - begun
        return result


def open_small(rows: int) -> EngineLoop:
    config = next(iter(small_models().values()))
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = open_model(Path(folder), "cpu", "float32", dummy=False)
    tokens = rows * (INPUT + 2 * STEPS) * 2
    return open_loop(model, False, page_size=64, kv_tokens=tokens, overlap=True, max_running=rows)


def host_time(rows: int) -> float:
    """Milliseconds of a step that are not the model's."""
    loop = open_small(rows)
    talks = [Talk(loop, f"talk {number}") for number in range(rows)]
    for number, talk in enumerate(talks):
        talk.begin([(number + 31 * place) % VOCABULARY for place in range(INPUT)], 2 * STEPS)
    while not all(len(talk.said) >= 4 for talk in talks):
        loop.step()
    watch, times = Watch(loop.model), []
    for _ in range(STEPS):
        begun, spent = time.thread_time(), watch.spent
        loop.step()
        times.append(time.thread_time() - begun - (watch.spent - spent))
    assert not any(talk.over for talk in talks), "a step of fewer rows was measured"
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    for rows in parser.parse_args().rows:
        took = host_time(rows)
        print(f"{rows:4} rows  {took:6.2f} ms a step  {took / rows * 1e3:6.1f} us a row", flush=True)


if __name__ == "__main__":
    main()
