"""Damages of a model's files: each changes one file of a whole model so that it cannot be loaded.

A damage is a name, the file that an error must name, and what is done to it. Used by tests of loading in
this process and by tests of `holdfast serve`.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-"
UNEXPECTED = "unexpected (1)"

DEEP = 200_000


def cut(path: Path) -> None:
    """Half of the file is missing."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def holds(content: bytes) -> Change:
    """The file holds something else."""

    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def sparse(size: int) -> Change:
    """The file claims to be large, and takes no room."""

    def damage(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return damage


def directory(path: Path) -> None:
    """A directory has the file's name."""
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    """A pipe that nobody writes to has the file's name: whoever opens it waits."""
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    """A device without end has the file's name."""
    path.unlink()
    path.symlink_to("/dev/zero")


def keys(**changes: Any) -> Change:
    """Keys of a JSON object have other values."""

    def damage(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """The header of a safetensors file says something else."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        changed = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
        path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])

    return damage


def header_length(length: int) -> Change:
    """The header of a safetensors file claims to be so long."""

    def damage(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

    return damage


def raw_header(text: bytes) -> Change:
    """The header of a safetensors file is this."""
    return holds(struct.pack("<Q", len(text)) + text)


def _every(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda entries: {name: entry | fields for name, entry in entries.items() if name[0] != "_"}


def _named(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda entries: {**entries, name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}


NESTED = b"[" * DEEP + b"]" * DEEP
NESTED_OBJECT = b'{"a":' * DEEP + b"1" + b"}" * DEEP
LOOPS = "".join(f"{{% for i{n} in messages %}}" for n in range(60)) + "{% endfor %}" * 60

_JSON_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, INDEX)
DAMAGES: list[tuple[str, str, Change]] = [
    *(
        (f"{name} {what}", name, change)
        for name in _JSON_FILES
        for what, change in (
            ("cut short", cut),
            ("empty", holds(b"")),
            ("of bytes that are no text", holds(b'{"a": "\xff\xfe"}')),
            ("nested too deeply", holds(NESTED_OBJECT)),
            ("nested lists", holds(NESTED)),
            ("a list", holds(b"[1, 2]")),
            ("too large", sparse((256 << 20) + 1)),
            ("a directory", directory),
            ("a pipe", pipe),
            ("a device", device),
        )
    ),
    ("more layers than memory", CONFIG, keys(num_hidden_layers=10**9)),
    ("more layers than there are", CONFIG, keys(num_hidden_layers=1 << 61)),
    ("sizes of no model", CONFIG, keys(hidden_size=1 << 61)),
    ("rows that the weights do not have", "model.embed_tokens.weight", keys(hidden_size=1 << 30)),
    ("a vocabulary that the weights do not have", "model.embed_tokens.weight", keys(vocab_size=1 << 31)),
    ("no architecture", CONFIG, keys(architectures=None)),
    ("an unknown architecture", "NoSuchModel", keys(architectures=["NoSuchModel"])),
    ("architectures of lists", CONFIG, keys(architectures=[["LlamaForCausalLM"]])),
    ("rotary settings of another type", CONFIG, keys(rope_parameters=[1], rope_scaling=[1])),
    ("a negative size", CONFIG, keys(intermediate_size=-1)),
    ("a temperature in words", GENERATION, keys(do_sample=True, temperature="hot")),
    ("an end token in words", GENERATION, keys(eos_token_id="stop")),
    ("an unknown kind of vocabulary", TOKENIZER, keys(model={"type": "Runes", "vocab": {}})),
    ("a vocabulary of another type", TOKENIZER, keys(model={"type": "BPE", "vocab": [1], "merges": []})),
    ("negative token ids", TOKENIZER, keys(model={"type": "BPE", "vocab": {"a": -1}, "merges": []})),
    ("merges of nothing", TOKENIZER, keys(model={"type": "BPE", "vocab": {}, "merges": [["a", "b"]]})),
    ("an unknown pre-tokenizer", TOKENIZER, keys(pre_tokenizer={"type": "Runes"})),
    (
        "a pattern that cannot be compiled",
        TOKENIZER,
        keys(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
    ),
    ("a template that cannot be parsed", TOKENIZER_CONFIG, keys(chat_template="{% for x in %}{{ x }")),
    ("an unknown filter in a template", TOKENIZER_CONFIG, keys(chat_template="{{ messages | runes }}")),
    ("a template of nested brackets", TOKENIZER_CONFIG, keys(chat_template="{{ " + "(" * 50_000 + "1")),
    (
        "a template of nested lists",
        TOKENIZER_CONFIG,
        keys(chat_template="{{ " + "[" * 5000 + "]" * 5000 + " }}"),
    ),
    ("a template that is a number", TOKENIZER_CONFIG, keys(chat_template=7)),
    (
        "a named template that is a list",
        TOKENIZER_CONFIG,
        keys(chat_template=[{"name": "default", "template": []}]),
    ),
    ("a template of nested loops", TOKENIZER_CONFIG, keys(chat_template=LOOPS)),
    ("a template that is too long", TOKENIZER_CONFIG, keys(chat_template="x" * ((1 << 20) + 1))),
    ("a template file that is no text", TEMPLATE, holds(b"\xff\xfe\xfa")),
    ("a template file that cannot be parsed", TEMPLATE, holds(b"{% if %}")),
    ("a template file that is too large", TEMPLATE, sparse(1 << 40)),
    ("an index without a map", "model", keys(weight_map={})),
    ("an index whose map is a list", INDEX, keys(weight_map=["a"])),
    ("an index of numbers", INDEX, keys(weight_map={"model.norm.weight": 7})),
    ("an index of files that are not there", "lost.safetensors", keys(weight_map={"a": "lost.safetensors"})),
    (
        "an index of many files that are not there",
        "lost-0.safetensors",
        keys(weight_map={f"w{number}": f"lost-{number}.safetensors" for number in range(5000)}),
    ),
    ("weights cut short", SHARD, cut),
    ("weights that are a pipe", SHARD, pipe),
    ("weights that are a device", SHARD, device),
    ("a tensor of a long name", UNEXPECTED, header(_named("x" * 100_000))),
    ("empty weights", SHARD, holds(b"")),
    ("weights that are something else", SHARD, holds(b"PK\x03\x04" * 1000)),
    ("a header without end", SHARD, header_length((1 << 63) - 1)),
    ("a header longer than the file", SHARD, header_length(1 << 40)),
    ("a header of no length", SHARD, header_length(0)),
    ("a header that is no JSON", SHARD, raw_header(b"{" * 100)),
    ("a nested header", SHARD, raw_header(NESTED_OBJECT)),
    ("a header of another type", SHARD, raw_header(b"[1]")),
    ("absurd offsets", SHARD, header(_every(data_offsets=[0, 1 << 62]))),
    ("absurd shapes", SHARD, header(_every(shape=[1 << 40, 1 << 40]))),
    ("an unknown type of weights", SHARD, header(_every(dtype="Q17"))),
]


def damaged_file(model: Path, name: str) -> Path:
    """The file of a model directory that a damage is of."""
    if name in (SHARD, UNEXPECTED):
        return min(model.glob(f"{SHARD}*"))
    if name in ("NoSuchModel", "model.embed_tokens.weight"):
        return model / CONFIG
    return model / (name if name in (*_JSON_FILES, TEMPLATE) else INDEX)
