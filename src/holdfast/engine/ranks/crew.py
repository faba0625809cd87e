"""Rank 0's side: the processes of the other ranks, and the messages to them.

`Crew` starts a process for each other rank and implements `step.lead.Lead` by sending frames to all of them.
If a rank ends, or fails during an all-reduce, the ranks are out of step: `require` raises
`RankLost`, which ends the engine's process like the loss of a GPU. Ranks end with this process, however it
ends: they see the end of their stream, and are killed with their parent where that is its main thread.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from torch import Tensor

from holdfast.core.plan import TierMove
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.group import RankGroup, join
from holdfast.engine.ranks.messages import Channel, Digest, Frame, Kind, RankEnded, encode
from holdfast.engine.start.tuning import StepCost
from holdfast.engine.step.inputs import Shape, Words
from holdfast.engine.step.lead import StepCall
from holdfast.engine.step.profiling import measure_step
from holdfast.engine.step.runner import DeviceLost
from holdfast.models.fields import ConfigurationError
from holdfast.models.memory import MemoryTypes, UnitCounts
from holdfast.models.model import Model
from holdfast.models.ranks import Ranks

__all__ = ["Crew", "RankLost"]

log = logging.getLogger("holdfast.ranks")

SUM_SECONDS = 60.0
"""How long a sum over the ranks, or a rank that is told something, may take before it counts as stalled."""

STOP_SECONDS = 5.0
"""How long ranks may take to end."""

MODULE = "holdfast.engine.ranks.follower"


def spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which inherits its end of a stream."""
    command = [sys.executable, "-m", MODULE, str(descriptor)]
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)


class RankLost(DeviceLost):
    """The ranks of a model no longer agree, or one of them has ended; only new processes can go on."""


