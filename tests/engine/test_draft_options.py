"""A draft model that cannot be used is refused at the start, with an error that names the option."""

import json
from pathlib import Path

import pytest

from holdfast.engine.draft import opening
from holdfast.engine.draft.opening import find_draft
from holdfast.engine.engine import Engine
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start import memory_plan
from holdfast.models.checkpoint import open_checkpoint
from tests.engine.drafting import PROMPT, drafting_engine, proposer_of, write_draft
from tests.engine.tiny import greedy, tiny_engine, tokenizer, write_model


def renamed_token(directory: Path) -> Path:
    """A model whose vocabulary has the size of the others, and one other token."""
    path = write_model(directory, "llama")
    written = json.loads((path / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["Ġnight"] = vocabulary.pop("Ġtoday")
    (path / "tokenizer.json").write_text(json.dumps(written))
    return path


def more_tokens(directory: Path) -> Path:
    """A model with one token more."""
    path = write_model(directory, "llama", vocab_size=270)
    written = json.loads((path / "tokenizer.json").read_text())
    written["model"]["vocab"]["Ġnight"] = len(written["model"]["vocab"])
    (path / "tokenizer.json").write_text(json.dumps(written))
    return path


def no_configuration(directory: Path) -> Path:
    """A directory without a model."""
    directory.mkdir()
    return directory


def garbage(directory: Path) -> Path:
    """A configuration that is not JSON."""
    path = write_model(directory, "llama")
    (path / "config.json").write_text("{")
    return path


def encoder_model(directory: Path) -> Path:
    """A model that is not a decoder."""
    return write_model(directory, "llama", architectures=["BertForMaskedLM"], model_type="bert")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (renamed_token, "its vocabulary differs, token .* is 'Ġtoday' in the model only"),
        (more_tokens, "its vocabulary differs, .* tokens instead of"),
        (no_configuration, "has no config.json"),
        (garbage, "config.json"),
        (encoder_model, "BertForMaskedLM"),
        (lambda directory: write_model(directory, "bamba"), "it has recurrent layers"),
        (lambda directory: directory / "nowhere", "does not exist"),
        (lambda directory: "echo", "it has no weights"),
    ],
)
def test_a_draft_model_that_cannot_be_used(tmp_path: Path, write: object, problem: str) -> None:
    target = write_model(tmp_path / "target", "llama")
    assert callable(write)
    draft = write(tmp_path / "draft")
    with pytest.raises(OptionError, match=problem) as error:
        tiny_engine(target, draft=draft)
    assert error.value.option == "draft" and error.value.typed.startswith(f"--draft {draft} cannot be used: ")


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="draft cannot be used with tensor_parallel"):
        make_options(draft="small", tensor_parallel=2)
    with pytest.raises(OptionError, match="draft_tokens has no effect without draft"):
        make_options(draft_tokens=100)
    with pytest.raises(OptionError, match="draft must name a model"):
        make_options(draft="")
    with pytest.raises(OptionError, match="draft cannot be used: echo has no weights"):
        Engine("echo", draft="small")


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    """They are loaded after the target's; the error names the draft model."""
    draft = write_draft(tmp_path)
    (draft / "model.safetensors").write_bytes(b"no tensors")
    options = make_options(draft=str(draft), load_format="auto")
    target = write_model(tmp_path / "target", "llama")
    found = find_draft(options, tokenizer(), open_checkpoint(target))
    assert found is not None
    with pytest.raises(OptionError, match="cannot be used") as error:
        found.load(options, tiny_engine(target).loop.setup.model)  # type: ignore[arg-type]
    assert error.value.option == "draft"


def test_the_cache_takes_a_part_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "target", "llama")
    for module in (opening, memory_plan):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 28)
    with pytest.raises(OptionError, match=r"draft_tokens is too large: .* tokens do not fit, .* would"):
        tiny_engine(path, draft=str(path), draft_tokens=2_000_000)
    sizes = {"draft": str(path), "session_tokens": 2048}
    proposer = proposer_of(tiny_engine(path, **sizes))
    pool = next(iter(proposer.cache.ledger.pools.values()))
    room = pool.size * proposer.page_bytes
    assert 0.9 * opening.MEMORY_SHARE < room / (1 << 28) <= opening.MEMORY_SHARE
    assert len(proposer.passes.executor._free_rows) == opening.ROWS_MAX


def test_the_pools_fit_beside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_engine(write_model(tmp_path, "llama")).loop.setup.model
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 28)
    options = make_options(session_tokens=512)
    whole, half = (memory_plan.plan_memory(model, options, promised=part) for part in (0, 1 << 27))
    assert abs(half.device.full - whole.device.full / 2) <= 512
    with pytest.raises(OptionError, match="kv_tokens is too large"):
        memory_plan.plan_memory(model, make_options(kv_tokens=600_000), promised=1 << 27)


def test_the_cache_is_in_the_memory_report(tmp_path: Path) -> None:
    path = write_model(tmp_path / "target", "llama")
    engine = drafting_engine(path, write_draft(tmp_path), draft_tokens=512)
    session = engine.session()
    session.say(PROMPT, greedy(12)).wait()
    report = engine.memory()["draft"]
    assert isinstance(report, dict)
    held = report["holders"]["SESSION"]
    assert held == -(-len(proposer_of(engine).cache.entries[session.id].tokens) // report["page_size"])
    assert held > 0 and report["holders"]["FREE"] + held == report["units"] == 512 // report["page_size"]
    session.close()
    report = engine.memory()["draft"]
    assert isinstance(report, dict)
    assert report["holders"] == {"FREE": report["units"], "SESSION": 0}
    assert "draft" not in tiny_engine(path).memory()
