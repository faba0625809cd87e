"""Everything that is claimed about the GPU: first that it computes the right thing, then how fast.

    PYTHONPATH=src python3 benchmarks/gpu.py                      # all of it
    PYTHONPATH=src python3 benchmarks/gpu.py --checks             # kernels and tokens alone
    PYTHONPATH=src python3 benchmarks/gpu.py --model qwen3-8b     # one model's figures
    PYTHONPATH=src python3 benchmarks/gpu.py --model qwen3-8b --profile 1 64

Needs torch, triton, transformers, safetensors and numpy alone, and one NVIDIA GPU. Every kernel is checked
against float64 formulas (`gpu_kernels.py` also times them beside their rooflines), and small models of each
layout must say the same tokens on the CPU, on the GPU and from graphs. Then models with real shapes and dummy
weights are timed. One JSON object a line: the figure, what SGLang 0.5.12.post1 does on the same GPU with the
same shapes and lengths (`anchor`, on an H200), their ratio, and the aim. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_timings as timings
from benchmarks.gpu_kernels import ceilings, run_checks
from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_sessions import check_tokens, dense_alone, open_loop, shaped_model, to_fp8
from holdfast.engine.loop import EngineLoop
from holdfast.engine.memory_plan import plan_memory
from holdfast.engine.options import make_options
from holdfast.kernels.cuda.twelve import COLUMNS
from holdfast.models.config import ExpertsConfig
from holdfast.models.model import Model

# (model, measure): SGLang's figure and the aim. Milliseconds where less is better, else tokens a second.
ANCHORS: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("qwen3-8b", "decode 1"): (5.09, 4.7),
    ("qwen3-8b", "decode 16"): (5.34, 4.9),
    ("qwen3-8b", "decode 64"): (6.34, 5.8),
    ("qwen3-8b", "decode 256"): (12.0, 11.0),
    ("qwen3-8b", "turn 1024"): (20.5, 7.0),
    ("qwen3-8b", "turn 8192"): (21.2, 7.0),
    ("qwen3-8b", "turn 32768"): (22.9, 9.0),
    ("qwen3-8b", "turn after abort 1024"): (37.5, None),
    ("qwen3-8b", "turn after abort 8192"): (224.0, None),
    ("qwen3-8b", "turn after abort 32768"): (1279.0, 9.9),
    ("qwen3-8b", "64 sessions tokens/s"): (5816.0, 7500.0),
    ("qwen3-8b", "64 sessions first token median"): (66.5, None),
    ("qwen3-8b", "64 sessions first token p90"): (85.6, None),
    ("qwen3-8b", "prefill 1 x 8192"): (37287.0, 33558.0),
    ("qwen3-8b", "prefill 16 x 2048"): (41752.0, 37577.0),
    ("nemotron-h-8b", "decode 1"): (5.82, 4.8),
    ("nemotron-h-8b", "decode 16"): (7.54, 5.8),
    ("nemotron-h-8b", "decode 64"): (11.4, 9.0),
    ("nemotron-h-8b", "decode 256"): (35.4, 25.0),
    ("nemotron-h-8b", "turn 1024"): (37.1, 9.0),
    ("nemotron-h-8b", "turn 8192"): (35.6, 9.0),
    ("nemotron-h-8b", "turn 32768"): (44.1, 10.0),
    ("nemotron-h-8b", "turn after abort 1024"): (96.0, None),
    ("nemotron-h-8b", "turn after abort 8192"): (352.0, None),
    ("nemotron-h-8b", "turn after abort 32768"): (1394.0, 11.0),
    ("nemotron-h-8b", "64 sessions tokens/s"): (2813.0, 5600.0),
    ("nemotron-h-8b", "64 sessions first token median"): (235.0, None),
    ("nemotron-h-8b", "64 sessions first token p90"): (931.0, None),
    ("nemotron-h-8b", "prefill 1 x 8192"): (25900.0, 25900.0),
    ("nemotron-h-8b", "prefill 16 x 2048"): (25822.0, 25822.0),
}

OPTIONS: dict[str, object] = {
    "page_size": 64,
    "kv_tokens": 400_000,
    "window_tokens": 100_000,
    "overlap": True,
    "max_running": 256,
    "chunk_tokens": 8192,
    "step_tokens": 8192,
    "checkpoints": 1,
}
STATE_SLOTS = 700
ROUNDS = 10
SESSION_RUNS = 3


def report(**figure: object) -> None:
    print(json.dumps(figure), flush=True)


def note(model: str, measure: str, value: float, unit: str, floor: float | None = None) -> None:
    anchor, aim = ANCHORS.get((model, measure), (None, None))
    figure: dict[str, object] = {"model": model, "measure": measure, "value": round(value, 3), "unit": unit}
    if floor is not None:
        figure["roofline"] = round(floor, 3)
    if anchor is not None:
        # Above one is better, whatever is measured.
        figure |= {"anchor": anchor, "ratio": round(anchor / value if unit == "ms" else value / anchor, 2)}
    if aim is not None:
        figure |= {"aim": aim, "reached": value <= aim if unit == "ms" else value >= aim}
    report(**figure)


def checks() -> bool:
    """Kernels, then tokens."""
    failed = run_checks("")
    report(check="kernels against float64 formulas", failed=failed)
    wrong = 0
    for name, same in check_tokens():
        wrong += not same
        if not same:
            report(check="tokens", case=name, same=same)
    report(check="tokens: CPU, GPU, graphs", different=wrong)
    return not failed and not wrong


def step_bytes(model: Model, batch: int, context: int) -> float:
    """Bytes that a decode step must move: weights, keys and values once, states read and written."""
    shape = model.memory_shape
    moved = float(weight_bytes(model, batch))
    for pages in (shape.full, shape.window):
        if pages is not None:
            seen = context if pages is shape.full else min(context, shape.window_tokens)
            moved += batch * pages.bytes_per_page(seen, 2)
    if shape.state is not None:
        moved += 2 * batch * shape.state.bytes_per_slot(2)
    return moved


def weight_bytes(model: Model, tokens: int) -> int:
    """Bytes of all tensors that were there before any memory of sequences, less the table of embeddings.

    Of a weight that is there twice a step reads one.
    """
    twice = [(linear.weight.nbytes, linear.twelve.nbytes) for linear in model._dense if linear.twelve]
    spared = sum(dense if tokens <= COLUMNS[-1] else packed for dense, packed in twice)
    return LOADED[id(model)] - model.config.vocabulary * model.config.width * 2 - spared


LOADED: dict[int, int] = {}


def measure_decode(name: str, loop: EngineLoop, bandwidth: float) -> None:
    for batch in (1, 16, 64, 256):
        timings.decode_step(loop, batch, 8)
        # A step of experts reads those that its tokens pick, which shapes alone do not tell.
        known = not any(isinstance(layer.mlp, ExpertsConfig) for layer in loop.model.config.layers)
        floor = step_bytes(loop.model, batch, 256) / bandwidth * 1e3 if known else None
        note(name, f"decode {batch}", timings.decode_step(loop, batch), "ms", floor)


def measure_turns(name: str, loop: EngineLoop) -> None:
    for history in (1024, 8192, 32768):
        for measure, value in timings.turns(loop, history).items():
            note(name, f"{measure} {history}", value, "ms")


def measure_prefill(name: str, loop: EngineLoop) -> None:
    for prompts, length in ((1, 8192), (16, 2048), (1, 2048), (1, 512), (1, 32)):
        note(name, f"prefill {prompts} x {length}", timings.prefill(loop, prompts, length), "tokens/s")


def measure_sessions(name: str, loop: EngineLoop) -> None:
    """The medians of some runs, after a short one; and what was still compiled in them."""
    timings.sessions(loop, 64, 2, 1024)
    with timings.compilations() as compiled:
        runs = [timings.sessions(loop, 64, ROUNDS, 1024) for _ in range(SESSION_RUNS)]
    for measure in runs[0]:
        unit = measure if measure == "tokens/s" else "ms"
        note(name, f"64 sessions {measure}", statistics.median(run[measure] for run in runs), unit)
    report(model=name, runs=[round(run["tokens/s"]) for run in runs], compiled_in_them=compiled)
    note(name, "audit, share of a decode step of 64", timings.share_of_audit(loop, 64), "of the time")


def measure_tiers(name: str, model: Model) -> None:
    """Sessions of 32k where two fit: every turn finds its session on the host."""
    small = {**OPTIONS, "kv_tokens": 80_000, "window_tokens": 8192, "state_slots": 8, "checkpoints": 0}
    loop = open_loop(model, True, **small, host_memory=24 << 30, session_tokens=34_000, leave_history=False)
    for measure, value in timings.spill_and_restore(loop, 32768).items():
        note(name, f"{measure} 32768", value, "ms")


def measure(name: str, parts: list[str], profiled: list[int], bandwidth: float) -> None:
    begun = time.perf_counter()
    before = torch.cuda.memory_allocated()
    model = shaped_model(SHAPES[name])
    LOADED[id(model)] = torch.cuda.memory_allocated() - before
    options = dict(OPTIONS)
    if model.memory_shape.state is not None:
        options |= {"state_slots": STATE_SLOTS, "kv_tokens": 200_000}
    loop = open_loop(model, False, **options)
    loaded = time.perf_counter()
    loop.executor.capture()
    report(model=name, loaded_s=round(loaded - begun, 1), captured_s=round(time.perf_counter() - loaded, 1))
    in_use = torch.cuda.memory_allocated()
    with few_collections():
        if "decode" in parts:
            measure_decode(name, loop, bandwidth)
        if "turns" in parts:
            measure_turns(name, loop)
        if "prefill" in parts:
            measure_prefill(name, loop)
        if "sessions" in parts:
            measure_sessions(name, loop)
    for batch in profiled:
        for kernel, took, count in timings.kernel_times(loop, batch)[:24]:
            report(model=name, profile=batch, kernel=kernel, us=round(took, 1), launches=count)
    del loop
    gc.collect()
    torch.cuda.empty_cache()
    report(model=name, in_use_gib=round(in_use / 2**30, 1), planned=planned(model))
    if "tiers" in parts:
        measure_tiers(name, model)
    if "dense" in parts and name == "qwen3-8b":
        measure_dense(name, model)
    if "fp8" in parts and name == "qwen3-8b":
        measure_fp8(name, model)


def planned(model: Model) -> list[str]:
    """How an empty GPU would be shared out, after a run of the largest step."""
    return plan_memory(model, make_options(page_size=64, step_tokens=8192, max_running=256)).lines()


def measure_dense(name: str, model: Model) -> None:
    """The same model without its weights in twelve bits, and once more with them, beside each other."""
    runs: dict[str, list[float]] = {"dense alone": [], "twelve bits": []}
    with dense_alone(model):
        without = open_loop(model, True, **{**OPTIONS, "max_running": 64, "kv_tokens": 116_000})
    loops = {
        "dense alone": without,
        "twelve bits": open_loop(model, True, **{**OPTIONS, "max_running": 64, "kv_tokens": 116_000}),
    }
    with few_collections():
        for way, loop in loops.items():
            for batch in (1, 16, 64):
                timings.decode_step(loop, batch, 8)
                note(f"{name} {way}", f"decode {batch}", timings.decode_step(loop, batch), "ms")
            timings.sessions(loop, 64, 2, 1024)
        for _ in range(SESSION_RUNS):
            for way, loop in loops.items():
                runs[way].append(timings.sessions(loop, 64, ROUNDS, 1024)["tokens/s"])
    for way, values in runs.items():
        note(f"{name} {way}", "64 sessions tokens/s", statistics.median(values), "tokens/s")


def measure_fp8(name: str, model: Model) -> None:
    """The same shapes with weights in 8-bit floating point, a scale for each 128 x 128 of them."""
    to_fp8(model)
    loop = open_loop(model, True, **{**OPTIONS, "max_running": 64})
    with few_collections():
        for batch in (1, 16, 64):
            timings.decode_step(loop, batch, 8)
            note(f"{name} fp8", f"decode {batch}", timings.decode_step(loop, batch), "ms")
        note(f"{name} fp8", "turn 1024", timings.turns(loop, 1024)["turn"], "ms")
        for prompts, length in ((1, 8192), (16, 2048)):
            value = timings.prefill(loop, prompts, length)
            note(f"{name} fp8", f"prefill {prompts} x {length}", value, "tokens/s")
        measure_sessions(f"{name} fp8", loop)


@contextmanager
def few_collections() -> Iterator[None]:
    """What was loaded is not looked at again by the garbage collector, as in a server."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


PARTS = ["decode", "turns", "prefill", "sessions", "tiers", "dense", "fp8"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checks", action="store_true", help="no timings")
    parser.add_argument("--timings", action="store_true", help="no checks")
    parser.add_argument("--model", choices=SHAPES, action="append", help="only this model")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument(
        "--profile", type=int, nargs="*", default=[], help="batch sizes whose kernels to list"
    )
    arguments = parser.parse_args()
    torch.manual_seed(1)
    report(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        date=time.strftime("%Y-%m-%d"),
    )
    good = arguments.timings or checks()
    if not arguments.checks:
        bandwidth, rate = ceilings()
        report(copy_tb_s=round(bandwidth / 1e12, 2), product_tflop_s=round(rate / 1e12))
        for name in arguments.model or SHAPES:
            measure(name, arguments.part or PARTS, arguments.profile, bandwidth)
            gc.collect()
            torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
