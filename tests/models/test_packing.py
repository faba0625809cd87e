"""Packed 12-bit weights beside the dense ones: which weights are packed, and which products use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast import kernels
from holdfast.kernels import TwelveBits
from holdfast.kernels.cuda.twelve import Tiling, pack
from holdfast.models.checkpoint import load_model, open_checkpoint, room_to_pack
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models.paged import PagedRunner, Sequence

WIDTH, INNER, VOCABULARY = 64, 128, 96


def model_of(folder: Path, **more: object) -> Model:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    place = Placement(torch.device("cpu"), torch.bfloat16)
    return load_model(open_checkpoint(folder), place, load_format="dummy")


def packed(weight: torch.Tensor, gated: bool) -> TwelveBits | None:
    """As on a device with kernels for all weights."""
    return pack(weight, gated, Tiling(3))


@pytest.mark.parametrize("tied", [False, True])
def test_projections_and_the_head_are_packed_as_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    model = model_of(tmp_path, tie_word_embeddings=tied)
    monkeypatch.setattr(kernels, "pack_weight", packed)
    dense = sum(linear.bytes for linear in model._dense)
    assert len(model._dense) == 2 * 4 + 1
    took = model.pack_weights(room=1 << 30)
    assert took == sum(linear.bytes for linear in model._dense) - dense
    assert 0.75 * dense <= took < dense, "padded to whole tiles"
    gated = [linear.twelve.gated for linear in model._dense if linear.twelve is not None]
    assert sorted(gated) == [False] * 7 + [True] * 2
    given: list[tuple[int, TwelveBits | None]] = []
    usual = kernels.linear, kernels.linear_gated

    def linear(
        x: torch.Tensor, weight: torch.Tensor, _: object, twelve: TwelveBits | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        given.append((weight.shape[0], twelve))
        return usual[0](x, weight, None, twelve, out)

    def gate(
        x: torch.Tensor, weight: torch.Tensor, _: object, activation: kernels.Activation, twelve: TwelveBits
    ) -> torch.Tensor:
        given.append((weight.shape[0], twelve))
        return usual[1](x, weight, None, activation, twelve)

    monkeypatch.setattr(kernels, "linear", linear)
    monkeypatch.setattr(kernels, "linear_gated", gate)
    PagedRunner(model, 16).run([(Sequence(), [1, 2, 3])])
    assert [rows for rows, _ in given] == [128, 64, 256, 64] * 2 + [VOCABULARY]
    assert all(twelve is not None and twelve.rows == rows for rows, twelve in given)


def test_nothing_is_packed_where_not_all_of_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path)
    monkeypatch.setattr(kernels, "pack_weight", packed)
    monkeypatch.setattr(kernels, "packed_size", lambda weight, _: weight.nbytes)
    dense = sum(linear.bytes for linear in model._dense)
    assert model.pack_weights(room=dense - 1) == 0
    assert all(linear.twelve is None for linear in model._dense)
    assert model.pack_weights(room=dense) > 0


def test_nothing_is_packed_where_no_kernel_reads_it(tmp_path: Path) -> None:
    assert model_of(tmp_path).pack_weights(room=1 << 30) == 0


def test_sessions_keep_most_of_what_is_free_unless_somebody_asks() -> None:
    assert room_to_pack(64 << 30, None) == 8 << 30
    assert room_to_pack(64 << 30, True) == 62 << 30
    assert room_to_pack(1 << 30, True) == 0


def test_who_asks_in_vain_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_of(tmp_path)
    place = Placement(torch.device("cpu"), torch.bfloat16)
    assert not caplog.records
    load_model(open_checkpoint(tmp_path), place, load_format="dummy", pack_weights=True)
    assert "no weights are packed" in caplog.text
