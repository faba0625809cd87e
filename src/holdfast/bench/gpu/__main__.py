"""Measure models on the GPU: decode steps, turns, prefill, sessions, spills, a storm, other weight formats.

    PYTHONPATH=src python3 -m holdfast.bench.gpu                      # checks, then all figures
    PYTHONPATH=src python3 -m holdfast.bench.gpu --checks             # checks alone
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --model qwen3-8b
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --model qwen3-8b --profile 1 64
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --part steps --model gpt-oss-20b-mxfp4
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --part constrained --tokenizer tokenizer.json
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --part tiers --part storm
    PYTHONPATH=src python3 -m holdfast.bench.gpu --timings --part drafts --model qwen3-8b

Needs torch, triton, safetensors, numpy and one NVIDIA GPU; the checks (`python3 -m tests.gpu`) need a
checkout and transformers too. Constrained turns need llguidance and a tokenizer, which
`holdfast.bench.cpu.constrained --write-tokenizer` writes; they are left out without. Models have real shapes
and dummy weights. Prints one JSON object a line: the figure, SGLang's on the same GPU with the same shapes
and lengths (`anchor`), their ratio, and the target (`aim`). Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.bench import constrained
from holdfast.bench.drafts import DraftCase, measure_drafts
from holdfast.bench.gpu import timings
from holdfast.bench.gpu.graphs import measure_ceilings, require_gpu
from holdfast.bench.gpu.kv8 import measure_kv8
from holdfast.bench.gpu.report import note, report
from holdfast.bench.gpu.roofline import Roofline
from holdfast.bench.gpu.shapes import DENSE, SHAPES, dense_only, shaped_model
from holdfast.bench.loops import capture_graphs, open_loop
from holdfast.bench.storm import Storm, host_room, storm
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.pauses import bound_pauses
from holdfast.engine.start.memory_plan import plan_memory
from holdfast.engine.start.pull import PullError
from holdfast.engine.step.executor import Executor
from holdfast.models.model import Model

CHECKS = Path("tests/gpu/__main__.py")

OPTIONS: dict[str, Any] = {
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
CONSTRAINED_RUNS = 7
"""More, since each run has other texts, of which more or less is forced."""

PARTS_BY_NAME = ["steps", "drafts"]
"""Measured only where they are named."""
SHARED_PARTS = ("decode", "turns", "prefill", "sessions", "constrained")
"""The parts that are measured with one engine loop."""
PARTS = [*SHARED_PARTS, "tiers", "storm", "defaults", "dense", "kv8"]


DRAFTS_AIMS = {(0.8, 1): 1.9, (0.8, 16): 1.3}
"""Tokens a second with drafts to those without, by acceptance and rows."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The parts to measure, the batch sizes whose kernels are profiled, and the tokenizer of grammars."""

    parts: Sequence[str]
    profiled: Sequence[int]
    tokenizer: Path | None = None
    """For constrained turns: a `tokenizer.json`."""
    storm: Storm = field(default_factory=Storm)


def measure_decode(name: str, loop: EngineLoop, roofline: Roofline) -> None:
    """Decode steps of four batch sizes, beside their rooflines."""
    for batch in (1, 16, 64, 256):
        timings.decode_step(loop, batch, 8)
        value = timings.decode_step(loop, batch)
        note(name, f"decode {batch}", value, "ms", roofline.decode_ms(batch, 256))


def measure_turns(name: str, loop: EngineLoop) -> None:
    """First tokens of turns on three lengths of history."""
    for history in (1024, 8192, 32768):
        for measure, value in timings.turns(loop, history).items():
            note(name, f"{measure} {history}", value, "ms")


def measure_prefill(name: str, loop: EngineLoop) -> None:
    """Tokens per second of prompts."""
    for prompts, length in ((1, 8192), (16, 2048), (1, 2048), (1, 512), (1, 32)):
        note(name, f"prefill {prompts} x {length}", timings.prefill(loop, prompts, length), "tokens/s")


