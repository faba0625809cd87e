"""The parts of a snapshot file: the first holds a session's memory, each later one the new units since then.

    part 1            pages 0..4, state     tokens 0..70
    part 2, after 70         4..6, state    tokens 0..100     page 4 was partly filled
    part 3, after 100           6..9, state tokens 0..150

A page that is full never changes, so a later part begins with the page that was partly filled; it has the
recurrent state as a whole. The pages of a part end with its last token. Reading takes each page from the last
part that has it. The file of earlier versions is a file of one part. Called by the disk tier and its thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from holdfast.engine.tiers.files import (
    BadFile,
    Header,
    Snapshot,
    SnapshotFiles,
    check_header,
    decode,
)
from holdfast.engine.tiers.packing import UNREADABLE

__all__ = ["PARTS_MAX", "read_parts", "read_snapshot"]

PARTS_MAX = 64
"""Parts of a file; the next one is a new file."""


def read_parts(files: SnapshotFiles, name: str, size: int, expected: Header) -> Snapshot:
    """The parts in the first `size` bytes of a file, from their headers.

    Raises `BadFile` if a header is damaged, does not follow on the one before, or is of another model or
    memory than expected. Lengths and digests of tokens are those that the parts state.
    """
    if files.size(name) < size:
        raise BadFile("it is truncated")
    snapshot: Snapshot | None = None
    start = 0
    while start < size:
        head = files.read_head(name, start)
        length, tokens, end = _outline(head)
        after = snapshot.length if snapshot is not None else 0
        if length <= after:
            raise BadFile("a part holds nothing new")
        check_header(head, replace(expected, length=length, tokens=tokens), after)
        start += end
        snapshot = Snapshot(name, length, tokens, start, snapshot)
    if snapshot is None or start != size:
        raise BadFile("its last part is truncated")
    return snapshot


def _outline(head: bytes) -> tuple[int, str, int]:
    """The number and digest of a part's tokens, and its size in bytes."""
    size = int.from_bytes(head[:8], "little")
    try:
        found = json.loads(head[8 : 8 + size])
        facts = found.pop("__metadata__")
        end = max((int(tensor["data_offsets"][1]) for tensor in found.values()), default=0)
        if end < 0:
            raise BadFile("a tensor ends before the header does")
        return int(facts["length"]), str(facts["tokens"]), 8 + size + end
    except UNREADABLE as error:
        raise BadFile("the header cannot be read") from error


def read_snapshot(
    files: SnapshotFiles, snapshot: Snapshot, header: Callable[[Snapshot], Header], page_size: int
) -> dict[str, list[Tensor]]:
    """The tensors of a whole file, as the rows of its parts that follow each other.

    Each part is checked against its `header`; raises `BadFile` if one is damaged.
    """
    runs: dict[str, list[Tensor]] = {}
    start, after = 0, 0
    for part in snapshot.parts:
        tensors = decode(files.read(part.file, start, part.bytes), header(part), after)
        if runs and runs.keys() != tensors.keys():
            raise BadFile("its parts hold different tensors")
        for name, tensor in tensors.items():
            end, first = -(-after // page_size), -(-part.length // page_size) - len(tensor)
            _follow(name.split(".")[-2], runs.setdefault(name, []), tensor, end - first)
        start, after = part.bytes, part.length
    return runs


def _follow(component: str, runs: list[Tensor], new: Tensor, overlap: int) -> None:
    """Put the rows of a later part in the place of the last `overlap` ones.

    A recurrent state is in one part as a whole. A later part of a sliding window may begin past the end of an
    earlier one, which is of no use then.
    """
    if component == "full" and overlap < 0:
        raise BadFile("it lacks pages")
    if component == "state" or overlap < 0:
        runs.clear()
    while runs and overlap > 0:
        last = runs.pop()
        if len(last) > overlap:
            runs.append(last[: len(last) - overlap])
        overlap -= len(last)
    runs.append(new)
