"""Selects Triton's interpreter where there is no GPU, and spares it work that has no effect.

The first must happen before Triton is imported, and holds for the whole process, so tests of kernels import
this module first. On a machine with a GPU, Triton compiles; `python3 -m tests.gpu` has the checks.

The interpreter replaces the functions of `triton.language` at each launch, and again, around the replaced
ones, at each call of a device function. Once a launch is enough. It also computes for each sum and product
of integers whether it overflows, and uses the result only with its option `debug`, which is off.
"""

import os
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def spare_work() -> None:
    """Replace the language once a launch, and compute nothing about overflows."""
    language, interpreter = import_module("triton.language"), import_module("triton.runtime.interpreter")
    patch, launch, launched = interpreter._patch_lang, interpreter.GridExecutor.__call__, False
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def patch_once(_function: object) -> Any:
        nonlocal launched
        if launched:
            return None
        launched = True
        return patch(everything)

    def launch_once(executor: Any, *arguments: Any, **options: Any) -> None:
        nonlocal launched
        try:
            launch(executor, *arguments, **options)
        finally:
            launched = False

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    spare_work()
