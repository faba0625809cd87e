"""The wheel holds everything that the package needs at run time, and nothing that was only lying about."""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"


@pytest.mark.skipif(find_spec("setuptools") is None or find_spec("pip") is None, reason="needs a builder")
def test_every_file_is_in_the_wheel(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(SOURCE, copy / "src" / "holdfast", ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(copy)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("holdfast-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("holdfast/")}
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "holdfast = holdfast.cli:main" in archive.read(points).decode()
    parts = (copy / "src").rglob("*")
    expected = {path.relative_to(copy / "src").as_posix() for path in parts if path.is_file()}
    assert inside == {name for name in expected if name.startswith("holdfast/")}
    assert {"holdfast/py.typed", "holdfast/cli/serve.py", "holdfast/client/sync.py"} <= inside
