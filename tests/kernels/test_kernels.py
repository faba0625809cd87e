"""Both implementations against the formulas in float64: odd sizes, ragged batches, poisoned storage.

The Triton kernels run in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from holdfast.kernels import Clamp, ExpertForm, Mamba2Weights, Rotation, build_batch
from tests.kernels import naive
from tests.kernels.batches import NAN, fill_cache, paged_batch, relative_error

# The interpreter computes with NumPy, which remarks on masked values and on scalars that are arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

CLOSE = 2e-6


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return import_module(f"holdfast.kernels.{request.param}")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(ops: ModuleType, generator: torch.Generator, offset: float) -> None:
    x, weight = normal(generator, 3, 5, 37), normal(generator, 37)
    expected = naive.rms_norm(x, weight, 1e-5, offset)
    assert relative_error(ops.rms_norm(x, weight, 1e-5, offset=offset), expected) < CLOSE
    assert ops.rms_norm(x.bfloat16(), weight, 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_rms_norm_residual(ops: ModuleType, generator: torch.Generator, multiplier: float) -> None:
    x, residual, weight = normal(generator, 4, 33), normal(generator, 4, 33), normal(generator, 33)
    before = residual.clone()
    normed, total = ops.rms_norm_residual(x, residual, weight, 1e-6, multiplier=multiplier)
    expected = residual.double() + multiplier * x.double()
    assert relative_error(total, expected) < CLOSE
    assert relative_error(normed, naive.rms_norm(expected, weight, 1e-6)) < CLOSE
    assert torch.equal(residual, before)


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("group", [48, 16, 3])
def test_rms_norm_gated(
    ops: ModuleType, generator: torch.Generator, norm_before_gate: bool, group: int
) -> None:
    x, gate, weight = normal(generator, 5, 48), normal(generator, 5, 48), normal(generator, 48)
    actual = ops.rms_norm_gated(x, gate, weight, 1e-5, group_size=group, norm_before_gate=norm_before_gate)
    expected = naive.rms_norm_gated(x, gate, weight, 1e-5, group, norm_before_gate)
    assert relative_error(actual, expected) < CLOSE


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_clamped", "relu_squared"])
def test_activations(ops: ModuleType, generator: torch.Generator, activation: str) -> None:
    x = normal(generator, 7, 2, 46) * 6
    functions = {
        "swiglu": ops.swiglu,
        "geglu": ops.geglu,
        "swiglu_clamped": ops.swiglu_clamped,
        "relu_squared": ops.relu_squared,
    }
    assert relative_error(functions[activation](x), naive.activate(x, activation)) < CLOSE


@pytest.mark.parametrize("rotary_dim", [None, 8, 20])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_rotate_and_write(
    ops: ModuleType, generator: torch.Generator, rotary_dim: int | None, norms: bool, page_size: int
) -> None:
    batch, total = paged_batch([3, 1, 5], [0, 6, 2], page_size)
    assert batch.full is not None
    tokens, heads, kv_heads, dim = 9, 6, 2, 20
    fused = normal(generator, tokens, (heads + 2 * kv_heads) * dim)
    before = fused.clone()
    query, key, value = (
        part.view(tokens, -1, dim) for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    )
    weights = [normal(generator, dim) for _ in range(2)] if norms else [None, None]
    cos_sin = None if rotary_dim is None else torch.rand(16, rotary_dim, generator=generator)
    storage = torch.full((total, 2, 2, page_size, kv_heads, dim), NAN)
    out = ops.rotate_and_write(
        query, key, value, storage[:, 1, 0], storage[:, 1, 1], batch.full.slots, batch.positions,
        Rotation(cos_sin, weights[0], weights[1], eps=1e-5),
    )  # fmt: skip
    assert torch.equal(fused, before)
    assert out.is_contiguous()
    expected = [query.double(), key.double()]
    for index, weight in enumerate(weights):
        if weight is not None:
            expected[index] = naive.rms_norm(expected[index], weight, 1e-5)
        if cos_sin is not None:
            expected[index] = naive.rotate(expected[index], cos_sin, batch.positions)
    assert relative_error(out, expected[0]) < CLOSE
    written = storage.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    assert relative_error(written[1, 0, batch.full.slots], expected[1]) < CLOSE
    assert torch.equal(written[1, 1, batch.full.slots], value)
    assert int((~storage.isnan()).sum()) == 2 * tokens * kv_heads * dim


ATTENTION_BATCHES = {
    "decode": ([1, 1, 1, 1], [0, 8, 40, 17]),
    "prefill": ([9, 33], [0, 0]),
    "mixed": ([1, 7, 1, 20, 1], [30, 12, 0, 3, 63]),
    "padded": ([1, 0, 5], [4, 0, 6]),
}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("shape", list(ATTENTION_BATCHES))
@pytest.mark.parametrize("extras", ["plain", "window", "sinks", "softcap"])
def test_attend(ops: ModuleType, generator: torch.Generator, page_size: int, shape: str, extras: str) -> None:
    counts, starts = ATTENTION_BATCHES[shape]
    window = 11 if extras in ("window", "sinks") else None
    softcap = 1.5 if extras == "softcap" else None
    heads, kv_heads, dim = 6, 2, 20
    sinks = normal(generator, heads) if extras == "sinks" else None
    batch, total = paged_batch(counts, starts, page_size, window=window)
    storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
    query = normal(generator, sum(counts), heads, dim)
    pages = batch.full or batch.window
    assert pages is not None
    if pages.table.shape[1] * page_size and window is None:
        for row in range(batch.rows):
            pages.table[row, -(-int(batch.context[row]) // page_size) :] = 2**30
    actual = ops.attend(
        query, storage[:, 1, 0], storage[:, 1, 1], pages, batch,
        scale=0.3, window=window, sinks=sinks, softcap=softcap,
    )  # fmt: skip
    offsets = batch.row_start.tolist()
    for row, count in enumerate(counts):
        if count:
            span = slice(offsets[row], offsets[row + 1])
            expected = naive.attend_row(query[span], keys[row], values[row], 0.3, window, sinks, softcap)
            assert relative_error(actual[span], expected) < CLOSE


def test_attend_long_rows_in_blocks(ops: ModuleType, generator: torch.Generator) -> None:
    for window in (None, 100):
        batch, total = paged_batch([300, 130], [50, 0], 16, window=window)
        storage, keys, values = fill_cache(batch, total, 1, 8, generator=generator)
        query = normal(generator, 430, 2, 8)
        pages = batch.full or batch.window
        assert pages is not None
        actual = ops.attend(query, storage[:, 1, 0], storage[:, 1, 1], pages, batch, scale=0.4, window=window)
        for row, span in enumerate((slice(0, 300), slice(300, 430))):
            expected = naive.attend_row(query[span], keys[row], values[row], 0.4, window)
            assert relative_error(actual[span], expected) < CLOSE


# name: counts, sources, destinations. Slot 5 always stays NaN: nothing may read or write it.
STATE_BATCHES = {
    "decode": ([1, 1, 1], [0, -1, 2], [0, 1, 3]),
    "prefill": ([37, 70], [-1, 1], [0, 2]),
    "mixed": ([1, 19, 1, 2], [0, 1, -1, 3], [4, 1, 2, 6]),
    "padded": ([3, 0, 1], [0, 1, 2], [3, 4, 2]),
}


def states_of(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Layer 1 of two of seven slots; slot 5 is poison."""
    storage = torch.randn(7, 2, *shape, generator=generator)
    storage[5] = NAN
    return storage[:, 1]