def measure_sessions(name: str, loop: EngineLoop) -> None:
    """Medians of several runs after a warm-up, and the kernels that were still compiled during them."""
    timings.sessions(loop, 64, 2, 1024)
    with timings.compilations() as compiled:
        runs = [timings.sessions(loop, 64, ROUNDS, 1024) for _ in range(SESSION_RUNS)]
    for measure in runs[0]:
        unit = measure if measure == "tokens/s" else "ms"
        note(name, f"64 sessions {measure}", statistics.median(run[measure] for run in runs), unit)
    report(model=name, runs=[round(run["tokens/s"]) for run in runs], compiled_in_them=compiled)
    note(name, "audit, share of a decode step of 64", timings.share_of_audit(loop, 64), "of the time")


def measure_constrained(name: str, loop: EngineLoop, tokenizer: Path | None) -> None:
    """64 rows with JSON schemas beside 64 without, and the steps of an object with six fixed keys."""
    try:
        schemas = constrained.Constraints(
            constrained.read_tokenizer(tokenizer), loop.setup.model.config.vocabulary
        )
    except (GrammarError, PullError) as error:
        report(model=name, part="constrained", skipped=str(error))
        return
    with timings.compilations() as compiled:
        rates = constrained.measure(loop, schemas, 64, 256, CONSTRAINED_RUNS)
    note(name, "64 rows without schemas", rates.free, "tokens/s")
    note(name, "64 rows with schemas", rates.constrained, "tokens/s")
    report(model=name, measure="64 rows with schemas, to none", value=round(rates.ratio, 3), aim=0.95,
           reached=rates.ratio >= 0.95, tokens_per_step=round(rates.tokens_per_step, 2),
           compiled_in_them=compiled)  # fmt: skip
    tokens, steps = constrained.steps_of_fixed_keys(loop, schemas)
    report(model=name, measure="six fixed keys", tokens=tokens, steps=steps, ratio=round(steps / tokens, 3))


def measure_steps_alone(name: str, model: Model, profiled: Sequence[int], roofline: Roofline) -> None:
    """Decode steps and a prompt. Graphs are captured where steps lack them, so that few are."""
    options = {**OPTIONS, "kv_tokens": 64_000, "window_tokens": 32_000, "max_running": 64}
    if model.memory_shape.state is not None:
        options["state_slots"] = 4 * options["max_running"]
    loop = open_loop(model, False, **options)
    assert isinstance(loop.executor, Executor)
    loop.executor.capture(first_only=True)
    with few_collections():
        for batch in (1, 16, 64):
            timings.decode_step(loop, batch, 8)
            while loop.executor.capture_next(missed=True):
                pass
            timings.decode_step(loop, batch, 8)
            value = timings.decode_step(loop, batch)
            note(name, f"decode {batch}", value, "ms", roofline.decode_ms(batch, 256))
        timings.prefill(loop, 1, 8192)
        note(name, "prefill 1 x 8192", timings.prefill(loop, 1, 8192), "tokens/s")
    list_kernels(name, loop, profiled)


def list_kernels(name: str, loop: EngineLoop, profiled: Sequence[int]) -> None:
    """The kernels of decode steps, the longest first."""
    for batch in profiled:
        for kernel, took, count in timings.kernel_times(loop, batch)[:24]:
            report(model=name, profile=batch, kernel=kernel, us=round(took, 1), launches=count)


def measure_tiers(name: str, model: Model) -> None:
    """Sessions of 32k tokens where two fit: every turn finds its session spilled to the host."""
    small = {**OPTIONS, "kv_tokens": 80_000, "window_tokens": 8192, "state_slots": 8, "checkpoints": 0}
    loop = open_loop(model, True, **small, host_memory=24 << 30, session_tokens=34_000, leave_history=False)
    for measure, value in timings.spill_and_restore(loop, 32768).items():
        note(name, f"{measure} 32768", value, "ms")


