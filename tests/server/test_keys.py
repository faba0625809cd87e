"""Keys: how they are found, whom they may name, who may read them, and how many sessions one may open."""

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holdfast.engine.options import OptionError
from holdfast.server.http.keys import ANONYMOUS, Caller, Keys, warn_if_readable
from holdfast.server.options import ServerOptions
from tests.server.conftest import Serve


def lines_run(keys: Keys, key: str | None) -> int:
    """How many lines of Python finding a caller takes."""
    count = 0

    def traced(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    sys.settrace(traced)
    try:
        keys.caller(key)
    finally:
        sys.settrace(None)
    return count


def test_a_caller_is_found_at_the_same_cost_among_any_number_of_keys() -> None:
    few, many = (Keys({f"key-{n}": f"tenant-{n}" for n in range(count)}, "admin") for count in (10, 10_000))
    for key in ("key-0", "key-9", "admin", "wrong", "", None):
        assert 0 < lines_run(many, key) == lines_run(few, key)
    assert many.caller("key-9999") == Caller("tenant-9999", admin=False)
    assert many.caller("key-10000") is None and many.caller(None) is None
    assert many.caller("admin") == Caller(ANONYMOUS, admin=True)


@pytest.mark.parametrize("line", [f"{ANONYMOUS}:secret", f"ann:x\n{ANONYMOUS}:secret device=0.5"])
def test_no_key_has_the_tenancy_of_those_without_one(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(OptionError) as refused:
        Keys.read(ServerOptions(api_keys=str(path)))
    assert refused.value.option == "api_keys" and "secret" not in str(refused.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o644, 1), (0o604, 1)])
def test_a_file_of_keys_that_others_can_read_draws_a_warning(
    tmp_path: Path, mode: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("ann:secret")
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        warn_if_readable(str(path))
        warn_if_readable(None)
    assert len(caplog.messages) == warned and "secret" not in caplog.text


def test_how_many_sessions_a_tenant_may_have() -> None:
    one, two = Keys({"a": "ann", "b": "ann"}, None), Keys({"a": "ann", "b": "bob"}, None)
    assert [two.session_limit(None, count) for count in (1, 2, 3, 10_000)] == [1, 1, 2, 5000]
    assert one.session_limit(None, 10) is None and Keys({}, None).session_limit(None, 10) is None
    assert two.session_limit(10, 10) == 10 and one.session_limit(3, 10) == 3


def test_one_key_does_not_lock_out_another(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann:secret-a\nbob:secret-b\n")
    path.chmod(0o644)
    server = serve("echo", "--max-sessions", "4", "--api-keys", str(path))
    ann, bob = ({"Authorization": f"Bearer secret-{name}"} for name in "ab")
    opened = [server.post("/v1/sessions", {}, headers=ann).status_code for _ in range(4)]
    assert opened == [201, 201, 429, 429]
    assert server.post("/v1/sessions", {}, headers=bob).status_code == 201
    assert sum("key file is readable by other users" in line for line in server.lines) == 1
