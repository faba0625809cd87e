"""The table of kernel checks, and how they are run without pytest.

A check poisons with NaN what must not be read or must be written, and compares in bfloat16 and float32 with
the float64 formulas of `tests/kernels/naive.py`.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from tests.gpu.codes_checks import check_codes, check_codes_experts
from tests.gpu.far_checks import check_far
from tests.gpu.kernel_checks import KERNEL_CHECKS, LIMITS
from tests.gpu.product_checks import PRODUCT_CHECKS
from tests.gpu.quantised_checks import check_quantised, check_quantised_experts
from tests.gpu.scaled_checks import SCALED_CHECKS

CHECKS = {
    **PRODUCT_CHECKS,
    **KERNEL_CHECKS,
    **SCALED_CHECKS,
    "far": check_far,
    "codes": check_codes,
    "codes_experts": check_codes_experts,
    "quantised": check_quantised,
    "quantised_experts": check_quantised_experts,
}
WORKERS = 8


def run_check(name: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether a check passes, and a line about it; runs in a worker process."""
    torch.manual_seed(1)
    title = f"check {name:24} {str(dtype).removeprefix('torch.'):9}"
    begun = time.perf_counter()
    try:
        worst = max(CHECKS[name](dtype), default=0.0)
    except Exception:  # noqa: BLE001 - the other checks still run
        return False, f"{title} RAISED\n{traceback.format_exc(limit=-4)}"
    fine = worst <= LIMITS[dtype]
    took = time.perf_counter() - begun
    return fine, f"{title} worst {worst:.2e} {'ok' if fine else 'WRONG'} in {took:.0f} s"


def run_checks(only: str) -> int:
    """Run the checks in several processes, since most of the time is compilation; returns how many failed."""
    wanted = [(name, dtype) for name in CHECKS if only in name for dtype in LIMITS]
    failed = 0
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(run_check, *check) for check in wanted]
        for check in as_completed(running):
            fine, line = check.result()
            failed += not fine
            print(line, flush=True)
    return failed
