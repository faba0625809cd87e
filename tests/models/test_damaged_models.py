"""Models whose files are damaged: one error that names the file and what is wrong."""

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.engine.engine import Engine
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from holdfast.models.fields import ConfigurationError, reading
from tests.models.damage import DAMAGES, Change, damaged_file
from tests.models.gguf_files import finish, write_gguf
from tests.models.small import write_small_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("models") / "model")


def check(error: ConfigurationError, named: str) -> None:
    """The error is for people: one line of some length, with the file's name."""
    said = str(error)
    assert named in said
    assert "\n" not in said and len(said) < 1000, said


def test_the_model_that_is_damaged_can_be_loaded_whole(whole: Path) -> None:
    with Engine(str(whole), device="cpu", kv_tokens=512) as engine:
        assert engine.session().say("bak bal").wait().text


@pytest.mark.parametrize(("what", "named", "change"), DAMAGES, ids=[name for name, _, _ in DAMAGES])
def test_what_cannot_be_read_is_named(
    whole: Path, tmp_path: Path, what: str, named: str, change: Change
) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    change(damaged_file(model, named))
    with pytest.raises(ConfigurationError) as caught:
        Engine(str(model), device="cpu", kv_tokens=512)
    check(caught.value, named)


def test_end_tokens_outside_the_vocabulary_end_nothing(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    (model / "generation_config.json").write_text('{"eos_token_id": [-5, 0, 1000000000]}')
    assert open_checkpoint(model).generation.eos_tokens == (0,)


# --- GGUF ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_gguf(LlamaForCausalLM(config), path, Kind.F32)
    return path.read_bytes()


def entry(key: str, kind: int, value: bytes) -> bytes:
    """One key of a GGUF file's metadata."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def with_entry(content: bytes, added: bytes) -> bytes:
    """A GGUF file with one more key in front."""
    version, tensors, count = struct.unpack_from("<IQQ", content, 4)
    return content[:4] + struct.pack("<IQQ", version, tensors, count + 1) + added + content[24:]


def nested_arrays(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


TEXT, ARRAY, UINT32, UINT64 = 8, 9, 4, 10
GGUF_ENTRIES = {
    "arrays in arrays": entry("deep", ARRAY, nested_arrays(100_000)),
    "an array without end": entry("long", ARRAY, struct.pack("<IQ", UINT64, 1 << 60)),
    "an array of strings without end": entry("long", ARRAY, struct.pack("<IQ", TEXT, 1 << 60)),
    "a string without end": entry("long", TEXT, struct.pack("<Q", 1 << 62)),
    "a key without end": struct.pack("<Q", 1 << 62),
    "an unknown type": entry("odd", 77, b""),
    "an alignment of zero": entry("general.alignment", UINT32, struct.pack("<I", 0)),
    "an absurd alignment": entry("general.alignment", UINT64, struct.pack("<Q", 1 << 62)),
    "a name that is no text": struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1),
}


@pytest.mark.parametrize("what", GGUF_ENTRIES)
def test_an_absurd_header_of_a_gguf_file_is_refused(tmp_path: Path, whole_gguf: bytes, what: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_entry(whole_gguf, GGUF_ENTRIES[what]))
    with pytest.raises(ConfigurationError) as caught:
        open_checkpoint(path)
    check(caught.value, "model.gguf")


@pytest.mark.parametrize(
    ("place", "layout", "value"),
    [(8, "<Q", 1 << 60), (16, "<Q", 1 << 60), (8, "<Q", (1 << 20) + 1), (16, "<Q", (1 << 16) + 1)],
)
def test_absurd_counts_of_a_gguf_file_are_refused_before_anything_is_read(
    tmp_path: Path, whole_gguf: bytes, place: int, layout: str, value: int
) -> None:
    content = bytearray(whole_gguf)
    struct.pack_into(layout, content, place, value)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"claims {value} ") as caught:
        open_checkpoint(tmp_path / "model.gguf")
    check(caught.value, "model.gguf")


def test_absurd_dimensions_and_layers_of_a_gguf_file_are_refused(tmp_path: Path, whole_gguf: bytes) -> None:
    path, name = tmp_path / "model.gguf", b"token_embd.weight"
    at = whole_gguf.index(name) + len(name)
    many = bytearray(whole_gguf)
    struct.pack_into("<I", many, at, 1 << 31)
    large = bytearray(whole_gguf)
    struct.pack_into("<QQ", large, at + 4, 1 << 62, 1 << 62)
    key = b"llama.block_count"
    layers = bytearray(whole_gguf)
    struct.pack_into("<I", layers, whole_gguf.index(key) + len(key) + 4, (1 << 32) - 1)
    for content, said in ((many, "dimensions of a tensor"), (large, "past the end"), (layers, "layers")):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=said) as caught:
            open_checkpoint(path)
        check(caught.value, "model.gguf")


@pytest.mark.parametrize("template", ["{% for %}", "{{ " + "(" * 50_000])
def test_a_template_of_a_gguf_file_that_cannot_be_compiled_names_the_file(
    tmp_path: Path, whole_gguf: bytes, template: str
) -> None:
    tokens = [f"t{number}".encode() for number in range(64)]
    listed = b"".join(struct.pack("<Q", len(token)) + token for token in tokens)
    content = whole_gguf
    for key, kind, value in (
        ("tokenizer.ggml.model", TEXT, struct.pack("<Q", 4) + b"gpt2"),
        ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", TEXT, 64) + listed),
        ("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", TEXT, 0)),
        ("tokenizer.chat_template", TEXT, struct.pack("<Q", len(template)) + template.encode()),
    ):
        content = with_entry(content, entry(key, kind, value))
    # Metadata in front moves the tensors: the alignment is kept by padding what stands between.
    path = tmp_path / "model.gguf"
    path.write_bytes(content + bytes(1 << 16))
    with pytest.raises(ConfigurationError) as caught:
        open_tokenizer(open_checkpoint(path))
    check(caught.value, "model.gguf")
    assert "template" in str(caught.value) or "nested" in str(caught.value)


def test_a_gguf_file_of_the_package_itself_stays_readable(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("words", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    finish(writer)
    with pytest.raises(ConfigurationError, match=r"llama\.attention\.head_count"):
        open_checkpoint(tmp_path / "model.gguf")


# --- whatever is raised -----------------------------------------------------------------------------


class Panic(BaseException):
    """What a library in Rust raises when it gives up."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RecursionError(), "nested too deeply"),
        (MemoryError(), "more memory than there is"),
        (Panic("index out of\nbounds"), "index out of bounds"),
        (KeyError(), "KeyError"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_whatever_is_raised_while_a_file_is_read_is_said_in_one_line(
    tmp_path: Path, error: BaseException, said: str
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ConfigurationError, match=said) as caught, reading(path):
        raise error
    check(caught.value, "model.bin")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_who_wants_to_stop_is_let_go(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), reading(tmp_path):
        raise error
