"""One server process for the tests of a worker, with the strict audit; each test leaves it empty."""

from collections.abc import Iterator

import pytest

from holdfast.client import Client, Retries
from tests.client.serving import assert_nothing_is_held, serving

PATIENT = Retries(attempts=8, first_seconds=0.05, longest_seconds=1.0)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that says what it is told."""
    log = tmp_path_factory.mktemp("server") / "log"
    sizes = ("--kv-tokens", "65536", "--host-memory", "64M")  # The strict audit looks at every page.
    with serving(log, "echo", "--audit", "strict", *sizes) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client of that server; at the end no session is left, and nothing was found."""
    with Client(url, retries=PATIENT) as client:
        yield client
        assert_nothing_is_held(client)
