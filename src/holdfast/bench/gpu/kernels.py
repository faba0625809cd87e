"""Checks every Triton kernel on the GPU against float64 formulas, then times it beside its roofline.

    PYTHONPATH=src python3 benchmarks/gpu_kernels.py               # checks, then all timings
    PYTHONPATH=src python3 benchmarks/gpu_kernels.py --only attend  # checks and timings whose name has it
    PYTHONPATH=src python3 benchmarks/gpu_kernels.py --checks       # no timings; --timings: no checks
    PYTHONPATH=src python3 benchmarks/gpu_kernels.py --timings --only layer --sustained

Needs torch, triton and numpy alone. A check poisons what must not be read or must be written with NaN, and
compares in bfloat16 and float32 with the formulas of `tests/kernels/naive.py`. A timing captures several
calls in one CUDA graph (which also shows that the kernel never waits for the host) and takes the median of
replays. The roofline is the larger of bytes moved over the measured copy bandwidth and operations over the
measured rate of a large bfloat16 matrix product. `--sustained` then repeats each for a second, as a server
would: a GPU that is held at its limit of power lowers its clock. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel_checks
from benchmarks.gpu_power import Meter
from benchmarks.kernel_cases import Case, cases
from benchmarks.kernel_checks import LIMITS
from benchmarks.kernel_far import check_far
from benchmarks.product_checks import PRODUCT_CHECKS

CHECKS = {**PRODUCT_CHECKS, **kernel_checks.CHECKS, "far": check_far}
CHECKERS = 8
REPEATS = 20
REPLAYS = 5
LOADED_SECONDS, SUSTAINED_SECONDS = 0.4, 1.0
"""How long a GPU is loaded until its clock has settled, and how long it is then watched."""


def graph_of(call: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of one call, inside a graph of several."""
    graph = graph_of(call, repeats)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), operations a second of a large matrix product."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    bandwidth = 4 * source.numel() / seconds(lambda: torch.neg(source, out=target), 5)
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / seconds(lambda: torch.mm(left, right), 5)
    return bandwidth, rate


def run_check(name: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether a check holds, and a line about it; in a process of its own."""
    torch.manual_seed(1)
    title = f"check {name:24} {str(dtype).removeprefix('torch.'):9}"
    begun = time.perf_counter()
    try:
        worst = max(CHECKS[name](dtype), default=0.0)
    except Exception:  # noqa: BLE001 - the rest is still worth running
        return False, f"{title} RAISED\n{traceback.format_exc(limit=-4)}"
    fine = worst <= LIMITS[dtype]
    took = time.perf_counter() - begun
    return fine, f"{title} worst {worst:.2e} {'ok' if fine else 'WRONG'} in {took:.0f} s"


def run_checks(only: str) -> int:
    """Runs the checks, several at a time since most of it is compilation; answers how many failed."""
    wanted = [(name, dtype) for name in CHECKS if only in name for dtype in LIMITS]
    failed = 0
    with ProcessPoolExecutor(CHECKERS, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(run_check, *check) for check in wanted]
        for check in as_completed(running):
            fine, line = check.result()
            failed += not fine
            print(line, flush=True)
    return failed


def sustained(call: Callable[[], object], repeats: int, meter: Meter) -> str:
    """The time of one call, its energy and the clock, after the GPU has been busy with it for a while."""
    graph = graph_of(call, repeats)

    def replay_for(duration: float) -> tuple[int, float, int]:
        """Calls, how long they took, and the clock in the middle of the last of them."""
        begun, calls, clock = time.perf_counter(), 0, 0
        while time.perf_counter() - begun < duration:
            for _ in range(REPLAYS):
                graph.replay()
            clock = meter.megahertz()
            torch.cuda.synchronize()
            calls += REPLAYS * repeats
        return calls, time.perf_counter() - begun, clock

    replay_for(LOADED_SECONDS)
    before = meter.joules()
    calls, took, clock = replay_for(SUSTAINED_SECONDS)
    joules = meter.joules() - before
    return (
        f"{'':18} {'for a second':44} {took / calls * 1e6:10.1f} us  {joules / calls * 1e3:.1f} mJ, "
        f"{joules / took:.0f} W, {clock} MHz"
    )


def time_case(case: Case, bandwidth: float, rate: float) -> str:
    took = seconds(case.call, case.repeats)
    floor = max(case.bytes_moved / bandwidth, case.operations / rate)
    figures = f"{case.bytes_moved / took / 1e12:7.2f} TB/s {case.operations / took / 1e12:7.1f} TFLOP/s"
    return (
        f"{case.name:18} {case.shape:44} {took * 1e6:10.1f} us  roofline {floor * 1e6:9.1f} us "
        f"{100 * floor / took:5.1f} %  {figures}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--checks", action="store_true", help="run no timings")
    parser.add_argument("--timings", action="store_true", help="run no checks")
    parser.add_argument("--sustained", action="store_true", help="time each for a second too")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    failed = 0 if arguments.timings else run_checks(arguments.only)
    if not arguments.checks:
        bandwidth, rate = ceilings()
        device = torch.cuda.get_device_name()
        print(
            f"{device}: copy {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        meter = Meter() if arguments.sustained else None
        for make in cases(arguments.only):
            try:
                case = make()
                print(time_case(case, bandwidth, rate), flush=True)
                if meter is not None:
                    print(sustained(case.call, case.repeats, meter), flush=True)
                del case
            except Exception:  # noqa: BLE001 - the rest is still worth running
                failed += 1
                print(f"case RAISED\n{traceback.format_exc(limit=-4)}", flush=True)
            torch.cuda.empty_cache()
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
