"""The configuration that HAProxy gets: only the port of the service is open to other machines."""

from pathlib import Path

import pytest

from holdfast.replicas.haproxy import UNAVAILABLE, OpenPort, rewritten

# The parts of a configuration of Ray Serve 2.60 that matter here.
SERVE = """global
    log 127.0.0.1:514 local0 info
    stats socket /run/serve/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    errorfile 502 /run/serve/500.http
    errorfile 503 /run/serve/500.http
    errorfile 504 /run/serve/500.http
frontend prometheus
    bind :9101
    http-request use-service prometheus-exporter if { path /metrics }
frontend http_frontend
    bind *:8000
    use_backend http-holdfast if is_http-holdfast
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
backend http-holdfast
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
  stats enable
"""
ERRORS = Path("/run/serve/unavailable.http")


def test_only_the_service_stays_open() -> None:
    lines = rewritten(SERVE, ERRORS).splitlines()
    assert [line.strip() for line in lines if line.strip().startswith("bind")] == [
        "bind 127.0.0.1:9101",
        "bind *:8000",
        "bind 127.0.0.1:8404",
    ]
    assert "    stats socket /run/serve/admin.sock mode 600 level admin expose-fd listeners" in lines


def test_requests_that_nobody_answered_may_be_sent_again() -> None:
    lines = [line.strip() for line in rewritten(SERVE, ERRORS).splitlines() if "errorfile" in line]
    assert lines == [
        *(f"errorfile {status} {ERRORS}" for status in (502, 503, 504)),
        f"http-request return status 503 errorfile {ERRORS}",
    ]
    head, _, body = UNAVAILABLE.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert f"Content-Length: {len(body)}" in head


def test_nothing_else_changes() -> None:
    before, after = SERVE.splitlines(), rewritten(SERVE, ERRORS).splitlines()
    assert len(before) == len(after)
    changed = [old.split()[0] for old, new in zip(before, after, strict=True) if old != new]
    assert changed == ["stats", "errorfile", "errorfile", "errorfile", "bind", "http-request", "bind"]
    assert rewritten(rewritten(SERVE, ERRORS), ERRORS) == rewritten(SERVE, ERRORS)


@pytest.mark.parametrize("bind", ["bind /run/x.sock", "bind quic4@:443", "bind :::9101,:9102"])
def test_a_port_that_is_not_understood_is_refused(bind: str) -> None:
    with pytest.raises(OpenPort, match="cannot tell where stats listens"):
        rewritten(f"listen stats\n  {bind}\n", ERRORS)