def measure_storm(name: str, model: Model, shape: Storm) -> None:
    """96 clients on 300 sessions of 4,096 tokens, of which about 97 fit: all others lie on the host.

    A model with recurrent state has slots for the turns of all clients and about as many sessions at rest.
    """
    options = {**OPTIONS, "checkpoints": 0, "session_tokens": shape.tokens_max, "leave_history": False}
    if model.memory_shape.state is not None:
        options |= {"state_slots": 3 * shape.clients}
    host, sessions = host_room(model, shape, **options)
    shape = replace(shape, sessions=sessions)
    report(model=name, part="storm", sessions=sessions, clients=shape.clients, turns=shape.turns,
           host_gib=round(host / 2**30, 1))  # fmt: skip
    loop = open_loop(model, True, **options, host_memory=host)
    with few_collections():
        for measure, value in storm(loop, shape).items():
            timed = measure.startswith(("first token", "longest", "usual"))
            note(name, f"storm {measure}", value, "ms" if timed else measure.partition(" ")[0])


def measure_steps(name: str, model: Model, chosen: Selection, roofline: Roofline) -> None:
    """The selected parts that share one engine loop."""
    options = dict(OPTIONS)
    if model.memory_shape.state is not None:
        options |= {"state_slots": STATE_SLOTS, "kv_tokens": 200_000}
    begun = time.perf_counter()
    loop = open_loop(model, False, **options)
    built = time.perf_counter()
    capture_graphs(loop)
    report(model=name, built_s=round(built - begun, 1), captured_s=round(time.perf_counter() - built, 1))
    in_use = torch.cuda.memory_allocated()
    with few_collections():
        if "decode" in chosen.parts:
            measure_decode(name, loop, roofline)
        if "turns" in chosen.parts:
            measure_turns(name, loop)
        if "prefill" in chosen.parts:
            measure_prefill(name, loop)
        if "sessions" in chosen.parts:
            measure_sessions(name, loop)
        if "constrained" in chosen.parts:
            measure_constrained(name, loop, chosen.tokenizer)
    list_kernels(name, loop, chosen.profiled)
    report(model=name, in_use_gib=round(in_use / 2**30, 1))


def measure(name: str, chosen: Selection, bandwidth: float) -> None:
    """All selected parts of one model."""
    begun = time.perf_counter()
    before = torch.cuda.memory_allocated()
    model = shaped_model(SHAPES[name])
    roofline = Roofline(model, torch.cuda.memory_allocated() - before, bandwidth)
    report(model=name, loaded_s=round(time.perf_counter() - begun, 1))
    if "steps" in chosen.parts:
        measure_steps_alone(name, model, chosen.profiled, roofline)
    elif chosen.profiled or not set(SHARED_PARTS).isdisjoint(chosen.parts):
        measure_steps(name, model, chosen, roofline)
    gc.collect()
    torch.cuda.empty_cache()
    if not {"kv8", "steps", "drafts"}.issuperset(chosen.parts):  # which do not plan, or by themselves
        report(model=name, planned=planned(model))
    if "tiers" in chosen.parts:
        measure_tiers(name, model)
        gc.collect()
    if "storm" in chosen.parts:
        measure_storm(name, model, chosen.storm)
        gc.collect()
        torch.cuda.empty_cache()
    if "defaults" in chosen.parts:
        measure_defaults(name, model)
        gc.collect()
        torch.cuda.empty_cache()
    if "dense" in chosen.parts and name == "qwen3-8b":
        measure_dense(name, model)
    if "kv8" in chosen.parts:
        measure_kv8(name, model)
    if "drafts" in chosen.parts:
        measure_heads(name, model)


def measure_heads(name: str, model: Model) -> None:
    """Three drafts a step at a planted acceptance: verification alone, and with an EAGLE-3 head."""
    cases = [DraftCase(rows, agreement) for agreement in (0.6, 0.8) for rows in (1, 16)]
    options = {**OPTIONS, "kv_tokens": 32_000, "window_tokens": 16_000, "max_running": 64, "overlap": None}
    if model.memory_shape.state is not None:
        options["state_slots"] = 4 * options["max_running"]
    with few_collections():
        for figure in measure_drafts(lambda: model, True, options, cases):
            aim = DRAFTS_AIMS.get((figure["agreement"], figure["rows"]))
            reached = {} if aim is None else {"aim": aim, "reached": figure["head_to_none"] >= aim}
            report(model=name, **figure, **reached)


