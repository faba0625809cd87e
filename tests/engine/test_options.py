"""Options are checked when they are made, and every error names its option."""

from pathlib import Path

import pytest
import torch

from holdfast.engine.engine import Engine
from holdfast.engine.options import CHOICES, EngineOptions, OptionError, check_context, make_options
from holdfast.engine.start.pull import PullError
from holdfast.engine.start.startup import open_loop
from holdfast.models.checkpoint import choose_placement, open_checkpoint
from holdfast.models.config import AttentionConfig, LayerConfig, ModelConfig
from holdfast.models.families import family_of
from holdfast.models.fields import Fields, Json
from tests.engine.tiny import CONFIGURATIONS, write_model


def test_defaults_are_possible() -> None:
    assert make_options() == EngineOptions()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("page_size", 0),
        ("page_size", 257),
        ("mixed_tokens", 0),
        ("max_queue", None),
        ("page_size", True),
        ("page_size", 1.5),
        ("context_length", 0),
        ("kv_tokens", -1),
        ("window_tokens", 0),
        ("state_slots", 0),
        ("session_tokens", 0),
        ("max_running", 0),
        ("chunk_tokens", 0),
        ("step_tokens", 0),
        ("max_queue", 0),
        ("max_sessions", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.0),
        ("host_memory", -1),
        ("checkpoints", -1),
        ("host_memory", 1 << 61),
        ("kv_tokens", 1 << 31),
        ("context_length", 10**20),
        ("max_running", 1_000_000),
        ("disk_limit", 10**400),
        ("checkpoints", 10**400),
        ("session_ttl", 10**400),
        ("snapshot_seconds", 1e300),
        ("session_ttl", 0.0),
        ("session_ttl", float("nan")),
        ("snapshot_seconds", -1.0),
        ("snapshot_seconds", float("nan")),
        ("tenant_device", 0.0),
        ("tenant_host", 1.5),
        ("tenant_disk", -1.0),
        ("tenant_shares", {"ann": {"device": 2.0}}),
        ("tenant_shares", {"ann": {"gpu": 0.5}}),
        ("device", "gpu"),
        ("device", "cuda:first"),
        ("device", None),
        ("dtype", "fp16"),
        ("load_format", "pickle"),
        ("audit", "off"),
        ("audit", ["on"]),
        ("host_memory", "4GiB"),
        ("host_memory", 1.5),
        ("host_memory", None),
        ("checkpoints", "x"),
        ("session_ttl", "x"),
        ("session_ttl", True),
        ("snapshot_seconds", None),
        ("tenant_device", "x"),
        ("tenant_shares", {"ann": {"device": "half"}}),
        ("tenant_shares", {"ann": 0.5}),
        ("tenant_shares", None),
        ("memory_fraction", "x"),
        ("leave_history", "no"),
        ("overlap", 1),
        ("fast_start", None),
        ("disk_limit", "4GiB"),
        ("journal", 7),
        ("journal", ""),
        ("journal", "."),
        ("journal", ".."),
        ("journal", "/"),
        ("disk", ""),
        ("disk", False),
    ],
)
def test_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"^{option} ") as caught:
        make_options(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize("option", sorted(EngineOptions.__dataclass_fields__))
def test_no_option_takes_what_it_cannot_use(option: str) -> None:
    """Whatever type an option has, a thing of none of them is refused by its name."""
    with pytest.raises(OptionError, match=rf"^{option} must be "):
        make_options(**{option: object()})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("host_memory", "4GiB", "--host-memory must be a whole number, not '4GiB'"),
        ("kv_tokens", "x", "--kv-tokens must be a whole number or None, not 'x'"),
        ("session_ttl", "x", "--session-ttl must be a number, not 'x'"),
        ("leave_history", "no", "--leave-history must be true or false, not 'no'"),
        ("journal", "", "--journal must name a file, not ''"),
        ("disk", "", "--disk must name a directory, not ''"),
    ],
)
def test_a_refusal_says_what_may_be(option: str, value: object, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_options(**{option: value})
    assert caught.value.typed == said


def test_what_is_as_good_as_its_type_is_taken(tmp_path: Path) -> None:
    assert make_options(session_ttl=60, tenant_device=1).session_ttl == 60
    assert make_options(session_ttl=float("inf")).session_ttl == float("inf"), "for ever"
    assert make_options(journal=tmp_path / "j", disk=tmp_path).journal == str(tmp_path / "j")


def test_an_engine_refuses_a_journal_without_a_name() -> None:
    with pytest.raises(OptionError, match=r"^journal must name a file"):
        Engine("echo", journal="")


def test_one_of_a_few_words_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError) as caught:
        make_options(dtype="int8")
    assert caught.value.typed == "--dtype must be one of auto, float32, bfloat16, float16, not 'int8'"
    assert make_options(device="cuda:1").device == "cuda:1"


