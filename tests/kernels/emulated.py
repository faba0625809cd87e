"""The CUDA kernels carried out on the CPU: each reads the memory that its launch points to, and writes there.

A test that launches one of these and compares the result with torch checks the whole launch: pointers, tensor
maps, sizes and the number of programs. Results are NaN where no program has written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from holdfast.kernels.batch import KEY_BLOCK, QUEUE_FIELDS
from holdfast.kernels.cuda import products, twelve
from holdfast.kernels.cuda.attention import FETCHED, Shape
from holdfast.kernels.cuda.driver import SWIZZLE_64_BYTES, SWIZZLE_128_BYTES
from holdfast.kernels.cuda.scaled_attention import ScaledShape
from holdfast.kernels.torch.activation import Activation, activate
from holdfast.kernels.torch.scaled import decode

Address = int | None


class TensorMap(NamedTuple):
    """A tensor map: sizes, strides and block in elements, innermost dimension first."""

    data: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    swizzle: int = SWIZZLE_128_BYTES

    def tensor(self) -> torch.Tensor:
        """The bfloat16 tensor that the copy engine would see, outermost dimension first."""
        strides = (1, *self.strides)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True))
        return memory(self.data, extent, torch.bfloat16).as_strided(self.sizes[::-1], strides[::-1])

    def codes(self) -> torch.Tensor:
        """The same as bytes [units, page, key heads, dim], two of them an element."""
        token, head, unit = (2 * stride for stride in self.strides)
        pairs, page, heads, units = self.sizes
        extent = 2 * pairs + (page - 1) * token + (heads - 1) * head + (units - 1) * unit
        shape, strides = (units, page, heads, 2 * pairs), (unit, token, head, 1)
        return memory(self.data, extent, torch.uint8).as_strided(shape, strides)


def memory(address: Address, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies at an address; writing to it writes there."""
    assert address is not None
    storage = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(storage, dtype=dtype, count=count)


class Kernel:
    """A compiled kernel that counts its launches; `run` gets the values of the parameters."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, programs: int, maps: tuple[TensorMap, ...], *parameters: Any) -> None:
        self.launches += 1
        self.run(programs, maps, [parameter.value for parameter in parameters])

    def run(self, programs: int, maps: tuple[TensorMap, ...], values: Sequence[Any]) -> None:
        raise NotImplementedError


def read_x(map_of_x: TensorMap, tokens: int, depth: int, bytes_fetched: int) -> torch.Tensor:
    """The activations; a fetch brings as many bytes as its barrier waits for."""
    width, rows = map_of_x.block
    assert 2 * width * rows == bytes_fetched and rows >= tokens
    x = map_of_x.tensor()
    assert x.shape == (tokens, depth)
    return x.float()


def write_result(
    sums: torch.Tensor, bias: Address, out: Address, outputs: int, activation: Activation | None
) -> None:
    """Bias and activation of sums [tokens, rows of the weight], into bfloat16 memory."""
    if bias is not None:
        sums += memory(bias, sums.shape[1], torch.bfloat16).float()
    result = sums if activation is None else activate(sums, activation)
    assert result.shape[1] == outputs
    memory(out, result.numel(), torch.bfloat16).copy_(result.bfloat16().flatten())


class Product(Kernel):
    """`source/product.cu` for one cut: program p takes tile p // splits and part p % splits of the depth."""

    def __init__(self, cut: products.Cut, activation: Activation | None) -> None:
        super().__init__()
        self.cut, self.activation = cut, activation

    def run(self, programs: int, maps: tuple[TensorMap, ...], values: Sequence[Any]) -> None:
        bias, out, tokens, outputs, depth, bytes_fetched = values
        x, weight = read_x(maps[0], tokens, depth, bytes_fetched), maps[1].tensor().float()
        halves = weight.shape[0] // outputs
        tile = maps[1].block[1]
        assert tile * halves == self.cut.rows and maps[1].block[0] == maps[0].block[0]
        part = depth // self.cut.splits
        sums = torch.full((tokens, weight.shape[0]), torch.nan)
        for program in range(programs):
            number, share = divmod(program, self.cut.splits)
            columns = slice(share * part, (share + 1) * part)
            for half in range(halves):
                rows = slice(
                    half * outputs + number * tile, half * outputs + min((number + 1) * tile, outputs)
                )
                done = x[:, columns] @ weight[rows, columns].T
                sums[:, rows] = done if share == 0 else sums[:, rows] + done
        write_result(sums, bias, out, outputs, self.activation)