def planned(model: Model) -> list[str]:
    """The memory plan of an otherwise empty GPU, and the sizes that are chosen for it."""
    return plan_memory(model, make_options()).lines()


def measure_defaults(name: str, model: Model) -> None:
    """With default sizes: the start, prefill beside that of the best options, and pauses beside a prompt."""
    begun = time.perf_counter()
    loop = open_loop(model, False, overlap=True)
    assert isinstance(loop.executor, Executor)
    built = time.perf_counter()
    loop.executor.capture(first_only=True)
    ready = time.perf_counter()
    each: list[float] = []
    while loop.capturing.remaining:
        before = time.perf_counter()
        loop.capturing.when_idle()
        each.append(time.perf_counter() - before)
    report(model=name, part="defaults", measured_and_planned_s=round(built - begun, 1),
           first_graphs_s=round(ready - built, 1), other_graphs_s=round(sum(each), 1),
           longest_capture_s=round(max(each), 2), graphs=loop.executor.graphs)  # fmt: skip
    report(model=name, part="defaults", sizes=loop.setup.tuning.lines())
    with few_collections():
        timings.prefill(loop, 1, 8192)
        for prompts, length in ((1, 8192), (16, 2048)):
            value = timings.prefill(loop, prompts, length)
            note(name, f"default prefill {prompts} x {length}", value, "tokens/s")
        for batch in (16, 64, 256):
            for measure, value in timings.pauses_beside_a_prompt(loop, batch, 8192).items():
                unit = "steps" if measure.endswith("steps") else "ms"
                note(name, f"{measure}, {batch} answers beside 8192", value, unit)


def measure_dense(name: str, model: Model) -> None:
    """The model with and without weights packed in twelve bits, side by side."""
    runs: dict[str, list[float]] = {"dense alone": [], "twelve bits": []}
    with dense_only(model):
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


@contextmanager
def few_collections() -> Iterator[None]:
    """Freeze what was loaded and collect garbage rarely, as the server does."""
    usual = gc.get_threshold()
    bound_pauses()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def run_checks() -> bool:
    """Run the checks in a process of their own; returns whether all of them passed."""
    if not CHECKS.is_file():
        sys.exit(f"{CHECKS} not found: run in the root of a checkout, or pass --timings")
    return subprocess.run([sys.executable, "-m", "tests.gpu"], check=False).returncode == 0


def main() -> int:
    """Run what the arguments select; status 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checks", action="store_true", help="run the checks alone")
    parser.add_argument("--timings", action="store_true", help="skip the checks")
    parser.add_argument("--model", choices=SHAPES, action="append", help="measure this model; repeatable")
    parser.add_argument(
        "--part", choices=[*PARTS, *PARTS_BY_NAME], action="append", help="measure this part; repeatable"
    )
    parser.add_argument(
        "--profile", type=int, nargs="*", default=[], help="batch sizes whose kernels are listed"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for constrained turns")
    parser.add_argument(
        "--storm-sessions", type=int, default=300, help="sessions of the storm, if the host has room for them"
    )
    arguments = parser.parse_args()
    require_gpu()
    torch.manual_seed(1)
    report(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        date=time.strftime("%Y-%m-%d"),
    )
    good = arguments.timings or run_checks()
    if not arguments.checks:
        ceilings = measure_ceilings()
        report(copy_tb_s=round(ceilings.bandwidth / 1e12, 2), product_tflop_s=round(ceilings.rate / 1e12))
        chosen = Selection(
            arguments.part or PARTS,
            arguments.profile,
            arguments.tokenizer,
            Storm(sessions=arguments.storm_sessions),
        )
        for name in arguments.model or DENSE:
            measure(name, chosen, ceilings.bandwidth)
            gc.collect()
            torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