def test_every_dtype_that_can_be_chosen_can_be_loaded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path))
    for name in CHOICES["dtype"]:
        placed = choose_placement(checkpoint, torch.device("cpu"), name).dtype
        assert str(placed) == f"torch.{'float32' if name == 'auto' else name}"


def test_one_of_several_gpus_is_the_one_that_kernels_are_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, wherever the tensors are."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        with pytest.raises(PullError):
            open_loop("/no/such/model", make_options(device=name))
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.skipif(torch.cuda.device_count() > 99, reason="that many GPUs are here")
def test_a_gpu_that_is_not_there_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(OptionError, match=r"^device cuda:99 cannot be used: torch finds \d+ GPUs here"):
        open_loop("no-such-model", make_options(device="cuda:99"))


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    expected = r"^pagesize is not an option; the options are .*page_size"
    with pytest.raises(OptionError, match=expected) as caught:
        make_options(pagesize=16)
    assert caught.value.option == "pagesize"


LENGTHS = {"max_position_embeddings": 4096, "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("more", "reach"),
    [
        ({}, 4096),
        ({"rope_scaling": YARN}, 16_384),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ],
)
def test_positions_carry_as_far_as_the_configuration_says(more: dict[str, Json], reach: int) -> None:
    fields = Fields({**CONFIGURATIONS["llama"], **LENGTHS, **more}, "test")  # type: ignore[dict-item]
    config = family_of("LlamaForCausalLM").configure(fields, "LlamaForCausalLM")
    assert (config.context_length, config.context_reach) == (4096, reach)


def test_a_model_without_positions_has_no_end() -> None:
    attention = AttentionConfig(heads=2, kv_heads=2, head_dim=8, scale=1.0, rope=None)
    config = ModelConfig("none", 10, 16, 4096, (LayerConfig((attention,)),), 1e-5)
    assert config.context_reach is None


@pytest.mark.parametrize(
    ("asked", "reach", "warned"),
    [(None, 4096, False), (1, 4096, False), (4096, 4096, False), (16_384, 16_384, True), (10**6, None, True)],
)
def test_a_longer_context_than_the_models_own_is_warned_of(
    asked: int | None, reach: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_context(make_options(context_length=asked), 4096, reach)
    said = f"context_length {asked} is more than the 4096 tokens that the model was trained for"
    assert caplog.messages == ([said] if warned else [])


def test_a_context_that_the_model_cannot_have_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path))
    with pytest.raises(OptionError) as caught:
        open_loop(directory, make_options(context_length=2049))
    assert (
        caught.value.typed
        == "--context-length must be at most 2048, the limit of the model's positions, not 2049"
    )
    # Random weights were made for nothing.
    assert open_loop(directory, make_options(context_length=2049, load_format="dummy", kv_tokens=64))


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ("load_weights", torch.OutOfMemoryError("tried 90 GiB"), "for the weights: a smaller model"),
        ("load_weights", RuntimeError("not enough memory: tried 90 GiB"), "for the weights: a smaller model"),
        ("build_loop", MemoryError("tried 90 GiB"), "for pools and steps: smaller pools"),
    ],
)
def test_memory_that_runs_out_while_starting_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception, said: str
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"holdfast.engine.start.startup.{part}", run_out)
    with pytest.raises(OptionError) as caught:
        open_loop(str(write_model(tmp_path)), make_options(load_format="dummy"))
    assert caught.value.typed.startswith(f"--device cpu has too little free memory {said}")
    assert caught.value.typed.endswith("tried 90 GiB)")


def test_what_goes_wrong_otherwise_while_starting_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr("holdfast.engine.start.startup.load_weights", fail)
    with pytest.raises(RuntimeError, match="an illegal instruction"):
        open_loop(str(write_model(tmp_path)), make_options())
