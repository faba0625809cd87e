"""The host's time for a decode step, without the model's forward pass.

    python -m holdfast.bench.cpu.host_step [--rows 1 16 64 256]

A few small layers decode greedily on the CPU, without stop strings. The processor time of the forward pass is
subtracted from each step's; the rest is planning, inputs, sampling from tiny logits, settling and events.
On a GPU it overlaps with the device's work: a step cannot be shorter than this.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from holdfast.bench.loops import Talk, open_loop, open_model
from holdfast.bench.small_models import saved_small_model
from holdfast.models.model import Model

STEPS = 100
INPUT = 16
VOCABULARY = 120


class Watch:
    """The processor time that the forward passes of a model have taken."""

    def __init__(self, model: Model) -> None:
        self.spent = 0.0
        self._forward: Callable[..., Any] = model.forward
        vars(model)["forward"] = self._timed

    def _timed(self, *arguments: Any, **named: Any) -> Any:
        begun = time.thread_time()
        result = self._forward(*arguments, **named)
        self.spent += time.thread_time() - begun
        return result


def host_time(rows: int) -> float:
    """Milliseconds of a decode step without its forward pass."""
    with saved_small_model("dense") as path:
        model = open_model(path, "cpu", "float32", dummy=False)
    tokens = rows * (INPUT + 2 * STEPS) * 2
    loop = open_loop(model, False, page_size=64, kv_tokens=tokens, overlap=True, max_running=rows)
    talks = [Talk(loop, f"talk {number}") for number in range(rows)]
    for number, talk in enumerate(talks):
        talk.begin([(number + 31 * place) % VOCABULARY for place in range(INPUT)], 2 * STEPS)
    while not all(len(talk.said) >= 4 for talk in talks):
        loop.step()
    watch, times = Watch(model), []
    for _ in range(STEPS):
        begun, spent = time.thread_time(), watch.spent
        loop.step()
        times.append(time.thread_time() - begun - (watch.spent - spent))
    assert not any(talk.over for talk in talks), "a turn ended while it was measured"
    return statistics.median(times) * 1e3


def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    for rows in parser.parse_args().rows:
        took = host_time(rows)
        print(f"{rows:4} rows  {took:6.2f} ms a step  {took / rows * 1e3:6.1f} us a row", flush=True)


if __name__ == "__main__":
    main()
