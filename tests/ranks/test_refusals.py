"""What cannot be divided is refused before weights are read, and the message names it."""

import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.cli.options import ENGINE_OPTIONS
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.ranks import crew, starting
from holdfast.engine.ranks.messages import Channel, Digest, Frame, Kind, RankEnded, encode
from holdfast.engine.start.memory_plan import _largest_step
from holdfast.engine.start.startup import open_loop
from holdfast.engine.start.tuning import StepCost
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.memory import MemoryTypes
from holdfast.models.weights import Placement
from holdfast.replicas.plan import ClusterOptions, make_plan
from tests.engine.tiny import write_model
from tests.ranks.models import variant_of
from tests.ranks.together import Alone


def refused(directory: Path, ranks: int) -> str:
    options = make_options(tensor_parallel=ranks, load_format="dummy", device="cpu")
    with pytest.raises(OptionError) as error:
        open_loop(str(directory), options)
    assert error.value.option == "tensor_parallel"
    return error.value.problem


@pytest.mark.parametrize(
    ("family", "ranks", "fields", "problem"),
    [
        ("llama", 3, {}, "3 ranks do not divide 4 attention heads (num_attention_heads)"),
        ("bamba", 4, {"mamba_n_heads": 2, "mamba_d_head": 32}, "4 ranks do not divide 2 Mamba2 heads"),
        ("llama", 4, {"intermediate_size": 3}, "4 ranks do not divide a width of an MLP of 3"),
        ("llama", 2, {"vocab_size": 1}, "2 ranks do not divide a vocabulary of 1"),
    ],
)
def test_what_ranks_do_not_divide_is_named(
    tmp_path: Path, family: str, ranks: int, fields: dict[str, object], problem: str
) -> None:
    directory = write_model(tmp_path, family, **fields)
    assert problem in refused(directory, ranks)


def test_groups_of_quantised_weights_bound_the_ranks(tmp_path: Path) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"weights": scheme, "targets": ["Linear"]}},
    }
    directory = write_model(tmp_path, "llama", quantization_config=config)
    assert "a width of an MLP of 64 in groups of 64" in refused(directory, 2)


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert starting._devices(torch.device("cuda"), 2) == [torch.device("cuda", rank) for rank in (0, 1)]
    with pytest.raises(OptionError, match="tensor_parallel 4 needs as many GPUs: torch finds 2 here"):
        starting._devices(torch.device("cuda"), 4)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(OptionError, match="cuda:1 is one GPU, and tensor_parallel needs several"):
        make_options(tensor_parallel=2, device="cuda:1")
    with pytest.raises(OptionError, match="tensor_parallel must be a whole number of at least 1, not 0"):
        make_options(tensor_parallel=0)
    with pytest.raises(OptionError, match="tensor_parallel must be 1: echo has no weights"):
        open_loop("echo", make_options(tensor_parallel=2))
    with pytest.raises(OptionError, match="tensor_parallel cannot be combined with --replicas"):
        make_plan("m", ClusterOptions(replicas=2), {"tensor_parallel": 2}, {"link_keys": "keys.pem"})
    assert "tensor_parallel" in {option.name for option in ENGINE_OPTIONS}


def test_a_step_that_does_not_fit_on_a_rank_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have stopped somewhere in it: another, smaller one would not be theirs."""

    def fails(*_: object, **__: object) -> StepCost:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(crew, "measure_step", fails)
    alone = crew.Crew([], [])
    with pytest.raises(OptionError, match="step_tokens must be less than 8192"):
        _largest_step(Mock(), 16, 4, MemoryTypes.of(torch.float32), alone.measure)
    with pytest.raises(crew.RankLost):
        alone.require()


Q_PROJ, A_LOG = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mamba.A_log"


@pytest.mark.parametrize(
    ("family", "name", "change", "problem"),
    [
        ("llama", Q_PROJ, lambda found: found[:0], "has a dimension of 0 where the model has 48"),
        ("llama", Q_PROJ, lambda found: found[:-1], "has a dimension of 47 where the model has 48"),
        ("llama", Q_PROJ, lambda found: found[:24], "is [12, 48], not [24, 48]"),
        ("llama", Q_PROJ, lambda found: found.repeat(2, 1), "has a dimension of 96 where the model has 48"),
        ("llama", Q_PROJ, lambda found: found[None], "is [1, 48, 48]: it should have 2 dimensions"),
        ("bamba", A_LOG, lambda found: found[:1], "is [1], not [6]"),
        ("bamba", A_LOG, lambda found: found[:3], "is [3], not [6]"),
        ("bamba", A_LOG, lambda found: found.repeat(2), "is [12], not [6]"),
        ("bamba", A_LOG, lambda found: found[None], "is [1, 6]: it should have 1 dimensions"),
    ],
)
def test_a_tensor_of_another_size_is_named(
    tmp_path: Path, family: str, name: str, change: Callable[[Tensor], Tensor], problem: str
) -> None:
    """As on one rank: a larger one is not cut to what a rank needs, a smaller one is not taken whole."""
    variant_of(family).build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name]).clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigurationError) as error:
        load_model(open_checkpoint(tmp_path), Placement(torch.device("cpu"), torch.float32), group=Alone())
    assert f"{name} {problem}" in str(error.value)


def test_ranks_that_run_different_steps_notice() -> None:
    """In a strict audit each frame carries a digest of all frames so far."""
    mine, theirs = (Channel(end) for end in socket.socketpair())
    sent, theirs.digest.checked = Digest(), True
    sent.checked = True
    frames = [Frame(Kind.COPY, [1, 2]), Frame(Kind.STEP, [3], b"words"), Frame(Kind.FENCE, [4])]
    first, second, third = (encode(frame, sent) for frame in frames)
    mine.send(first)
    assert theirs.receive() == frames[0]
    mine.send(third)
    with pytest.raises(RuntimeError, match="the digest of a plan does not match"):
        theirs.receive()
    assert second != third
    mine.close()
    with pytest.raises(RankEnded):
        theirs.receive()
    theirs.close()
