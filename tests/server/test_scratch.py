"""The directory of the engine's socket: made for one server, removed with it, or by the next one."""

import signal
import tempfile
from pathlib import Path

import pytest

from holdfast.server.link.scratch import LOCK, PREFIX, Scratch, remove_abandoned
from tests.server.conftest import Serve


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_nobody_holds_is_removed(temporary: Path) -> None:
    dead, starting, other = (temporary / f"{PREFIX}{name}" for name in ("dead", "starting", "file"))
    for path in (dead, starting):
        path.mkdir()
    (dead / LOCK).touch()
    (dead / "engine-0.sock").touch()
    other.touch()
    (temporary / f"{PREFIX}link").symlink_to(starting)
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / LOCK).touch()
    first, second = Scratch(), Scratch()
    left = {path.name for path in temporary.iterdir()}
    assert left == {
        first.path.name,
        second.path.name,
        starting.name,
        other.name,
        f"{PREFIX}link",
        "elsewhere",
    }
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    remove_abandoned(temporary)
    assert not first.path.exists() and second.path.exists()
    second.remove()


def test_what_a_killed_server_leaves_goes_with_the_next_start(serve: Serve, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    lives, dies = (serve("echo", environment=environment) for _ in range(2))

    dies.stop(signal.SIGKILL)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    following = serve("echo", environment=environment)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    assert lives.get("/health/ready").status_code == following.get("/health/ready").status_code == 200
    for server in (lives, following):
        assert server.stop() == 0
    assert list(tmp_path.glob(f"{PREFIX}*")) == []
