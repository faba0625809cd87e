"""Tiny models of a dense and a hybrid family, made once a session, and few threads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest

from holdfast.engine.engine import Engine
from tests.engine.cover import left_out
from tests.engine.tiny import CONFIGURATIONS, WINDOWED, tiny_engine, write_model
from tests.few_threads import few_threads

__all__ = ["few_threads"]

FOLDER = Path(__file__).parent

Value = TypeVar("Value")

SAID: dict[tuple[object, ...], object] = {}
"""What `Make.once` was told."""


class Make:
    """Makes engines of a model directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[Engine] = []

    def __call__(self, **options: object) -> Engine:
        self.made.append(tiny_engine(self.directory, **options))
        return self.made[-1]

    def once(self, tell: Callable[..., Value], *arguments: object) -> Value:
        """What `tell` says of undisturbed engines that it makes: asked once a session for each model."""
        key = (self.directory, tell, *arguments)
        if key not in SAID:
            SAID[key] = tell(self, *arguments)
        return cast(Value, SAID[key])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In `make test` models take turns over the other parameters, and cases over overlap (`cover`)."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != FOLDER:
            continue
        if hasattr(item, "callspec") and item.get_closest_marker("soak") is None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        for number in left_out(name, [case.callspec.params for case in cases]):
            cases[number].add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each tiny family."""
    families = (*CONFIGURATIONS, *WINDOWED)
    return {name: write_model(tmp_path_factory.mktemp("tiny") / name, name) for name in families}


@pytest.fixture(params=sorted(CONFIGURATIONS))
def make(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Make]:
    """Engines of a dense and a hybrid family in turn; at the end each is closed, audited and found empty."""
    yield from maker(directories[request.param])


@pytest.fixture(params=["bamba", "llama", pytest.param("mistral", marks=pytest.mark.soak), "olmo3"])
def make_any(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Make]:
    """As `make`, with families of every layout of memory; windows alone belong to the long runs."""
    yield from maker(directories[request.param])


def maker(directory: Path) -> Iterator[Make]:
    """Makes engines of a model directory; at the end each is closed, audited and found empty."""
    make = Make(directory)
    yield make
    for each in make.made:
        each.close()
        assert each.audit() == []
        assert each.loop.scheduler.audit.findings == []
        assert not each.loop.dispatcher.live.turns
        assert len(each.loop.executor._free_rows) == each.options.max_running
        each.loop.scheduler.flush()
        each.loop.step()
        each.loop.step()
        for pool in each.loop.scheduler.registry.ledger.pools.values():
            assert len(pool.free) == pool.size, f"{pool.counts()} are left when everything is closed"
        assert not each.loop.executor.tables._rows


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()
