"""A GGUF model shortened to its first layers: a draft model for a figure of real acceptance."""

from __future__ import annotations

import re
from pathlib import Path

import gguf

__all__ = ["shorten"]

_BLOCK = re.compile(r"blk\.(\d+)\.")


def shorten(model: Path, layers: int, target: Path) -> Path:
    """Write a copy of a GGUF model with its first `layers` layers and all that is not a layer."""
    reader = gguf.GGUFReader(model)
    architecture = str(reader.fields["general.architecture"].contents())
    count = f"{architecture}.block_count"
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == count else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        block = _BLOCK.match(tensor.name)
        if block is None or int(block[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
