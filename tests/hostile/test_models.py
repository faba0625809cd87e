"""Directories that are no models or drafts, and chat templates that explode."""

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.heads import write_eagle3, write_llama
from tests.hostile import demands
from tests.hostile.conftest import Serve
from tests.hostile.neighbours import Watch
from tests.models.damage import pipe
from tests.plain import NO_TLS
from tests.preloaded.commands import run

pytestmark = pytest.mark.soak


def _cut(name: str) -> Callable[[Path], None]:
    def cut(directory: Path) -> None:
        path = next(directory.glob(name))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return cut


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        next(directory.glob(name)).write_bytes(content)

    return write


def _change(name: str, **fields: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
SHARD = "model-00001-*.safetensors"

UNREADABLE: dict[str, Callable[[Path], None]] = {
    "half a tokenizer": _cut("tokenizer.json"),
    "an empty tokenizer": _write("tokenizer.json", b""),
    "a nested tokenizer": _write("tokenizer.json", NESTED),
    "a tokenizer of another kind": _write("tokenizer.json", b"[1, 2, 3]"),
    "a tokenizer that is no text": _write("tokenizer.json", b"\xff\xfe\x00" * 100),
    "half a tokenizer's description": _cut("tokenizer_config.json"),
    "a template with an open tag": _change("tokenizer_config.json", chat_template="{% for message in"),
    "a template of unknown tags": _change("tokenizer_config.json", chat_template="{% explode %}"),
    "a template that is a number": _change("tokenizer_config.json", chat_template=7),
    "a nested template": _change(
        "tokenizer_config.json", chat_template="{{ " + "(" * 5000 + ")" * 5000 + " }}"
    ),
    "half a configuration": _cut("config.json"),
    "a nested configuration": _write("config.json", NESTED),
    "absurd sizes": _change("config.json", hidden_size=1 << 60, vocab_size=1 << 60),
    "negative sizes": _change("config.json", num_hidden_layers=-1),
    "sizes of another kind": _change("config.json", hidden_size="large"),
    "no layers": _change("config.json", num_hidden_layers=0),
    "an absurd header": _write(SHARD, struct.pack("<Q", (1 << 63) - 1) + b"{}"),
    "a nested header": _write(SHARD, struct.pack("<Q", len(NESTED)) + NESTED),
    "half the weights": _cut(SHARD),
    "no weights": _write(SHARD, b""),
    "half an index": _cut("model.safetensors.index.json"),
    "a nested index": _write("model.safetensors.index.json", NESTED),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_model_that_cannot_be_read_is_one_line(small_llama: Path, tmp_path: Path, damage: str) -> None:
    """One line that says what is wrong, one start of the engine, an exit status that is not 0."""
    model = tmp_path / "model"
    shutil.copytree(small_llama, model)
    UNREADABLE[damage](model)
    arguments = ("serve", str(model), "--port", "0", "--kv-tokens", "4096")
    ended = run(*arguments, text=True, timeout=demands.START_SECONDS)
    said = ended.stdout + ended.stderr
    assert ended.returncode in demands.ENDS_WITH, said[-2000:]
    assert "Traceback" not in said, said[-2000:]
    assert "starting it again" not in said, said[-2000:]
    lines = [line for line in said.splitlines() if "holdfast serve: " in line]
    assert len(lines) == 1, said[-2000:]
    assert len(lines[0]) < 600, "a line that can be read"


BOMBS = {
    "padding": "{{ 'x'.ljust(1000000000) }}",
    "centering": "{{ 'x'.center(1000000000) }}",
    "a filter": "{{ 'x' | center(1000000000) }}",
    "zeros": "{{ '7'.zfill(1000000000) }}",
    "a format": "{{ '%1000000000d' % 7 }}",
    "a format by name": "{{ '{:1000000000}'.format(7) }}",
    "a product": "{{ 'x' * 1000000000 }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(10000) }}",
    "replacing": "{{ ('x' * 30000).replace('x', 'x' * 30000) }}",
    "joining": "{{ ('x' * 30000).join(['x'] * 30000) }}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(30) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    "{{ n.s }}",
    "doubling lists": "{% set n = namespace(s=[1, 2]) %}{% for i in range(30) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}{{ n.s | length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output of loops": "{% for a in range(9999) %}{% for b in range(99999) %}xxxxxxx{% endfor %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a power": "{{ 7 ** 77777777 }}",
    "a power of powers": "{{ (9 ** 9) ** (9 ** 7) }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_explodes_harms_one_request(
    serve: Serve, small_llama: Path, tmp_path: Path, bomb: str
) -> None:
    """It explodes for one message alone; neighbours of the same model say token ids and go on."""
    model = tmp_path / "model"
    shutil.copytree(small_llama, model)
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["chat_template"] = (
        "{% if messages[-1]['content'] == 'boom' %}"
        + BOMBS[bomb]
        + "{% endif %}"
        + described["chat_template"]
    )
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    server = serve(model, "--kv-tokens", "16384")
    boom = {"messages": [{"role": "user", "content": "boom"}], "max_tokens": 2}

    def attack() -> list[int]:
        with httpx.Client(base_url=server.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
            return [http.post("/v1/chat/completions", json=boom).status_code for _ in range(3)]

    with Watch(server, growth_bytes=4 * demands.GROWTH_BYTES) as watch:
        statuses = watch.during(attack)
        assert all(demands.refused(status) for status in statuses), statuses
        calm = {"messages": [{"role": "user", "content": "bak"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", calm).status_code == 200, "others use the template"


def test_many_exploding_requests_leave_room_for_others(
    serve: Serve, small_llama: Path, tmp_path: Path
) -> None:
    """Whatever renders templates is not taken for ever by those that explode."""
    model = tmp_path / "model"
    shutil.copytree(small_llama, model)
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["chat_template"] = (
        "{% if messages[-1]['content'] == 'boom' %}"
        + BOMBS["loops"]
        + "{% endif %}"
        + described["chat_template"]
    )
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    server = serve(model, "--kv-tokens", "16384")
    boom = json.dumps({"messages": [{"role": "user", "content": "boom"}], "max_tokens": 2})
    with Watch(server, growth_bytes=4 * demands.GROWTH_BYTES) as watch:

        def attack() -> float:
            clients = [httpx.Client(base_url=server.url, timeout=0.5, verify=NO_TLS) for _ in range(12)]
            for http in clients:
                try:
                    http.post(
                        "/v1/chat/completions", content=boom, headers={"content-type": "application/json"}
                    )
                except httpx.TimeoutException:
                    continue  # It was sent, and nobody waits for it.
                finally:
                    http.close()
            return time.monotonic()

        watch.during(attack)
        calm = {"messages": [{"role": "user", "content": "bak"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", calm, timeout=demands.ANSWER_SECONDS).status_code == 200


# --- what drafts ------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"


def _fill(name: str, value: int) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        weights = load_file(directory / WEIGHTS)
        weights[name].fill_(value)
        save_file(weights, directory / WEIGHTS)

    return fill


DRAFTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "half a configuration": ("model", _cut("config.json")),
    "a nested configuration": ("model", _write("config.json", NESTED)),
    "a pipe for a configuration": ("model", lambda directory: pipe(directory / "config.json")),
    "absurd sizes": ("model", _change("config.json", hidden_size=1 << 60, vocab_size=1 << 60)),
    "another vocabulary": ("model", _change("config.json", vocab_size=7)),
    "half a tokenizer": ("model", _cut("tokenizer.json")),
    "half the weights": ("model", _cut(WEIGHTS)),
    "an absurd header": ("model", _write(WEIGHTS, struct.pack("<Q", (1 << 63) - 1) + b"{}")),
    "a head with half a configuration": ("head", _cut("config.json")),
    "a head with a nested configuration": ("head", _write("config.json", NESTED)),
    "a head of another vocabulary": ("head", _change("config.json", vocab_size=1 << 40)),
    "a head of absurd sizes": (
        "head",
        _change("config.json", hidden_size=1 << 60, intermediate_size=1 << 60),
    ),
    "a head of more words than there are": ("head", _change("config.json", draft_vocab_size=1 << 60)),
    "a head for layers that are not there": (
        "head",
        _change("config.json", eagle_aux_hidden_state_layer_ids=[1 << 40, -1, 1]),
    ),
    "a head for many layers": ("head", _change("config.json", eagle_aux_hidden_state_layer_ids=[1] * 5000)),
    "a head with half its weights": ("head", _cut(WEIGHTS)),
    "a head with a nested header": ("head", _write(WEIGHTS, struct.pack("<Q", len(NESTED)) + NESTED)),
    "a head with a pipe for weights": ("head", lambda directory: pipe(directory / WEIGHTS)),
    "a head whose words are past the vocabulary": ("head", _fill("d2t", 1 << 62)),
    "a head whose words are below the vocabulary": ("head", _fill("d2t", -(1 << 63))),
    "a head whose words are unknown": ("head", _fill("t2d", 0)),
}


@pytest.mark.parametrize("damage", DRAFTS)
def test_a_draft_that_cannot_be_read_is_one_line(tmp_path: Path, damage: str) -> None:
    """It is read beside a model that is whole: the line names the option, and nothing is tried again."""
    target, made = write_llama(tmp_path / "target", layers=4), tmp_path / "draft"
    kind, change = DRAFTS[damage]
    if kind == "model":
        write_llama(made)
    else:
        write_eagle3(made)
    change(made)
    arguments = ("serve", str(target), "--draft", str(made), "--port", "0", "--kv-tokens", "4096")
    ended = run(*arguments, text=True, timeout=demands.START_SECONDS)
    said = ended.stdout + ended.stderr
    assert ended.returncode in demands.ENDS_WITH, said[-2000:]
    assert "Traceback" not in said and "starting it again" not in said, said[-2000:]
    lines = [line for line in said.splitlines() if "holdfast serve: " in line]
    assert len(lines) == 1 and "--draft" in lines[0], said[-2000:]
    assert len(lines[0]) < 1200, "a line that can be read"
