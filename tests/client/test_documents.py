"""The examples of the client's page run as they stand, and pages show the files that they talk about."""

import re
from pathlib import Path

import pytest

from holdfast.cli import COMMANDS
from holdfast.cli.config import read_config
from holdfast.cli.options import option_kinds
from holdfast.client import Client
from holdfast.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def test_examples_run(client: Client, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "client.md").read_text()
    examples = EXAMPLE.findall(page)
    assert len(examples) >= 8
    assert ADDRESS in page
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example.replace(ADDRESS, url), "docs/client.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "['echo']" in shown
    assert "Name three rivers." in shown
    assert "invalid_value sampling.temperature" in shown


def test_the_example_of_openai_s_realtime_events_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = EXAMPLE.findall((ROOT / "docs" / "realtime.md").read_text())
    exec(compile(example.replace(ADDRESS, url), "docs/realtime.md", "exec"), {})
    assert capsys.readouterr().out == "Name a river. completed 0\n"


@pytest.mark.parametrize("page", ["command.md", "operations.md"])
def test_configuration_files_are_accepted(page: str, tmp_path: Path) -> None:
    examples = FILE.findall((ROOT / "docs" / page).read_text())
    assert examples
    for example in examples:
        path = tmp_path / "holdfast.toml"
        path.write_text(example)
        assert read_config(path, option_kinds(), ["serve"])


def test_the_page_of_the_command_names_every_command() -> None:
    page = (ROOT / "docs" / "command.md").read_text()
    missing = [command.name for command in COMMANDS if f"holdfast {command.name}" not in page]
    assert missing == []


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    unit = (ROOT / "deploy" / "holdfast.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > ServerOptions().drain_seconds
    assert "KillMode=mixed" in unit
