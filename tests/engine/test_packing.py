"""Tensors in the format of safetensors, with one copy and without: the package itself is the reference."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from holdfast.engine.tiers.packing import TYPES, BadPack, pack, unpack

ABOUT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def some_tensors() -> dict[str, torch.Tensor]:
    """One of each type and size of element, one that is empty, and one that is not contiguous."""
    found = {name: torch.arange(12).reshape(3, 4).to(dtype) for name, dtype in TYPES.items()}
    return {**found, "empty": torch.empty(0, 7), "turned": torch.arange(6.0).reshape(2, 3).t()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and one[name].tolist() == other[name].tolist()
        for name in one
    )


def test_packed_tensors_are_read_by_the_package_and_those_of_the_package_unpacked() -> None:
    tensors, notes = some_tensors(), {"format": "x", "length": "7"}
    packed = pack(tensors, notes)
    assert same(load(bytes(packed)), tensors) and same(unpack(packed), tensors)
    size = int.from_bytes(packed[:8], "little")
    assert json.loads(bytes(packed[8 : 8 + size]))["__metadata__"] == notes
    theirs = save({name: tensor.contiguous() for name, tensor in tensors.items()}, notes)
    assert same(unpack(memoryview(bytearray(theirs))), tensors)
    assert unpack(pack({}, notes)) == {}


def test_unpacked_tensors_are_the_buffer_itself() -> None:
    packed = pack({"a": torch.zeros(4)}, {})
    unpacked = unpack(packed)["a"]
    packed[-4:] = b"\x00\x00\x80?"
    assert unpacked.tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"a": ABOUT, "b": ABOUT}, "b is not at its place"),
        ({"a": ABOUT | {"data_offsets": [4, 12]}}, "a is not at its place"),
        ({"a": ABOUT | {"shape": [3], "data_offsets": [0, 12]}}, "a is truncated"),
        ({"a": ABOUT | {"shape": [1], "data_offsets": [0, 4]}}, "bytes follow the last tensor"),
        ({}, "bytes follow the last tensor"),
        ({"a": ABOUT | {"shape": [3]}}, "cannot be read"),
        ({"a": ABOUT | {"shape": [-1, -2]}}, "cannot be read"),
        ({"a": ABOUT | {"shape": 2}}, "cannot be read"),
        ({"a": ABOUT | {"dtype": "F31"}}, "cannot be read"),
        ({"a": ABOUT | {"dtype": []}}, "cannot be read"),
        ({"a": {"dtype": "F32"}}, "cannot be read"),
        ({"a": ABOUT | {"shape": [10**400], "data_offsets": [0, 4 * 10**400]}}, "a is truncated"),
        ({"a": 3}, "cannot be read"),
        ([], "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(header: Any, why: str) -> None:
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    content = bytearray(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(BadPack, match=why):
        unpack(memoryview(content))


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    head = json.dumps({"a": ABOUT}).encode()
    head += b" " * (-len(head) % 8 + 2)
    with pytest.raises(BadPack, match="a is not at its place"):
        unpack(memoryview(bytearray(len(head).to_bytes(8, "little") + head + bytes(8))))
