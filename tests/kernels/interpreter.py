"""Asks for Triton's interpreter where there is no device.

It must be asked for before anybody imports Triton, and then holds for the whole process: whoever runs tests
of kernels imports this first. Where there is a device it is not asked for: other tests compile for it, and
`python3 -m tests.gpu` has the checks.
"""

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")
