"""Selects Triton's interpreter where there is no GPU.

This must happen before Triton is imported, and holds for the whole process, so tests of kernels import this
module first. On a machine with a GPU, Triton compiles; `python3 -m tests.gpu` has the checks.
"""

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")
