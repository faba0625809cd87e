"""The models of the parity tests, each made once a session, and few threads."""

from collections.abc import Callable, Iterator

import pytest
import torch

from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.weights import Placement
from tests.few_threads import few_threads
from tests.models.reference import VARIANTS
from tests.models.shared_references import shared_reference
from tests.parity.subject import Subject

__all__ = ["few_threads"]


@pytest.fixture(scope="session")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """The subject of a variant, made when first asked for."""
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            variant = VARIANTS[name]
            reference = shared_reference(name, tmp_path_factory)
            placement = Placement(torch.device("cpu"), torch.float32, quantised=True)
            ours = load_model(open_checkpoint(reference.path), placement, context_length=1024)
            made[name] = Subject(name, variant.build(), ours, reference)
        return made[name]

    return get


@pytest.fixture
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Iterator[Subject]:
    """The subject that a test is parametrised with, by name; reports (`--junitxml`) get its largest error."""
    chosen = subject_of(request.param)
    chosen.errors.clear()
    yield chosen
    if chosen.errors:
        request.node.user_properties.append(("error", f"{max(chosen.errors):.1e}"))