def check_states(before: torch.Tensor, after: torch.Tensor, finals: dict[int, torch.Tensor]) -> None:
    for slot in range(before.shape[0]):
        if slot in finals:
            assert relative_error(after[slot], finals[slot]) < CLOSE
        else:
            assert torch.equal(after[slot].isnan(), before[slot].isnan())
            assert torch.equal(after[slot].nan_to_num(), before[slot].nan_to_num())


@pytest.mark.parametrize("name", list(STATE_BATCHES))
@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv(ops: ModuleType, generator: torch.Generator, name: str, taps: int) -> None:
    counts, sources, destinations = STATE_BATCHES[name]
    batch = build_batch(
        [[0] * count for count in counts], [0] * len(counts),
        state_source=sources, state_destination=destinations,
    )  # fmt: skip
    channels = 13
    x = normal(generator, sum(counts), 2 * channels)[:, :channels]
    weight, bias = normal(generator, channels, taps), normal(generator, channels)
    for silu in (True, False):
        state = states_of(generator, channels, taps - 1)
        before = state.clone()
        actual = ops.causal_conv(
            x, weight, bias if silu else None, state, batch, activation="silu" if silu else None
        )
        offsets, finals = batch.row_start.tolist(), {}
        for row, count in enumerate(counts):
            if not count:
                continue
            span = slice(offsets[row], offsets[row + 1])
            first = before[sources[row]] if sources[row] >= 0 else torch.zeros(channels, taps - 1)
            expected, final = naive.conv_row(x[span], weight, bias if silu else None, first, silu)
            assert relative_error(actual[span], expected) < CLOSE
            finals[destinations[row]] = final
        check_states(before, state, finals)


