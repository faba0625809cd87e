"""The ranks that compute one model, over torch.distributed: NCCL between GPUs, gloo between CPUs.

The process groups are built directly, without torch's global one: an engine may run in a program that uses
torch.distributed itself. Ranks meet in a file that only this user can read, and gloo listens on the loopback
interface alone, until the ranks are connected: it would hold connections of anybody, and stall.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from holdfast.models.ranks import Ranks

__all__ = ["RankGroup", "join", "join_gloo"]

LOOPBACK = "127.0.0.1"

_ATTACH_FILTER = 26
"""Linux's SO_ATTACH_FILTER, which Python has no name for."""
_NOTHING_PASSES = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: return 0, of each packet nothing is kept."""

_TORCH: Any = distributed
"""torch does not describe the types of its process groups."""


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """The part of torch's process groups that is used."""

    def allreduce(self, tensors: Sequence[Tensor]) -> _Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> _Work: ...

    def _allgather_base(self, output: Tensor, mine: Tensor) -> _Work: ...

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> _Work: ...

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> _Work: ...

    def abort(self) -> None: ...


class RankGroup:
    """One rank's end of a group. A rank that has died, or does not answer in time, is a RuntimeError.

    Without `nccl`, tensors on a GPU pass through main memory. A rank alone has every sum already and asks
    nobody, unless `alone_too`: NCCL would take 2.7 microseconds for each.
    """

    def __init__(
        self,
        ranks: Ranks,
        gloo: _Backend,
        nccl: _Backend | None = None,
        *,
        alone_too: bool = False,
    ) -> None:
        self._ranks = ranks
        self._asks = ranks.size > 1 or alone_too
        self._host = gloo
        self._nccl = nccl
        self._group = gloo if nccl is None else nccl
        self._staged = nccl is None

    @property
    def ranks(self) -> Ranks:
        """Which rank this is."""
        return self._ranks

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place where x is contiguous."""
        if not self._asks:
            return x
        mine = self._staged_out(x)
        self._group.allreduce([mine]).wait()
        return self._staged_in(mine, x)

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks along a new first dimension."""
        if not self._asks:
            return x[None]
        mine = self._staged_out(x)
        every = mine.new_empty(self._ranks.size * mine.numel())
        self._group._allgather_base(every, mine.view(-1)).wait()
        return self._staged_in(every.view(self._ranks.size, *x.shape), x)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x, which is contiguous, with that of rank 0."""
        if not self._asks:
            return
        mine = self._staged_out(x)
        self._group.broadcast(mine, 0).wait()
        if mine is not x:
            x.copy_(mine)

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor in main memory to a rank that receives one of this shape and type."""
        self._host.send([x.contiguous()], rank, 0).wait()

    def receive(self, x: Tensor, rank: int) -> None:
        """Overwrite a contiguous tensor in main memory with one that a rank sends."""
        self._host.recv([x], rank, 0).wait()

    def close(self) -> None:
        """No more calls follow. NCCL's threads end, which look into the file in which ranks met."""
        if self._nccl is not None:
            self._nccl.abort()

    def _staged_out(self, x: Tensor) -> Tensor:
        return x.cpu() if self._staged and x.is_cuda else x.contiguous()

    def _staged_in(self, mine: Tensor, x: Tensor) -> Tensor:
        return mine.to(x.device) if self._staged else mine


def _store(meeting: Path, ranks: Ranks, seconds: float) -> Any:
    store = _TORCH.FileStore(str(meeting), ranks.size)
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _gloo(meeting: Path, ranks: Ranks, seconds: float) -> _Backend:
    before = set(_listeners())
    options = _TORCH.ProcessGroupGloo._Options()
    options._devices = [_TORCH.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=seconds)
    store = _store(meeting, ranks, seconds)
    group: _Backend = _TORCH.ProcessGroupGloo(store, ranks.rank, ranks.size, options)
    for listener in set(_listeners()) - before:
        _shut(listener)
    return group


def _listeners() -> Iterator[int]:
    """The descriptors of this process that accept connections over TCP."""
    for path in list(Path("/dev/fd").iterdir()):
        descriptor = int(path.name)
        with suppress(OSError):  # The one that lists them is closed.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    over_tcp = each.family in (socket.AF_INET, socket.AF_INET6)
                    if over_tcp and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield descriptor


def _shut(listener: int) -> None:
    """Let nobody connect any more. Not closed, which gloo does itself; without Linux it stays open."""
    if sys.platform == "linux":
        instructions = ctypes.create_string_buffer(_NOTHING_PASSES)
        program = struct.pack("HP", 1, ctypes.addressof(instructions))
        with socket.socket(fileno=os.dup(listener)) as each:
            each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def join_gloo(meeting: Path, ranks: Ranks, seconds: float, *, alone_too: bool = False) -> RankGroup:
    """Join the others over loopback sockets; all calls of the group give up after some seconds."""
    return RankGroup(ranks, _gloo(meeting, ranks, seconds), alone_too=alone_too)


def join_nccl(
    meeting: Path, ranks: Ranks, seconds: float, device: torch.device, *, alone_too: bool = False
) -> RankGroup:
    """Join the others, each with a GPU of its own."""
    options = _TORCH.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    with torch.cuda.device(device):
        store = _store(meeting.with_name(f"{meeting.name}-nccl"), ranks, seconds)
        nccl: _Backend = _TORCH.ProcessGroupNCCL(store, ranks.rank, ranks.size, options)
        # The first call connects the ranks, which a graph must not.
        nccl.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return RankGroup(ranks, _gloo(meeting, ranks, seconds), nccl, alone_too=alone_too)


def join(meeting: Path, ranks: Ranks, seconds: float, device: torch.device) -> RankGroup:
    """Join the others: over NCCL where this rank has a GPU, else over gloo."""
    if device.type == "cuda":
        return join_nccl(meeting, ranks, seconds, device)
    return join_gloo(meeting, ranks, seconds)
