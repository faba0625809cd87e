"""Time every kernel on the GPU beside its roofline.

    PYTHONPATH=src python3 -m holdfast.bench.gpu.kernels                  # all timings
    PYTHONPATH=src python3 -m holdfast.bench.gpu.kernels --only attend    # kernels with this in their name
    PYTHONPATH=src python3 -m holdfast.bench.gpu.kernels --only layer --sustained

Needs torch, triton and numpy. The roofline is the larger of bytes moved over the measured copy bandwidth and
operations over the measured rate of a large bfloat16 matrix product. `--sustained` also repeats each case for
a second: a GPU at its power limit lowers its clock. `python3 -m tests.gpu` checks the same kernels against
float64 formulas. Exit status 1: a case raised an error.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

import torch

from holdfast.bench.gpu.graphs import REPLAYS, Ceilings, graph_of, measure_ceilings, require_gpu, seconds
from holdfast.bench.gpu.kernel_cases import Case, cases
from holdfast.bench.gpu.power import Meter

LOADED_SECONDS, SUSTAINED_SECONDS = 0.4, 1.0
"""How long the GPU runs until its clock has settled, and how long it is then measured."""


def sustained(call: Callable[[], object], repeats: int, meter: Meter) -> str:
    """One line: the time of a call, its energy and the clock, under sustained load."""
    graph = graph_of(call, repeats)

    def replay_for(duration: float) -> tuple[int, float, int]:
        """The number of calls, the seconds that they took, and the clock during the last of them."""
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


def time_case(case: Case, ceilings: Ceilings) -> str:
    """One line: the time of a case beside its roofline."""
    took = seconds(case.call, case.repeats)
    floor = max(case.bytes_moved / ceilings.bandwidth, case.operations / ceilings.rate)
    figures = f"{case.bytes_moved / took / 1e12:7.2f} TB/s {case.operations / took / 1e12:7.1f} TFLOP/s"
    return (
        f"{case.name:18} {case.shape:44} {took * 1e6:10.1f} us  roofline {floor * 1e6:9.1f} us "
        f"{100 * floor / took:5.1f} %  {figures}"
    )


def main() -> int:
    """Time the cases that the arguments select; status 1 if one of them raised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="time only kernels whose name contains this")
    parser.add_argument("--sustained", action="store_true", help="also run each case for a second")
    arguments = parser.parse_args()
    require_gpu()
    torch.manual_seed(1)
    ceilings, failed = measure_ceilings(), 0
    print(
        f"{torch.cuda.get_device_name()}: copy {ceilings.bandwidth / 1e12:.2f} TB/s, "
        f"matrix product {ceilings.rate / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    meter = Meter() if arguments.sustained else None
    for make in cases(arguments.only):
        try:
            case = make()
            print(time_case(case, ceilings), flush=True)
            if meter is not None:
                print(sustained(case.call, case.repeats, meter), flush=True)
            del case
        except Exception:  # noqa: BLE001 - the other cases are still timed
            failed += 1
            print(f"case RAISED\n{traceback.format_exc(limit=-4)}", flush=True)
        torch.cuda.empty_cache()
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
