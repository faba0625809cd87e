"""What all tests share: the Hypothesis profiles, and skipping of tests that cannot run here.

Tests marked `gpu` need a device. Tests marked `asserts` expect an assertion of the core to fail; `python -O`
removes those. Pytest compiles the assertions of test modules itself, so `-O` does not remove them; the
modules that tests share are registered for the same treatment.

The default profile draws the same examples in every run, so a test that passed passes again; the profile
`explore` (`pytest --hypothesis-profile=explore`) draws new ones. Neither Hypothesis nor torch is needed to
load this file: machines with a GPU run the tests of the kernels with torch and pytest alone.
"""

import gc
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

# They run in environments of their own (`make clients`), which read `clients/pytest.ini`, not this file.
collect_ignore = ["clients"]

pytest.register_assert_rewrite("tests.core", "tests.property", "tests.sim")

if find_spec("hypothesis"):
    settings = import_module("hypothesis").settings
    settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
    settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
    settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests of kernels will come behind others, in a folder that holds both, prepare for them now.

    A process whose workers run the tests needs nothing.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    folder = Path(__file__).parent / "kernels"
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if find_spec("torch") and any(path in folder.parents for path in named):
        import_module("tests.kernels.interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Run no garbage collection while tests are collected: modules stay, and would be visited each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no device, and `asserts` where there are no assertions.

    Imports torch only if there is a test that needs a device.
    """
    if not __debug__:
        for item in items:
            if item.get_closest_marker("asserts"):
                item.add_marker(pytest.mark.skip(reason="python -O removes the assertion that it expects"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _device_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _device_is_there() -> bool:
    return find_spec("torch") is not None and bool(import_module("torch").cuda.is_available())
