"""The benchmarks that are run as modules: all of them start, and those without a GPU or a server measure."""

from argparse import ArgumentTypeError
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from holdfast.bench.constrained import Rates
from holdfast.bench.cpu import __main__ as cpu
from holdfast.bench.cpu import constrained, experts, formats, host_step, kv_quality, processor, write_gguf
from holdfast.bench.loops import open_model
from holdfast.bench.server import attacks, commits, engine_turns, neighbours
from holdfast.bench.small_models import saved_small_model
from holdfast.bench.timing import in_turn
from holdfast.engine.durable.stores import read_sessions
from holdfast.kernels.cpu.matrix import available
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.gguf import GgufFile
from holdfast.models.weights import Placement
from tests.databases import STORES, new_place

SCRIPTS = (
    "cluster.__main__",
    "cpu.__main__",
    "cpu.constrained",
    "cpu.drafting",
    "cpu.engine",
    "cpu.experts",
    "cpu.formats",
    "cpu.halves",
    "cpu.heads",
    "cpu.host_step",
    "cpu.kv_quality",
    "cpu.processor",
    "cpu.speculation",
    "cpu.storm",
    "cpu.write_gguf",
    "gpu.__main__",
    "gpu.kernels",
    "gpu.write_shape",
    "server.__main__",
    "server.commits",
    "server.neighbours",
    "server.page_map",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = import_module(f"holdfast.bench.{name}")
    monkeypatch.setattr("sys.argv", ["script", "--help"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 0
    called = f"python -m holdfast.bench.{name.removesuffix('.__main__')}"
    assert called in capsys.readouterr().out.replace("python3", "python")


def test_the_engine_is_measured_without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_turns, "ROUNDS", 1)
    figures = engine_turns.engine_turns("echo-hybrid")
    assert set(figures) == {"engine_turn_10_ms", "engine_turn_150_ms", "ratio_engine_turn_150_to_10"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize("store", STORES)
def test_commits_are_measured_on_both_stores(store: str, tmp_path: Path) -> None:
    place = new_place(store, tmp_path / "journal")
    figures = commits.commits(place, "commit", sessions=3, steps=5, ends=2, step_seconds=0.001)
    assert figures["turns"] == 10 and 0 < figures["added_p50_ms"] <= figures["added_p99_ms"]
    assert read_sessions(place) == [], "its sessions are gone"


def test_the_quality_of_memory_is_measured() -> None:
    """Fewer bits of mantissa cost more; a state that rests more often, too."""
    with saved_small_model("hybrid") as directory:
        model = open_model(directory, "cpu", "float32", dummy=False)
    tokens = [(7 * place + place * place) % 128 for place in range(64)]
    found = kv_quality.kv_quality(model, tokens)
    assert 0.0 < found["float16"].kl < found["bfloat16"].kl < found["fp8"].kl
    rested = kv_quality.state_quality(model, tokens, 8)
    assert 0.0 < rested.kl < found["fp8"].kl and rested.top_1 > 0.9
    assert len(kv_quality.docstrings()) > 10_000


def test_the_host_is_measured_without_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "STEPS", 16)
    assert host_step.host_time(2) > 0


@pytest.mark.parametrize("dtype", write_gguf.KINDS)
def test_a_gguf_file_of_random_weights_is_a_model(tmp_path: Path, dtype: str) -> None:
    path, shape = tmp_path / "model.gguf", formats.Shape(64, 96, heads=4, kv_heads=2, head_dim=16, layers=2)
    write_gguf.write(path, shape, dtype)
    checkpoint = open_checkpoint(path)
    source = checkpoint.gguf_source
    assert source is not None and len(source.names()) == 2 + 2 * 9
    kinds = {source.dtype(name) for name in source.names() if len(source.shape(name)) == 2}
    assert kinds == {write_gguf.KINDS[dtype][1].name}
    model = load_model(checkpoint, Placement(torch.device("cpu"), torch.float32))
    embedding = model._embedding(torch.arange(49152))
    said = embedding.any(dim=1)
    assert 0.11 < float(embedding[said].std()) < 0.14
    texts = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    spoken = {text for text, plain in zip(texts, said.tolist(), strict=True) if plain}
    assert spoken >= {"Ġthe", "a"} and not spoken & {"<|im_end|>", "Ã"}


def test_a_mixture_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not available():
        pytest.skip("this machine has no C kernels")
    sizes = ["--experts", "3", "--picks", "2", "--width", "32", "--inner", "48", "--tokens", "1", "3"]
    monkeypatch.setattr("sys.argv", ["experts", *sizes, "--rounds", "1"])
    experts.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in (experts.TORCH, *experts.DTYPES))


def test_processor_time_is_shown_as_a_rate_or_as_seconds() -> None:
    four, first = processor.Work(4, 64, 32), processor.Work(1, 2000, 1)
    assert four.figure(2.0) == 64.0 and first.figure(2.0) == 2.0
    assert four.title == "4 streams, tokens/s" and first.title == "first token of a prompt of 2000, s"


def test_rounds_start_with_another_item_each_time() -> None:
    assert [in_turn("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_the_table_of_the_cpu_has_a_line_for_each_row() -> None:
    ours = {"name": "prefill", "system": "holdfast", "value": 300.0, "min": 290.0, "max": 310.0}
    theirs = {**ours, "system": "llama-server", "value": 100.0}
    figures = [{**ours, "ratio_to_llama-server": 3.0, "foreign_load": 0.1}, {**theirs, "foreign_load": 0.2}]
    row = next(row for row in cpu.ROWS if row.name == "prefill")
    line = cpu.line(row, figures)
    assert line.startswith("| prompt of 512, tokens/s | 300 (290-310) | 100 (290-310) |  |  | 3.00 |")
    assert ">= 3: met (llama-server); >= 1: not measured (transformers)" in line
    assert line.endswith("| 0.20 |")


def test_the_table_of_the_cpu_takes_the_figures_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first token is not that of the streams."""
    for name in ("open_loop", "read_tokenizer", "Constraints", "Engine"):
        monkeypatch.setattr(constrained, name, Mock())
    monkeypatch.setattr(constrained, "measure", lambda *_: Rates(200.0, 190.0, 0.95, 1.4))
    monkeypatch.setattr(constrained, "steps_of_fixed_keys", lambda *_: (30, 10))
    monkeypatch.setattr(constrained, "first_token_delay", lambda *_: (50.0, 5.0))
    figures = constrained.figures(16, 64, 5)
    lines = {row.title: cpu.line(row, figures) for row in cpu.ROWS}
    filled = {title for title, line in lines.items() if not line.startswith(f"| {title} |  |")}
    assert filled == {
        "16 rows with JSON schemas, tokens/s, to none",
        "object with six fixed keys, steps per token",
    }
    assert "| 0.95 (0.95-0.95) |" in lines["16 rows with JSON schemas, tokens/s, to none"]


def test_an_attack_sends_whole_requests_and_frames_of_a_client() -> None:
    target = attacks.Target("http://127.0.0.1:8000")
    head, _, body = attacks.chat(10)(target).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert f"Authorization: Bearer {attacks.KEY}".encode() in head
    begun = attacks.BEGUN
    assert begun[0] == 0x1, "a text frame that is not the last"
    assert begun[1] == 0x80 | 1, "masked, one byte"


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_the_parts_of_the_attacks_are_all_of_them_once(parts: int) -> None:
    found = [neighbours.chosen([], number, parts) for number in range(1, parts + 1)]
    assert [name for part in found for name in part] == list(attacks.ATTACKS)
    assert max(map(len, found)) <= -(-len(attacks.ATTACKS) // parts)


def test_attacks_are_chosen_by_how_their_names_begin() -> None:
    assert neighbours.chosen(["text", "pings"], 1, 1) == [
        "text of 100 kB",
        "text of 1 MB",
        "text of 15 MB",
        "pings",
    ]
    assert neighbours.chosen(["text", "pings"], *neighbours.part("2/2")) == ["text of 15 MB", "pings"]
    for text in ("0/3", "4/3", "1", "1/0", "-1/2", "1/2/3"):
        with pytest.raises(ArgumentTypeError):
            neighbours.part(text)


def test_formats_are_measured_beside_q4_1(capsys: pytest.CaptureFixture[str]) -> None:
    if not available():
        pytest.skip("this machine has no C kernels")
    shape = formats.Shape(width=256, inner=256, heads=4, kv_heads=1, head_dim=64, layers=2)
    formats.report("small", shape, [*formats.SINGLE, *formats.MIXTURES], [1, 3], 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == [*formats.SINGLE, *formats.MIXTURES]
    assert "(1.00)" in lines[0]
    forms = [[part.form.name for part in matrix.parts] for matrix in formats.matrices(shape, "Q4_K_M")]
    assert forms == [["Q4_K", "Q6_K"], ["Q4_K"], ["Q4_K"], ["Q6_K"], *[["Q4_K"]] * 4]