class Crew:
    """The other ranks of one model."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], channels: list[Channel]) -> None:
        """Made by `start`."""
        self._processes = processes
        self._channels = channels
        self._folder = TemporaryDirectory(prefix="holdfast-ranks-")
        self._digest = Digest()
        self._group: RankGroup | None = None
        self._working = False
        self._closed = False
        self._lost = ""

    @property
    def group(self) -> RankGroup:
        """The ranks, for sums."""
        assert self._group is not None
        return self._group

    # --- start and end ----------------------------------------------------------------------------

    @classmethod
    def start(cls, path: str, options: EngineOptions, devices: Sequence[torch.device]) -> Crew:
        """Start a process for each rank but the first, and meet them; they load their parts meanwhile."""
        size = len(devices)
        crew = cls([], [])
        try:
            meeting = Path(crew._folder.name) / "meeting"
            for rank in range(1, size):
                crew._begin(_setup(path, options, Ranks(rank, size), devices[rank], meeting))
            crew._hear_all()
            crew._group = join(meeting, Ranks(0, size), SUM_SECONDS, devices[0])
            crew._hear_all()
            if devices[0].type == "cpu":
                crew._folder.cleanup()  # NCCL may look into it later.
        except BaseException:
            crew.kill()
            raise
        return crew

    def _begin(self, setup: dict[str, Any]) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._processes.append(spawn(theirs.fileno()))
        self._channels.append(Channel(mine))
        self._channels[-1].send(encode(Frame.of_json(Kind.SETUP, setup), Digest()))

    def _hear_all(self) -> None:
        """Wait for an answer of every rank; raises the error of one that failed."""
        for rank, channel in enumerate(self._channels, 1):
            try:
                answer = channel.receive().json()
            except RankEnded as error:
                raise OptionError("tensor_parallel", f"failed: rank {rank} ended; see the log") from error
            if answer["option"]:
                raise OptionError(answer["option"], answer["error"])
            if answer["error"]:
                raise ConfigurationError(f"rank {rank}: {answer['error']}")

    def loaded(self) -> None:
        """Wait until every rank has its weights."""
        self._hear_all()

    def plan(self, options: EngineOptions, units: UnitCounts) -> None:
        """Give the ranks their pools, which options state: as many units as this rank has."""
        self._publish(Frame.of_json(Kind.PLAN, {"options": _written(options), "units": asdict(units)}))
        self._hear_all()
        if options.audit == "strict":
            self._digest.checked = True

    def measure(
        self, model: Model, tokens: int, page_size: int, rows_max: int, types: MemoryTypes, *, timed: bool
    ) -> StepCost:
        """`profiling.measure_step` on all ranks.

        A step that does not fit cannot be tried again with fewer tokens: ranks may have stopped at different
        sums of it.
        """
        self._working = True
        self._publish(Frame(Kind.MEASURE, [tokens, page_size, rows_max, timed]))
        try:
            cost = measure_step(model, tokens, page_size, rows_max, types, timed=timed)
        except torch.OutOfMemoryError as error:
            text = f"must be less than {tokens} with this model on so many GPUs: such a step does not fit"
            raise OptionError("step_tokens", text) from error
        self.done()
        return cost

    def close(self) -> None:
        """No more calls follow: the ranks end."""
        if self._closed:
            return
        self._closed = True
        frame = encode(Frame(Kind.STOP, []), self._digest)
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send(frame, STOP_SECONDS)
            except RankEnded as error:
                log.warning("rank %d %s before it was told to end", rank, error)
        self._reap()

    def kill(self) -> None:
        """End all ranks at once."""
        self._closed = True
        for process in self._processes:
            process.kill()
        self._reap()

    def _reap(self) -> None:
        if self._group is not None:
            self._group.close()
        self._folder.cleanup()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Only now: a rank whose stream ends before it has read the last frame ends where it stands.
        for channel in self._channels:
            channel.close()

    # --- telling ----------------------------------------------------------------------------------

    def _publish(self, frame: Frame) -> None:
        """Send a frame to all ranks; raises `RankLost` if one has ended or reads nothing."""
        if self._closed:
            return
        content = encode(frame, self._digest)
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send(content, SUM_SECONDS)
            except RankEnded as error:
                self._lose(f"rank {rank} {error}")

    def _tell(self, kind: Kind, numbers: list[int], body: bytes = b"", *, works: bool = False) -> None:
        """Tell the ranks of something, which has sums in it if it `works`."""
        if self._working or self._lost:
            self._lose("an earlier step failed on some of the ranks")
        if works and self._closed:
            self._lose("the engine is closed")
        self._working = works
        self._publish(Frame(kind, numbers, body))

    def step(self, call: StepCall, words: Words) -> None:
        """The words of a step."""
        self._tell(Kind.STEP, messages.write_step(call), words.tobytes(), works=True)

    def logits(self, first: int, count: int) -> None:
        """Logits of some hidden states."""
        self._tell(Kind.LOGITS, [first, count], works=True)

    def take(self, tokens: Tensor) -> Tensor:
        """The tokens that were sampled last."""
        tokens = tokens.contiguous()
        self._tell(Kind.TAKE, [tokens.numel()], works=True)
        self.group.broadcast(tokens)
        self.done()
        return tokens

    def copy(self, name: str, sources: list[int], destinations: list[int]) -> None:
        """Copies of units."""
        self._tell(Kind.COPY, messages.write_copy(name, sources, destinations))

    def move(self, moves: Sequence[TierMove]) -> None:
        """Copies between device and host."""
        self._tell(Kind.MOVE, messages.write_moves(moves))

    def fence(self, numbers: Sequence[int]) -> None:
        """Moves that have ended."""
        self._tell(Kind.FENCE, list(numbers))

    def moved_states(self, wakes: bool, pairs: list[tuple[int, int]]) -> None:
        """States that wake or are put to rest."""
        self._tell(Kind.WAKE if wakes else Kind.REST, [number for pair in pairs for number in pair])

    def prepare_graphs(self) -> None:
        """Graphs are going to be captured."""
        self._tell(Kind.GRAPHS, [])

    def capture(self, shape: Shape) -> None:
        """A graph is captured."""
        self._tell(Kind.CAPTURE, list(map(int, shape)), works=True)

    def begin(self, kind: Kind, numbers: list[int]) -> None:
        """Tensors of sessions are exchanged; `done` follows."""
        self._tell(kind, numbers, works=True)

    def done(self) -> None:
        """The work of the last call has succeeded."""
        self._working = False

    def require(self) -> None:
        """Raise `RankLost` if the ranks no longer agree, or one has ended."""
        ended = [rank for rank, process in enumerate(self._processes, 1) if process.poll() is not None]
        if ended and not self._closed:
            self._lose(f"rank {ended[0]} has ended")
        if self._working or self._lost:
            self._lose("a step failed on some of the ranks")

    def _lose(self, why: str) -> NoReturn:
        """End all ranks, which no longer agree; the first reason is kept."""
        self._lost = self._lost or why
        if not self._closed:
            self.kill()
        raise RankLost(self._lost)


def _written(options: EngineOptions) -> dict[str, Any]:
    """The options as a rank gets them: it has no journal, no files and no tenants."""
    return asdict(replace(options, journal=None, disk=None, tenant_shares={}))


def _setup(
    path: str, options: EngineOptions, ranks: Ranks, device: torch.device, meeting: Path
) -> dict[str, Any]:
    return {
        "model": path,
        "options": _written(options),
        "ranks": list(ranks),
        "device": str(device),
        "meeting": str(meeting),
        "seconds": SUM_SECONDS,
        "threads": torch.get_num_threads(),
        "parent": os.getpid() if threading.current_thread() is threading.main_thread() else 0,
    }
