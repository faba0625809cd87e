"""Requests made from the server's own schema: whatever it allows, and whatever it forbids, gets no 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok

from tests.server.serving import Server

SKIPPED = {"/v1/storm", "/health_generate"}


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_no_request_of_the_schema_breaks_the_server(echo: Server, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{echo.url}/openapi.json")
    seen: set[str] = set()
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path in SKIPPED:
            continue
        seen.add(f"{operation.method} {operation.path}")
        strategy = operation.as_strategy()

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def try_one(case: schemathesis.Case) -> None:
            response = case.call(base_url=echo.url, timeout=120)
            assert response.status_code < 500 or response.status_code == 503, response.text[:500]

        try_one()
    assert len(seen) > 15
    echo.close_all()


@pytest.mark.parametrize("path", ["/v1/sessions/{session_id}/turns", "/v1/chat/completions", "/generate"])
def test_the_schema_names_the_routes(echo: Server, path: str) -> None:
    assert path in echo.get("/openapi.json").json()["paths"]