@pytest.mark.parametrize("name", list(STATE_BATCHES))
@pytest.mark.parametrize("chunk", [16, 256])
def test_mamba2_scan(ops: ModuleType, generator: torch.Generator, name: str, chunk: int) -> None:
    counts, sources, destinations = STATE_BATCHES[name]
    batch = build_batch(
        [[0] * count for count in counts], [0] * len(counts),
        state_source=sources, state_destination=destinations,
    )  # fmt: skip
    tokens, heads, dim, groups, size = sum(counts), 6, 5, 2, 9
    fused = normal(generator, tokens, heads * dim + 2 * groups * size)
    x, B, C = fused.split([heads * dim, groups * size, groups * size], 1)
    x, B, C = x.view(tokens, heads, dim), B.view(tokens, groups, size), C.view(tokens, groups, size)
    dt, A = normal(generator, tokens, heads), -normal(generator, heads).exp()
    D, bias = normal(generator, heads), normal(generator, heads)
    state = states_of(generator, heads, dim, size)
    before = state.clone()
    weights = Mamba2Weights(A, D, bias, dt_limit=(0.05, 2.0), chunk_size=chunk)
    actual = ops.mamba2_scan(x, dt, B, C, weights, state, batch)
    offsets, finals = batch.row_start.tolist(), {}
    for row, count in enumerate(counts):
        if not count:
            continue
        span = slice(offsets[row], offsets[row + 1])
        first = before[sources[row]] if sources[row] >= 0 else torch.zeros(heads, dim, size)
        expected, finals[destinations[row]] = naive.mamba2_row(
            x[span], dt[span], A, B[span], C[span], D, bias, first, (0.05, 2.0)
        )
        assert relative_error(actual[span], expected) < CLOSE
    check_states(before, state, finals)


@pytest.mark.parametrize("name", list(STATE_BATCHES))
@pytest.mark.parametrize("normalise", [False, True])
def test_gated_delta(ops: ModuleType, generator: torch.Generator, name: str, normalise: bool) -> None:
    counts, sources, destinations = STATE_BATCHES[name]
    batch = build_batch(
        [[0] * count for count in counts], [0] * len(counts),
        state_source=sources, state_destination=destinations,
    )  # fmt: skip
    tokens, key_heads, heads, key_dim, dim = sum(counts), 2, 4, 8, 5
    query, key = normal(generator, tokens, key_heads, key_dim), normal(generator, tokens, key_heads, key_dim)
    if not normalise:
        key = key / key.norm(dim=-1, keepdim=True)
    value = normal(generator, tokens, heads, dim)
    g, beta = -normal(generator, tokens, heads).exp(), normal(generator, tokens, heads).sigmoid()
    state = states_of(generator, heads, dim, key_dim)
    before = state.clone()
    actual = ops.gated_delta(query, key, value, g, beta, state, batch, normalise=normalise)
    offsets, finals = batch.row_start.tolist(), {}
    for row, count in enumerate(counts):
        if not count:
            continue
        span = slice(offsets[row], offsets[row + 1])
        first = before[sources[row]] if sources[row] >= 0 else torch.zeros(heads, dim, key_dim)
        expected, finals[destinations[row]] = naive.gated_delta_row(
            query[span], key[span], value[span], g[span], beta[span], first, normalise
        )
        assert relative_error(actual[span], expected) < CLOSE
    check_states(before, state, finals)


