"""Batches for the kernel tests, and Triton's interpreter: it must be asked for before Triton is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

torch.set_num_threads(1)
