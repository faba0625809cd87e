"""KV caches in eight bits: what is stored, and attention over it, in torch and in Triton's interpreter."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from holdfast.kernels import Pieces, Rotation, ScaledCache, tile_count
from holdfast.kernels.batch import PIECE_FIELDS
from holdfast.kernels.torch.scaled import decode, encode
from tests.kernels import naive
from tests.kernels.batches import NAN, fill_cache, paged_batch, relative_error, scaled_caches
from tests.kernels.test_kernels import ATTENTION_BATCHES

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

CLOSE = 2e-6
HALF_A_STEP = 2.0**-4
"""The largest relative error of rounding to three bits of mantissa."""


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return import_module(f"holdfast.kernels.{request.param}")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def heads_of_all_sizes(generator: torch.Generator) -> torch.Tensor:
    """Heads [40, 3, 16] from 1e-6 to 1e4, with elements far apart; zeros, and limits of the scales."""
    x = torch.randn(40, 3, 16, generator=generator)
    x = x * 10 ** torch.linspace(-6, 4, 120).view(40, 3, 1) * 4.0 ** torch.linspace(0, -6, 16)
    x[0] = 0.0
    x[1, 0, 0], x[2, 0, 5] = 448.0, -448.0 * 2**7
    return x


# --- what is stored -------------------------------------------------------------------------------


def test_numbers_are_rounded_to_three_bits_of_mantissa(generator: torch.Generator) -> None:
    x = heads_of_all_sizes(generator)
    codes, scales = encode(x)
    found = decode(codes, scales).double()
    step = 2.0 ** (scales.double() - 127)
    error = (found - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() * HALF_A_STEP, step[..., None] * 2**-10)).all())


def test_a_scale_is_the_smallest_with_which_no_code_saturates(generator: torch.Generator) -> None:
    codes, scales = encode(heads_of_all_sizes(generator))
    largest = (codes & 127).amax(-1)
    assert int(largest.max()) <= 126, "no code is NaN"
    free = (scales > 127 - 15) & (scales < 127 + 7)
    assert int(free.sum()) > 60
    assert bool((largest[free] >= 118).all()), "224 or more, up to rounding"


def test_stored_numbers_are_exact_in_both_short_types(generator: torch.Generator) -> None:
    """So that a kernel may compute in either."""
    found = decode(*encode(heads_of_all_sizes(generator)))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(found.to(dtype).float(), found)


def test_what_is_too_large_saturates_and_nan_stays_nan() -> None:
    x = torch.tensor([[1e30, -1e30, 3.0], [NAN, 1.0, 2.0], [float("inf"), 0.0, 0.0]])
    found = decode(*encode(x))
    assert found[0].tolist() == [57344.0, -57344.0, 3.0]
    assert found[1].isnan().tolist() == [True, False, False]
    assert found[2].tolist() == [57344.0, 0.0, 0.0]


def test_triton_stores_the_same_bytes(interpreter: None, generator: torch.Generator) -> None:
    key = heads_of_all_sizes(generator)
    value = key.flip(0)
    value[8, 2, 0] = 1e30
    slots = torch.randperm(60, generator=generator)[:40]
    made = []
    for package in ("torch", "triton"):
        codes = torch.full((2, 6, 10, 3, 16), 99, dtype=torch.uint8)
        scales = torch.full((2, 6, 3, 10), 99, dtype=torch.uint8)
        caches = [ScaledCache(codes[part], scales[part]) for part in range(2)]
        import_module(f"holdfast.kernels.{package}").write_kv(key, value, *caches, slots)
        made.append((codes, scales))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert int((made[0][1] == 99).sum()) == 2 * 20 * 3, "other tokens are untouched"


def test_nan_is_written_as_nan(ops: ModuleType) -> None:
    """A row that computes with it has no token; a number in its place would go unnoticed."""
    value = torch.ones(1, 2, 4)
    value[0, 1, 2] = NAN
    codes = torch.zeros(2, 1, 4, 2, 4, dtype=torch.uint8)
    scales = torch.zeros(2, 1, 2, 4, dtype=torch.uint8)
    caches = [ScaledCache(codes[part], scales[part]) for part in range(2)]
    ops.write_kv(value, value, *caches, torch.tensor([3]))
    for cache in caches:
        found = decode(cache.codes, cache.scales.transpose(1, 2))[0, 3]
        assert found.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("rotary_dim", [None, 8, 20])
@pytest.mark.parametrize("norms", [False, True])
def test_keys_are_rotated_before_they_are_rounded(
    ops: ModuleType, generator: torch.Generator, rotary_dim: int | None, norms: bool
) -> None:
    batch, total = paged_batch([3, 1, 5], [0, 6, 2], 3)
    assert batch.full is not None
    tokens, heads, kv_heads, dim = 9, 6, 2, 20
    query, key, value = (
        torch.randn(tokens, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads)
    )
    weights = [torch.randn(dim, generator=generator) for _ in range(2)] if norms else [None, None]
    cos_sin = None if rotary_dim is None else torch.rand(16, rotary_dim, generator=generator)
    codes = torch.full((total, 2, 3, kv_heads, dim), 127, dtype=torch.uint8)
    scales = torch.full((total, 2, kv_heads, 3), 255, dtype=torch.uint8)
    caches = [ScaledCache(codes[:, part], scales[:, part]) for part in range(2)]
    rotation = Rotation(cos_sin, weights[0], weights[1], eps=1e-5)
    out = ops.rotate_and_write(query, key, value, *caches, batch.full.slots, batch.positions, rotation)
    expected = [query.double(), key.double()]
    for index, weight in enumerate(weights):
        if weight is not None:
            expected[index] = naive.rms_norm(expected[index], weight, 1e-5)
        if cos_sin is not None:
            expected[index] = naive.rotate(expected[index], cos_sin, batch.positions)
    assert relative_error(out, expected[0]) < CLOSE
    for cache, wanted in zip(caches, (expected[1], value), strict=True):
        numbers = decode(cache.codes, cache.scales.transpose(1, 2)).flatten(0, 1)
        assert relative_error(numbers[batch.full.slots], wanted) < HALF_A_STEP / 2
    assert int((scales != 255).sum()) == 2 * tokens * kv_heads


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("shape", list(ATTENTION_BATCHES))
@pytest.mark.parametrize("extras", ["plain", "window", "sinks", "softcap"])
def test_attention_over_what_is_stored(
    ops: ModuleType, generator: torch.Generator, page_size: int, shape: str, extras: str
) -> None:
    counts, starts = ATTENTION_BATCHES[shape]
    window = 11 if extras in ("window", "sinks") else None
    softcap = 1.5 if extras == "softcap" else None
    heads, kv_heads, dim = 6, 2, 20
    sinks = torch.randn(heads, generator=generator) if extras == "sinks" else None
    batch, total = paged_batch(counts, starts, page_size, window=window)
    storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
    storage[..., 0, :] *= 50.0
    for part in (*keys, *values):
        part[:, 0] *= 50.0
    key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
    query = torch.randn(sum(counts), heads, dim, generator=generator)
    pages = batch.full or batch.window
    assert pages is not None
    actual = ops.attend(
        query, key_cache, value_cache, pages, batch, scale=0.1, window=window, sinks=sinks, softcap=softcap
    )
    offsets = batch.row_start.tolist()
    for row, count in enumerate(counts):
        if count:
            span = slice(offsets[row], offsets[row + 1])
            expected = naive.attend_row(query[span], keys[row], values[row], 0.1, window, sinks, softcap)
            assert relative_error(actual[span], expected) < CLOSE


@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_queries_of_any_size_meet_keys_in_float16(
    interpreter: None, generator: torch.Generator, size: float
) -> None:
    """Bfloat16 queries of a range that float16 lacks."""
    batch, total = paged_batch([1, 7, 1], [30, 12, 63], 16)
    storage, keys, values = fill_cache(batch, total, 2, 32, generator=generator)
    key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
    query = (torch.randn(9, 6, 32, generator=generator) * size).bfloat16()
    query[:, ::2] *= 10
    assert batch.full is not None
    triton = import_module("holdfast.kernels.triton")
    actual = triton.attend(query, key_cache, value_cache, batch.full, batch, scale=0.2 / size)
    for row, span in enumerate((slice(0, 1), slice(1, 8), slice(8, 9))):
        expected = naive.attend_row(query[span], keys[row], values[row], 0.2 / size)
        assert relative_error(actual[span], expected) < 8e-3


def test_pieces_over_what_is_stored(interpreter: None, generator: torch.Generator) -> None:
    triton = import_module("holdfast.kernels.triton")
    heads, kv_heads, dim, counts = 4, 2, 16, [1, 20, 1]
    batch, total = paged_batch(counts, [700, 30, 90], 64)
    storage, keys, values = fill_cache(batch, total, kv_heads, dim, generator=generator)
    key_cache, value_cache, keys, values = scaled_caches(storage, keys, values)
    lists = []
    for queries, above, most in ((8, 0, 16), (32, 16, 64)):
        lines = tile_count(sum(counts), len(counts), queries) + 9
        listed = torch.full((lines, PIECE_FIELDS), 1 << 30, dtype=torch.int32)
        arrived = torch.zeros(lines * kv_heads, dtype=torch.int32)
        lists.append(Pieces(listed, arrived, queries, 9, above, most))
    batch.pieces = tuple(lists)
    triton.list_pieces(batch)
    assert int(lists[0].listed[:, 0].max()) > 1, "the keys of the long row are split"
    query = torch.randn(sum(counts), heads, dim, generator=generator)
    assert batch.full is not None
    actual = triton.attend(query, key_cache, value_cache, batch.full, batch, scale=0.3)
    begin = 0
    for row, count in enumerate(counts):
        span = slice(begin, begin + count)
        expected = naive.attend_row(query[span], keys[row], values[row], 0.3)
        assert relative_error(actual[span], expected) < CLOSE
        begin += count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_of_another_type_than_the_queries(
    ops: ModuleType, generator: torch.Generator, dtype: torch.dtype
) -> None:
    counts, starts = ATTENTION_BATCHES["mixed"]
    batch, total = paged_batch(counts, starts, 16)
    storage, keys, values = fill_cache(batch, total, 2, 20, dtype=dtype, generator=generator)
    query = torch.randn(sum(counts), 6, 20, generator=generator)
    assert batch.full is not None
    actual = ops.attend(query, storage[:, 1, 0], storage[:, 1, 1], batch.full, batch, scale=0.3)
    offsets = batch.row_start.tolist()
    for row in range(batch.rows):
        span = slice(offsets[row], offsets[row + 1])
        expected = naive.attend_row(query[span], keys[row], values[row], 0.3)
        assert relative_error(actual[span], expected) < CLOSE