def test_gated_delta_with_repeated_keys(ops: ModuleType, generator: torch.Generator) -> None:
    """Equal keys, full rate and no decay: the hardest system to solve, and the answer is still exact."""
    batch = build_batch([[0] * 130], [0], state_source=[-1], state_destination=[0])
    key = normal(generator, 1, 1, 8).expand(130, 1, 8)
    value, query = normal(generator, 130, 1, 6), normal(generator, 130, 1, 8)
    g, beta = torch.full((130, 1), -1e-4), torch.full((130, 1), 0.999)
    state = torch.full((1, 1, 6, 8), NAN)
    actual = ops.gated_delta(query, key, value, g, beta, state, batch, normalise=True)
    expected, final = naive.gated_delta_row(query, key, value, g, beta, torch.zeros(1, 6, 8), True)
    assert relative_error(actual, expected) < 1e-5
    assert relative_error(state[0], final) < 1e-5


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu_squared"])
def test_experts(ops: ModuleType, generator: torch.Generator, activation: str) -> None:
    tokens, hidden, inner, count, picks = 11, 14, 9, 5, 2
    wide = inner if activation == "relu_squared" else 2 * inner
    x = normal(generator, tokens, hidden)
    ids = torch.stack([torch.randperm(count, generator=generator)[:picks] for _ in range(tokens)])
    ids[ids == 3] = 1  # expert 3 gets no token
    weights = normal(generator, tokens, picks).softmax(-1)
    w13, w2 = normal(generator, count, wide, hidden), normal(generator, count, hidden, inner)
    for biases in ((None, None), (normal(generator, count, wide), normal(generator, count, hidden))):
        form = ExpertForm(activation, bias13=biases[0], bias2=biases[1])
        actual = ops.experts(x, ids, weights, w13, w2, form)
        expected = naive.experts(x, ids, weights, w13, w2, activation, *biases)
        assert relative_error(actual, expected) < CLOSE


def test_experts_with_another_clamp(ops: ModuleType, generator: torch.Generator) -> None:
    """Alpha and limit are the caller's: one expert is the two products with the activation between them."""
    x, ids, share = normal(generator, 7, 12), torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1)
    w13, w2 = normal(generator, 1, 20, 12), normal(generator, 1, 12, 10)
    actual = ops.experts(x, ids, share, w13, w2, ExpertForm("swiglu_clamped", Clamp(0.8, 1.5)))
    inner = ops.swiglu_clamped(x @ w13[0].T, alpha=0.8, limit=1.5)
    assert relative_error(actual, inner @ w2[0].T) < CLOSE
    usual = ops.experts(x, ids, share, w13, w2, ExpertForm("swiglu_clamped"))
    assert relative_error(actual, usual) > 0.1


def test_unit_copies(ops: ModuleType, generator: torch.Generator) -> None:
    storage = normal(generator, 9, 3, 2, 5)
    before = storage.clone()
    ops.copy_units(storage, torch.tensor([0, 4, 4]), torch.tensor([8, 2, 1], dtype=torch.int32))
    expected = before.clone()
    expected[8], expected[2], expected[1] = before[0], before[4], before[4]
    assert torch.equal(storage, expected)


def test_units_move_to_another_tier(ops: ModuleType, generator: torch.Generator) -> None:
    """More blocks than a move has programs, the last of each unit not full."""
    here, there = normal(generator, 12, 5, 2500), torch.full((14, 5, 2500), NAN)
    order = torch.randperm(12, generator=generator)
    targets = torch.randperm(14, generator=generator)[:11]
    ops.move_units(here, order[:11], there, targets)
    assert torch.equal(there[targets], here[order[:11]])
    assert int(there.isnan().any(dim=(1, 2)).sum()) == 3, "the others are as they were"


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("activation", [None, "swiglu", "geglu", "relu_squared"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(
    ops: ModuleType, generator: torch.Generator, tokens: int, activation: str | None, biased: bool
) -> None:
    """Odd sizes, in the type that the kernels of few tokens take."""
    x, weight = normal(generator, tokens, 700).half(), normal(generator, 74, 700).half()
    bias = normal(generator, 74).half() if biased else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    if activation is None:
        actual = ops.linear(x, weight, bias)
    else:
        actual = ops.linear_gated(x, weight, bias, activation)
        expected = naive.activate(expected, activation)
    assert actual.dtype == torch.float16
    assert relative_error(actual, expected) < 2e-3


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("block", [(128, 128), (1, 300), (200, 300)])
def test_linear_fp8(generator: torch.Generator, tokens: int, block: tuple[int, int]) -> None:
    """One scale for all, one a row, one a block; Triton's interpreter cannot convert 8-bit floats."""
    ops = import_module("holdfast.kernels.torch")
    x, weight = normal(generator, tokens, 300), normal(generator, 200, 300)
    codes = weight.to(torch.float8_e4m3fn)
    scales = torch.rand(-(-200 // block[0]), -(-300 // block[1]), generator=generator) + 0.5
    bias = normal(generator, 200)
    whole = scales.repeat_interleave(block[0], 0)[:200].repeat_interleave(block[1], 1)[:, :300]
    expected = x.double() @ (codes.double() * whole.double()).T + bias.double()
    assert relative_error(ops.linear_fp8(x, codes, scales, block, bias), expected) < CLOSE
