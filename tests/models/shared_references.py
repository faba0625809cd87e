"""References that all workers and folders of a test run share: each is made once."""

import fcntl
import os

import pytest
import torch

from tests.models.reference import VARIANTS, Reference, make_reference, prompts


def shared_reference(name: str, factory: pytest.TempPathFactory) -> Reference:
    """The reference of a variant, made by the first worker and the first folder that ask for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    path, answers = folder / name, folder / f"{name}.pt"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers.exists():
            made = make_reference(VARIANTS[name], path)
            torch.save((made.generated, made.logits), answers)
            return made
    generated, logits = torch.load(answers)
    return Reference(path, prompts(), generated, logits)
