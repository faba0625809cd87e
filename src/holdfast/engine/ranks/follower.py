"""The process of a rank other than 0: it carries out what rank 0 tells it, on its part of the model.

Started by `crew` as `python -m holdfast.engine.ranks.follower DESCRIPTOR`. It never plans, samples or
decides: frames come in the order of rank 0's launches. It ends when told to, or when its stream ends.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # A terminal sends it to the whole process group, also while the imports below take their seconds.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import ctypes
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from holdfast import kernels
from holdfast.core.turn import Turn
from holdfast.engine.options import EngineOptions, OptionError, make_options
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.exchange import receive_part, send_part
from holdfast.engine.ranks.group import RankGroup, join
from holdfast.engine.ranks.messages import Channel, Digest, Frame, Kind, RankEnded, encode
from holdfast.engine.ranks.units import RankUnits
from holdfast.engine.start.loading import configure_kernels, load_weights
from holdfast.engine.start.memory_plan import memory_types, plan_memory
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Forwarded
from holdfast.engine.step.inputs import Shape
from holdfast.engine.step.profiling import measure_step
from holdfast.engine.text.stream import TurnStream
from holdfast.kernels.cpu.library import match_threads
from holdfast.models.checkpoint import open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.model import Model
from holdfast.models.ranks import Ranks

log = logging.getLogger("holdfast.ranks")

_PR_SET_PDEATHSIG = 1


class Follower:
    """Carries out steps on one rank."""

    def __init__(self, executor: Executor, group: RankGroup) -> None:
        self._executor = executor
        self._group = group
        self._units = RankUnits(executor.memory, executor.host)
        self._last: Forwarded | None = None
        self._acts: dict[Kind, Callable[[Frame], None]] = {
            Kind.STEP: self._step,
            Kind.LOGITS: self._logits,
            Kind.TAKE: self._take,
            Kind.COPY: lambda frame: executor.copy_units(*messages.read_copy(frame.numbers)),
            Kind.MOVE: lambda frame: executor.host_tier.start(messages.read_moves(frame.numbers)),
            Kind.FENCE: lambda frame: executor.host_tier.follow_fence(frame.numbers),
            Kind.REST: lambda frame: executor.memory.put_to_rest(_pairs(frame)),
            Kind.WAKE: lambda frame: executor.memory.wake(_pairs(frame)),
            Kind.GRAPHS: self._prepare_graphs,
            Kind.CAPTURE: self._capture,
            Kind.GATHER: self._gather,
            Kind.SCATTER: self._scatter,
        }

    @torch.inference_mode()
    def follow(self, channel: Channel) -> None:
        """Carry out frames until rank 0 says that no more follow."""
        while (frame := channel.receive()).kind is not Kind.STOP:
            self._acts[frame.kind](frame)
        self._executor.host_tier.drain()

    def _step(self, frame: Frame) -> None:
        executor, call = self._executor, messages.read_step(frame.numbers)
        executor.tables.follow(call.tables)
        words = np.frombuffer(frame.body, dtype=np.int32)
        if call.limits is None:
            graphs = executor.prepared_graphs
            executor.bring_array(words, call.shape, graphs.words)
            self._last = executor.replay(graphs, call.shape)
            return
        brought = executor.bring_array(words, call.shape, None)
        self._last = executor.run_once(brought, call.shape, call.limits)
        if call.shape.samples:
            executor.logits_of(self._last, call.shape.samples)

    def _ran(self) -> Forwarded:
        assert self._last is not None, "a step ran before"
        return self._last

    def _logits(self, frame: Frame) -> None:
        first, count = frame.numbers
        self._executor.model.logits(self._ran().hidden[first : first + count])

    def _take(self, frame: Frame) -> None:
        (count,) = frame.numbers
        tokens = torch.empty(count, dtype=torch.int64, device=self._executor.model.device)
        self._group.broadcast(tokens)
        kernels.note_sampled(self._executor.tables.sampled, self._ran().given.note[:count], tokens)

    def _prepare_graphs(self, _: Frame) -> None:
        self._executor.prepare_graphs(None)

    def _capture(self, frame: Frame) -> None:
        rows, tokens, samples, decode = frame.numbers
        self._executor.capture_shape(
            self._executor.prepared_graphs, Shape(rows, tokens, samples, bool(decode))
        )

    def _gather(self, frame: Frame) -> None:
        units = messages.read_units(frame.numbers)
        if any(each.on_host for each in units):
            self._executor.host_tier.complete()
        for tensor in self._units.gather(units).values():
            send_part(self._group, tensor, 0)

    def _scatter(self, frame: Frame) -> None:
        rank, *numbers = frame.numbers
        if rank != self._group.ranks.rank:
            return
        name, units, _ = messages.read_copy(numbers)
        received = self._units.rows(name, len(units))
        for rows in received:
            receive_part(self._group, rows, 0)
        self._units.scatter(name, units, received)


def _pairs(frame: Frame) -> list[tuple[int, int]]:
    numbers = frame.numbers
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _no_stream(_turn: Turn) -> TurnStream:
    raise AssertionError("a rank other than 0 has no turns")


def _load(setup: dict[str, Any], options: EngineOptions, group: RankGroup) -> Model:
    """This rank's part of the model."""
    device = torch.device(setup["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    configure_kernels(options)
    model = load_weights(open_checkpoint(Path(setup["model"])), options, device, group=group)
    if device.type == "cpu":
        match_threads()
    return model


def _planned(channel: Channel, model: Model, options: EngineOptions) -> Executor:
    """The executor, once rank 0 has measured its steps and sized the pools."""
    while (frame := channel.receive()).kind is Kind.MEASURE:
        tokens, page_size, rows, timed = frame.numbers
        measure_step(model, tokens, page_size, rows, memory_types(model, options), timed=bool(timed))
    assert frame.kind is Kind.PLAN
    plan = frame.json()
    memory = plan_memory(model, make_options(**plan["options"]))
    if asdict(memory.device) != plan["units"]:
        raise OptionError("tensor_parallel", "failed: ranks would have pools of different sizes")
    return Executor(model, memory, memory.tuning.max_running, _no_stream)


def run(channel: Channel) -> None:
    """Load, and carry out what rank 0 tells."""
    setup = channel.receive().json()
    options = make_options(**setup["options"])
    if setup["parent"]:
        _die_with(setup["parent"])
    torch.set_num_threads(setup["threads"])
    _answer(channel)
    ranks = Ranks(*setup["ranks"])
    group = join(Path(setup["meeting"]), ranks, setup["seconds"], torch.device(setup["device"]))
    _answer(channel)
    try:
        model = _load(setup, options, group)
        _answer(channel)
        executor = _planned(channel, model, options)
    except OptionError as error:
        _answer(channel, error.problem, error.option)
        raise
    except (ConfigurationError, MemoryError, torch.OutOfMemoryError) as error:
        _answer(channel, str(error))
        raise
    _answer(channel)
    channel.digest.checked = options.audit == "strict"
    Follower(executor, group).follow(channel)


def _answer(channel: Channel, error: str = "", option: str = "") -> None:
    channel.send(encode(Frame.of_json(Kind.ANSWER, {"error": error, "option": option}), Digest()))


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(descriptor: int) -> NoReturn:
    """End this process when its stream ends, whatever it is doing."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def main(descriptor: int) -> int:
    """Run a rank on its stream."""
    # A terminal sends both signals to the whole process group; rank 0 decides when ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_watch, args=(descriptor,), daemon=True).start()
    try:
        run(Channel(connection))
    except RankEnded:
        return 1
    except Exception:
        log.exception("a rank failed")
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