class TwelveBitProduct(Kernel):
    """`source/twelve.cu` for one cut: program p takes tile p, and in a loop every tile `programs` further."""

    def __init__(self, cut: twelve.Cut, activation: Activation | None) -> None:
        super().__init__()
        self.cut, self.activation = cut, activation

    def run(self, programs: int, maps: tuple[TensorMap, ...], values: Sequence[Any]) -> None:
        words, scale, bias, out, tokens, outputs, depth, bytes_fetched = values
        assert tokens <= self.cut.columns
        x = read_x(maps[0], tokens, depth, bytes_fetched)
        gated = self.activation not in products.PLAIN
        rows = 2 * outputs if gated else outputs
        tiling = twelve.Tiling(self.cut.slabs, self.cut.looped)
        tiles, blocks = tiling.tiles(rows), depth // twelve.DEPTH
        shape = (tiles, blocks, self.cut.slabs, 4, 96)
        packed = twelve.TwelveBits(
            memory(words, tiles * blocks * self.cut.slabs * 4 * 96, torch.int32).view(shape),
            memory(scale, rows, torch.float32), rows, depth, gated, tiling,
        )  # fmt: skip
        weight = twelve.unpack(packed)
        sums = torch.full((tokens, rows), torch.nan)
        for program in range(programs):
            for tile in range(program, tiles, programs) if self.cut.looped else [program]:
                picked = self._rows(tile, rows, gated)
                sums[:, picked] = x @ weight[picked].T
        write_result(sums, bias, out, outputs, self.activation)

    def _rows(self, tile: int, rows: int, gated: bool) -> torch.Tensor:
        """The weight rows of a tile; slabs of a gated weight hold eight rows of each half."""
        tall = 16 * self.cut.slabs
        if not gated:
            return torch.arange(tile * tall, min((tile + 1) * tall, rows))
        outputs = torch.arange(tile * tall // 2, min((tile + 1) * tall // 2, rows // 2))
        return torch.cat((outputs, outputs + rows // 2))


class Attention(Kernel):
    """`source/attention.cu` for one shape: a softmax over each listed piece, merged tile by tile."""

    def __init__(self, shape: Shape | ScaledShape) -> None:
        super().__init__()
        self.shape = shape

    def run(self, programs: int, maps: tuple[TensorMap, ...], values: Sequence[Any]) -> None:
        assert programs > 0 and [each.data for each in maps[:2]] == [each.data for each in maps[2:]]
        # [units, key heads, halves, page, 64] -> [units, page, key heads, dim]
        keys, values_of = (each.tensor().permute(0, 3, 1, 2, 4).flatten(3).float() for each in maps[:2])
        self.attend(keys, values_of, values)

    def attend(self, keys: torch.Tensor, values_of: torch.Tensor, values: Sequence[Any]) -> None:
        """Attention over keys and values [units, page, key heads, dim]."""
        query, out, sinks, table, listed, _, _, _, lines, stride, scale = values
        kv_heads, dim, page = self.shape.kv_heads, self.shape.dim, self.shape.page_size
        heads = kv_heads * self.shape.group
        pieces = memory(listed, lines * QUEUE_FIELDS, torch.int32).view(lines, QUEUE_FIELDS).tolist()
        logits = None if sinks is None else memory(sinks, heads, torch.float32)
        partial: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for row, token, tokens, first, _, begin, finish, *_ in pieces:
            if tokens == 0:
                break
            units = memory(table + 4 * row * stride, -(-finish // page), torch.int32).long()
            places = torch.arange(begin, finish)
            seen_keys = keys[units[places // page], places % page]
            seen_values = values_of[units[places // page], places % page]
            q = memory(query + 2 * token * heads * dim, tokens * heads * dim, torch.bfloat16).float()
            scores = torch.einsum(
                "tkgd,skd->tkgs", q.view(tokens, kv_heads, self.shape.group, dim) * scale, seen_keys
            )
            hidden = places[None] > first + torch.arange(tokens)[:, None]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            mixed = torch.einsum("tkgs,skd->tkgd", torch.nan_to_num(scores.softmax(-1)), seen_values)
            partial.setdefault((token, tokens), []).append((scores.logsumexp(-1), mixed))
        for (token, tokens), parts in partial.items():
            sums = torch.stack([weight for weight, _ in parts])
            total = sums.logsumexp(0)
            if logits is not None:
                total = torch.logaddexp(total, logits.view(kv_heads, -1).expand_as(total))
            result = sum((sums[i] - total).exp()[..., None] * mixed for i, (_, mixed) in enumerate(parts))
            assert isinstance(result, torch.Tensor)
            place = memory(out + 2 * token * heads * dim, tokens * heads * dim, torch.bfloat16)
            place.copy_(result.bfloat16().flatten())


class ScaledAttention(Attention):
    """`source/scaled_attention.cu` for one shape: the same over codes and scales, for one-token rows."""

    def run(self, programs: int, maps: tuple[TensorMap, ...], values: Sequence[Any]) -> None:
        *shared, key_scales, value_scales, sixteens = values
        page, dim = self.shape.page_size, self.shape.dim
        assert programs > 0
        for each, keys in zip(maps, (KEY_BLOCK, KEY_BLOCK, FETCHED, FETCHED), strict=True):
            assert each.block == (dim // 2, min(keys, page), 1, 1)
            assert each.swizzle == (SWIZZLE_128_BYTES if dim == 128 else SWIZZLE_64_BYTES)
        numbers = []
        for each, address in zip(maps[:2], (key_scales, value_scales), strict=True):
            codes = each.codes()
            units, unit = codes.shape[0], 16 * sixteens
            extent = (units - 1) * unit + self.shape.kv_heads * page
            shape = (units, page, self.shape.kv_heads)
            numbers.append(
                decode(codes, memory(address, extent, torch.uint8).as_strided(shape, (unit, 1, page)))
            )
        self.attend(numbers[0], numbers[1], shared)
