"""Kernels compile for a GPU that is not there: what the interpreter does not see.

A compiled kernel takes an integer argument of 1 for a constant, which has no tensor's methods.
"""

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Absent:
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")


driver.set_active(Absent())
launch = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **named: launch(
    self, *args, grid=grid, warmup=True, **named
)

from holdfast.kernels.triton import linear, linear_gated

tokens, outputs = int(sys.argv[1]), int(sys.argv[2])
x, weight = torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(outputs, 64, dtype=torch.bfloat16)
linear(x, weight, None)
linear_gated(x, torch.cat((weight, weight)), None, "swiglu")
print("compiled")
"""


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("outputs", [1, 24])
def test_projections_of_any_width_compile(tokens: int, outputs: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tokens), str(outputs)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr[-2000:]
