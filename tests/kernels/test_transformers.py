"""Conventions that a formula of one's own cannot prove: the kernels against transformers' functions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

from holdfast import kernels
from holdfast.kernels import Rotation, build_batch
from tests.kernels.batches import relative_error


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def test_rotary_embedding(generator: torch.Generator) -> None:
    tokens, heads, kv_heads, dim = 7, 4, 2, 16
    query, key = (torch.randn(tokens, n, dim, generator=generator) for n in (heads, kv_heads))
    positions = torch.arange(3, 3 + tokens)
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.arange(16).float().unsqueeze(1) * frequencies
    batch = build_batch([[0] * tokens], [3], full_units=[[1]])
    assert batch.full is not None
    cache = torch.zeros(2, 1, 2, 16, kv_heads, dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    turned = kernels.rotate_and_write(
        query, key, key, cache[:, 0, 0], cache[:, 0, 1], batch.full.slots, positions, Rotation(cos_sin)
    )
    doubled = torch.cat((angles, angles), dim=-1)[positions]
    expected_query, expected_key = modeling_llama.apply_rotary_pos_emb(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        doubled.cos().unsqueeze(0),
        doubled.sin().unsqueeze(0),
    )
    assert relative_error(turned, expected_query.squeeze(0).transpose(0, 1)) < 1e-6
    assert relative_error(cache[1, 0, 0, 3 : 3 + tokens], expected_key.squeeze(0).transpose(0, 1)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 70])
def test_gated_delta_rule(generator: torch.Generator, tokens: int) -> None:
    heads, size, dim = 3, 8, 6
    query, key = (torch.randn(1, tokens, heads, size, generator=generator) for _ in range(2))
    value = torch.randn(1, tokens, heads, dim, generator=generator)
    g = -torch.rand(1, tokens, heads, generator=generator)
    beta = torch.rand(1, tokens, heads, generator=generator)
    first = torch.randn(1, heads, size, dim, generator=generator)
    expected, final = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        query, key, value, g, beta, first, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state = torch.cat((first.transpose(-1, -2), torch.full((1, heads, dim, size), float("nan"))))
    batch = build_batch([[0] * tokens], [0], state_source=[0], state_destination=[1])
    actual = kernels.gated_delta(query[0], key[0], value[0], g[0], beta[0], state, batch, normalise=True)
    assert relative_error(actual, expected[0]) < 1e-5
    assert relative_error(state[1], final[0].transpose(-1, -2)) < 1e-5
    assert torch.equal(state[0], first[0].transpose(-1, -2))


def test_gated_norm(generator: torch.Generator) -> None:
    norm = modeling_qwen3_next.Qwen3NextRMSNormGated(24, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24, generator=generator))
        x, gate = (torch.randn(5, 24, generator=generator) for _ in range(2))
        actual = kernels.rms_norm_gated(x, gate, norm.weight, 1e-5, norm_before_gate=True)
        assert relative_error(actual, norm(x, gate)) < 1e-6
